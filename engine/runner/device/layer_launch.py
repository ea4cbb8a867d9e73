"""`Launch`: one nano-operation of one layer about to be launched, and the rows that it works on."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.model.layer_weights import ProductWeights
from weft.engine.model.operations import Operation
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import TOKEN_STEP, NanoOperation
from weft.kernels.attention.output import Output


class Rows(NamedTuple):
    """What the operations of a layer read and write: of an iteration's tokens at their places, or of some that left."""

    activations: Mapping[str, Tensor]
    sumsq: Tensor
    """[parts, T] of the stream"""
    attended: Output
    """what attention writes: the activation "a", or, where it quantises, an operand in its place"""
    live: Tensor | None = None
    """[1] how many there are; None: as many as token ranges say"""


def rows_of(activations: Mapping[str, Tensor], sumsq: Tensor, attended: Output, live: Tensor | None = None) -> Rows:
    """Activations but for what attention writes, which is one of them where it is no operand."""
    named = {"a": attended} if isinstance(attended, Tensor) else {}
    return Rows({**activations, **named}, sumsq, attended, live)


Fused = Literal["lists", "together", "tiles"]
"""what one launch does with decodes and chunks: one list behind the other, or some programs begin with decodes; both at
the same time on every SM; decodes are tiles of the chunks' list, which is all that the chunks' kernel has to do"""


class Launch(NamedTuple):
    """One nano-operation of one layer, about to be launched on the current stream."""

    nano: NanoOperation
    operation: Operation
    layer: int
    weights: ProductWeights | None
    """None for an operation that is no product"""
    kv: Tensor
    pipeline: Pipeline
    parts: list[int]
    """rows of `sumsq` that hold sums, by block of tokens: a product leaves one per feature tile"""
    rows: Rows
    leaving: bool = False
    """behind this layer's attention rows leave that nobody reads"""
    fused: Fused | None = None
    """attention of decodes and of chunks is one launch, that of the decodes, which does both lists so"""

    @property
    def x(self) -> Tensor:
        return self.rows.activations["x"][self.tokens]

    @property
    def sumsq(self) -> Tensor:
        """[parts, T] of the stream, its tokens' part"""
        return self.rows.sumsq[:, self.tokens]

    @property
    def product(self) -> ProductWeights:
        assert self.weights is not None
        return self.weights

    @property
    def tokens(self) -> slice:
        return slice(self.nano.begin, self.nano.end)

    @property
    def sums(self) -> Tensor:
        """[parts, T] of `sumsq`: those that the products before have written"""
        return self.sumsq[: same_parts(self.parts[self._blocks])]

    def note_sums(self, sums: Tensor) -> None:
        """What an operation that adds to the stream has written of `sumsq`."""
        blocks = self._blocks
        self.parts[blocks] = [sums.shape[0]] * len(self.parts[blocks])

    @property
    def _blocks(self) -> slice:
        return slice(self.nano.begin // TOKEN_STEP, -(-self.nano.end // TOKEN_STEP))


def one_part(pipeline: Pipeline) -> list[int]:
    """The embedding writes one partial sum of squares."""
    return [1] * -(-pipeline.tokens // TOKEN_STEP)


def same_parts(parts: list[int]) -> int:
    """How many partial sums a product reads: the products before it must have written equally many for its tokens."""
    if len(set(parts)) != 1:
        raise ConfigError("a plan gives nano-operations that one operation reads together different feature tiles")
    return parts[0]
