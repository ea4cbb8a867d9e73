"""`Collectives`: what the ranks of one model tell each other while they compute an iteration.

All ranks call the same methods in the same order with tensors of the same shapes. What comes back is equal to the bit
on all of them: sums are in rank order, whoever asks. Implementations: memory shared by processes on a CPU
(`ranks/shared_collectives.py`), GPUs that reach each other's memory (`peer_collectives.py`), and `Alone`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import NamedTuple, Protocol

import torch
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


class Graph(Enum):
    """What is captured apart, and replayed by every rank in turn with the others."""

    MODEL = 0
    SAMPLE = 1


class DeviceCollectives(Protocol):
    """Of GPUs: what they do is launched on the current stream, and may be captured. See `Collectives`."""

    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Zeroed memory that other ranks reach. All ranks take the same, in the same order."""
        ...

    def inside(self, graph: Graph) -> AbstractContextManager[None]:
        """Inside, launches belong to that graph: the first of its exchanges, the second, … each time."""
        ...

    def reduce(self, partial: Tensor, x: Tensor, sumsq: Tensor, *, live: Tensor, add: bool, num_sms: int) -> Tensor:
        """The sum of every rank's `partial [T, H]`, plus x if `add`, rounded once, into `x [T, H]`; returns what was
        written of `sumsq [parts, T]` float32: squares of the parts of x's rows. Rows from `live [1]` on are left alone.

        All three from `take`, from the same place of it on every rank. Two partials must take turns.
        """
        ...

    def all_gather(self, mine: Tensor) -> Tensor:
        """`[ranks, *mine.shape]`, of numbers of 4 or 8 bytes."""
        ...


class Several(NamedTuple):
    """What a GPU's runner has of the other ranks."""

    host: Collectives
    """of processes"""
    device: DeviceCollectives
    check: Callable[[], None]
    """raises `RankLost` when one has ended"""
