"""`CpuExecutor`: the operations of each layer over the torch twins, one after another."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.engine.model.layer_weights import ProductWeights
from weft.engine.model.operations import ALL_REDUCE, Operation
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.device.collectives import Alone, Collectives
from weft.engine.runner.device.launchers import launchers_of
from weft.engine.runner.iteration.batch import Batch
from weft.kernels.attention.backend import HostAttention
from weft.kernels.reference import experts as expert_twins
from weft.kernels.reference import layer as twins

BLOCK_ROWS = (32, 16, 8, 4, 2, 1)
"""tried in this order for batch invariance; one row at a time always holds"""
PROBES = 2


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
    rows: Tensor | None = None
    """[N] int64: tokens whose state behind the last layer is read, ascending; None: all"""


class _Iteration:
    """What launchers read and write: the inputs and the activations (see `ModelSpec.layer_operations`)."""

    def __init__(self, executor: CpuExecutor, inputs: CpuInputs) -> None:
        weights, spec = executor.weights, executor.spec
        self.executor, self.inputs = executor, inputs
        rows, table = inputs.token_ids, weights.embedding
        if executor.collectives.ranks > 1:
            rows, table = torch.arange(len(rows)), executor.embedded(rows)
        x, self.sumsq = twins.embed(
            rows, table, scale=spec.embedding_scale, places=weights.places, positions=inputs.positions,
            centred=spec.norm.centred,
        )  # fmt: skip
        self.partial: Tensor | None = None
        """[T, H]: what this rank's products shall add to the stream, until ranks add up theirs"""
        self.activations: dict[str, Tensor] = {"x": x, "a": x.new_empty(len(x), spec.num_heads * spec.head_dim)}
        self.rotary = [table[inputs.positions] for table in weights.rotary]  # once for all layers
        self.post_norm: Tensor | None = None
        """behind the product that left it"""
        self.routing: expert_twins.Routing | None = None

    def keep(self, rows: Tensor) -> None:
        """Go on with these tokens `[N]` alone; no operation behind this attends."""
        self.activations = {name: made[rows] for name, made in self.activations.items() if name != "q"}
        self.sumsq = self.sumsq[rows]
        self.partial = None if self.partial is None else self.partial[rows]

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
        it.activations[op.source], it.stream_sums, w.matrix, w.bias, spec.norm.eps,
        it.rotary[spec.rotary_table(layer)], slice(None), it.inputs.slot_mapping, it.executor.kv, layer,
        spec.num_heads, w.q_norm, w.k_norm, it.executor.means, it.executor.kv_inverse(layer),
    )  # fmt: skip


def _parts(it: _Iteration, layer: int) -> dict[str, Any]:
    """The attention's arguments where the model has sinks, or its pages scales."""
    sinks, scales = it.executor.weights.layers[layer]["qkv"].sinks, it.executor.kv_scales
    parts = {} if sinks is None else {"sinks": sinks}
    return parts if scales is None or it.executor.unit_scales else {**parts, "kv_scale": scales.scale[layer]}


def _decode(it: _Iteration, op: Operation, layer: int) -> None:
    q, out = it.activations[op.source], it.activations[op.target]
    it.executor.attention.decode(q, it.executor.kv, layer, it.inputs.attention, out=out, **_parts(it, layer))


def _prefill(it: _Iteration, op: Operation, layer: int) -> None:
    q, out = it.activations[op.source], it.activations[op.target]
    it.executor.attention.prefill(q, it.executor.kv, layer, it.inputs.attention, out=out, **_parts(it, layer))


def _residual(it: _Iteration, op: Operation, layer: int) -> None:
    w, norm = _own(it, op, layer), it.executor.spec.norm
    if it.executor.collectives.ranks > 1:
        part = twins.linear(it.activations[op.source], w.matrix, w.bias)
        it.partial = part if it.partial is None else it.partial + part
        it.post_norm = w.post_norm
        return
    it.activations[op.target], it.sumsq = twins.residual_project(
        it.activations[op.source], w.matrix, it.activations[op.target], bias=w.bias, post_norm=w.post_norm,
        eps=norm.eps, centred=norm.centred,
    )  # fmt: skip


