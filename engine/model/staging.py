"""`Staging`: copies mapped tensors to a device: threads fill pinned buffers and one stream empties them."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

THREADS = 8  # A thread copies about 5 GB/s out of the page cache; the bus takes 50.
BUFFER_BYTES = 8 << 20
BUFFERS = 2  # Per thread: one is filled while the other is being copied to the device.
AHEAD_BYTES = 512 << 20  # Bytes on the device ahead of use, in addition to the next tensor.


class _Coming(NamedTuple):
    tensor: Tensor
    pieces: list[Future[None]]


class _Buffer:
    """Pinned bytes, and the event after the last copy out of them."""

    def __init__(self, size: int, *, pinned: bool) -> None:
        self.bytes = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
        self.array = self.bytes.numpy()
        self.empty = torch.cuda.Event() if pinned else None


class Staging:
    """Returns the tensors `wanted` on `device`, in order, each once, with the same dtype and shape.

    It reads the following tensors while one is packed. It holds `THREADS * BUFFERS * BUFFER_BYTES` of host memory, and
    `AHEAD_BYTES` and the next tensor on the device. As a context manager it stops its threads on exit.
    """

    def __init__(self, wanted: Sequence[Tensor], device: torch.device, *, buffer_bytes: int = BUFFER_BYTES) -> None:
        """wanted: CPU tensors, contiguous in the last dimension. device: a GPU, or the CPU in tests."""
        self._wanted = deque(wanted)
        self._device, self._size = device, buffer_bytes
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._coming: deque[_Coming] = deque()
        self._ahead = 0
        self._own = threading.local()
        self._stopped = False
        self._pool = ThreadPoolExecutor(THREADS, thread_name_prefix="weft-load")

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped = True
        self._pool.shutdown(cancel_futures=True)
        if self._stream is not None:
            self._stream.synchronize()
            empty_host_cache = getattr(torch.accelerator, "empty_host_cache", None)  # not in every torch
            if empty_host_cache is not None:
                empty_host_cache()

    def take(self) -> Tensor:
        """Return the next tensor, complete for work launched later on the current stream. Raises read errors."""
        self._begin()
        tensor, pieces = self._coming.popleft()
        for piece in pieces:
            piece.result()
        self._ahead -= tensor.nbytes
        if self._stream is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return tensor

    def _begin(self) -> None:
        """Start reading as many tensors ahead as fit, at least one."""
        while self._wanted and (not self._coming or self._ahead + self._wanted[0].nbytes <= AHEAD_BYTES):
            source = self._wanted.popleft()
            target = torch.empty(source.shape, dtype=source.dtype, device=self._device)
            ready = None
            if self._stream is not None:
                # Its memory may belong to a tensor that a launched kernel still reads.
                ready = torch.cuda.current_stream(self._device).record_event()
            pieces = [self._pool.submit(self._copy, *pair, ready) for pair in _pieces(source, target, self._size)]
            self._coming.append(_Coming(target, pieces))
            self._ahead += target.nbytes

    def _copy(self, source: Tensor, target: Tensor, ready: torch.cuda.Event | None) -> None:
        """Copy up to one buffer of bytes."""
        if self._stopped:
            return
        with torch.cuda.stream(self._stream):  # no effect for None
            turn = self._own.__dict__.setdefault("turn", 0)
            self._own.turn = turn + 1
            buffers: list[_Buffer] = self._own.__dict__.setdefault("buffers", [])
            if len(buffers) < BUFFERS:
                buffers.append(_Buffer(self._size, pinned=self._stream is not None))
            buffer = buffers[turn % BUFFERS]
            if buffer.empty is not None:
                buffer.empty.synchronize()
            # numpy copies release the GIL and, unlike torch's, use no thread team.
            size = target.nbytes
            np.copyto(buffer.array[:size].view(_WORDS[source.element_size()]).reshape(source.shape), _array(source))
            staged = buffer.bytes[:size].view(source.dtype).view(target.shape)
            if self._stream is None or buffer.empty is None or ready is None:
                target.copy_(staged)
                return
            self._stream.wait_event(ready)
            target.copy_(staged, non_blocking=True)
            buffer.empty.record(self._stream)


_WORDS = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
_SAME_SIZE = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _array(tensor: Tensor) -> np.ndarray:
    """Return its memory as integers of the same size, because numpy has no bfloat16."""
    size = tensor.element_size()
    return tensor.view(_SAME_SIZE[size]).numpy().view(_WORDS[size])


def _pieces(source: Tensor, target: Tensor, limit: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Split both along their first dimensions into pieces of at most `limit` bytes; `target` is contiguous."""
    if target.nbytes <= limit:
        if target.numel():
            yield source, target
        return
    rows = limit * len(target) // target.nbytes
    if rows:
        yield from zip(source.split(rows), target.split(rows), strict=True)
        return
    for one, other in zip(source, target, strict=True):
        yield from _pieces(one, other, limit)
