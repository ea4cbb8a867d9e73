"""`Collectives`: what the ranks of one model tell each other while they compute an iteration.

All ranks call the same methods in the same order with tensors of the same shapes. What comes back is equal to the bit
on all of them: sums are in rank order, whoever asks. Implementations: memory shared by processes on a CPU
(`ranks/shared_collectives.py`), GPUs that reach each other's memory (`peer_collectives.py`), and `Alone`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

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


class Steps(NamedTuple):
    """How sums of some size are made."""

    sums: int = 1
    """1 or 2: see `kernels.collectives`"""
    pushed: int = 0
    """the same behind a product that writes to the ranks itself (`kernels.pushed`); 0: none does"""


MEASURED_STEPS = (Steps(1), Steps(2), Steps(1, 1), Steps(1, 2))
"""what a start measures, the simplest first"""


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

    def push(
        self, a: Tensor, weight: Tensor, bias: Tensor | None, *, turn: int, begin: int | None = None,
        among: int | None = None, num_sms: int, space: Any, num_tokens: Tensor | None, config: Any = None,
    ) -> bool:  # fmt: skip
        """The product `a [T, K] @ weight [H, K].T`, plus `bias [H]`, with its tiles sent to where the next `reduce`
        adds them up instead of `partial`. False, and nothing is launched, where that is not the quicker way.

        turn: of the two places that take turns, as `partial`'s. begin: None where launches run one behind the other
        and the next one is that `reduce`; else the first of these tokens in the iteration: before another product of
        them comes their `reduce`, launched anywhere behind this one's end. among: tokens of the iteration, where there
        are more than these: all of one sum are sent alike, or they would lie over each other.
        """
        ...

    def reduce(
        self, partial: Tensor, x: Tensor, sumsq: Tensor, *, live: Tensor, add: bool, num_sms: int,
        begin: int | None = None,
    ) -> Tensor:  # fmt: skip
        """The sum of every rank's `partial [T, H]`, plus x if `add`, rounded once, into `x [T, H]`; returns what was
        written of `sumsq [parts, T]` float32: squares of the parts of x's rows. Rows from `live [1]` on are left alone.

        All three from `take`, from the same place of it on every rank. Two partials must take turns. begin: as that of
        the `push`, if there was one.
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
    measure: Callable[[], None] = lambda: None
    """called by all ranks at a start, once tiles of products are known and compiled"""
