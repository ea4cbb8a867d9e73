"""`CpuExecutor`: runs the operations of all layers in sequence, with the reference implementations."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.memory.state_layout import NO_STATES, StateLayout
from weft.engine.model.adapter import Adapter
from weft.engine.model.layer_weights import ProjectionWeights
from weft.engine.model.operations import ALL_REDUCE, Operation, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.cpu.cpu_states import CpuStates, StateStep
from weft.engine.runner.cpu.native_layers import NativeLayers, native_layers
from weft.engine.runner.device.collectives import Collectives, SingleRank
from weft.engine.runner.device.image_rows import ImagePool
from weft.engine.runner.device.launchers import launchers_for
from weft.engine.runner.iteration.batch import Batch
from weft.kernels.attention.backend import HostAttention
from weft.kernels.reference import experts as reference_experts
from weft.kernels.reference import latent
from weft.kernels.reference import layer as reference
from weft.kernels.reference.adapters import Delta, ExpertDelta, LowRank, add_values

BLOCK_ROWS = (32, 16, 8, 4, 2, 1)
"""Block sizes to try for batch invariance, in this order. A single row is always invariant."""
PROBES = 2


class CpuInputs(NamedTuple):
    """Tensors of one iteration. Those of tokens are `[T]` int64."""

    token_ids: Tensor
    positions: Tensor
    slot_mapping: Tensor
    attention: Any  # The attention back end's step.
    rows: Tensor | None = None  # `[N]` int64 tokens whose state after the last layer is read, ascending; None: all.
    states: StateStep | None = None  # None: the model has no recurrent states.
    adapters: Tensor | None = None  # Number of each token's adapter, 0 for none; None: no token has any.
    embeddings: Tensor | None = None
    """1 + the row of the pool with the token's embedding, 0 for its id's; None: no token has one."""
    rope: Tensor | None = None  # `[3, T]` rotary positions; None: `positions`.


class _Iteration:
    """Inputs and activations that launchers read and write (see `ModelSpec.layer_operations`)."""

    def __init__(self, executor: CpuExecutor, inputs: CpuInputs) -> None:
        weights, spec = executor.weights, executor.spec
        self.executor, self.inputs = executor, inputs
        rows, table = inputs.token_ids, weights.table
        if executor.collectives.ranks > 1:
            rows, table = torch.arange(len(rows)), executor.embedded(rows)
        x, self.sumsq = reference.embed(
            rows, table, dtype=executor.dtype, scale=spec.embedding_scale, position_table=weights.positions,
            positions=inputs.positions, centred=spec.norm.centred,
        )  # fmt: skip
        self.embeddings = inputs.embeddings
        if self.embeddings is not None:
            at, rows = self._images(self.embeddings)
            x[at] = rows[:, 0]
            self.sumsq[at] = reference.row_sumsq(x[at], spec.norm.centred)
        self.partial: Tensor | None = None
        """`[T, H]` this rank's partial sum for the stream, until the next all-reduce."""
        self.activations: dict[str, Tensor] = {"x": x}
        for name, width in executor.mixed.items():
            self.activations[name] = x.new_empty(len(x), width)
        self.rotary = executor.rotated(inputs.positions, inputs.rope)  # once for all layers
        self.post_norm: Tensor | None = None  # Norm weight to apply after that all-reduce.
        self.routing: reference_experts.Routing | None = None
        self.adapters = self._groups(inputs.adapters)

    def _groups(self, of: Tensor | None) -> Sequence[tuple[Tensor, Adapter]]:
        """Return the tokens of each adapter, in the order of their numbers."""
        if of is None:
            return ()
        loaded = self.executor.adapters
        return [((of == n).nonzero()[:, 0], loaded[n]) for n in of.unique().tolist() if n]

    def _images(self, embeddings: Tensor) -> tuple[Tensor, Tensor]:
        """Return the tokens `[N]` with an embedding of an image, and their embeddings `[N, 1 + deepstack, H]`."""
        assert self.executor.image_rows is not None
        at = embeddings.nonzero()[:, 0]
        return at, self.executor.image_rows.rows[embeddings[at] - 1]

    def add_deepstack(self, layer: int) -> None:
        """Add the further embeddings of images to the stream after a layer."""
        if self.embeddings is None:
            return
        x, (at, rows) = self.activations["x"], self._images(self.embeddings)
        x[at] += rows[:, 1 + layer]
        self.sumsq[at] = reference.row_sumsq(x[at], self.executor.spec.norm.centred)

    def delta(self, op: Operation, layer: int) -> Delta | None:
        """Return what adapters add to an operation's output; None: nothing."""
        groups = self._adapted(op, layer)
        return Delta(groups, op.out, row_by_row=self.executor.block_rows > 0) if groups else None

    def expert_delta(self, op: Operation, layer: int) -> ExpertDelta | None:
        """`delta` of an operation of experts."""
        groups, tokens = self._adapted(op, layer), len(self.activations["x"])
        return ExpertDelta(groups, op.out, tokens, row_by_row=self.executor.block_rows > 0) if groups else None

    def _adapted(self, op: Operation, layer: int) -> list[tuple[Tensor, tuple[LowRank, ...]]]:
        return [(rows, found) for rows, adapter in self.adapters if (found := adapter.layers[layer].get(op.name))]

    def keep(self, rows: Tensor) -> None:
        """Continue with these tokens `[N]` only. No later operation may be attention."""
        self.activations = {name: made[rows] for name, made in self.activations.items() if name != "q"}
        self.sumsq = self.sumsq[rows]
        self.partial = None if self.partial is None else self.partial[rows]
        self.embeddings = None if self.embeddings is None else self.embeddings[rows]
        self.adapters = self._groups(None if self.inputs.adapters is None else self.inputs.adapters[rows])

    @property
    def stream_sums(self) -> Tensor | None:
        """Sums of squares for GEMMs that read the stream; None if no norm precedes them."""
        return self.sumsq if self.executor.spec.placement.before else None


