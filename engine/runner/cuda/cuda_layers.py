"""`CudaLayers`: buffers and launchers of a model's layer operations on one GPU.

All launches have fixed grids and read counts and work lists from device memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.engine.model.operations import ALL_REDUCE
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import serial_period
from weft.engine.runner.cuda.adapter_layers import AdapterLayers
from weft.engine.runner.cuda.adapter_slots import AdapterSlots
from weft.engine.runner.cuda.cuda_experts import ExpertLayers, Fp8ExpertLayers
from weft.engine.runner.cuda.cuda_fp8 import Fp8Layers
from weft.engine.runner.cuda.cuda_fp8_unfused import UnfusedFp8Layers
from weft.engine.runner.cuda.cuda_images import CudaImages
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.cuda.layer_launch import OperationLaunch, Rows, rows_of
from weft.engine.runner.cuda.rank_sums import RankSums
from weft.engine.runner.device.collectives import DeviceCollectives
from weft.engine.runner.device.launchers import launchers_for
from weft.engine.runner.options.gpu_limits import unfused_fp8
from weft.kernels.attention.backend import AttentionBackend
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.fp8_unpack import Unpacked, counting_table
from weft.kernels.attention.output import Output
from weft.kernels.attention.prefill_attention import prefill_workspace
from weft.kernels.attention.triton_backend import PrefillSplits, TritonStep
from weft.kernels.common.gpu import gpu
from weft.kernels.experts.experts import gate_shared
from weft.kernels.formats.fp8 import KvScales
from weft.kernels.matmul.fp8_projections import rows_buffer
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_launch import choose, workspace
from weft.kernels.matmul.heads import place_heads
from weft.kernels.matmul.mid_projections import (
    Config,
    gate_up_project,
    linear_project,
    qkv_project,
    residual_project,
    unsplit,
)
from weft.kernels.matmul.projections import fuses_heads, sumsq_buffer
from weft.kernels.matmul.rows import row_sumsq


class CudaLayers:
    """Launches one operation of one layer at a time on the current stream, in the order of `CudaExecutor`.

    Raises `ModelError` for a model with an operation that has no launcher."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, inputs: DeviceInputs, dtype: torch.dtype,
        attention: AttentionBackend[Any], *, invariant: bool = False, collectives: DeviceCollectives | None = None,
        kv_scales: KvScales | None = None, images: Tensor | None = None,
        adapters: AdapterSlots | None = None,
    ) -> None:  # fmt: skip
        """invariant: the order of accumulation in GEMMs, sums of squares and attention does not depend on the batch.
        collectives: given for one of several ranks, whose GEMMs write partial sums. kv_scales: scales of e4m3 pages.
        images: the pool of embeddings of images, if the model takes any.
        adapters: LoRA adapters that iterations may use; None: none."""
        self.spec, self.weights, self.inputs = spec, weights, inputs
        self.collectives = collectives
        self.attention, self.invariant = attention, invariant
        self._kv_scales, self._dtype = kv_scales, dtype
        self.page_scales: dict[str, Any] = {} if kv_scales is None else {"kv_scales": kv_scales}
        self._launchers = launchers_for(spec, TABLE, "a GPU")
        device, tokens = inputs.slab.device, inputs.layout.max_tokens
        here = gpu(device)
        assert here is not None
        self.num_sms = here.sms
        self._unfused_fp8 = spec.quantization is not None and unfused_fp8(spec)
        self._separate_heads = self._needs_separate_heads()  # A separate pass after the QKV GEMM processes its heads.
        self.x = self._buffer(spec.hidden_size, shared=True)
        """`[T, H]` residual stream; after a run, the last layer's."""
        self.sumsq = sumsq_buffer(spec.hidden_size, tokens, device)
        """`[sums, T]` partial sums of squares of its rows."""
        self.rank_sums: RankSums | None = None
        if collectives is not None:
            # Each rank sums the squares of its shard of a row.
            self.sumsq = collectives.allocate((max(len(self.sumsq), collectives.ranks), tokens), torch.float32)
            self.rank_sums = RankSums(spec, weights, collectives, tokens, dtype, device, invariant=invariant)
        activations = {
            "x": self.x,
            "q": self._buffer(spec.num_heads, spec.head_dim),
            "h": self._buffer(spec.intermediate_size),
        }
        if spec.experts is not None:
            activations["s"] = self._buffer(spec.experts.shared_size)
        self._raw = {
            "qkv": None if self._fuses_heads() else self._buffer(spec.qkv_size),
            "residual": self._buffer(spec.hidden_size) if spec.placement.after and collectives is None else None,
        }
        """GEMM outputs that a separate pass processes, if there is one."""
        self._fp8 = self._fp8_layers(activations["h"])
        self._experts: ExpertLayers | None = None
        if self._fp8 is not None and spec.experts is not None:
            self._experts = Fp8ExpertLayers(spec, self._fp8, tokens, dtype, device, invariant=invariant)
        elif spec.experts is not None:
            self._experts = ExpertLayers(spec, tokens, dtype, device)
        self.whole, self.kept = self._rows(activations)
        self.activations = self.whole.activations
        self.gemm_space = workspace(device, elements=1 << 26)
        self.images = None if images is None else CudaImages(spec, weights, inputs, images)
        self.steps: list[Any] = [self._attention_step(k) for k in range(inputs.layout.nano_batches)]
        """The attention back end's steps, one for each nano-batch."""
        self.kept_steps = [self._step_of_kept_tiles(k, step) for k, step in enumerate(self.steps)]
        """Steps of the last layer if rows are dropped."""
        self.adapted = None if adapters is None else AdapterLayers(adapters, inputs, spec.norm.eps, dtype)

    def _needs_separate_heads(self) -> bool:
        """Return whether heads need a separate pass: for unfused FP8, for FP8 pages after a 16-bit GEMM, and for head
        norms with batch invariance, because the order of an epilogue's sums depends on the token count."""
        heads_normed = self.weights.layers[0]["qkv"].q_norm is not None
        writes_fp8 = self._kv_scales is not None and self.spec.quantization is None
        return (self.invariant and heads_normed) or writes_fp8 or self._unfused_fp8

    def _fuses_heads(self) -> bool:
        q_norm = self.weights.layers[0]["qkv"].q_norm
        fused = fuses_heads(self.spec.head_dim, q_norm, normed=self.spec.placement.before)
        return fused and not self._separate_heads

    def _buffer(self, *row: int, shared: bool = False) -> Tensor:
        """Allocate a buffer with a row per token. shared: other ranks can access it."""
        shape = self.inputs.layout.max_tokens, *row
        if shared and self.collectives is not None:
            return self.collectives.allocate(shape, self._dtype)
        return torch.zeros(shape, dtype=self._dtype, device=self.inputs.slab.device)

    def _fp8_layers(self, h: Tensor) -> Fp8Layers | None:
        spec, tokens, device = self.spec, self.inputs.layout.max_tokens, self.inputs.slab.device
        if spec.quantization is None:
            return None
        if not self._unfused_fp8:
            return Fp8Layers(spec, self.weights, tokens, device, invariant=self.invariant)
        raw = {**self._raw, "h": h}
        return UnfusedFp8Layers(spec, self.weights, tokens, device, raw, invariant=self.invariant)

    def _rows(self, activations: Mapping[str, Tensor]) -> tuple[Rows, Rows]:
        """Return the rows of all tokens, and those kept in the last layer."""
        spec, tokens, device = self.spec, self.inputs.layout.max_tokens, self.inputs.slab.device
        width = spec.num_heads * spec.head_dim
        operand: Output | None = None
        if self._fp8 is not None and not self._unfused_fp8 and self.attention.quantizes:
            operand = self._fp8.operand("a", slice(None))
        whole = rows_of(activations, self.sumsq, self._buffer(width) if operand is None else operand)
        if not Pipeline(serial_period(spec, tokens, self.num_sms), spec).after_drop:
            return whole, whole
        kept = {**activations, "x": self._buffer(spec.hidden_size)}
        sums = sumsq_buffer(spec.hidden_size, tokens, device)
        attended = self._buffer(width) if operand is None else rows_buffer(tokens, width, device)
        return whole, rows_of(kept, sums, attended, self.inputs.count["kept"])

    def launch_of(self, pipeline: Pipeline, i: int, layer: int, kv: Tensor, sum_counts: list[int]) -> OperationLaunch:
        """Return the launch of operation `i` of a pipeline's period in a layer, on all rows."""
        nano, op = pipeline.operations[i]
        weights = self.weights.layers[layer].get(op.name)
        return OperationLaunch(nano, op, layer, weights, kv, pipeline, sum_counts, self.whole)

    def launch(self, it: OperationLaunch) -> None:
        if it.adapted and self.adapted is not None:
            sums = None if it.operation.target == "x" else self.stream_sums(it)
            it = it._replace(more=self.adapted.further_depth(it, sums))
        self._launchers[it.operation.name](self, it)
        if self.images is not None and self.images.adds_after(it):
            self.images.add(it, {} if self._fp8 is None else self._fp8.stream_outputs(it))

    def _attention_step(self, nano: int) -> TritonStep:
        """Return a nano-batch's work lists with separate scratch, because two nano-batches may run at once."""
        spec, layout = self.spec, self.inputs.layout
        space = decode_workspace(
            layout.max_part_slots, layout.max_tokens, spec.num_kv_heads, spec.heads_per_kv, spec.head_dim,
            self.inputs.slab.device,
        )  # fmt: skip
        decodes, prefill = self.inputs.decode_work(nano), self.inputs.prefill_work(nano)
        splits = None
        if layout.prefill_slots:
            partial_sums = prefill_workspace(
                layout.prefill_slots, spec.num_kv_heads, spec.head_dim, self.inputs.slab.device
            )
            splits = PrefillSplits(partial_sums, self.inputs.decoders(nano))
        until = self.inputs.column.get("until")
        return TritonStep(self.inputs.page_table, decodes, *prefill, space, self._unpacked(nano), splits, until)

    def _unpacked(self, nano: int) -> Unpacked | None:
        (pages, page_size), table = self.inputs.layout.unpacked, self.inputs.page_table
        if not pages:
            return None
        shape = pages, 1, 2, page_size, self.spec.num_kv_heads, self.spec.head_dim
        wide = torch.zeros(shape, dtype=self.x.dtype, device=table.device)
        return Unpacked(*self.inputs.unpacked_work(nano), wide, counting_table(pages, table.shape[1], table.device))

    def _step_of_kept_tiles(self, nano: int, step: TritonStep) -> TritonStep:
        items, count = self.inputs.kept_prefill_work(nano)
        wide = step.unpacked
        if wide is not None:
            _, _, wide_items, wide_count = self.inputs.unpacked_work(nano, kept=True)
            wide = wide._replace(items=wide_items, num_items=wide_count)
        return step._replace(prefill_items=items, prefill_count=count, unpacked=wide)

    def fill(self, x: Tensor) -> None:
        """Fill activations as in the middle of a model, to time its layers: x `[T, H]`, rows of unit variance; others
        random."""
        for name, activation in self.activations.items():
            if name == "x":
                activation.copy_(x)
            else:
                activation.normal_()
        self.sumsq.fill_(self.spec.hidden_size)
        if self._fp8 is not None:
            self._fp8.fill()

    def embedding_outputs(self, pipeline: Pipeline) -> dict[str, Any]:
        """Return `embed`'s arguments for the first layer's FP8 operand, if there is one."""
        return {} if self._fp8 is None else self._fp8.embedding_outputs(pipeline)

    # -- launchers

    def _qkv(self, it: OperationLaunch) -> None:
        own, w, eps, scales = it.tokens, it.projection, self.spec.norm.eps, self.page_scales
        x, sums, raw = it.rows.activations[it.operation.source][own], self.stream_sums(it), self._raw_of("qkv", own)
        heads = self.heads(it)
        out = self.activations[it.operation.target][own]
        if self._fp8 is not None:
            self._fp8.qkv(it, heads, out, self.common(it) | scales)
        elif self._separate_heads:
            assert raw is not None
            linear_project(x, sums, w.weight, eps, bias=w.bias, out=raw, **self.common(it))
            place_heads(raw, eps, *heads, out=out, num_tokens=self.live(it), **scales)
        else:
            qkv_project(x, sums, w.weight, w.bias, eps, *heads, out=out, raw=raw, **self.common(it))

    def heads(self, it: OperationLaunch) -> tuple[Any, ...]:
        """Return what rotates the heads of a QKV projection, and where their keys and values go."""
        w, column = it.projection, self.inputs.column
        rotary, positions = self.weights.rotary[self.spec.rotary_table(it.layer)], column["positions"]
        if self.images is not None:
            rotary, positions = self.images.rotary(it.layer) or (rotary, positions)
        return (
            rotary, positions[it.tokens],
            column["slot_mapping"][it.tokens], it.kv, it.layer, self.spec.num_heads, w.q_norm, w.k_norm,
        )  # fmt: skip

    def _decode(self, it: OperationLaunch) -> None:
        if it.fused is None:
            attend: Callable[..., Output] = self.attention.decode
        elif it.fused == "tiles":
            attend = self.attention.prefill
        else:
            attend = partial(self.attention.attend, together=it.fused == "together")
        self._attend(attend, it)

    def _prefill(self, it: OperationLaunch) -> None:
        if it.fused is None:
            self._attend(self.attention.prefill, it)

    def _attend(self, attend: Callable[..., Output], it: OperationLaunch) -> None:
        """Launch attention on the full activations; work lists select the rows."""
        steps = self.kept_steps if it.drops_rows and self.attention.captured else self.steps
        step = steps[it.pipeline.nano_batches.index((it.nano.begin, it.nano.end))]
        step = self.attention.within(step, it.pipeline.tokens)
        sinks = self.weights.layers[it.layer]["qkv"].sinks
        attend(
            self.activations[it.operation.source], it.kv, it.layer, step, out=self.whole.attended, num_sms=it.nano.sms,
            **({} if sinks is None else {"sinks": sinks}),
        )  # fmt: skip

    def _residual(self, it: OperationLaunch) -> None:
        if self.rank_sums is not None:
            self.rank_sums.project(it, self.common(it))
            return
        if self._fp8 is not None:
            it.note_sums(self._fp8.residual(it, self.common(it)))
            return
        own, w, norm = it.tokens, it.projection, self.spec.norm
        x, sumsq = it.x, it.sumsq
        _, sums = residual_project(
            it.rows.activations[it.operation.source][own], w.weight, x, out=x, sumsq=sumsq, post_norm=w.post_norm,
            bias=w.bias, eps=norm.eps, centred=norm.centred, raw=self._raw_of("residual", own), **self.common(it),
        )  # fmt: skip
        if self.invariant and w.post_norm is None and not norm.centred:
            # The epilogue's partial sums follow the GEMM's tiles, which depend on the token count.
            sums = row_sumsq(x, out=sumsq[:1])
        it.note_sums(sums)

    def _all_reduce(self, it: OperationLaunch) -> None:
        assert self.rank_sums is not None
        it.note_sums(self.rank_sums.reduce(it, self.live(it)))

    def _gate_up(self, it: OperationLaunch) -> None:
        if self._fp8 is not None:
            self._fp8.gate_up(it, self.common(it))
            return
        out = it.rows.activations[it.operation.target][it.tokens]
        gate_up_project(
            it.x, self.stream_sums(it), it.projection.weight, self.spec.norm.eps, activation=self.spec.activation,
            bias=it.projection.bias, out=out, **self.common(it),
        )  # fmt: skip
        if it.projection.gate is not None:
            sums = self.stream_sums(it)
            assert sums is not None  # `resolve` refuses experts without norms before them
            gate_shared(it.x, sums, it.projection.gate, self.spec.norm.eps, out=out)

    def _up(self, it: OperationLaunch) -> None:
        if self._fp8 is not None:
            self._fp8.gate_up(it, self.common(it))
            return
        linear_project(
            it.x, self.stream_sums(it), it.projection.weight, self.spec.norm.eps, activation=self.spec.activation,
            bias=it.projection.bias, out=it.rows.activations[it.operation.target][it.tokens], **self.common(it),
        )  # fmt: skip

    def _router(self, it: OperationLaunch) -> None:
        assert self._experts is not None
        self._experts.route(it, self.stream_sums(it), self.live(it))

    def _experts_gate_up(self, it: OperationLaunch) -> None:
        assert self._experts is not None
        self._experts.gate_up(it, self.stream_sums(it), self.live(it))

    def _experts_residual(self, it: OperationLaunch) -> None:
        assert self._experts is not None
        if self.rank_sums is not None:
            self._experts.residual(it, *self.rank_sums.expert_buffers(it), self.live(it))
        else:
            it.note_sums(self._experts.residual(it, it.x, it.sumsq, self.live(it)))

    def live(self, it: OperationLaunch) -> Tensor:
        """Return `[1]` number of tokens that an operation really has."""
        return self.inputs.live(it.pipeline, it.nano.begin) if it.rows.live is None else it.rows.live

    def stream_sums(self, it: OperationLaunch) -> Tensor | None:
        """Return the sums `[sums, T]` for GEMMs that norm the stream; None if no norm precedes them."""
        return it.sums if self.spec.placement.before else None

    def _raw_of(self, name: str, own: slice) -> Tensor | None:
        raw = self._raw[name]
        return None if raw is None else raw[own]

    def common(self, it: OperationLaunch) -> dict[str, Any]:
        """Return the arguments of every GEMM besides its operands."""
        return {
            **({} if it.more is None else {"more": it.more}),
            "num_sms": it.nano.sms,
            "space": self.gemm_space,
            "num_tokens": self.live(it),
            "config": self._tiles(it),
        }

    def _tiles(self, it: OperationLaunch) -> Config | None:
        """Return the tiles of an operation's GEMM: the plan's or None (the kernel's choice); unsplit if invariant."""
        given, tokens, weight = it.nano.config, it.nano.end - it.nano.begin, it.projection.weight
        if not self.invariant or self.rank_sums is not None or self._fp8 is not None:
            return self.config(given, tokens, weight)
        if given is not None:
            return given._replace(split=1)
        features, depth = weight.shape
        return unsplit(tokens, features, depth, it.nano.sms)

    def config(self, given: GemmConfig | None, tokens: int, weight: Tensor) -> GemmConfig | None:
        """Return a GEMM's configuration: the plan's or None (the kernel's choice); without split-K if invariant."""
        if not self.invariant:
            return given
        features, depth = weight.shape
        return choose(tokens, features, depth, self.num_sms)._replace(split=1)


TABLE: Mapping[str, Callable[[CudaLayers, OperationLaunch], None]] = {
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
