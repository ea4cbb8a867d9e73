"""`Collectives`: what the ranks of one model tell each other while they compute an iteration.

All ranks call the same methods in the same order with tensors of the same shapes. What comes back is equal to the bit
on all of them: sums are in rank order, whoever asks. Two implementations: memory shared by processes on a CPU
(`ranks/shared_collectives.py`), and `Alone`. GPUs will have a third.
"""

from __future__ import annotations

from typing import Protocol

from torch import Tensor


class Collectives(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def all_gather(self, mine: Tensor) -> Tensor:
        """`[ranks, *mine.shape]`: every rank's, in rank order. Raises `RankLost` when another one has ended."""
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """The sum of every rank's floating `partial`, added up in rank order in float32, which it is. Raises
        `RankLost`.
        """
        ...


class Alone:
    """Of a model that one rank has whole."""

    rank = 0
    ranks = 1

    def all_gather(self, mine: Tensor) -> Tensor:
        return mine[None]

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial.float()