def _gate_up(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _own(it, op, layer), it.executor.spec
    it.activations[op.target] = twins.gate_up_project(
        it.activations[op.source], it.stream_sums, w.matrix, spec.norm.eps, activation=spec.activation, bias=w.bias,
        gate=w.gate,
    )  # fmt: skip


def _up(it: _Iteration, op: Operation, layer: int) -> None:
    w, spec = _own(it, op, layer), it.executor.spec
    it.activations[op.target] = twins.up_project(
        it.activations[op.source], it.stream_sums, w.matrix, spec.norm.eps, activation=spec.activation, bias=w.bias
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
        it.activations[op.source], it.stream_sums, it.routing, w.matrix, spec.norm.eps, activation=spec.activation,
        bias=w.bias,
    )  # fmt: skip


def _experts_residual(it: _Iteration, op: Operation, layer: int) -> None:
    w, centred = _own(it, op, layer), it.executor.spec.norm.centred
    assert it.routing is not None
    if it.executor.collectives.ranks > 1:
        x = it.activations[op.target]
        before = torch.zeros_like(x) if it.partial is None else it.partial
        it.partial, _ = expert_twins.experts_residual(
            it.activations[op.source], it.routing, w.matrix, before, bias=w.bias
        )
        it.post_norm = w.post_norm
        return
    it.activations[op.target], it.sumsq = expert_twins.experts_residual(
        it.activations[op.source], it.routing, w.matrix, it.activations[op.target], bias=w.bias, centred=centred
    )


def _all_reduce(it: _Iteration, op: Operation, layer: int) -> None:  # noqa: ARG001
    norm, partial = it.executor.spec.norm, it.partial
    assert partial is not None
    it.activations[op.target], it.sumsq = twins.add_reduced(
        it.executor.collectives.all_reduce(partial), it.activations[op.source], post_norm=it.post_norm, eps=norm.eps,
        centred=norm.centred,
    )  # fmt: skip
    it.partial = it.post_norm = None


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
    ALL_REDUCE: _all_reduce,
}