Launcher = Callable[[_Iteration, Operation, int], None]


def _weights_of(it: _Iteration, op: Operation, layer: int) -> ProjectionWeights:
    return it.executor.weights.layers[layer][op.name]


def _qkv(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _weights_of(it, op, layer), it.executor.spec
    it.activations[op.target] = reference.qkv_project(
        it.activations[op.source], it.stream_sums, w.matrix, w.bias, spec.norm.eps,
        it.rotary[spec.rotary_table(layer)], slice(None), it.inputs.slot_mapping, it.executor.kv,
        it.executor.kv_layers[layer], spec.num_heads, w.q_norm, w.k_norm, it.executor.means,
        it.executor.kv_inverse(layer), it.delta(op, layer),
    )  # fmt: skip


def _attention_arguments(it: _Iteration, layer: int) -> dict[str, Any]:
    """Return attention's optional arguments, for sinks and scaled pages."""
    if it.executor.spec.latent is not None:
        return {}
    sinks, scales = it.executor.weights.layers[layer]["qkv"].sinks, it.executor.kv_scales
    parts = {} if sinks is None else {"sinks": sinks}
    if scales is None or it.executor.unit_scales:
        return parts
    return {**parts, "kv_scale": scales.scale[it.executor.kv_layers[layer]]}


def _attend(it: _Iteration, op: Operation, layer: int) -> None:
    q, out, attention = it.activations[op.source], it.activations[op.target], it.executor.attention
    attend = attention.decode if op.kernel == "decode" else attention.prefill
    arguments = _attention_arguments(it, layer)
    attend(q, it.executor.kv, it.executor.kv_layers[layer], it.inputs.attention, out=out, **arguments)


def _latent_in(it: _Iteration, op: Operation, layer: int) -> None:
    w, eps = _weights_of(it, op, layer), it.executor.spec.norm.eps
    it.activations[op.target] = reference.normed_linear(
        it.activations[op.source], it.stream_sums, w.matrix, w.bias, eps
    )


def _query_up(it: _Iteration, op: Operation, layer: int) -> None:
    w, own = _weights_of(it, op, layer), it.executor.spec.latent
    assert own is not None
    assert w.q_norm is not None
    normed = reference.head_norm(it.activations[op.source][:, : own.query_rank], w.q_norm, own.eps)
    it.activations[op.target] = reference.linear(normed, w.matrix)


def _latent_queries(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _weights_of(it, op, layer), it.executor.spec
    own, inner = spec.latent, it.activations["l"]
    assert own is not None
    assert w.k_norm is not None
    queries = it.activations[op.source][:, : spec.num_heads * own.query_dim]
    it.activations[op.target] = latent.latent_queries(
        queries.unflatten(-1, (spec.num_heads, -1)), inner[:, -own.width :], w.k_norm, w.weight,
        it.rotary[spec.rotary_table(layer)], it.inputs.slot_mapping, it.executor.kv, it.executor.kv_layers[layer],
        own.eps,
    )  # fmt: skip


def _latent_values(it: _Iteration, op: Operation, layer: int) -> None:
    it.activations[op.target] = latent.latent_values(it.activations[op.source], _weights_of(it, op, layer).weight)


def _output_gate(it: _Iteration, op: Operation, layer: int) -> None:
    w, eps = _weights_of(it, op, layer), it.executor.spec.norm.eps
    it.activations[op.target] = reference.normed_linear(
        it.activations[op.source], it.stream_sums, w.matrix, w.bias, eps
    )


def _gated_residual(it: _Iteration, op: Operation, layer: int) -> None:
    it.activations[op.source].mul_(torch.sigmoid(it.activations["g"]))
    _residual(it, op, layer)


def _state_in(it: _Iteration, op: Operation, layer: int) -> None:
    w, eps, x = _weights_of(it, op, layer), it.executor.spec.norm.eps, it.activations[op.source]
    assert w.state is not None
    wide = reference.normed_linear(x, it.stream_sums, w.matrix, w.bias, eps)
    if w.state.scalars is not None:
        few = reference.normed_linear(x.float(), it.stream_sums, w.state.scalars, w.state.scalars_bias, eps)
        wide = torch.cat((wide, few.to(wide.dtype)), -1)
    it.activations[op.target] = wide


def _recur(it: _Iteration, op: Operation, layer: int) -> None:
    states, work = it.executor.states, it.inputs.states
    w = it.executor.weights.layers[layer]["state_in"].state
    assert states is not None
    assert work is not None
    assert w is not None
    scan = op.role is Role.STATE_SCAN
    for group in work.prefill if scan else work.decode:
        inputs = it.activations[op.source][group.tokens]
        it.activations[op.target][group.tokens] = states.run(inputs, layer, w, group, scan=scan)


def _residual(it: _Iteration, op: Operation, layer: int) -> None:
    w, norm = _weights_of(it, op, layer), it.executor.spec.norm
    if it.executor.collectives.ranks > 1:
        part = reference.linear(it.activations[op.source], w.matrix, w.bias)
        if (delta := it.delta(op, layer)) is not None:
            part = add_values(part, delta.values(it.activations[op.source]))
        it.partial = part if it.partial is None else it.partial + part
        it.post_norm = w.post_norm
        return
    it.activations[op.target], it.sumsq = reference.residual_project(
        it.activations[op.source], w.matrix, it.activations[op.target], bias=w.bias, post_norm=w.post_norm,
        eps=norm.eps, centred=norm.centred, delta=it.delta(op, layer),
    )  # fmt: skip


def _gate_up(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _weights_of(it, op, layer), it.executor.spec
    it.activations[op.target] = reference.gate_up_project(
        it.activations[op.source], it.stream_sums, w.matrix, spec.norm.eps, activation=spec.activation, bias=w.bias,
        gate=w.gate, delta=it.delta(op, layer),
    )  # fmt: skip


def _up(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _weights_of(it, op, layer), it.executor.spec
    it.activations[op.target] = reference.up_project(
        it.activations[op.source], it.stream_sums, w.matrix, spec.norm.eps, activation=spec.activation, bias=w.bias,
        delta=it.delta(op, layer),
    )  # fmt: skip


def _router(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _weights_of(it, op, layer), it.executor.spec
    e = spec.experts
    assert e is not None
    it.routing = reference_experts.route(
        it.activations[op.source], it.stream_sums, w.weight, spec.norm.eps, kind=e.router, top=e.top,
        normalise=e.normalise, scaling=e.scaling, bias=w.bias, choice_bias=w.choice_bias, groups=e.groups,
        top_groups=e.top_groups, group_best=e.group_best, weight_eps=e.weight_eps, delta=it.delta(op, layer),
    )  # fmt: skip


def _experts_gate_up(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _weights_of(it, op, layer), it.executor.spec
    assert it.routing is not None
    it.activations[op.target] = reference_experts.experts_gate_up(
        it.activations[op.source], it.stream_sums, it.routing, w.of_experts, spec.norm.eps, activation=spec.activation,
        bias=w.bias, has_gate=spec.gated, delta=it.expert_delta(op, layer),
    )  # fmt: skip


def _experts_residual(it: _Iteration, op: Operation, layer: int) -> None:
    w, centred = _weights_of(it, op, layer), it.executor.spec.norm.centred
    assert it.routing is not None
    if it.executor.collectives.ranks > 1:
        x = it.activations[op.target]
        before = torch.zeros_like(x) if it.partial is None else it.partial
        it.partial, _ = reference_experts.experts_residual(
            it.activations[op.source], it.routing, w.of_experts, before, bias=w.bias, delta=it.expert_delta(op, layer)
        )
        it.post_norm = w.post_norm
        return
    it.activations[op.target], it.sumsq = reference_experts.experts_residual(
        it.activations[op.source],
        it.routing,
        w.of_experts,
        it.activations[op.target],
        bias=w.bias,
        centred=centred,
        delta=it.expert_delta(op, layer),
    )


def _all_reduce(it: _Iteration, op: Operation, layer: int) -> None:  # noqa: ARG001
    norm, partial = it.executor.spec.norm, it.partial
    assert partial is not None
    it.activations[op.target], it.sumsq = reference.add_reduced(
        it.executor.collectives.all_reduce(partial), it.activations[op.source], post_norm=it.post_norm, eps=norm.eps,
        centred=norm.centred,
    )  # fmt: skip
    it.partial = it.post_norm = None


TABLE: Mapping[str, Launcher] = {
    "qkv": _qkv,
    "decode": _attend,
    "prefill": _attend,
    "residual": _residual,
    "latent_in": _latent_in,
    "query_up": _query_up,
    "latent_queries": _latent_queries,
    "latent_values": _latent_values,
    "output_gate": _output_gate,
    "gated_residual": _gated_residual,
    "state_in": _state_in,
    "state_step": _recur,
    "state_scan": _recur,
    "gate_up": _gate_up,
    "up": _up,
    "router": _router,
    "experts_gate_up": _experts_gate_up,
    "experts_up": _experts_gate_up,
    "experts_residual": _experts_residual,
    ALL_REDUCE: _all_reduce,
}


class CpuExecutor:
    """Runs a model's layers on the CPU. Raises `ModelError` for a model with an operation that has no launcher.

    invariant: a row's result depends on that row only. GEMM libraries choose the order of additions by shape, so all
    operations between attentions run in padded blocks of a fixed number of rows."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, kv: Tensor, attention: HostAttention[Any], *,
        states: StateLayout = NO_STATES, invariant: bool = False, collectives: Collectives | None = None,
        image_rows: ImagePool | None = None, dtype: torch.dtype | None = None, adapts: bool = False,
        first_kv_layer: int = 0,
    ) -> None:  # fmt: skip
        """adapts: requests may use LoRA adapters. first_kv_layer: index in `kv` of the first layer with K and V."""
        self.spec, self.weights, self.kv, self.attention = spec, weights, kv, attention
        self.collectives = collectives or SingleRank()
        self.adapters: dict[int, Adapter] = {}  # Loaded adapters by number.
        self.image_rows = image_rows  # Embeddings of images; None: the model takes none.
        self.dtype = dtype or weights.norm.dtype  # The dtype of activations.
        self.kv_scales = weights.kv_page_scales(spec, kv.dtype)
        self.unit_scales = self.kv_scales is not None and bool((self.kv_scales.scale == 1).all())
        self.means: reference.Means | None = None
        if self.collectives.ranks > 1 and spec.qk_norm == "projection":
            self.means = self._means
        self.kv_layers = [first_kv_layer + spec.kv_layer(layer) for layer in range(spec.num_layers)]
        """Index of each layer in `kv`."""
        width = spec.head_dim if spec.latent is None else spec.latent.rank
        self.mixed = {"a": spec.num_heads * width} if any(layer.attention for layer in spec.layers) else {}
        """Columns of what attention and recurrences write, by activation."""
        self.states: CpuStates | None = None
        if spec.recurrence is not None:
            self.mixed["m"] = spec.recurrence.width
            self.states = CpuStates(spec, states, kv, alone=invariant, collectives=self.collectives)
        self.block_rows = 0  # Rows per block of operations between attentions; 0: no blocks.
        self._must_find_block_rows = invariant
        self.native: NativeLayers | None = None  # The same operations in C++, if they can be.
        self._last_attention = -1
        """Step after which rows that are not read are dropped; -1: never, as routers of parallel blocks ran before."""
        launchers = launchers_for(spec, TABLE, "the CPU")
        self._steps = [
            (launchers[op.name], op, layer) for layer in range(spec.num_layers) for op in spec.layer_operations(layer)
        ]
        ends = {layer: step for step, (_, _, layer) in enumerate(self._steps)}
        deep = range(0 if image_rows is None else image_rows.vision.deepstack)
        self._deep_ends = {ends[layer] for layer in deep}  # Steps after which further embeddings of images are added.
        self._taps: dict[int, int] = {}  # Steps before which the stream is kept, and their place in `tapped`.
        self.tapped: list[Tensor] = []
        """The residual stream `[T, H]` entering each layer of `tap`, in the last iteration."""
        pairs = spec.rotary_width // 2
        self._axes = [torch.tensor(rope.axes(pairs)) if rope.sections else None for rope in spec.ropes]
        """The axis that each pair of a head turns with, by rope; None: there is one position."""
        if spec.experts is None or not spec.placement.parallel:
            self._last_attention = max(i for i, (_, op, _) in enumerate(self._steps) if op.role.attends)
        # C++ has no adapters. Its bits differ, so with batch invariance it must compute every iteration or none.
        if not self._deep_ends and not (invariant and adapts):
            self.native = native_layers(spec, weights, kv, attention, self._steps)

    def tap(self, layers: tuple[int, ...]) -> None:
        """Keep the stream that enters these layers, for each iteration. The number of layers stands for the end."""
        begins = {layer: step for step, (_, _, layer) in reversed(list(enumerate(self._steps)))}
        begins[self.spec.num_layers] = len(self._steps)
        if self.spec.num_layers in layers:
            self._last_attention = -1  # No row is dropped.
        self._taps = {begins[layer]: place for place, layer in enumerate(layers)}
        self.tapped = [torch.empty(0)] * len(layers)

    def _keep_tapped(self, step: int, streams: list[Tensor], tokens: int) -> None:
        if (place := self._taps.get(step)) is not None:
            self.tapped[place] = torch.cat(streams)[:tokens]

    def rotated(self, positions: Tensor, rope: Tensor | None) -> list[Tensor]:
        """Return the rows `[T, D/2, 2]` of each rotary table. rope `[3, T]`: positions of M-RoPE."""
        tables, axes = self.weights.rotary, [*self._axes, None]
        if rope is None:
            return [table[positions] for table in tables]
        return [
            table[positions] if own is None else table[rope[own].T, torch.arange(len(own))]
            for table, own in zip(tables, axes, strict=False)
        ]

    def kv_inverse(self, layer: int) -> Tensor | None:
        """Return the factors `[2, Hkv]` that K and V are multiplied by before they are stored in FP8 pages."""
        return None if self.kv_scales is None else self.kv_scales.inverse[self.kv_layers[layer]]

    def inputs(self, batch: Batch, token_ids: Tensor) -> CpuInputs:
        """Return an iteration's inputs. token_ids `[T]` int64: the batch's, completed with the decodes' tokens."""
        return CpuInputs(
            token_ids,
            torch.from_numpy(batch.positions.astype(np.int64)),
            torch.from_numpy(batch.slot_mapping),
            self.attention.prepare(batch),
            torch.from_numpy(batch.read_rows),
            None if self.states is None else self.states.prepare(batch),
            _by_token(batch),
            None if batch.images is None else torch.from_numpy(batch.images.rows.astype(np.int64)) + 1,
            _rope(batch),
        )

    def forward(self, inputs: CpuInputs) -> tuple[Tensor, Tensor]:
        """Return the residual stream after the last layer, x `[T, H]`, and its sum of squares `[T]`.

        Rows that are not read are dropped after the last layer's attention, once their keys and values are stored, and
        are zero here. This does not change the other rows: to the bit with batch invariance; without it a library may
        add in another order for fewer rows. With batch invariance and all rows read, padding rows follow."""
        rows = inputs.rows if self._last_attention >= 0 else None
        if rows is None or len(rows) == len(inputs.token_ids):
            return self._forward(inputs, None)
        x, sumsq = self._forward(inputs, rows)
        whole = x.new_zeros(len(inputs.token_ids), x.shape[1]), sumsq.new_zeros(len(inputs.token_ids))
        whole[0][rows], whole[1][rows] = x[: len(rows)], sumsq[: len(rows)]
        return whole

    def _forward(self, inputs: CpuInputs, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """rows `[N]`: rows to keep after the last attention, and to return in this order; None: all."""
        if self.native is not None and inputs.adapters is None:
            return self._forward_natively(self.native, inputs, rows)
        if self._must_find_block_rows:  # found here, because GEMMs also depend on the calling thread's thread count
            # An expert multiplies all its rows at once, and their number depends on the rest of the batch.
            candidates = BLOCK_ROWS if self.spec.experts is None else (1,)
            self.block_rows = next(rows for rows in candidates if rows == 1 or self._is_invariant_on_all_ranks(rows))
            self._must_find_block_rows = False
        if self.block_rows:
            return self._forward_in_blocks(inputs, rows)
        iteration = _Iteration(self, inputs)
        for step, (launch, op, layer) in enumerate(self._steps):
            self._keep_tapped(step, [iteration.activations["x"]], len(inputs.token_ids))
            launch(iteration, op, layer)
            if rows is not None and step == self._last_attention:
                iteration.keep(rows)
                if not len(rows):
                    break
            if step in self._deep_ends:
                iteration.add_deepstack(layer)
        self._keep_tapped(len(self._steps), [iteration.activations["x"]], len(inputs.token_ids))
        return iteration.activations["x"], iteration.sumsq

    def _forward_natively(
        self, native: NativeLayers, inputs: CpuInputs, rows: Tensor | None
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        """`_forward` in C++, except for prefill attention. It is invariant without blocks."""
        it = _Iteration(self, inputs)
        steps = native.begin(it.activations, it.rotary, inputs.slot_mapping, inputs.attention)
        it.sumsq = steps.sumsq
        begin = 0
        for step, (launch, op, layer) in enumerate(self._steps):
            last = step == self._last_attention
            if op.role is Role.PREFILL_ATTENTION and (steps.chunks or last):
                steps.run(begin, step)
                if steps.chunks:
                    launch(it, op, layer)
                begin = step + 1
            if last and rows is not None:
                if not len(rows):
                    return steps.x[:0], steps.sumsq[:0]
                steps = steps.keep(rows)
        steps.run(begin, len(self._steps))
        return steps.x, steps.sumsq

    def _forward_in_blocks(self, inputs: CpuInputs, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """`_forward` with all operations but attention run per block of rows. Padding tokens fill the last block."""
        height = self.block_rows
        none = torch.zeros_like(inputs.token_ids)
        adapters = none if inputs.adapters is None else inputs.adapters
        embeddings = none if inputs.embeddings is None else inputs.embeddings
        rope = none.expand(3, -1) if inputs.rope is None else inputs.rope
        columns = (*inputs[:3], adapters, embeddings, rope)
        parts = zip(*(_padded(column, height).split(height, -1) for column in columns), strict=True)
        blocks = [
            _Iteration(
                self,
                inputs._replace(
                    token_ids=ids,
                    positions=at,
                    slot_mapping=slots,
                    rows=None,
                    adapters=None if inputs.adapters is None else which,
                    embeddings=None if inputs.embeddings is None else rows_of,
                    rope=None if inputs.rope is None else turned,
                ),
            )
            for ids, at, slots, which, rows_of, turned in parts
        ]
        mixed = {name: torch.cat([block.activations[name].zero_() for block in blocks]) for name in self.mixed}
        for name, tensor in mixed.items():
            for block, part in zip(blocks, tensor.split(height), strict=True):
                block.activations[name] = part
        whole = copy.copy(blocks[0])
        for step, (launch, op, layer) in enumerate(self._steps):
            self._keep_tapped(step, [block.activations["x"] for block in blocks], len(inputs.token_ids))
            if op.role.attends:
                queries = torch.cat([block.activations[op.source] for block in blocks])
                whole.activations = {op.source: queries, op.target: mixed[op.target]}
                launch(whole, op, layer)
            else:
                for block in blocks:
                    launch(block, op, layer)
            if step in self._deep_ends:
                for block in blocks:
                    block.add_deepstack(layer)
            if rows is not None and step == self._last_attention:
                if not len(rows):
                    return blocks[0].activations["x"][:0], blocks[0].sumsq[:0]
                blocks = self._blocks_of(blocks, rows)
        self._keep_tapped(len(self._steps), [block.activations["x"] for block in blocks], len(inputs.token_ids))
        return torch.cat([block.activations["x"] for block in blocks]), torch.cat([block.sumsq for block in blocks])

    def _blocks_of(self, blocks: list[_Iteration], rows: Tensor) -> list[_Iteration]:
        """Return new blocks with only these rows."""
        joined = copy.copy(blocks[0])
        names = [name for name in joined.activations if name != "q"]
        joined.activations = {name: torch.cat([block.activations[name] for block in blocks]) for name in names}
        joined.sumsq = torch.cat([block.sumsq for block in blocks])
        if joined.inputs.adapters is not None:
            every = [block.inputs.adapters for block in blocks if block.inputs.adapters is not None]
            joined.inputs = joined.inputs._replace(adapters=torch.cat(every))
        if joined.embeddings is not None:
            joined.embeddings = torch.cat([block.embeddings for block in blocks if block.embeddings is not None])
        if joined.partial is not None:
            joined.partial = torch.cat([block.partial for block in blocks if block.partial is not None])
        fewer = []
        for part in _padded(rows, self.block_rows).split(self.block_rows):
            fewer.append(copy.copy(joined))
            fewer[-1].keep(part)
        return fewer

    def logits(self, x: Tensor, sumsq: Tensor, rows: Tensor) -> Tensor:
        """Return float32 logits `[S, V]` of rows `[S]`."""
        if not self.block_rows or not len(rows):
            return self._head(x[rows], sumsq[rows])
        blocks = _padded(rows, self.block_rows).split(self.block_rows)
        return torch.cat([self._head(x[block], sumsq[block]) for block in blocks])[: len(rows)]

    def hidden(self, x: Tensor, sumsq: Tensor, rows: Tensor) -> Tensor:
        """Return the states `[N, H]` after the final norm of rows `[N]`."""
        w, norm = self.weights, self.spec.norm
        return reference.final_norm(x[rows], sumsq[rows], w.norm, norm.eps, norm_bias=w.norm_bias, centred=norm.centred)

    def _head(self, x: Tensor, sumsq: Tensor) -> Tensor:
        w, spec = self.weights, self.spec
        return reference.lm_head(
            x, sumsq, w.norm, w.head, spec.norm.eps, norm_bias=w.norm_bias, centred=spec.norm.centred,
            bias=w.head_bias, scale=spec.logits_scale, softcap=spec.logits_softcap,
        )  # fmt: skip

    def embedded(self, token_ids: Tensor) -> Tensor:
        """Return rows `[T, H]` of the embedding, which is split over ranks."""
        own, table = token_ids - self.spec.vocabulary.start, self.weights.table
        mine = (own >= 0) & (own < len(table))
        rows, _ = reference.embed(own.clamp(0, len(table) - 1), table, dtype=self.dtype)
        return self.collectives.all_reduce(rows.masked_fill_(~mine[:, None], 0.0)).to(rows.dtype)

    def _means(self, means: Tensor) -> Tensor:
        """Average over all ranks, whose shards have equal sizes."""
        return self.collectives.all_reduce(means) / self.collectives.ranks

    def _is_invariant_on_all_ranks(self, rows: int) -> bool:
        """Return whether `_is_invariant` is true on every rank."""
        return bool(self.collectives.all_gather(torch.tensor([self._is_invariant(rows)])).all())

    def _is_invariant(self, rows: int) -> bool:
        """Return whether a row's result in a block of this size is bit-equal in any row, with any other rows."""
        generator = torch.Generator().manual_seed(0)
        width = sum(self.mixed.values())
        holds = True
        for _ in range(PROBES):  # no early exit, because other ranks take part
            token = torch.randint(self.spec.vocab_size, (rows,), generator=generator)
            mixed = torch.randn(rows, width, generator=generator)
            alike = self._probe(token[:1].expand(rows), mixed[:1].expand(rows, -1))
            seen = [*alike.unbind(), self._probe(token, mixed)[0]]
            token[rows - 1], mixed[rows - 1] = token[0], mixed[0]
            seen.append(self._probe(token, mixed)[rows - 1])
            holds &= all(torch.equal(row, seen[0]) for row in seen)
        return holds

    def _probe(self, token_ids: Tensor, mixed: Tensor) -> Tensor:
        """Return all results of one layer of each kind and of the head, `[rows, …]`; mixed `[rows, …]`: what attention
        and recurrences give."""
        nowhere = torch.zeros(len(token_ids), dtype=torch.int64)
        iteration = _Iteration(self, CpuInputs(token_ids, nowhere, nowhere, None))
        made = iteration.activations
        given = dict(zip(self.mixed, mixed.to(made["x"].dtype).split(list(self.mixed.values()), -1), strict=True))
        kinds = {self.spec.layer(i): i for i in reversed(range(self.spec.num_layers))}
        found = []
        for kind in sorted(kinds.values()):
            made |= {name: tensor.clone() for name, tensor in given.items()}
            for launch, op, layer in self._steps:
                if layer == kind and not op.role.attends:
                    launch(iteration, op, layer)
            found += [tensor.flatten(1).float() for tensor in made.values()]
        self.kv[0] = 0  # clear the dummy page, which received the keys and values
        return torch.cat([*found, self._head(made["x"], iteration.sumsq)], 1)


def _by_token(batch: Batch) -> Tensor | None:
    """Return the number of each token's adapter `[T]` int64; None if no request has one."""
    if batch.adapters is None:
        return None
    return torch.from_numpy(np.repeat(batch.adapters, batch.query_len).astype(np.int64))


def _rope(batch: Batch) -> Tensor | None:
    if batch.images is None or batch.images.positions is None:
        return None
    return torch.from_numpy(batch.images.positions.astype(np.int64))


def _padded(values: Tensor, multiple: int) -> Tensor:
    """Pad `[…, n]` with zeros to a multiple."""
    return F.pad(values, (0, -values.shape[-1] % multiple))
