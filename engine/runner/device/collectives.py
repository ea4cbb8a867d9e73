"""`Collectives`: exchanges between the ranks of one model during an iteration.

All ranks call the same methods in the same order with tensors of the same shapes. Results are equal to the bit on all
ranks, because sums are in rank order. Implementations: memory shared by processes on a CPU
(`ranks/shared_collectives.py`), GPUs that access each other's memory (`peer_collectives.py`), and `SingleRank`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor


class _Ranks(Protocol):
    @property
    def rank(self) -> int: ...

    @property
    def ranks(self) -> int: ...


class Collectives(_Ranks, Protocol):
    def all_gather(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor in rank order, `[ranks, *mine.shape]`. Raises `RankLost` if a rank has ended."""
        ...

    def all_reduce(self, partial: Tensor) -> Tensor:
        """Return the float32 sum of every rank's floating-point `partial`, added in rank order. Raises `RankLost`."""
        ...


class SingleRank:
    """`Collectives` of a model on one rank."""

    rank = 0
    ranks = 1

    def all_gather(self, mine: Tensor) -> Tensor:
        return mine[None]

    def all_reduce(self, partial: Tensor) -> Tensor:
        return partial.float()


class Graph(Enum):
    """Graphs that are captured separately and replayed by all ranks in the same order."""

    MODEL = 0
    SAMPLE = 1


class Steps(NamedTuple):
    """Steps of an all-reduce of some size."""

    sums: int = 1  # 1 or 2; see `kernels.collectives`.
    pushed: int = 0
    """Steps after a GEMM that pushes its tiles to other ranks (`kernels.collectives.push_gemm`); 0: no GEMM pushes."""


MEASURED_STEPS = (Steps(1), Steps(2), Steps(1, 1), Steps(1, 2))
"""Alternatives that a start measures, the simplest first."""


class DeviceCollectives(_Ranks, Protocol):
    """`Collectives` of GPUs, which launch on the current stream and may be captured."""

    def allocate(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Return zeroed memory that other ranks can access. All ranks allocate the same, in the same order."""
        ...

    def inside(self, graph: Graph) -> AbstractContextManager[None]:
        """Within this context launches belong to that graph, and its exchanges are numbered from the first."""
        ...

    def push(
        self, a: Tensor, weight: Tensor, bias: Tensor | None, *, turn: int, begin: int | None = None,
        among: int | None = None, num_sms: int, space: Any, num_tokens: Tensor | None, config: Any = None,
    ) -> bool:  # fmt: skip
        """Compute the GEMM `a [T, K] @ weight [H, K].T` plus `bias [H]`, and send its tiles to where the next `reduce`
        adds them instead of `partial`. Returns False and launches nothing if that is not faster.

        turn: which of the two alternating buffers, as for `partial`. begin: None if launches are in sequence and the
        next one is that `reduce`. Otherwise the first of these tokens in the iteration: their `reduce` is launched
        after this GEMM and before the next one of the same tokens. among: tokens of the iteration, if there are more
        than these. They decide the steps, since all tokens of one sum must be sent the same way or would overlap."""
        ...

    def reduce(
        self, partial: Tensor, x: Tensor, sumsq: Tensor, *, live: Tensor, add: bool, num_sms: int,
        begin: int | None = None,
    ) -> Tensor:  # fmt: skip
        """Write the sum of every rank's `partial [T, H]`, plus x if `add`, to `x [T, H]`, rounded once. Returns the
        rows of `sumsq [sums, T]` float32 that hold sums of squares of x. Rows from `live [1]` on do not change.

        All three tensors come from the same `allocate` call on every rank. Use two partials alternately. begin: that of
        the `push`, if any."""
        ...

    def all_gather(self, mine: Tensor) -> Tensor:
        """Return every rank's tensor, `[ranks, *mine.shape]`, of a 4- or 8-byte dtype."""
        ...


class RankGroup(NamedTuple):
    """A GPU runner's access to the other ranks."""

    host: Collectives  # Exchanges between processes.
    device: DeviceCollectives
    check: Callable[[], None]  # Raises `RankLost` if a rank has ended.
    measure: Callable[[], None] = lambda: None
    """Measures all-reduces. All ranks call it at the start, once GEMM tiles are known and compiled."""
