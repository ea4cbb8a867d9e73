"""`CpuExecutor`: the operations of each layer over the torch twins, one after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from weft.engine.model.layer_weights import ProductWeights
from weft.engine.model.operations import Operation
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.launchers import launchers_of
from weft.kernels import experts_reference as expert_twins
from weft.kernels import reference as twins
from weft.kernels.attention import AttentionBackend


class CpuInputs(NamedTuple):
    """Tensors of one iteration."""

    token_ids: Tensor
    """[T] int64"""
    positions: Tensor
    """[T] int64"""
    slot_mapping: Tensor
    """[T] int64"""
    attention: Any
    """the attention back end's step"""


class _Iteration:
    """What launchers read and write: the inputs and the activations (see `ModelSpec.layer_operations`)."""

    def __init__(self, executor: CpuExecutor, inputs: CpuInputs) -> None:
        weights, spec = executor.weights, executor.spec
        self.executor, self.inputs = executor, inputs
        x, self.sumsq = twins.embed(
            inputs.token_ids, weights.embedding, scale=spec.embedding_scale, places=weights.places,
            positions=inputs.positions, centred=spec.norm.centred,
        )  # fmt: skip
        self.activations: dict[str, Tensor] = {"x": x, "a": x.new_empty(len(x), spec.num_heads * spec.head_dim)}
        self.rotary = [table[inputs.positions] for table in weights.rotary]  # once for all layers
        self.routing: expert_twins.Routing | None = None

    @property
    def stream_sums(self) -> Tensor | None:
        """What a product that reads the stream is normed by; None where no norm stands before it."""
        return self.sumsq if self.executor.spec.placement.before else None


Launcher = Callable[[_Iteration, Operation, int], None]


def _own(it: _Iteration, op: Operation, layer: int) -> ProductWeights:
    return it.executor.weights.layers[layer][op.name]


def _qkv(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _own(it, op, layer), it.executor.spec
    it.activations[op.target] = twins.qkv_project(
        it.activations[op.source], it.stream_sums, w.weight, w.bias, spec.norm.eps,
        it.rotary[spec.rotary_table(layer)], slice(None), it.inputs.slot_mapping, it.executor.kv, layer,
        spec.num_heads, w.q_norm, w.k_norm,
    )  # fmt: skip


def _sinks(it: _Iteration, layer: int) -> dict[str, Any]:
    """The attention's argument, where the model has sinks."""
    sinks = it.executor.weights.layers[layer]["qkv"].sinks
    return {} if sinks is None else {"sinks": sinks}


def _decode(it: _Iteration, op: Operation, layer: int) -> None:
    q, out = it.activations[op.source], it.activations[op.target]
    it.executor.attention.decode(q, it.executor.kv, layer, it.inputs.attention, out=out, **_sinks(it, layer))


def _prefill(it: _Iteration, op: Operation, layer: int) -> None:
    q, out = it.activations[op.source], it.activations[op.target]
    it.executor.attention.prefill(q, it.executor.kv, layer, it.inputs.attention, out=out, **_sinks(it, layer))


def _residual(it: _Iteration, op: Operation, layer: int) -> None:
    w, norm = _own(it, op, layer), it.executor.spec.norm
    it.activations[op.target], it.sumsq = twins.residual_project(
        it.activations[op.source], w.weight, it.activations[op.target], bias=w.bias, post_norm=w.post_norm,
        eps=norm.eps, centred=norm.centred,
    )  # fmt: skip


def _gate_up(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _own(it, op, layer), it.executor.spec
    it.activations[op.target] = twins.gate_up_project(
        it.activations[op.source], it.stream_sums, w.weight, spec.norm.eps, activation=spec.activation, bias=w.bias,
        gate=w.gate,
    )  # fmt: skip


def _up(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _own(it, op, layer), it.executor.spec
    it.activations[op.target] = twins.up_project(
        it.activations[op.source], it.stream_sums, w.weight, spec.norm.eps, activation=spec.activation, bias=w.bias
    )


def _router(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _own(it, op, layer), it.executor.spec
    e = spec.experts
    assert e is not None
    it.routing = expert_twins.route(
        it.activations[op.source], it.stream_sums, w.weight, spec.norm.eps, kind=e.router, top=e.top,
        normalise=e.normalise, scaling=e.scaling, bias=w.bias, choice_bias=w.choice_bias, groups=e.groups,
        top_groups=e.top_groups,
    )  # fmt: skip


def _experts_gate_up(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _own(it, op, layer), it.executor.spec
    assert it.routing is not None
    it.activations[op.target] = expert_twins.experts_gate_up(
        it.activations[op.source], it.stream_sums, it.routing, w.weight, spec.norm.eps, activation=spec.activation,
        bias=w.bias,
    )  # fmt: skip


def _experts_residual(it: _Iteration, op: Operation, layer: int) -> None:
    w, centred = _own(it, op, layer), it.executor.spec.norm.centred
    assert it.routing is not None
    it.activations[op.target], it.sumsq = expert_twins.experts_residual(
        it.activations[op.source], it.routing, w.weight, it.activations[op.target], bias=w.bias, centred=centred
    )


TABLE: Mapping[str, Launcher] = {
    "qkv": _qkv,
    "decode": _decode,
    "prefill": _prefill,
    "residual": _residual,
    "gate_up": _gate_up,
    "up": _up,
    "router": _router,
    "experts_gate_up": _experts_gate_up,
    "experts_residual": _experts_residual,
}


class CpuExecutor:
    """Weights and KV pool of the CPU. Raises `ModelError` for a model with an operation it cannot launch."""

    def __init__(self, spec: ModelSpec, weights: Weights, kv: Tensor, attention: AttentionBackend[Any]) -> None:
        self.spec, self.weights, self.kv, self.attention = spec, weights, kv, attention
        launchers = launchers_of(spec, TABLE, "the CPU")
        self._steps = [
            (launchers[op.name], op, layer) for layer in range(spec.num_layers) for op in spec.layer_operations(layer)
        ]

    def forward(self, inputs: CpuInputs) -> tuple[Tensor, Tensor]:
        """The residual stream after the last layer: x `[T, H]` and its sum of squares `[T]`."""
        iteration = _Iteration(self, inputs)
        for launch, op, layer in self._steps:
            launch(iteration, op, layer)
        return iteration.activations["x"], iteration.sumsq

    def logits(self, x: Tensor, sumsq: Tensor, rows: Tensor) -> Tensor:
        """`[S, V]` float32 logits of the rows `[S]` that need them."""
        w, spec = self.weights, self.spec
        return twins.lm_head(
            x[rows], sumsq[rows], w.norm, w.lm_head, spec.norm.eps, norm_bias=w.norm_bias, centred=spec.norm.centred,
            bias=w.head_bias, scale=spec.logits_scale, softcap=spec.logits_softcap,
        )  # fmt: skip