class CpuExecutor:
    """Weights and KV pool of the CPU. Raises `ModelError` for a model with an operation it cannot launch.

    invariant: what a row becomes depends on that row alone. A library picks a product's order of additions by its
    shape, so all between two attentions runs in blocks of as many rows, padded.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        kv: Tensor,
        attention: HostAttention[Any],
        *,
        invariant: bool = False,
        collectives: Collectives | None = None,
    ) -> None:
        self.spec, self.weights, self.kv, self.attention = spec, weights, kv, attention
        self.collectives = collectives or Alone()
        self.kv_scales = weights.scales_of_pages(spec, kv.dtype)
        self.unit_scales = self.kv_scales is not None and bool((self.kv_scales.scale == 1).all())
        self.means: twins.Means | None = None
        if self.collectives.ranks > 1 and spec.qk_norm == "projection":
            self.means = self._means
        self.block_rows = 0
        """of every operation between attentions; 0: as many as there are"""
        self._unknown = invariant
        self._last_attention = -1
        """the step behind which rows may leave that nobody reads; -1: a router has chosen for all of them before"""
        launchers = launchers_of(spec, TABLE, "the CPU")
        self._steps = [
            (launchers[op.name], op, layer) for layer in range(spec.num_layers) for op in spec.layer_operations(layer)
        ]
        if spec.experts is None or not spec.placement.parallel:
            self._last_attention = max(i for i, (_, op, _) in enumerate(self._steps) if op.role.attends)

    def kv_inverse(self, layer: int) -> Tensor | None:
        """`[2, Hkv]`: what K and V are multiplied by on their way into pages in FP8."""
        return None if self.kv_scales is None else self.kv_scales.inverse[layer]

    def inputs(self, batch: Batch, token_ids: Tensor) -> CpuInputs:
        """Of an iteration. token_ids `[T]` int64: the batch's, with those that decodes read on the device."""
        return CpuInputs(
            token_ids,
            torch.from_numpy(batch.positions.astype(np.int64)),
            torch.from_numpy(batch.slot_mapping),
            self.attention.prepare(batch),
            torch.from_numpy(batch.read_rows),
        )

    def forward(self, inputs: CpuInputs) -> tuple[Tensor, Tensor]:
        """The residual stream after the last layer: x `[T, H]` and its sum of squares `[T]`.

        Rows that nobody reads leave once the last layer has attended: their keys and values are written, and nothing
        behind looks at them. They are zero here. What the others become does not change: to the bit with batch
        invariance; without it a library may add in another order for fewer rows.

        With batch invariance both have further rows, of nobody, where all are read.
        """
        rows = inputs.rows if self._last_attention >= 0 else None
        if rows is None or len(rows) == len(inputs.token_ids):
            return self._forward(inputs, None)
        x, sumsq = self._forward(inputs, rows)
        whole = x.new_zeros(len(inputs.token_ids), x.shape[1]), sumsq.new_zeros(len(inputs.token_ids))
        whole[0][rows], whole[1][rows] = x[: len(rows)], sumsq[: len(rows)]
        return whole

    def _forward(self, inputs: CpuInputs, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """rows `[N]`: that go on behind the last attention, and come back in this order; None: all."""
        if self._unknown:  # found here, because a product also depends on the threads of who asks for it
            # Experts take together what comes to each of them: how much that is, the neighbours decide.
            candidates = BLOCK_ROWS if self.spec.experts is None else (1,)
            self.block_rows = next(rows for rows in candidates if rows == 1 or self._all_hold(rows))
            self._unknown = False
        if self.block_rows:
            return self._forward_in_blocks(inputs, rows)
        iteration = _Iteration(self, inputs)
        for step, (launch, op, layer) in enumerate(self._steps):
            launch(iteration, op, layer)
            if rows is not None and step == self._last_attention:
                iteration.keep(rows)
                if not len(rows):
                    break
        return iteration.activations["x"], iteration.sumsq

    def _forward_in_blocks(self, inputs: CpuInputs, rows: Tensor | None) -> tuple[Tensor, Tensor]:
        """As `_forward`, but for the attentions a block of rows after the other; tokens of nobody fill the last one."""
        height = self.block_rows
        columns = (_filled(column, height).split(height) for column in inputs[:3])
        parts = zip(*columns, strict=True)
        blocks = [_Iteration(self, CpuInputs(ids, at, slots, inputs.attention)) for ids, at, slots in parts]
        attended = torch.cat([block.activations["a"].zero_() for block in blocks])
        for block, part in zip(blocks, attended.split(height), strict=True):
            block.activations["a"] = part
        whole = copy.copy(blocks[0])
        for step, (launch, op, layer) in enumerate(self._steps):
            if op.role.attends:
                queries = torch.cat([block.activations[op.source] for block in blocks])
                whole.activations = {op.source: queries, op.target: attended}
                launch(whole, op, layer)
            else:
                for block in blocks:
                    launch(block, op, layer)
            if rows is not None and step == self._last_attention:
                if not len(rows):
                    return blocks[0].activations["x"][:0], blocks[0].sumsq[:0]
                blocks = self._blocks_of(blocks, rows)
        return torch.cat([block.activations["x"] for block in blocks]), torch.cat([block.sumsq for block in blocks])

    def _blocks_of(self, blocks: list[_Iteration], rows: Tensor) -> list[_Iteration]:
        """With these rows alone, in as many blocks as they fill."""
        joined = copy.copy(blocks[0])
        names = [name for name in joined.activations if name != "q"]
        joined.activations = {name: torch.cat([block.activations[name] for block in blocks]) for name in names}
        joined.sumsq = torch.cat([block.sumsq for block in blocks])
        if joined.partial is not None:
            joined.partial = torch.cat([block.partial for block in blocks if block.partial is not None])
        fewer = []
        for part in _filled(rows, self.block_rows).split(self.block_rows):
            fewer.append(copy.copy(joined))
            fewer[-1].keep(part)
        return fewer

    def logits(self, x: Tensor, sumsq: Tensor, rows: Tensor) -> Tensor:
        """`[S, V]` float32 logits of the rows `[S]` that need them."""
        if not self.block_rows or not len(rows):
            return self._head(x[rows], sumsq[rows])
        blocks = _filled(rows, self.block_rows).split(self.block_rows)
        return torch.cat([self._head(x[block], sumsq[block]) for block in blocks])[: len(rows)]

    def hidden(self, x: Tensor, sumsq: Tensor, rows: Tensor) -> Tensor:
        """`[N, H]` states behind the final norm of the rows `[N]`."""
        w, norm = self.weights, self.spec.norm
        return twins.final_norm(x[rows], sumsq[rows], w.norm, norm.eps, norm_bias=w.norm_bias, centred=norm.centred)

    def _head(self, x: Tensor, sumsq: Tensor) -> Tensor:
        w, spec = self.weights, self.spec
        return twins.lm_head(
            x, sumsq, w.norm, w.lm_head, spec.norm.eps, norm_bias=w.norm_bias, centred=spec.norm.centred,
            bias=w.head_bias, scale=spec.logits_scale, softcap=spec.logits_softcap,
        )  # fmt: skip

    def embedded(self, token_ids: Tensor) -> Tensor:
        """`[T, H]`: rows of the embedding, each of which one rank has."""
        own = token_ids - self.spec.vocabulary.start
        mine = (own >= 0) & (own < len(self.weights.embedding))
        rows = F.embedding(own.clamp(0, len(self.weights.embedding) - 1), self.weights.embedding)
        return self.collectives.all_reduce(rows.masked_fill_(~mine[:, None], 0.0)).to(rows.dtype)

    def _means(self, means: Tensor) -> Tensor:
        """Of all ranks; each has as many numbers."""
        return self.collectives.all_reduce(means) / self.collectives.ranks

    def _all_hold(self, rows: int) -> bool:
        """`_holds`, on every rank."""
        return bool(self.collectives.all_gather(torch.tensor([self._holds(rows)])).all())

    def _holds(self, rows: int) -> bool:
        """Whether a row of a block of so many becomes the same to the bit at every place, whatever the others are."""
        generator = torch.Generator().manual_seed(0)
        width = self.spec.num_heads * self.spec.head_dim
        holds = True
        for _ in range(PROBES):  # to the end, for other ranks take part
            token = torch.randint(self.spec.vocab_size, (rows,), generator=generator)
            attended = torch.randn(rows, width, generator=generator)
            alike = self._probe(token[:1].expand(rows), attended[:1].expand(rows, -1))
            seen = [*alike.unbind(), self._probe(token, attended)[0]]
            token[rows - 1], attended[rows - 1] = token[0], attended[0]
            seen.append(self._probe(token, attended)[rows - 1])
            holds &= all(torch.equal(row, seen[0]) for row in seen)
        return holds

    def _probe(self, token_ids: Tensor, attended: Tensor) -> Tensor:
        """`[rows, …]`: all that the first layer's operations and the head make of rows, whatever they attended to."""
        nowhere = torch.zeros(len(token_ids), dtype=torch.int64)
        iteration = _Iteration(self, CpuInputs(token_ids, nowhere, nowhere, None))
        made = iteration.activations
        made["a"] = attended.to(made["x"].dtype)
        for launch, op, layer in self._steps:
            if layer == 0 and not op.role.attends:
                launch(iteration, op, layer)
        self.kv[0] = 0  # the dummy page, which took the keys and values
        return torch.cat([*(x.flatten(1).float() for x in made.values()), self._head(made["x"], iteration.sumsq)], 1)


def _filled(values: Tensor, multiple: int) -> Tensor:
    """`[n]` with zeros up to a multiple."""
    return torch.nn.functional.pad(values, (0, -len(values) % multiple))
