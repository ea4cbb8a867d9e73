"""`CudaCopyEngine`: pinned host memory on the GPU's NUMA node, one copy stream each way, an event for each batch."""

from __future__ import annotations

import contextlib
import mmap
import os
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.memory.kv_layout import page_rows
from weft.engine.memory.transfer import GIB, Copy, Gate, Pairs, map_host_pool

PIN_CHUNK = GIB
"""bytes of the host pool that are touched and registered at once"""
POLL_SECONDS = 1e-4


def _local_cpus(device: torch.device) -> set[int]:
    """The processors of the GPU's NUMA node, or an empty set where the machine does not say."""
    p: Any = torch.cuda.get_device_properties(device)
    address = f"{p.pci_domain_id:04x}:{p.pci_bus_id:02x}:{p.pci_device_id:02x}.0"
    try:
        text = (Path("/sys/bus/pci/devices") / address / "local_cpulist").read_text().strip()
        cpus: set[int] = set()
        for part in filter(None, text.split(",")):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return cpus & os.sched_getaffinity(0)


def _pin(memory: np.ndarray, device: torch.device) -> None:
    """Touch the memory from threads beside the GPU, so that the system takes it from that node, and page-lock it.

    Raises `OutOfMemory`.
    """
    cpus = _local_cpus(device)

    def pin(chunk: np.ndarray) -> int:
        if cpus:
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, cpus)  # this thread's alone
        chunk.reshape(-1)[:: mmap.PAGESIZE] = 0
        with torch.cuda.device(device):
            return int(torch.cuda.cudart().cudaHostRegister(chunk.ctypes.data, chunk.nbytes, 0))

    with ThreadPoolExecutor(8) as threads:
        if any(list(threads.map(pin, _chunks(memory)))):
            raise OutOfMemory(f"{memory.nbytes / GIB:.1f} GiB of host memory cannot be pinned: lower --host-kv-gib")


def _chunks(memory: np.ndarray) -> list[np.ndarray]:
    """Whole slots: a copy must not cross from one registration into the next."""
    slots = max(1, PIN_CHUNK // memory.shape[1])
    return [memory[start : start + slots] for start in range(0, len(memory), slots)]


class CudaCopy:
    def __init__(self) -> None:
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self.failed = False

    def done(self) -> bool:
        return self.end.query()

    @property
    def seconds(self) -> float:
        return self.begin.elapsed_time(self.end) / 1e3


class CudaCopyEngine:
    """Copies of a direction run in the order asked; the two directions run beside each other and beside compute.

    gates: a batch of pages to the host is spread over these, each page behind its own.
    """

    def __init__(self, kv: Tensor, slots: int, gates: Sequence[Gate] = ()) -> None:
        self._gates = gates
        self._kv = page_rows(kv)
        self.page_bytes = self._kv.shape[1]
        self.host = map_host_pool(slots, self.page_bytes)
        _pin(self.host, kv.device)
        self._host = torch.from_numpy(self.host)[:, : self.page_bytes]
        self._out, self._back = torch.cuda.Stream(kv.device), torch.cuda.Stream(kv.device)

    def out(self, pairs: Pairs) -> Copy:
        return self._copy(self._out, pairs, to_host=True)

    def back(self, pairs: Pairs) -> Copy:
        return self._copy(self._back, pairs, to_host=False)

    def _copy(self, stream: torch.cuda.Stream, pairs: Pairs, to_host: bool) -> CudaCopy:
        copy = CudaCopy()
        with torch.cuda.stream(stream), torch.inference_mode():
            copy.begin.record()
            for i, (page, slot) in enumerate(pairs):
                there, here = self._kv[page], self._host[slot]
                if to_host:
                    if self._gates:
                        self._gates[i * len(self._gates) // len(pairs)].wait(stream)
                    here.copy_(there, non_blocking=True)
                else:
                    there.copy_(here, non_blocking=True)
            copy.end.record()
        return copy

    def wait(self, copies: Sequence[Copy], seconds: float) -> None:
        end = time.monotonic() + seconds
        while not any(c.done() for c in copies) and time.monotonic() < end:
            time.sleep(POLL_SECONDS)

    def close(self) -> None:
        self._out.synchronize()
        self._back.synchronize()
        for chunk in _chunks(self.host):
            torch.cuda.cudart().cudaHostUnregister(chunk.ctypes.data)
