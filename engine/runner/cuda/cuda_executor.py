"""`CudaExecutor`: turns a pipeline of nano-operations into streams, events and kernel launches over the whole model.

Everything it launches has a fixed grid and reads counts and work lists from device memory, so a captured run serves
every iteration of its token bucket. What a layer's operations are launched with is `CudaLayers`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor

from weft.engine.model.operations import Role
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import Edge, NanoOperation
from weft.engine.runner.cuda.cuda_layers import CudaLayers
from weft.engine.runner.cuda.sum_places import OF_EMBEDDING
from weft.engine.runner.device.collectives import Graph
from weft.engine.runner.device.layer_launch import Fused, one_part, same_parts
from weft.kernels.attention.output import part_of
from weft.kernels.collectives.peer import embed_part
from weft.kernels.common.dependent_launch import dependent_launch
from weft.kernels.matmul.embedding import embed, final_norm
from weft.kernels.matmul.gemm import matmul
from weft.kernels.matmul.rows import gather_rows
from weft.kernels.reference import layer as reference
from weft.kernels.reference import sampling_shards
from weft.kernels.sampling import resident
from weft.kernels.sampling.sampler import sample, sample_scratch


class CudaExecutor:
    """The layers of one model on one GPU. Launches on the current stream and, for other lanes, on its own.

    With everything on the meta device it can `touch` and `sample` only (see `kernels.gpu`).

    An attention back end that plans on the host must have its `steps` set before each run.
    """

    def __init__(self, layers: CudaLayers) -> None:
        self._layers, self._collectives = layers, layers.collectives
        self.spec, self.weights, self.inputs = layers.spec, layers.weights, layers.inputs
        spec, inputs, dtype = self.spec, self.inputs, layers.x.dtype
        device = inputs.slab.device
        t, s = inputs.layout.max_tokens, inputs.layout.max_sampled

        def buffer(*shape: int, kind: torch.dtype = dtype) -> Tensor:
            return torch.zeros(shape, dtype=kind, device=device)

        self.last_token = buffer(s, kind=torch.int64)
        """[slots] the token that each slot's request sampled last"""
        # rows of whole 16 bytes, which the copy engine asks for
        vocabulary = len(spec.vocabulary)
        self.logits = buffer(s, -(-vocabulary // 4) * 4, kind=torch.float32)[:, :vocabulary]
        self.sampled = buffer(2, s, kind=torch.int64)
        """[2, rows] what `sample` drew, and 1 for rows whose logits were no numbers"""
        self.tokens, self._bad = self.sampled
        self._candidates = sample_scratch(s, device)
        self._ids = buffer(t, kind=torch.int32)
        self._rows_in_order = torch.arange(t, dtype=torch.int32, device=device)
        self._alone: dict[Pipeline, Pipeline] = {}
        """serial ones that the last layer of others goes on with"""
        self._rows = buffer(s, spec.hidden_size)
        runs = device.type != "meta"
        self.gates = [torch.cuda.Event(external=True) for _ in range(spec.num_layers if runs else 0)]
        """by layer: where a period's `offload` operation begins; streams outside a captured graph may wait for it"""
        # Attention and collectives are launched first where products wait, too: they have fewer programs and must find
        # their SMs free.
        self._streams = {lane: torch.cuda.Stream(device, priority=-1) for lane in ("memory", "network")} if runs else {}

    @property
    def x(self) -> Tensor:
        """`[T, H]` the residual stream; after a run, that of the last layer."""
        return self._layers.x

    @property
    def steps(self) -> list[Any]:
        """What the attention back end needs, for each nano-batch."""
        return self._layers.steps

    @steps.setter
    def steps(self, steps: list[Any]) -> None:
        self._layers.steps = steps

    def fill(self, x: Tensor) -> None:
        """See `CudaLayers.fill`."""
        self._layers.fill(x)

    def forward(self, pipeline: Pipeline, kv: Tensor, num_rows: int, *, fused: Fused = "lists") -> None:
        """From the slab to `logits[:num_rows]` of the rows that sample. fused: see `Launch`, where `fuses` says that
        attention is one launch."""
        with self._inside(Graph.MODEL):
            self._embed(pipeline)
            parts = self.layers(pipeline, kv, leaving=True, fused=fused)
            if pipeline.after_drop:
                parts = one_part(pipeline)
            for launch in self._behind(pipeline, kv, parts):
                launch()
            self._head(parts, pipeline, num_rows)

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
            fuses = self.inputs.fuses(pipeline)
            # The second layer reads sums of squares that the first one wrote; behind the last one no product in FP8 is
            # left an operand.
            parts, last = one_part(pipeline), pipeline.num_layers - 1

            def launch_one(layer: int, i: int, fused: Fused = "lists") -> None:
                with dependent_launch(len(pipeline.lanes) == 1):
                    launch = self._layers.launch_of(pipeline, i, layer, kv, parts)
                    self._layers.launch(launch._replace(fused=fused if fuses else None))

            for layer, i in pipeline.unrolled():
                if layer < 2 or layer == last or not pipeline.uniform:
                    yield partial(launch_one, layer, i)
                    if fuses and pipeline.operations[i][1].role is Role.DECODE_ATTENTION:
                        yield partial(launch_one, layer, i, fused="together")
                        yield partial(launch_one, layer, i, fused="tiles")
            left_parts = one_part(pipeline) if pipeline.after_drop else parts
            yield from self._behind(pipeline, kv, left_parts)
            yield partial(self._head, left_parts, pipeline, num_rows)

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
            sums = self._layers.rank_sums
            assert sums is not None
            part, table = sums.partials[OF_EMBEDDING][:tokens], sums.summed[:tokens]
            embed_part(ids, self.weights.embedding, self.spec.vocabulary.start, out=part)
            self._collectives.reduce(
                part,
                table,
                self._layers.sumsq[:, :tokens],
                live=count["tokens"],
                add=False,
                num_sms=self._layers.num_sms,
            )
            ids = self._rows_in_order[:tokens]
        embed(
            ids, table, scale=self.spec.embedding_scale, places=self.weights.places,
            positions=column["positions"], centred=self.spec.norm.centred, out=self.x[:tokens],
            sumsq=self._layers.sumsq[:, :tokens], **self._layers.of_embedding(pipeline),
        )  # fmt: skip

    def _head(self, parts: list[int], pipeline: Pipeline, num_rows: int) -> None:
        column, count, spec, weights = self.inputs.column, self.inputs.count, self.spec, self.weights
        layers = self._layers
        sums = (layers.left if pipeline.after_drop else layers.whole).sumsq[: same_parts(parts), : pipeline.tokens]
        rows = self._rows[:num_rows]
        at = self._rows_in_order if pipeline.after_drop else column["logit_tokens"]  # those that are sampled come first
        final_norm(
            self.states(pipeline)[: pipeline.tokens], sums, at[:num_rows], weights.norm, spec.norm.eps,
            norm_bias=weights.norm_bias, centred=spec.norm.centred, out=rows,
        )  # fmt: skip
        matmul(
            rows, weights.lm_head, self.logits[:num_rows], num_sms=layers.num_sms, space=layers.gemm_space,
            num_tokens=count["sampled"], config=layers.config(None, num_rows, weights.lm_head), bias=weights.head_bias,
            factor=spec.logits_scale, softcap=spec.logits_softcap,
        )  # fmt: skip

    def states(self, pipeline: Pipeline) -> Tensor:
        """`[T, H]` the stream behind the last layer, after a run; see `Assignment.left_at`."""
        return (self._layers.left if pipeline.after_drop else self._layers.whole).activations["x"]

    def hidden(self, pipeline: Pipeline, rows: Tensor) -> Tensor:
        """`[N, H]` states behind the final norm of rows `[N]` of `states`, after a run. Eager: graphs have those of
        sampled rows alone."""
        w, norm, picked = self.weights, self.spec.norm, self.states(pipeline)[rows]
        sums = reference.row_sumsq(picked, norm.centred)
        return reference.final_norm(picked, sums, w.norm, norm.eps, norm_bias=w.norm_bias, centred=norm.centred)

    def layers(
        self, pipeline: Pipeline, kv: Tensor, only: Collection[NanoOperation] | None = None, *, leaving: bool = False,
        fused: Fused = "lists",
    ) -> list[int]:  # fmt: skip
        """All layers on `x[: pipeline.tokens]`; returns, by block of tokens, how many partial sums of squares they
        leave.

        only: launch these operations of the period and no others, to time them. leaving: not what of the last layer is
        behind its attention, where rows leave; see `_behind`. fused: see `forward`.
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
        parts = one_part(pipeline)
        way = fused if only is None and self.inputs.fuses(pipeline) else None
        events: dict[tuple[int, int], torch.cuda.Event] = {}
        for layer, i in pipeline.unrolled():
            launch = self._layers.launch_of(pipeline, i, layer, kv, parts)._replace(fused=way)
            nano = launch.nano
            if only is not None and nano not in only:
                continue
            if leaving and layer == pipeline.num_layers - 1:
                if launch.operation.name in pipeline.after_drop:
                    if i == pipeline.gate:
                        self.gates[layer].record(main)
                    continue
                launch = launch._replace(leaving=bool(pipeline.after_drop))
            turn = layer - int(nano.next_layer)
            stream = main if nano.lane == "compute" else self._streams[nano.lane]
            for edge in waits[i]:
                if (event := events.get((edge.before, turn + edge.distance))) is not None:
                    stream.wait_event(event)
            if i == pipeline.gate:
                self.gates[layer].record(stream)
            # Launched early, the waiting programs of one lane would sit on the SMs that another lane is to have.
            with torch.cuda.stream(stream), dependent_launch(not lanes):
                self._layers.launch(launch)
            if i in awaited:
                event = events[i, turn] = torch.cuda.Event()
                event.record(stream)
        for lane in lanes:
            main.wait_stream(self._streams[lane])
        return parts

    def _behind(self, pipeline: Pipeline, kv: Tensor, parts: list[int]) -> Iterator[Callable[[], None]]:
        """Launches of the last layer behind its attention, on those rows alone that somebody reads, where others leave;
        into `parts` as `layers`. With the tiles of as many rows as there were: no bit of a row changes.
        """
        if not pipeline.after_drop:
            return
        if pipeline not in self._alone:
            self._alone[pipeline] = pipeline.serial(self.spec, self._layers.num_sms)
        alone, last, left, t = self._alone[pipeline], pipeline.num_layers - 1, self._layers.left, pipeline.tokens
        whole, early = self._layers.whole, len(pipeline.lanes) == 1

        def gather() -> None:
            assert left.live is not None
            with dependent_launch(early):
                gather_rows(
                    whole.activations["x"][:t], part_of(whole.attended, slice(0, t)),
                    self.inputs.column["left_tokens"][:t], left.live, x_out=left.activations["x"][:t],
                    a_out=part_of(left.attended, slice(0, t)),
                )  # fmt: skip

        def launch_one(i: int) -> None:
            launch = self._layers.launch_of(alone, i, last, kv, parts)._replace(rows=left)
            with dependent_launch(early):
                self._layers.launch(launch)

        yield gather
        for layer, i in alone.unrolled():
            if layer == last and alone.operations[i][1].name in pipeline.after_drop:
                yield partial(launch_one, i)
