"""`SharedCollectives`: collectives between ranks on the CPUs of one machine, through shared memory.

Each rank writes its data into its own buffer, rings the others, waits for their bells and reads their buffers. Data
crosses memory once, and every rank adds in rank order. Two buffers alternate, so one bell suffices: before a rank
writes a buffer again it has received a later bell from each rank, rung after that rank read the buffer.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from weft.engine.ranks.links import EXCHANGE_BYTES, Links


class SharedCollectives:
    """See `Collectives`. Used by one thread at a time."""

    def __init__(self, links: Links) -> None:
        self.rank, self.ranks = links.rank, links.ranks
        self._links = links
        self._buffers = torch.from_numpy(links.exchange())
        self._turn = 0

    def all_gather(self, mine: Tensor) -> Tensor:
        out = torch.empty(self.ranks, *mine.shape, dtype=mine.dtype)
        if not mine.numel():
            return out
        rows = out.view(self.ranks, -1).view(torch.uint8)
        for begin, end, shown in self._exchange(mine):
            rows[:, begin:end] = shown
        return out

    def all_reduce(self, partial: Tensor) -> Tensor:
        out = torch.empty(partial.shape, dtype=torch.float32)
        flat, size = out.view(-1), partial.element_size()
        for begin, end, shown in self._exchange(partial):
            addends = shown.view(partial.dtype)
            into = flat[begin // size : end // size]
            if addends.dtype == torch.float32:
                torch.add(addends[0], addends[1], out=into)
            else:
                into.copy_(addends[0]).add_(addends[1])
            for addend in addends[2:]:
                into.add_(addend)
        return out

    def _exchange(self, mine: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Yield begin and end byte of each piece, and all ranks' data there, `[ranks, bytes]` uint8."""
        links = self._links
        data = mine.contiguous().view(-1).view(torch.uint8)
        for begin in range(0, len(data), EXCHANGE_BYTES):
            end = min(begin + EXCHANGE_BYTES, len(data))
            buffer = self._buffers[self._turn, :, : end - begin]
            buffer[self.rank] = data[begin:end]
            for bell in links.to.values():
                bell.ring()
            for bell in links.of.values():
                links.wait_for(bell)
            links.on_progress()
            yield begin, end, buffer
            self._turn = 1 - self._turn
