"""`CudaExecutor`: turns a pipeline of nano-operations into streams, events and kernel launches over the whole model.

It owns the activations. Everything it launches has a fixed grid and reads counts and work lists from device memory, so
a captured run serves every iteration of its token bucket.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from weft.engine.errors import ConfigError
from weft.engine.model.layer_weights import ProductWeights
from weft.engine.model.operations import ALL_REDUCE, Operation
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import TOKEN_STEP, Edge, NanoOperation
from weft.engine.runner.collectives import DeviceCollectives, Graph
from weft.engine.runner.cuda_experts import ExpertLayers
from weft.engine.runner.cuda_fp8 import Fp8Layers
from weft.engine.runner.cuda_inputs import DeviceInputs
from weft.engine.runner.launchers import launchers_of
from weft.kernels import reference, resident, sampling_shards
from weft.kernels.attention import AttentionBackend
from weft.kernels.attention_triton import TritonStep
from weft.kernels.collectives import embed_part
from weft.kernels.decode_workspace import decode_workspace
from weft.kernels.dependent_launch import dependent_launch
from weft.kernels.embedding import embed, final_norm
from weft.kernels.experts import switch_shared
from weft.kernels.gemm import matmul
from weft.kernels.gemm_config import GemmConfig
from weft.kernels.gemm_launch import choose, workspace
from weft.kernels.gpu import gpu
from weft.kernels.heads import place_heads
from weft.kernels.projections import (
    fuses_heads,
    gate_up_project,
    linear_project,
    qkv_project,
    residual_project,
    sumsq_buffer,
)
from weft.kernels.rows import add_normed, row_sumsq
from weft.kernels.sampler import sample, sample_scratch


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

    @property
    def product(self) -> ProductWeights:
        assert self.weights is not None
        return self.weights

    @property
    def tokens(self) -> slice:
        return slice(self.nano.begin, self.nano.end)

    @property
    def blocks(self) -> slice:
        return slice(self.nano.begin // TOKEN_STEP, -(-self.nano.end // TOKEN_STEP))


class CudaExecutor:
    """The layers of one model on one GPU. Launches on the current stream and, for other lanes, on its own.

    With everything on the meta device it can `touch` and `sample` only (see `kernels.gpu`).

    attention: the back end; one that plans on the host must have its `steps` set before each run.
    invariant: one accumulation order for every product, sum of squares and attention, whatever shares the batch.
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
    ) -> None:
        """collectives: of a rank of several; its products then leave partial sums."""
        self.spec, self.weights, self.inputs = spec, weights, inputs
        self._collectives = collectives
        self.attention, self.invariant = attention, invariant
        self._launchers = launchers_of(spec, TABLE, "a GPU")
        heads_normed = weights.layers[0]["qkv"].q_norm is not None
        self._heads_apart = invariant and heads_normed
        """Norms of heads are a pass behind their product: in its epilogue they add up in an order that follows its
        tiles, and these the token count."""
        device = inputs.slab.device
        here = gpu(device)
        assert here is not None
        self.num_sms = here.sms
        t, s = inputs.layout.max_tokens, inputs.layout.max_sampled

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.last_token = buffer(s, kind=torch.int64)
        """[slots] the token that each slot's request sampled last"""

        def shared(*shape: int) -> Tensor:
            """What other ranks reach, where there are any."""
            return buffer(*shape) if collectives is None else collectives.take(shape, dtype)

        self.x = shared(t, spec.hidden_size)
        """[T, H] the residual stream; after a run, that of the last layer"""
        # rows of whole 16 bytes, which the copy engine asks for
        vocabulary = len(spec.vocabulary)
        self.logits = buffer(s, -(-vocabulary // 4) * 4, kind=torch.float32)[:, :vocabulary]
        self.sampled = buffer(2, s, kind=torch.int64)
        """[2, rows] what `sample` drew, and 1 for rows whose logits were no numbers"""
        self.tokens, self._bad = self.sampled
        self._candidates = sample_scratch(s, device)
        self._ids = buffer(t, kind=torch.int32)
        self._rows_in_order = torch.arange(t, dtype=torch.int32, device=device)
        self._sumsq = sumsq_buffer(spec.hidden_size, t, device)
        self._partials: list[Tensor] = []
        """[T, H] each: what this rank's products shall add to the stream, until ranks add up theirs; they take turns"""
        self._summed: Tensor | None = None
        """[T, H] a sum of all ranks that something else follows"""
        if collectives is not None:
            # each rank adds up the squares of its part of a row
            self._sumsq = collectives.take((max(len(self._sumsq), collectives.ranks), t), torch.float32)
            self._partials = [shared(t, spec.hidden_size) for _ in range(2)]
            self._summed = shared(t, spec.hidden_size)
            self._other_sums = sumsq_buffer(spec.hidden_size, t, device)
        self._turn = 0
        self._open = False
        """the partial sums whose turn it is have something in them"""
        self._post_norm: Tensor | None = None
        """behind the product that left them"""
        self._activations = {
            "x": self.x,
            "q": buffer(t, spec.num_heads, spec.head_dim),
            "a": buffer(t, spec.num_heads * spec.head_dim),
            "h": buffer(t, spec.intermediate_size),
        }
        self.expert_layers: ExpertLayers | None = None
        if spec.experts is not None:
            self.expert_layers = ExpertLayers(spec, t, dtype, device)
            self._activations["s"] = buffer(t, spec.experts.shared_size)
        self._fp8 = None if spec.quantization is None else Fp8Layers(spec, weights, t, device)
        self._raw = {
            name: buffer(t, width) if needed else None
            for name, width, needed in (
                ("qkv", spec.qkv_size, not self._fuses_heads(weights)),
                ("residual", spec.hidden_size, spec.placement.behind and collectives is None),
            )
        }
        """what a product leaves for a pass over its rows, where one follows"""
        self._rows = buffer(s, spec.hidden_size)
        self._gemm_space = workspace(device, elements=1 << 26)
        self.steps: list[Any] = [self._work(k) for k in range(inputs.layout.nano_batches)]
        """what the attention back end needs, for each nano-batch"""
        runs = device.type != "meta"
        self.gates = [torch.cuda.Event(external=True) for _ in range(spec.num_layers if runs else 0)]
        """by layer: where a period's `offload` operation begins; streams outside a captured graph may wait for it"""
        # Attention is launched first where both wait: it has fewer programs and must find its SMs free.
        self._streams = (
            {"memory": torch.cuda.Stream(device, priority=-1), "network": torch.cuda.Stream(device)} if runs else {}
        )

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
        return TritonStep(self.inputs.page_table, decodes, *prefill, space)

    def fill(self, x: Tensor) -> None:
        """Activations as in the middle of a model, to time its layers: x `[T, H]`, rows of unit variance, the rest
        random.
        """
        for name, activation in self._activations.items():
            if name == "x":
                activation.copy_(x)
            else:
                activation.normal_()
        self._sumsq.fill_(self.spec.hidden_size)

    def forward(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> None:
        """From the slab to `logits[:num_rows]` of the rows that sample."""
        with self._inside(Graph.MODEL):
            self._embed(pipeline)
            self._head(self.layers(pipeline, kv), pipeline, num_rows)

    def _inside(self, graph: Graph) -> AbstractContextManager[None]:
        """Around all launches of a graph."""
        return nullcontext() if self._collectives is None else self._collectives.inside(graph)

    def touch(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> None:
        """Every kernel of such a run once, one behind the other: loaded, and compiled if need be. Computes nothing."""
        for launch in self.touches(pipeline, kv, num_rows):
            launch()

    def touches(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> Iterator[Callable[[], None]]:
        """The launches of `touch`, in this order. Each computes nothing as long as the inputs are of no tokens."""
        with self._inside(Graph.MODEL):
            yield partial(self._embed, pipeline)
            # the second layer reads sums of squares that the first one wrote
            parts = _one_part(pipeline)

            def launch_one(layer: int, i: int) -> None:
                with dependent_launch(len(pipeline.lanes) == 1):
                    launch = self._launch_of(pipeline, i, layer, kv, parts)
                    self._launchers[launch.operation.name](self, launch)

            for layer, i in pipeline.unrolled(num_layers=2 if pipeline.alike else None):
                yield partial(launch_one, layer, i)
            yield partial(self._head, parts, pipeline, num_rows)

    def sample(self, num_rows: int) -> None:
        """A token for each of the first rows of `logits` into `tokens`; the slots' requests keep it as their last.

        Where each rank has a part of the logits, the best token, whatever was asked: see `keep`.
        """
        tokens = self.tokens[:num_rows]
        if self._collectives is not None:
            with self._inside(Graph.SAMPLE):
                best = sampling_shards.best_of(self.logits[:num_rows], self._shard)
            tokens.copy_(best.token)
            self._bad[:num_rows].copy_(~best.value.isfinite())
        else:
            sample(
                self.logits[:num_rows], **self.inputs.sampler_arguments(num_rows), out=tokens,
                bad=self._bad[:num_rows], scratch=self._candidates[:num_rows],
            )  # fmt: skip
        self._remember(num_rows)

    def keep(self, tokens: Tensor, bad: Tensor) -> None:
        """As `sample`, of rows that were sampled elsewhere: tokens `[S]` int64; rows without numbers `[S]` bool."""
        rows = len(tokens)
        self.tokens[:rows].copy_(tokens)
        self._bad[:rows].copy_(bad)
        if rows:
            self._remember(rows)

    def _remember(self, rows: int) -> None:
        slots = self.inputs.column["slots"][:rows]
        resident.remember(self.tokens[:rows], slots, self.inputs.count["sampled"], self.last_token)

    @property
    def _shard(self) -> sampling_shards.Shard:
        assert self._collectives is not None
        return sampling_shards.Shard(
            self.spec.vocabulary.start, self._collectives.rank, self._collectives.all_gather
        )  # fmt: skip

    def _embed(self, pipeline: Pipeline) -> None:
        column, count, tokens = self.inputs.column, self.inputs.count, pipeline.tokens
        ids = self._ids[:tokens]
        resident.prepare(
            column["token_ids"], column["token_slots"], self.last_token, self.inputs.page_table, column["update_at"],
            column["update_page"], count["updates"], out=ids,
        )  # fmt: skip
        table = self.weights.embedding
        if self._collectives is not None:
            assert self._summed is not None
            self._turn, self._open = 0, False
            part, table = self._partials[0][:tokens], self._summed[:tokens]
            embed_part(ids, self.weights.embedding, self.spec.vocabulary.start, out=part)
            self._collectives.reduce(
                part, table, self._sumsq[:, :tokens], live=count["tokens"], add=False, num_sms=self.num_sms
            )
            self._turn = 1
            ids = self._rows_in_order[:tokens]
        embed(
            ids, table, scale=self.spec.embedding_scale, places=self.weights.places,
            positions=column["positions"], centred=self.spec.norm.centred, out=self.x[:tokens],
            sumsq=self._sumsq[:, :tokens],
        )  # fmt: skip

    def _head(self, parts: list[int], pipeline: Pipeline, num_rows: int) -> None:
        column, count, spec, weights = self.inputs.column, self.inputs.count, self.spec, self.weights
        x, sumsq = self.x[: pipeline.tokens], self._sumsq[: _same(parts), : pipeline.tokens]
        rows = self._rows[:num_rows]
        final_norm(
            x, sumsq, column["logit_tokens"][:num_rows], weights.norm, spec.norm.eps, norm_bias=weights.norm_bias,
            centred=spec.norm.centred, out=rows,
        )  # fmt: skip
        matmul(
            rows, weights.lm_head, self.logits[:num_rows], num_sms=self.num_sms, space=self._gemm_space,
            num_tokens=count["sampled"], config=self._config(None, num_rows, weights.lm_head), bias=weights.head_bias,
            factor=spec.logits_scale, softcap=spec.logits_softcap,
        )  # fmt: skip

    def hidden(self, rows: Tensor) -> Tensor:
        """`[N, H]` states behind the final norm of rows `[N]` of `x`, after a run. Eager: graphs have those of sampled
        rows alone."""
        w, norm, picked = self.weights, self.spec.norm, self.x[rows]
        sums = reference.row_sumsq(picked, norm.centred)
        return reference.final_norm(picked, sums, w.norm, norm.eps, norm_bias=w.norm_bias, centred=norm.centred)

    def layers(self, pipeline: Pipeline, kv: Tensor, only: Collection[NanoOperation] | None = None) -> list[int]:
        """All layers on `x[: pipeline.tokens]`; returns, by block of tokens, how many partial sums of squares they
        leave.

        only: launch these operations of the period and no others, to time them.
        """
        main = torch.cuda.current_stream()
        operations = pipeline.period.operations
        waits: list[list[Edge]] = [[] for _ in pipeline.operations]
        for edge in pipeline.edges:
            if operations[edge.before].lane != operations[edge.after].lane:
                waits[edge.after].append(edge)
        awaited = {edge.before for edges in waits for edge in edges}
        lanes = pipeline.lanes - {"compute"}
        for lane in lanes:
            self._streams[lane].wait_stream(main)
        parts = _one_part(pipeline)
        events: dict[tuple[int, int], torch.cuda.Event] = {}
        for layer, i in pipeline.unrolled():
            launch = self._launch_of(pipeline, i, layer, kv, parts)
            nano = launch.nano
            if only is not None and nano not in only:
                continue
            turn = layer - int(nano.next_layer)
            stream = main if nano.lane == "compute" else self._streams[nano.lane]
            for edge in waits[i]:
                if (event := events.get((edge.before, turn + edge.distance))) is not None:
                    stream.wait_event(event)
            if i == pipeline.gate:
                self.gates[layer].record(stream)
            # Launched early, the waiting programs of one lane would sit on the SMs that another lane is to have.
            with torch.cuda.stream(stream), dependent_launch(not lanes):
                self._launchers[launch.operation.name](self, launch)
            if i in awaited:
                event = events[i, turn] = torch.cuda.Event()
                event.record(stream)
        for lane in lanes:
            main.wait_stream(self._streams[lane])
        return parts

    def _launch_of(self, pipeline: Pipeline, i: int, layer: int, kv: Tensor, parts: list[int]) -> Launch:
        nano, op = pipeline.operations[i]
        return Launch(nano, op, layer, self.weights.layers[layer].get(op.name), kv, pipeline, parts)

    # -- launchers

    def _qkv(self, it: Launch) -> None:
        own, w, column, eps = it.tokens, it.product, self.inputs.column, self.spec.norm.eps
        x, sums, raw = self._activations[it.operation.source][own], self._stream_sums(it), self._raw_of("qkv", own)
        heads = (
            self.weights.rotary[self.spec.rotary_table(it.layer)], column["positions"][own],
            column["slot_mapping"][own], it.kv, it.layer, self.spec.num_heads, w.q_norm, w.k_norm,
        )  # fmt: skip
        out = self._activations[it.operation.target][own]
        if self._fp8 is not None:
            assert sums is not None
            self._fp8.qkv(it.layer, own, w, x, sums, eps, heads, out, self._common(it))
        elif self._heads_apart:
            assert raw is not None
            linear_project(x, sums, w.weight, eps, bias=w.bias, out=raw, **self._common(it))
            place_heads(raw, eps, *heads, out=out, num_tokens=self._live(it))
        else:
            qkv_project(x, sums, w.weight, w.bias, eps, *heads, out=out, raw=raw, **self._common(it))

    def _decode(self, it: Launch) -> None:
        self._attend(self.attention.decode, it)

    def _prefill(self, it: Launch) -> None:
        self._attend(self.attention.prefill, it)

    def _attend(self, attend: Callable[..., Tensor], it: Launch) -> None:
        """On the whole activations: work lists say whose rows."""
        step = self.steps[it.pipeline.nano_batches.index((it.nano.begin, it.nano.end))]
        q, out = self._activations[it.operation.source], self._activations[it.operation.target]
        sinks = self.weights.layers[it.layer]["qkv"].sinks
        attend(
            q, it.kv, it.layer, step, out=out, num_sms=it.nano.sms, **({} if sinks is None else {"sinks": sinks})
        )  # fmt: skip

    def _residual(self, it: Launch) -> None:
        if self._collectives is not None:
            self._leave_partial(it)
            return
        own, w, norm = it.tokens, it.product, self.spec.norm
        x = self._activations[it.operation.target][own]
        if self._fp8 is not None:
            a = self._activations[it.operation.source][own]
            sums = self._fp8.residual(it.layer, own, it.operation, w, a, x, self._sumsq[:, own], self._common(it))
            it.parts[it.blocks] = [sums.shape[0]] * len(it.parts[it.blocks])
            return
        _, sums = residual_project(
            self._activations[it.operation.source][own], w.weight, x, out=x, sumsq=self._sumsq[:, own],
            post_norm=w.post_norm, bias=w.bias, eps=norm.eps, centred=norm.centred, raw=self._raw_of("residual", own),
            **self._common(it),
        )  # fmt: skip
        if self.invariant and w.post_norm is None and not norm.centred:
            # the parts follow the tiles of the product, and these the token count
            sums = row_sumsq(x, out=self._sumsq[:1, own])
        it.parts[it.blocks] = [sums.shape[0]] * len(it.parts[it.blocks])

    def _leave_partial(self, it: Launch) -> None:
        """A product whose sum over all ranks goes to the stream."""
        source, w = self._activations[it.operation.source][it.tokens], it.product
        part = self._partials[self._turn][it.tokens]
        if self._open:
            residual_project(
                source, w.weight, part, out=part, sumsq=self._other_sums[:, it.tokens], bias=w.bias,
                **self._common(it),
            )  # fmt: skip
        else:
            linear_project(source, None, w.weight, self.spec.norm.eps, bias=w.bias, out=part, **self._common(it))
        self._open, self._post_norm = True, w.post_norm

    def _all_reduce(self, it: Launch) -> None:
        assert self._collectives is not None
        assert self._summed is not None
        own, norm, post_norm = it.tokens, self.spec.norm, self._post_norm
        x, sumsq, part = self.x[own], self._sumsq[:, own], self._partials[self._turn][own]
        options: dict[str, Any] = {"live": self._live(it), "num_sms": it.nano.sms}
        if post_norm is None:
            sums = self._collectives.reduce(part, x, sumsq, add=True, **options)
        else:
            total, sums = self._summed[own], sumsq[:1]
            self._collectives.reduce(part, total, sumsq, add=False, **options)
            add_normed(x, total, post_norm, norm.eps, sumsq=sumsq)
        if norm.centred:
            sums = row_sumsq(x, out=sumsq[:1], centred=True)
        it.parts[it.blocks] = [sums.shape[0]] * len(it.parts[it.blocks])
        self._turn, self._open = 1 - self._turn, False

    def _gate_up(self, it: Launch) -> None:
        if self._fp8 is not None:
            sums = self._stream_sums(it)
            assert sums is not None
            self._fp8.gate_up(it.layer, it.tokens, it.product, sums, self.spec.norm.eps, self._common(it))
            return
        gate_up_project(
            self._activations[it.operation.source][it.tokens], self._stream_sums(it), it.product.weight,
            self.spec.norm.eps, activation=self.spec.activation, bias=it.product.bias,
            out=self._activations[it.operation.target][it.tokens], **self._common(it),
        )  # fmt: skip
        if it.product.gate is not None:
            sums, out = self._stream_sums(it), self._activations[it.operation.target][it.tokens]
            assert sums is not None  # `resolve` refuses experts without norms before them
            switch_shared(self.x[it.tokens], sums, it.product.gate, self.spec.norm.eps, out=out)

    def _up(self, it: Launch) -> None:
        linear_project(
            self._activations[it.operation.source][it.tokens], self._stream_sums(it), it.product.weight,
            self.spec.norm.eps, activation=self.spec.activation, bias=it.product.bias,
            out=self._activations[it.operation.target][it.tokens], **self._common(it),
        )  # fmt: skip

    def _router(self, it: Launch) -> None:
        assert self.expert_layers is not None
        self.expert_layers.route(it.product, self.x[it.tokens], self._stream_sums(it), it.nano, self._live(it))

    def _experts_gate_up(self, it: Launch) -> None:
        assert self.expert_layers is not None
        x = self.x[it.tokens]
        self.expert_layers.gate_up(it.product, x, self._stream_sums(it), it.nano, self._live(it), it.pipeline)

    def _experts_residual(self, it: Launch) -> None:
        assert self.expert_layers is not None
        own = it.tokens
        if self._collectives is not None:
            part = self._partials[self._turn][own]
            if not self._open:
                part.zero_()
            self.expert_layers.residual(
                it.product, part, self._other_sums[:, own], it.nano, self._live(it), it.pipeline
            )
            self._open, self._post_norm = True, it.product.post_norm
            return
        sums = self.expert_layers.residual(
            it.product, self.x[own], self._sumsq[:, own], it.nano, self._live(it), it.pipeline
        )
        it.parts[it.blocks] = [sums.shape[0]] * len(it.parts[it.blocks])

    def _live(self, it: Launch) -> Tensor:
        """`[1]`: how many of an operation's tokens there are."""
        return self.inputs.live(it.pipeline, it.nano.begin)

    def _stream_sums(self, it: Launch) -> Tensor | None:
        """`[parts, T]` that a product which reads the stream is normed by; None where no norm stands before it."""
        return self._sumsq[: _same(it.parts[it.blocks]), it.tokens] if self.spec.placement.before else None

    def _raw_of(self, name: str, own: slice) -> Tensor | None:
        raw = self._raw[name]
        return None if raw is None else raw[own]

    def _common(self, it: Launch) -> dict[str, Any]:
        """What every product is told beside its operands."""
        return {
            "num_sms": it.nano.sms,
            "space": self._gemm_space,
            "num_tokens": self._live(it),
            "config": self._config(it.nano.config, it.nano.end - it.nano.begin, it.product.weight),
        }

    def _config(self, given: GemmConfig | None, tokens: int, weight: Tensor) -> GemmConfig | None:
        """The configuration of a product: the plan's, or None for the kernel's own choice; unsplit for invariance."""
        if not self.invariant:
            return given
        features, depth = weight.shape
        return choose(tokens, features, depth, self.num_sms)._replace(split=1)


def _one_part(pipeline: Pipeline) -> list[int]:
    """The embedding writes one partial sum of squares."""
    return [1] * -(-pipeline.tokens // TOKEN_STEP)


def _same(parts: list[int]) -> int:
    """How many partial sums a product reads: the products before it must have written equally many for its tokens."""
    if len(set(parts)) != 1:
        raise ConfigError("a plan gives nano-operations that one operation reads together different feature tiles")
    return parts[0]


TABLE: Mapping[str, Callable[[CudaExecutor, Launch], None]] = {
    "qkv": CudaExecutor._qkv,
    "decode": CudaExecutor._decode,
    "prefill": CudaExecutor._prefill,
    "residual": CudaExecutor._residual,
    "gate_up": CudaExecutor._gate_up,
    "up": CudaExecutor._up,
    "router": CudaExecutor._router,
    "experts_gate_up": CudaExecutor._experts_gate_up,
    "experts_residual": CudaExecutor._experts_residual,
    ALL_REDUCE: CudaExecutor._all_reduce,
}
