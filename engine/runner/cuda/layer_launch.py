"""`OperationLaunch`: a nano-operation to launch in one layer. `Rows`: the tensors that it reads and writes."""

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
from weft.kernels.matmul.adapter_depth import More


class Rows(NamedTuple):
    """Tensors that a layer reads and writes: rows of all tokens, or of those kept after the last attention."""

    activations: Mapping[str, Tensor]
    sumsq: Tensor  # `[sums, T]` partial sums of squares of the residual stream.
    attended: Output  # Attention's output: the activation "a", or a quantised operand instead.
    live: Tensor | None = None  # `[1]` number of valid rows; None: the token ranges determine it.


def rows_of(activations: Mapping[str, Tensor], sumsq: Tensor, attended: Output, live: Tensor | None = None) -> Rows:
    """Build `Rows`. Attention's output also becomes the activation "a" if it is not quantised."""
    named = {"a": attended} if isinstance(attended, Tensor) else {}
    return Rows({**activations, **named}, sumsq, attended, live)


Fused = Literal["lists", "together", "tiles"]
"""How one launch computes decodes and chunks. "lists": the two lists in sequence; some programs may begin with chunks.
"together": both at the same time on every SM. "tiles": decodes are tiles of the chunks' list."""


class OperationLaunch(NamedTuple):
    """One nano-operation of one layer, to be launched on the current stream."""

    nano: NanoOperation
    operation: Operation
    layer: int
    weights: ProjectionWeights | None  # None for an operation without weights.
    kv: Tensor
    pipeline: Pipeline
    sum_counts: list[int]
    """For each block of TOKEN_STEP tokens, how many partial sums are valid. A GEMM writes one per feature tile."""
    rows: Rows
    drops_rows: bool = False  # Whether rows that are not read are dropped after this layer's attention.
    adapted: bool = False  # Whether rows may have a LoRA adapter.
    more: More | None = None  # The further depth of its GEMM, if rows may have a LoRA adapter.
    fused: Fused | None = None  # How one launch computes decodes and chunks; None: they are launched separately.

    @property
    def x(self) -> Tensor:
        return self.rows.activations["x"][self.tokens]

    @property
    def sumsq(self) -> Tensor:
        """`[sums, T]` of the operation's tokens."""
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
        """`[sums, T]`: the rows of `sumsq` that the preceding operations have written."""
        return self.sumsq[: equal_sum_count(self.sum_counts[self._blocks])]

    def note_sums(self, sums: Tensor) -> None:
        """Record the rows of `sumsq` that an operation has written while it added to the residual stream."""
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
        raise ConfigError("the plan is invalid: GEMMs that one operation reads must have the same feature tiles")
    return counts[0]
