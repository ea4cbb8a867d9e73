"""`CpuExecutor`: the serial period over the torch twins, one operation after another."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from torch import Tensor

from weft.engine.model.operations import Operation
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import ProductWeights, Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import serial_period
from weft.engine.runner.launchers import launchers_of
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
        weights = executor.weights
        self.executor, self.inputs = executor, inputs
        x, self.sumsq = twins.embed(inputs.token_ids, weights.embedding)
        spec = executor.spec
        self.activations: dict[str, Tensor] = {"x": x, "a": x.new_empty(len(x), spec.num_heads * spec.head_dim)}
        self.rotary = weights.rotary[inputs.positions]  # once for all layers


Launcher = Callable[[_Iteration, Operation, int], None]


def _own(it: _Iteration, op: Operation, layer: int) -> ProductWeights:
    return it.executor.weights.layers[layer][op.name]


def _qkv(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _own(it, op, layer), it.executor.spec
    it.activations[op.target] = twins.qkv_project(
        it.activations[op.source], it.sumsq, w.weight, w.bias, spec.rms_norm_eps, it.rotary, slice(None),
        it.inputs.slot_mapping, it.executor.kv, layer, spec.num_heads, w.q_norm, w.k_norm,
    )  # fmt: skip


def _decode(it: _Iteration, op: Operation, layer: int) -> None:
    q, out = it.activations[op.source], it.activations[op.target]
    it.executor.attention.decode(q, it.executor.kv, layer, it.inputs.attention, out=out)


def _prefill(it: _Iteration, op: Operation, layer: int) -> None:
    q, out = it.activations[op.source], it.activations[op.target]
    it.executor.attention.prefill(q, it.executor.kv, layer, it.inputs.attention, out=out)


def _residual(it: _Iteration, op: Operation, layer: int) -> None:
    w, x = _own(it, op, layer), it.activations[op.target]
    residual = x if w.bias is None else x + w.bias
    it.activations[op.target], it.sumsq = twins.residual_project(it.activations[op.source], w.weight, residual)


def _gate_up(it: _Iteration, op: Operation, layer: int) -> None:
    w, eps = _own(it, op, layer), it.executor.spec.rms_norm_eps
    it.activations[op.target] = twins.gate_up_project(it.activations[op.source], it.sumsq, w.weight, eps)


TABLE: Mapping[str, Launcher] = {
    "qkv": _qkv,
    "decode": _decode,
    "prefill": _prefill,
    "residual": _residual,
    "gate_up": _gate_up,
}


class CpuExecutor:
    """Weights and KV pool of the CPU. Raises `ModelError` for a model with an operation it cannot launch."""

    def __init__(self, spec: ModelSpec, weights: Weights, kv: Tensor, attention: AttentionBackend[Any]) -> None:
        self.spec, self.weights, self.kv, self.attention = spec, weights, kv, attention
        launchers = launchers_of(spec, TABLE, "the CPU")
        # The order of operations is that of any token count.
        pipeline = Pipeline(serial_period(spec, 1, 1), spec)
        operations = [op for _, op in pipeline.operations]
        self._steps = [(launchers[operations[i].name], operations[i], layer) for layer, i in pipeline.unrolled()]

    def forward(self, inputs: CpuInputs) -> tuple[Tensor, Tensor]:
        """The residual stream after the last layer: x `[T, H]` and its sum of squares `[T]`."""
        iteration = _Iteration(self, inputs)
        for launch, op, layer in self._steps:
            launch(iteration, op, layer)
        return iteration.activations["x"], iteration.sumsq

    def logits(self, x: Tensor, sumsq: Tensor, rows: Tensor) -> Tensor:
        """`[S, V]` float32 logits of the rows `[S]` that need them."""
        w = self.weights
        return twins.lm_head(x[rows], sumsq[rows], w.norm, w.lm_head, self.spec.rms_norm_eps)
