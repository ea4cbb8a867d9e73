"""`CudaLayers`: what the operations of a model's layers read and write on one GPU, and what launches each of them.

Everything launched has a fixed grid and reads counts and work lists from device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from weft.engine.model.operations import ALL_REDUCE
from weft.engine.model.spec import ModelSpec
from weft.engine.model.sums import summed_alone
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import serial_period
from weft.engine.runner.collectives import DeviceCollectives
from weft.engine.runner.cuda_experts import ExpertLayers
from weft.engine.runner.cuda_fp8 import Fp8Layers, stands_apart
from weft.engine.runner.cuda_fp8_apart import Fp8LayersApart
from weft.engine.runner.cuda_fp8_experts import Fp8ExpertLayers
from weft.engine.runner.cuda_inputs import DeviceInputs
from weft.engine.runner.launchers import launchers_of
from weft.engine.runner.layer_launch import Launch, rows_of
from weft.engine.runner.sum_places import SumPlace, sum_places
from weft.kernels.attention import AttentionBackend
from weft.kernels.attention_output import Output
from weft.kernels.attention_triton import PrefillParts, TritonStep
from weft.kernels.decode_workspace import decode_workspace
from weft.kernels.experts import switch_shared
from weft.kernels.fp8 import KvScales
from weft.kernels.fp8_projections import rows_buffer
from weft.kernels.fp8_unpack import Unpacked, counting_table
from weft.kernels.gemm_config import GemmConfig
from weft.kernels.gemm_launch import choose, workspace
from weft.kernels.gpu import gpu
from weft.kernels.heads import place_heads
from weft.kernels.mid_projections import gate_up_project, linear_project, qkv_project, residual_project
from weft.kernels.prefill_attention import prefill_workspace
from weft.kernels.projections import fuses_heads, sumsq_buffer
from weft.kernels.rows import add_normed, row_sumsq


class CudaLayers:
    """Launches one operation of one layer at a time, on the current stream; `CudaExecutor` says in which order.

    Raises `ModelError` for a model with an operation that it cannot launch.
    """

    def __init__(
        self,
        spec: ModelSpec,
        weights: Weights,
        inputs: DeviceInputs,
        dtype: torch.dtype,
        attention: AttentionBackend[Any],
        *,
        invariant: bool = False,
        collectives: DeviceCollectives | None = None,
        kv_scales: KvScales | None = None,
    ) -> None:
        """invariant: one accumulation order for every product, sum of squares and attention, whatever shares the batch.
        collectives: of a rank of several; its products then leave partial sums. kv_scales: of pages in e4m3.
        """
        self.spec, self.weights, self.inputs = spec, weights, inputs
        self.collectives = collectives
        self.attention, self.invariant = attention, invariant
        self._launchers = launchers_of(spec, TABLE, "a GPU")
        heads_normed = weights.layers[0]["qkv"].q_norm is not None
        self._kv_scales = kv_scales
        fp8_apart = spec.quantization is not None and stands_apart(spec)
        self._heads_apart = (
            (invariant and heads_normed) or (kv_scales is not None and spec.quantization is None) or fp8_apart
        )
        """What becomes of heads is a pass behind their product: norms of heads add up in its epilogue in an order that
        follows its tiles, and these the token count; no product in 16 bits writes pages in FP8; and products in FP8
        that stand apart leave all of it to passes."""
        device = inputs.slab.device
        here = gpu(device)
        assert here is not None
        self.num_sms = here.sms
        t = inputs.layout.max_tokens

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        def shared(*shape: int) -> Tensor:
            """What other ranks reach, where there are any."""
            return buffer(*shape) if collectives is None else collectives.take(shape, dtype)

        self.x = shared(t, spec.hidden_size)
        """[T, H] the residual stream; after a run, that of the last layer"""
        self.sumsq = sumsq_buffer(spec.hidden_size, t, device)
        self.partials: list[Tensor] = []
        """[T, H] each: what this rank's products shall add to the stream, until ranks add up theirs: see `SumPlace`"""
        self.summed: Tensor | None = None
        """[T, H] a sum of all ranks that something else follows"""
        if collectives is not None:
            # each rank adds up the squares of its part of a row
            self.sumsq = collectives.take((max(len(self.sumsq), collectives.ranks), t), torch.float32)
            self.partials = [shared(t, spec.hidden_size) for _ in range(2)]
            self.summed = shared(t, spec.hidden_size)
            self._other_sums = sumsq_buffer(spec.hidden_size, t, device)
        self._places = sum_places(spec)
        dense = spec.layer_operations() if spec.quantization is None else ()
        self._summed_alone = frozenset(op.name for op in summed_alone(dense))
        """products that may write to the other ranks themselves"""
        activations = {
            "x": self.x,
            "q": buffer(t, spec.num_heads, spec.head_dim),
            "h": buffer(t, spec.intermediate_size),
        }
        self.expert_layers: ExpertLayers | None = None
        if spec.experts is not None:
            self.expert_layers = ExpertLayers(spec, t, dtype, device)
            activations["s"] = buffer(t, spec.experts.shared_size)
        self._raw = {
            name: buffer(t, width) if needed else None
            for name, width, needed in (
                ("qkv", spec.qkv_size, not self._fuses_heads(weights)),
                ("residual", spec.hidden_size, spec.placement.behind and collectives is None),
            )
        }
        """what a product leaves for a pass over its rows, where one follows"""
        self._fp8: Fp8Layers | None = None
        if fp8_apart:
            raw = {**self._raw, "h": activations["h"]}
            self._fp8 = Fp8LayersApart(spec, weights, t, device, raw, invariant=invariant)
        elif spec.quantization is not None:
            self._fp8 = Fp8Layers(spec, weights, t, device, invariant=invariant)
        self._fp8_experts: Fp8ExpertLayers | None = None
        if self._fp8 is not None and self.expert_layers is not None:
            self._fp8_experts = Fp8ExpertLayers(spec, self._fp8, self.expert_layers.choice, t, dtype, device)
        width = spec.num_heads * spec.head_dim
        attended: Output | None = None
        if self._fp8 is not None and not fp8_apart and attention.quantizes:
            attended = self._fp8.operand("a", slice(None))
        self.whole = rows_of(activations, self.sumsq, buffer(t, width) if attended is None else attended)
        self.activations = self.whole.activations
        self.left = self.whole
        """what stays in the last layer, where rows leave"""
        if Pipeline(serial_period(spec, t, here.sms), spec).behind:
            left = {**activations, "x": buffer(t, spec.hidden_size)}
            sums = sumsq_buffer(spec.hidden_size, t, device)
            left_attended = buffer(t, width) if attended is None else rows_buffer(t, width, device)
            self.left = rows_of(left, sums, left_attended, inputs.count["left"])
        self.gemm_space = workspace(device, elements=1 << 26)
        self.steps: list[Any] = [self._work(k) for k in range(inputs.layout.nano_batches)]
        """what the attention back end needs, for each nano-batch"""
        self.left_steps = [self._of_read_tiles(k, step) for k, step in enumerate(self.steps)]
        """of the last layer, where rows leave"""

    def launch_of(self, pipeline: Pipeline, i: int, layer: int, kv: Tensor, parts: list[int]) -> Launch:
        """Operation `i` of a pipeline's period in a layer, on all of its rows."""
        nano, op = pipeline.operations[i]
        return Launch(nano, op, layer, self.weights.layers[layer].get(op.name), kv, pipeline, parts, self.whole)

    def launch(self, it: Launch) -> None:
        self._launchers[it.operation.name](self, it)

    def _fuses_heads(self, weights: Weights) -> bool:
        q_norm = weights.layers[0]["qkv"].q_norm
        fused = fuses_heads(self.spec.head_dim, q_norm, normed=self.spec.placement.before)
        return fused and not self._heads_apart

    def _work(self, nano: int) -> TritonStep:
        """The work lists of a nano-batch, with scratch of its own: those of two may be worked on at once."""
        spec, layout = self.spec, self.inputs.layout
        space = decode_workspace(
            layout.max_part_slots, layout.max_tokens, spec.num_kv_heads, spec.heads_per_kv, spec.head_dim,
            self.inputs.slab.device,
        )  # fmt: skip
        decodes, prefill = self.inputs.decode_work(nano), self.inputs.prefill_work(nano)
        parts = None
        if layout.prefill_slots:
            partial_sums = prefill_workspace(
                layout.prefill_slots, spec.num_kv_heads, spec.head_dim, self.inputs.slab.device
            )
            parts = PrefillParts(partial_sums, self.inputs.decoders(nano))
        return TritonStep(self.inputs.page_table, decodes, *prefill, space, self._unpacked(nano), parts)

    def _unpacked(self, nano: int) -> Unpacked | None:
        (pages, page_size), table = self.inputs.layout.unpacked, self.inputs.page_table
        if not pages:
            return None
        shape = pages, 1, 2, page_size, self.spec.num_kv_heads, self.spec.head_dim
        wide = torch.zeros(shape, dtype=self.x.dtype, device=table.device)
        return Unpacked(*self.inputs.unpacked_work(nano), wide, counting_table(pages, table.shape[1], table.device))

    def _of_read_tiles(self, nano: int, step: TritonStep) -> TritonStep:
        items, count = self.inputs.left_prefill_work(nano)
        wide = step.unpacked
        if wide is not None:
            _, _, wide_items, wide_count = self.inputs.unpacked_work(nano, left=True)
            wide = wide._replace(items=wide_items, num_items=wide_count)
        return step._replace(prefill_items=items, prefill_count=count, unpacked=wide)

    def fill(self, x: Tensor) -> None:
        """Activations as in the middle of a model, to time its layers: x `[T, H]`, rows of unit variance, the rest
        random.
        """
        for name, activation in self.activations.items():
            if name == "x":
                activation.copy_(x)
            else:
                activation.normal_()
        self.sumsq.fill_(self.spec.hidden_size)
        if self._fp8 is not None:
            self._fp8.fill()

    def of_embedding(self, pipeline: Pipeline) -> dict[str, Any]:
        """What `embed` is told to leave beside the stream."""
        return {} if self._fp8 is None else self._fp8.of_embedding(pipeline)

    # -- launchers

    def _qkv(self, it: Launch) -> None:
        own, w, column, eps = it.tokens, it.product, self.inputs.column, self.spec.norm.eps
        x, sums, raw = it.rows.activations[it.operation.source][own], self._stream_sums(it), self._raw_of("qkv", own)
        heads = (
            self.weights.rotary[self.spec.rotary_table(it.layer)], column["positions"][own],
            column["slot_mapping"][own], it.kv, it.layer, self.spec.num_heads, w.q_norm, w.k_norm,
        )  # fmt: skip
        scales: dict[str, Any] = {} if self._kv_scales is None else {"kv_scales": self._kv_scales}
        out = self.activations[it.operation.target][own]
        if self._fp8 is not None:
            self._fp8.qkv(it, heads, out, self._common(it) | scales)
        elif self._heads_apart:
            assert raw is not None
            linear_project(x, sums, w.weight, eps, bias=w.bias, out=raw, **self._common(it))
            place_heads(raw, eps, *heads, out=out, num_tokens=self._live(it), **scales)
        else:
            qkv_project(x, sums, w.weight, w.bias, eps, *heads, out=out, raw=raw, **self._common(it))

    def _decode(self, it: Launch) -> None:
        self._attend(self.attention.attend if it.fused else self.attention.decode, it)

    def _prefill(self, it: Launch) -> None:
        if not it.fused:
            self._attend(self.attention.prefill, it)

    def _attend(self, attend: Callable[..., Output], it: Launch) -> None:
        """On the whole activations: work lists say whose rows."""
        steps = self.left_steps if it.leaving and self.attention.captured else self.steps
        step = steps[it.pipeline.nano_batches.index((it.nano.begin, it.nano.end))]
        step = self.attention.within(step, it.pipeline.tokens)
        sinks = self.weights.layers[it.layer]["qkv"].sinks
        attend(
            self.activations[it.operation.source], it.kv, it.layer, step, out=self.whole.attended, num_sms=it.nano.sms,
            **({} if sinks is None else {"sinks": sinks}),
        )  # fmt: skip

    def _residual(self, it: Launch) -> None:
        if self.collectives is not None:
            self._leave_partial(it)
            return
        if self._fp8 is not None:
            it.note_sums(self._fp8.residual(it, self._common(it)))
            return
        own, w, norm = it.tokens, it.product, self.spec.norm
        x, sumsq = it.x, it.sumsq
        _, sums = residual_project(
            it.rows.activations[it.operation.source][own], w.weight, x, out=x, sumsq=sumsq, post_norm=w.post_norm,
            bias=w.bias, eps=norm.eps, centred=norm.centred, raw=self._raw_of("residual", own), **self._common(it),
        )  # fmt: skip
        if self.invariant and w.post_norm is None and not norm.centred:
            # the parts follow the tiles of the product, and these the token count
            sums = row_sumsq(x, out=sumsq[:1])
        it.note_sums(sums)

    def _leave_partial(self, it: Launch) -> None:
        """A product whose sum over all ranks goes to the stream."""
        if self._pushes(it):
            return
        source, w, place = self.activations[it.operation.source][it.tokens], it.product, self._place(it)
        part = self.partials[place.turn][it.tokens]
        if place.first:
            linear_project(source, None, w.weight, self.spec.norm.eps, bias=w.bias, out=part, **self._common(it))
        else:
            residual_project(
                source, w.weight, part, out=part, sumsq=self._other_sums[:, it.tokens], bias=w.bias,
                **self._common(it),
            )  # fmt: skip

    def _pushes(self, it: Launch) -> bool:
        """Have a product write its part of a sum to the other ranks, where that is quicker; false where it is not.

        Of the serial plan alone: what a product has sent is what the next sum adds up.
        """
        pipeline = it.pipeline
        if it.operation.name not in self._summed_alone or len(pipeline.lanes) > 1 or len(pipeline.begins) > 1:
            return False
        assert self.collectives is not None
        source, w = self.activations[it.operation.source][it.tokens], it.product
        return self.collectives.push(source, w.weight, w.bias, **self._common(it))

    def _all_reduce(self, it: Launch) -> None:
        assert self.collectives is not None
        assert self.summed is not None
        own, norm, place = it.tokens, self.spec.norm, self._place(it)
        post_norm = self.weights.layers[it.layer][place.last].post_norm
        x, sumsq, part = self.x[own], self.sumsq[:, own], self.partials[place.turn][own]
        options: dict[str, Any] = {"live": self._live(it), "num_sms": it.nano.sms}
        if post_norm is None:
            sums = self.collectives.reduce(part, x, sumsq, add=True, **options)
        else:
            total, sums = self.summed[own], sumsq[:1]
            self.collectives.reduce(part, total, sumsq, add=False, **options)
            add_normed(x, total, post_norm, norm.eps, sumsq=sumsq)
        if norm.centred:
            sums = row_sumsq(x, out=sumsq[:1], centred=True)
        it.note_sums(sums)

    def _place(self, it: Launch) -> SumPlace:
        return self._places[it.layer][it.operation.name]

    def _gate_up(self, it: Launch) -> None:
        if self._fp8 is not None:
            self._fp8.gate_up(it, self._common(it))
            return
        out = it.rows.activations[it.operation.target][it.tokens]
        gate_up_project(
            it.x, self._stream_sums(it), it.product.weight, self.spec.norm.eps, activation=self.spec.activation,
            bias=it.product.bias, out=out, **self._common(it),
        )  # fmt: skip
        if it.product.gate is not None:
            sums = self._stream_sums(it)
            assert sums is not None  # `resolve` refuses experts without norms before them
            switch_shared(it.x, sums, it.product.gate, self.spec.norm.eps, out=out)

    def _up(self, it: Launch) -> None:
        if self._fp8 is not None:
            self._fp8.gate_up(it, self._common(it))
            return
        linear_project(
            it.x, self._stream_sums(it), it.product.weight, self.spec.norm.eps, activation=self.spec.activation,
            bias=it.product.bias, out=it.rows.activations[it.operation.target][it.tokens], **self._common(it),
        )  # fmt: skip

    def _router(self, it: Launch) -> None:
        assert self.expert_layers is not None
        self.expert_layers.route(it, self._stream_sums(it), self._live(it))

    def _experts_gate_up(self, it: Launch) -> None:
        assert self.expert_layers is not None
        if self._fp8_experts is not None:
            self._fp8_experts.gate_up(it, self._live(it))
        else:
            self.expert_layers.gate_up(it, self._stream_sums(it), self._live(it))

    def _experts_residual(self, it: Launch) -> None:
        assert self.expert_layers is not None
        if self.collectives is not None:
            place = self._place(it)
            part = self.partials[place.turn][it.tokens]
            if place.first:
                part.zero_()
            self.expert_layers.residual(it, part, self._other_sums[:, it.tokens], self._live(it))
            return
        if self._fp8_experts is not None:
            sums = self._fp8_experts.residual(it, self._live(it))
        else:
            sums = self.expert_layers.residual(it, it.x, it.sumsq, self._live(it))
        it.note_sums(sums)

    def _live(self, it: Launch) -> Tensor:
        """`[1]`: how many of an operation's tokens there are."""
        return self.inputs.live(it.pipeline, it.nano.begin) if it.rows.live is None else it.rows.live

    def _stream_sums(self, it: Launch) -> Tensor | None:
        """`[parts, T]` that a product which reads the stream is normed by; None where no norm stands before it."""
        return it.sums if self.spec.placement.before else None

    def _raw_of(self, name: str, own: slice) -> Tensor | None:
        raw = self._raw[name]
        return None if raw is None else raw[own]

    def _common(self, it: Launch) -> dict[str, Any]:
        """What every product is told beside its operands."""
        return {
            "num_sms": it.nano.sms,
            "space": self.gemm_space,
            "num_tokens": self._live(it),
            "config": self.config(it.nano.config, it.nano.end - it.nano.begin, it.product.weight),
        }

    def config(self, given: GemmConfig | None, tokens: int, weight: Tensor) -> GemmConfig | None:
        """The configuration of a product: the plan's, or None for the kernel's own choice; unsplit for invariance."""
        if not self.invariant:
            return given
        features, depth = weight.shape
        return choose(tokens, features, depth, self.num_sms)._replace(split=1)


TABLE: Mapping[str, Callable[[CudaLayers, Launch], None]] = {
    "qkv": CudaLayers._qkv,
    "decode": CudaLayers._decode,
    "prefill": CudaLayers._prefill,
    "residual": CudaLayers._residual,
    "gate_up": CudaLayers._gate_up,
    "up": CudaLayers._up,
    "router": CudaLayers._router,
    "experts_gate_up": CudaLayers._experts_gate_up,
    "experts_residual": CudaLayers._experts_residual,
    ALL_REDUCE: CudaLayers._all_reduce,
}
