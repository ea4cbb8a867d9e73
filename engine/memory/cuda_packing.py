"""`CudaPacking`: packs pages on the GPU before they are copied to the host, and unpacks them after they return.

Each direction has two buffers of packed pages in GPU memory, `STAGED_BYTES` each at most: one is packed or unpacked
while the other is copied. Packing runs on high-priority streams, ahead of kernels that have not started.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from weft.kernels.formats.packed_page import PackedPage
from weft.kernels.tiers import pack_pages as kernels

STAGED_BYTES = 32 << 20
BUFFERS = 2
Places = Sequence[tuple[int, Tensor]]  # (GPU page, `[nbytes]` uint8 on the host)


class _Buffer:
    def __init__(self, form: PackedPage, device: torch.device) -> None:
        pages = max(1, min(kernels.PAGES_PER_LAUNCH, STAGED_BYTES // form.nbytes))
        self.memory = torch.zeros(pages, form.nbytes, dtype=torch.uint8, device=device)
        self.cells = list(self.memory)
        self.full, self.empty = torch.cuda.Event(), torch.cuda.Event()


class _Way:
    """One direction: alternating buffers, and the stream that packs or unpacks."""

    def __init__(self, form: PackedPage, device: torch.device) -> None:
        self.buffers = [_Buffer(form, device) for _ in range(BUFFERS)]
        self.stream = torch.cuda.Stream(device, priority=-1)
        self._turn = 0

    def chunks(self, places: Places) -> Sequence[tuple[_Buffer, Places]]:
        """Split pages into groups, each with its buffer."""
        size, taken = len(self.buffers[0].cells), []
        for first in range(0, len(places), size):
            taken.append((self.buffers[self._turn % BUFFERS], places[first : first + size]))
            self._turn += 1
        return taken


class CudaPacking:
    """Packing for a pool `kv [pages, ...]` of bf16 pages of one form."""

    def __init__(self, form: PackedPage, kv: Tensor) -> None:
        self.form, self._kv = form, kv
        self._outward, self._inward = _Way(form, kv.device), _Way(form, kv.device)
        # Load the kernels by moving the dummy page there and back: they cannot be loaded while a graph is captured. Use
        # this device's stream, because the current device of a rank's thread may be another one.
        self._outward.stream.wait_stream(torch.cuda.current_stream(kv.device))
        with torch.cuda.stream(self._outward.stream):
            buffer = self._outward.buffers[0]
            kernels.pack(form, kv, [0], buffer.memory)
            kernels.unpack(form, buffer.memory, kv, [0])
        self._outward.stream.synchronize()

    def out(self, copies: torch.cuda.Stream, places: Places, before: Callable[[int], None]) -> None:
        """Copy pages to the host. `before(i)` is called on the copy stream before the i-th page."""
        i, packs = 0, self._outward.stream
        for buffer, some in self._outward.chunks(places):
            packs.wait_event(buffer.empty)
            with torch.cuda.stream(packs):
                kernels.pack(self.form, self._kv, [page for page, _ in some], buffer.memory)
                buffer.full.record(packs)
            copies.wait_event(buffer.full)
            with torch.cuda.stream(copies):
                for cell, (_, host) in zip(buffer.cells, some, strict=False):
                    before(i)
                    host.copy_(cell, non_blocking=True)
                    i += 1
                buffer.empty.record(copies)

    def back(self, copies: torch.cuda.Stream, places: Places) -> torch.cuda.Stream:
        """Copy packed pages from the host. Returns the stream on which they and all earlier copies complete."""
        unpacks = self._inward.stream
        for buffer, some in self._inward.chunks(places):
            copies.wait_event(buffer.empty)
            with torch.cuda.stream(copies):
                for cell, (_, host) in zip(buffer.cells, some, strict=False):
                    cell.copy_(host, non_blocking=True)
                buffer.full.record(copies)
            unpacks.wait_event(buffer.full)
            with torch.cuda.stream(unpacks):
                kernels.unpack(self.form, buffer.memory, self._kv, [page for page, _ in some])
                buffer.empty.record(unpacks)
        unpacks.wait_stream(copies)
        return unpacks

    def close(self) -> None:
        self._outward.stream.synchronize()
        self._inward.stream.synchronize()
