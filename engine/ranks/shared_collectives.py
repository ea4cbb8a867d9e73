"""`SharedCollectives`: collectives of ranks on the CPUs of one machine, through the memory that they share.

Each rank writes what it has into its own place, rings, hears the others, and reads theirs: the data crosses memory
once, and sums are made in rank order by everybody. Two places take turns, so that one bell is enough: who writes into a
place again has heard everybody since, who had read it before.
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
        self._places = torch.from_numpy(links.exchange())
        self._turn = 0

    def all_gather(self, mine: Tensor) -> Tensor:
        out = torch.empty(self.ranks, *mine.shape, dtype=mine.dtype)
        if not mine.numel():
            return out
        rows = out.view(self.ranks, -1).view(torch.uint8)
        for begin, end, shown in self._shown(mine):
            rows[:, begin:end] = shown
        return out

    def all_reduce(self, partial: Tensor) -> Tensor:
        out = torch.empty(partial.shape, dtype=torch.float32)
        flat, size = out.view(-1), partial.element_size()
        for begin, end, shown in self._shown(partial):
            parts = shown.view(partial.dtype)
            into = flat[begin // size : end // size]
            if parts.dtype == torch.float32:
                torch.add(parts[0], parts[1], out=into)
            else:
                into.copy_(parts[0]).add_(parts[1])
            for part in parts[2:]:
                into.add_(part)
        return out

    def _shown(self, mine: Tensor) -> Iterator[tuple[int, int, Tensor]]:
        """Piece by piece: first and last byte, and what all ranks have there, `[ranks, bytes]` uint8."""
        links = self._links
        data = mine.contiguous().view(-1).view(torch.uint8)
        for begin in range(0, len(data), EXCHANGE_BYTES):
            end = min(begin + EXCHANGE_BYTES, len(data))
            place = self._places[self._turn, :, : end - begin]
            place[self.rank] = data[begin:end]
            for bell in links.to.values():
                bell.ring()
            for bell in links.of.values():
                links.hear(bell)
            links.moved()
            yield begin, end, place
            self._turn = 1 - self._turn
