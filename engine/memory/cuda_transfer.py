"""`CudaCopyEngine`: copies pages through pinned memory on the GPU's NUMA node, with one stream per direction.

`cuda_packing.py` packs and unpacks pages.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.memory.kv_layout import page_rows
from weft.engine.memory.transfer import GIB, Copy, Gate, PageSizes, Pairs, map_host_pool, map_remainders
from weft.engine.wire.cores import read_cpus
from weft.kernels.formats.packed_page import PackedPage

if TYPE_CHECKING:
    from weft.engine.memory.cuda_packing import CudaPacking

PIN_CHUNK = GIB  # bytes of the host pool to touch and register at once
POLL_SECONDS = 1e-4


def _local_cpus(device: torch.device) -> set[int]:
    """Return the processors of the GPU's NUMA node; empty if unknown."""
    p: Any = torch.cuda.get_device_properties(device)
    address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    try:
        cpus = read_cpus(Path("/sys/bus/pci/devices") / address / "local_cpulist")
    except (OSError, ValueError):
        return set()
    return cpus & os.sched_getaffinity(0)


def _pin(memory: np.ndarray, device: torch.device) -> None:
    """Touch the memory from threads on the GPU's NUMA node, so that it is allocated there, and page-lock it. Raises
    `OutOfMemory`."""
    cpus = _local_cpus(device)

    def pin(chunk: np.ndarray) -> int:
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)  # this thread only
        chunk.reshape(-1)[:: mmap.PAGESIZE] = 0
        with torch.cuda.device(device):
            return int(torch.cuda.cudart().cudaHostRegister(chunk.ctypes.data, chunk.nbytes, 0))

    with ThreadPoolExecutor(8) as threads:
        if any(list(threads.map(pin, _chunks(memory)))):
            raise OutOfMemory(f"{memory.nbytes / GIB:.1f} GiB of host memory cannot be pinned: lower --host-kv-gib")


def _chunks(memory: np.ndarray) -> list[np.ndarray]:
    """Split at slots, because a copy must not cross registrations."""
    slots = max(1, PIN_CHUNK // memory.shape[1])
    return [memory[start : start + slots] for start in range(0, len(memory), slots)]


class CudaCopy:
    def __init__(self) -> None:
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.failed = False
        self.raw: list[int] = []
        self.unkept: list[int] = []
        self.then: Callable[[], bool] | None = None  # called once after `end`; returns False if it started more copies

    def done(self) -> bool:
        if not self.end.query():
            return False
        then, self.then = self.then, None
        return then is None or then()

    @property
    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1e3


class CudaCopyEngine:
    """Copies of one direction run in order; the two directions overlap each other and compute. A batch of pages to the
    host is spread over `gates`, each page waiting for its gate. With `form`, pages are packed before they are copied to
    the host and unpacked after they return."""

    def __init__(self, kv: Tensor, slots: int, gates: Sequence[Gate] = (), form: PackedPage | None = None) -> None:
        self._gates = gates
        self._kv = page_rows(kv)
        page_bytes = self._kv.shape[1]
        self.sizes = PageSizes(page_bytes, form.nbytes if form is not None else page_bytes)
        self.host = map_host_pool(slots, self.sizes.packed)
        _pin(self.host, kv.device)
        self.remainders = map_remainders(slots, self.sizes) if form is not None else None
        if self.remainders is not None:
            _pin(self.remainders.memory, kv.device)
        self._host = torch.from_numpy(self.host)[:, : self.sizes.packed]
        self._out, self._back = torch.cuda.Stream(kv.device), torch.cuda.Stream(kv.device)
        self._packing: CudaPacking | None = None
        if form is not None:
            from weft.engine.memory.cuda_packing import CudaPacking  # needs Triton

            self._packing = CudaPacking(form, kv)

    def out(self, pairs: Pairs) -> Copy:
        copy, stream = CudaCopy(), self._out
        with torch.inference_mode():
            copy.begin.record(stream)
            if self._packing is None:
                with torch.cuda.stream(stream):
                    for i, (page, slot) in enumerate(pairs):
                        self._wait_at_gate(i, len(pairs))
                        self._host[slot].copy_(self._kv[page], non_blocking=True)
            else:
                assert self.remainders is not None
                for _, slot in pairs:
                    self.remainders.drop(slot)
                places = [(page, self._host[slot]) for page, slot in pairs]
                self._packing.out(stream, places, lambda i: self._wait_at_gate(i, len(pairs)))
                copy.then = lambda: self._keep_raw(copy, pairs)
            copy.end.record(stream)
        return copy

    def _wait_at_gate(self, i: int, of: int) -> None:
        if self._gates:
            self._gates[i * len(self._gates) // of].wait(self._out)

    def _keep_raw(self, copy: CudaCopy, pairs: Pairs) -> bool:
        """Copy pages that could not be packed as they are. Returns True if nothing was started."""
        assert self._packing is not None
        assert self.remainders is not None
        form, first, sent = self._packing.form, self.sizes.packed, False
        for page, slot in pairs:
            if form.holds(self.host[slot]):
                continue
            copy.raw.append(slot)
            if (end := self.remainders.reserve(slot)) is None:
                copy.unkept.append(slot)
                continue
            with torch.cuda.stream(self._out), torch.inference_mode():
                self._host[slot].copy_(self._kv[page, :first], non_blocking=True)
                torch.from_numpy(end).copy_(self._kv[page, first:], non_blocking=True)
            sent = True
        if sent:
            copy.end.record(self._out)
        return not sent

    def back(self, pairs: Pairs) -> Copy:
        copy, stream, first = CudaCopy(), self._back, self.sizes.packed
        packed: list[tuple[int, Tensor]] = []
        with torch.cuda.stream(stream), torch.inference_mode():
            copy.begin.record(stream)
            for page, slot in pairs:
                end = self.remainders.bytes_of(slot) if self.remainders is not None else None
                if end is not None:
                    copy.raw.append(slot)
                    self._kv[page, first:].copy_(torch.from_numpy(end), non_blocking=True)
                if end is not None or self._packing is None:
                    self._kv[page, :first].copy_(self._host[slot], non_blocking=True)
                else:
                    packed.append((page, self._host[slot]))
            last = self._packing.back(stream, packed) if self._packing is not None else stream
            copy.end.record(last)
        return copy

    def wait(self, copies: Sequence[Copy], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not any(c.done() for c in copies) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._out.synchronize()
        self._back.synchronize()
        if self._packing is not None:
            self._packing.close()
        for memory in [self.host] + ([self.remainders.memory] if self.remainders is not None else []):
            for chunk in _chunks(memory):
                torch.cuda.cudart().cudaHostUnregister(chunk.ctypes.data)
