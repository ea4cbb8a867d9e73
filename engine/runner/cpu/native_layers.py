"""`NativeLayers`: the layers of a model with packed weights, as operations that C++ runs one after the other.

Between two prefill attentions there is one call from Python, and one for all layers if an iteration has only decodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor

from weft.engine.model.layer_weights import ProjectionWeights
from weft.engine.model.operations import Operation
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.kernels.attention.backend import HostAttention
from weft.kernels.attention.native_backend import NativeAttention, NativeStep
from weft.kernels.native.layers import (
    ACTIVATIONS,
    BUFFERS,
    KINDS,
    CIteration,
    CPages,
    CStep,
    Steps,
    iteration_of,
    row_squares,
)
from weft.kernels.native.products import packed_pointer
from weft.kernels.native.tiles import LANES


class NativeIteration(NamedTuple):
    """One iteration over T tokens, and the tensors that it points to."""

    steps: Steps
    iteration: CIteration
    chunks: bool  # Whether it has requests that are not decodes.
    buffers: Mapping[str, Tensor]
    sumsq: Tensor
    kept: Sequence[Tensor]

    @property
    def x(self) -> Tensor:
        return self.buffers["x"]

    def run(self, begin: int, end: int) -> None:
        """Run some of the executor's steps. Prefill attention is none of them, and does nothing here."""
        self.steps.run(begin, end, self.iteration)

    def keep(self, rows: Tensor) -> NativeIteration:
        """Continue with some tokens only. No later step may be attention."""
        buffers = {name: tensor[rows] for name, tensor in self.buffers.items()}
        sumsq = self.sumsq[rows]
        old = self.iteration
        made = iteration_of(buffers, sumsq, (), sumsq, old.kv, old.decodes)
        return self._replace(iteration=made, buffers=buffers, sumsq=sumsq)


class NativeLayers:
    """Made by `native_layers`."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, kv: Tensor, attention: NativeAttention,
        steps: Iterable[tuple[Operation, int]],
    ) -> None:  # fmt: skip
        self._spec, self._weights, self._attention = spec, weights, attention
        self._kept: list[Tensor] = []
        self._steps = Steps([self._step(op, layer) for op, layer in steps], self._kept)
        self._pages = CPages.of(kv)

    def begin(
        self, activations: dict[str, Tensor], rotary: Sequence[Tensor], slots: Tensor, step: NativeStep
    ) -> NativeIteration:
        """Add the buffers of an iteration to its activations, of which there are x `[T, H]` and a."""
        x, spec = activations["x"].contiguous(), self._spec
        tokens = len(x)
        activations |= {
            "x": x,
            "q": x.new_empty(tokens, spec.num_heads, spec.head_dim),
            "h": x.new_empty(tokens, spec.intermediate_size),
        }
        sumsq = row_squares(x)
        tables = [table.contiguous() for table in rotary]
        buffers = {name: activations[name] for name in BUFFERS}
        made = iteration_of(buffers, sumsq, tables, slots, self._pages, step.decodes)
        return NativeIteration(self._steps, made, step.decodes.count < tokens, buffers, sumsq, [*tables, slots])

    def _step(self, op: Operation, layer: int) -> CStep:
        if op.kernel not in KINDS:
            return CStep(kind=-1)
        spec, weights = self._spec, self._weights.layers[layer]
        kv_layer = spec.kv_layer(layer)
        made = CStep(
            kind=KINDS[op.kernel], input=BUFFERS[op.source], output=BUFFERS[op.target], layer=kv_layer,
            heads=spec.num_heads, eps=spec.norm.eps, activation=ACTIVATIONS[spec.activation],
        )  # fmt: skip
        if op.kernel == "decode":
            scores = self._attention.scores(kv_layer, weights["qkv"].sinks)
            made.scores = scores
            return made
        w = weights[op.name]
        assert w.packed is not None
        made.w = packed_pointer(w.packed.tiles)
        made.rotary = spec.rotary_table(layer) if op.kernel == "qkv" else 0
        made.normed = spec.placement.before and op.source == "x"
        for name in ("bias", "q_norm", "k_norm", "post_norm"):
            setattr(made, name, self._pointer(getattr(w, name)))
        if made.normed:
            made.norm = self._pointer(w.packed.norm)
        return made

    def _pointer(self, vector: Tensor | None) -> int | None:
        if vector is None:
            return None
        self._kept.append(vector.float().contiguous())
        return self._kept[-1].data_ptr()


def native_layers(
    spec: ModelSpec, weights: Weights, kv: Tensor, attention: HostAttention[Any],
    steps: Iterable[tuple[object, Operation, int]],
) -> NativeLayers | None:  # fmt: skip
    """Return a model's layers in C++; None if one of their parts is not supported there."""
    if spec.packed is None or not isinstance(attention, NativeAttention) or spec.shard_of.ranks > 1:
        return None
    own = [(op, layer) for _, op, layer in steps]
    plain = (
        not spec.placement.parallel
        and not spec.norm.centred
        and spec.qk_norm in {"", "head"}
        and spec.activation in ACTIVATIONS
        and not any(width % LANES for width in (spec.hidden_size, spec.head_dim, spec.intermediate_size))
        and all(op.kernel in {*KINDS, "prefill"} for op, _ in own)
    )
    matrices = [weights.layers[layer][op.name] for op, layer in own if not op.role.attends]
    return NativeLayers(spec, weights, kv, attention, own) if plain and all(map(_fits, matrices)) else None


def _fits(w: ProjectionWeights) -> bool:
    matrix = w.packed
    return (
        matrix is not None
        and matrix.order is None
        and matrix.norm_bias is None
        and w.gate is None
        and not matrix.centred
    )
