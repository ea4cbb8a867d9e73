"""`Launch`: the arguments of one nano-operation's launch in one layer; `Rows`: the tensors it reads and writes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.model.layer_weights import ProjectionWeights
from weft.engine.model.operations import Operation
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import TOKEN_STEP, NanoOperation
from weft.kernels.attention.output import Output


class Rows(NamedTuple):
    """Tensors that a layer reads and writes: rows of all tokens, or of those kept after the last attention."""

    activations: Mapping[str, Tensor]
    sumsq: Tensor
    """`[parts, T]` sums of squares of the stream."""
    attended: Output
    """Attention's output: the activation "a", or a quantised operand instead."""
    live: Tensor | None = None
    """`[1]` number of rows; None: the token ranges determine it."""


def rows_of(activations: Mapping[str, Tensor], sumsq: Tensor, attended: Output, live: Tensor | None = None) -> Rows:
    """Build `Rows`. Attention's output also becomes the activation "a" if it is not quantised."""
    named = {"a": attended} if isinstance(attended, Tensor) else {}
    return Rows({**activations, **named}, sumsq, attended, live)


Fused = Literal["lists", "together", "tiles"]
"""How one launch computes decodes and chunks: one list after the other, where some programs may begin with chunks; both
at the same time on every SM; decodes as tiles of the chunks' list."""


class Launch(NamedTuple):
    """One nano-operation of one layer, about to be launched on the current stream."""

    nano: NanoOperation
    operation: Operation
    layer: int
    weights: ProjectionWeights | None
    """None for an operation without weights."""
    kv: Tensor
    pipeline: Pipeline
    sum_counts: list[int]
    """Rows of `sumsq` that hold sums, by block of tokens. A GEMM writes one per feature tile."""
    rows: Rows
    drops_rows: bool = False
    """After this layer's attention, rows that are not read are dropped."""
    fused: Fused | None = None
    """How the launch of the decodes computes chunks too; None: chunks have their own launch."""

    @property
    def x(self) -> Tensor:
        return self.rows.activations["x"][self.tokens]

    @property
    def sumsq(self) -> Tensor:
        """`[parts, T]` of the operation's tokens."""
        return self.rows.sumsq[:, self.tokens]

    @property
    def projection(self) -> ProjectionWeights:
        assert self.weights is not None
        return self.weights

    @property
    def tokens(self) -> slice:
        return slice(self.nano.begin, self.nano.end)

    @property
    def sums(self) -> Tensor:
        """`[parts, T]` of `sumsq` that the preceding operations have written."""
        return self.sumsq[: equal_sum_count(self.sum_counts[self._blocks])]

    def note_sums(self, sums: Tensor) -> None:
        """Record the part of `sumsq` that an operation which adds to the stream has written."""
        blocks = self._blocks
        self.sum_counts[blocks] = [sums.shape[0]] * len(self.sum_counts[blocks])

    @property
    def _blocks(self) -> slice:
        return slice(self.nano.begin // TOKEN_STEP, -(-self.nano.end // TOKEN_STEP))


def initial_sum_counts(pipeline: Pipeline) -> list[int]:
    """Return the counts after the embedding, which writes one partial sum of squares."""
    return [1] * -(-pipeline.tokens // TOKEN_STEP)


def equal_sum_count(counts: list[int]) -> int:
    """Return the number of partial sums that an operation reads, which must be the same for all its tokens."""
    if len(set(counts)) != 1:
        raise ConfigError("a plan has different feature tiles for nano-operations that one operation reads together")
    return counts[0]
