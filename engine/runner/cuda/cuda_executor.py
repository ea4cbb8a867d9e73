"""`CudaExecutor`: runs a pipeline of nano-operations over all layers, with streams, events and kernel launches.

Launches have fixed grids and read counts and work lists from device memory, so a captured run serves every iteration of
its token bucket. `CudaLayers` launches the operations of a layer.
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
from weft.engine.runner.cuda.layer_launch import Fused, equal_sum_count, initial_sum_counts
from weft.engine.runner.cuda.sample_buffers import SampleBuffers
from weft.engine.runner.cuda.sum_buffers import EMBEDDING_BUFFER
from weft.engine.runner.device.collectives import Graph
from weft.kernels.attention.output import slice_output
from weft.kernels.collectives.peer import embed_shard
from weft.kernels.common.dependent_launch import dependent_launch
from weft.kernels.matmul.embedding import embed, final_norm
from weft.kernels.matmul.gemm import matmul
from weft.kernels.matmul.rows import gather_rows
from weft.kernels.reference import layer as reference
from weft.kernels.reference import sampling_shards


class CudaExecutor(SampleBuffers):
    """One model on one GPU. Launches on the current stream, and on its own streams for lanes other than compute.

    On the meta device only `touch` and `sample` work (see `kernels.common.gpu`). For an attention back end that plans
    on the host, call `set_steps` before each run."""

    def __init__(self, layers: CudaLayers) -> None:
        super().__init__(layers.inputs, len(layers.spec.vocabulary))
        self._layers, self._collectives = layers, layers.collectives
        spec = self.spec = layers.spec
        self.weights, self.x = layers.weights, layers.x
        device, layout = self.inputs.slab.device, self.inputs.layout
        self._rows_in_order = torch.arange(layout.max_tokens, dtype=torch.int32, device=device)
        self._serial_of: dict[Pipeline, Pipeline] = {}
        """Serial pipelines that finish the last layer of other pipelines in `_after_drop`."""
        self._rows = torch.zeros(layout.max_sampled, spec.hidden_size, dtype=layers.x.dtype, device=device)
        runs = device.type != "meta"
        self.taps: dict[int, Tensor] = {}
        """By layer: where to copy the stream `[T, H]` that enters it."""
        self.gates = [torch.cuda.Event(external=True) for _ in range(spec.num_layers if runs else 0)]
        """By layer, recorded where a period's `offload` operation begins. Streams outside a graph may wait for it."""
        # Attention and collectives have priority over waiting GEMMs: they have fewer programs and need their SMs free.
        self._streams = {lane: torch.cuda.Stream(device, priority=-1) for lane in ("memory", "network")} if runs else {}

    def set_steps(self, steps: list[Any]) -> None:
        """Set the attention back end's steps, one for each nano-batch."""
        self._layers.steps = steps

    def fill(self, x: Tensor) -> None:
        """See `CudaLayers.fill`."""
        self._layers.fill(x)

    def forward(
        self, pipeline: Pipeline, kv: Tensor, num_rows: int, *, fused: Fused = "lists", adapted: bool = False
    ) -> None:
        """Compute `logits[:num_rows]` of the rows that sample, from the slab. fused: see `OperationLaunch`; used if
        `inputs.fuses(pipeline)` and not `adapted`: whether rows may have an adapter."""
        with self._within(Graph.MODEL):
            self._embed(pipeline)
            sum_counts = self.layers(pipeline, kv, drops_rows=True, fused=fused, adapted=adapted)
            if pipeline.after_drop:
                sum_counts = initial_sum_counts(pipeline)
            for launch in self._after_drop(pipeline, kv, sum_counts, adapted=adapted):
                launch()
            self._head(sum_counts, pipeline, num_rows)

    def _within(self, graph: Graph) -> AbstractContextManager[None]:
        """Return a context for all launches of a graph."""
        return nullcontext() if self._collectives is None else self._collectives.inside(graph)

    def touch(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> None:
        """Launch every kernel of such a run once, in sequence, to load and if necessary compile it."""
        for launch in self.touches(pipeline, kv, num_rows):
            launch()

    def touches(self, pipeline: Pipeline, kv: Tensor, num_rows: int) -> Iterator[Callable[[], None]]:
        """Yield the launches of `touch`. They compute nothing while the inputs have no tokens."""
        with self._within(Graph.MODEL):
            yield partial(self._embed, pipeline)
            fuses, adapts = self.inputs.fuses(pipeline), self._layers.adapted is not None and pipeline.is_serial
            # The second layer reads sums of squares of the first. After the last one FP8 GEMMs write no operand.
            sum_counts, last = initial_sum_counts(pipeline), pipeline.num_layers - 1

            def launch_one(layer: int, i: int, fused: Fused = "lists", *, adapted: bool = False) -> None:
                with dependent_launch(len(pipeline.lanes) == 1):
                    launch = self._layers.launch_of(pipeline, i, layer, kv, sum_counts)
                    path = fused if fuses and not adapted else None
                    self._layers.launch(launch._replace(fused=path, adapted=adapted))

            for layer, i in pipeline.unrolled():
                if layer < 2 or layer == last or not pipeline.uniform:
                    yield partial(launch_one, layer, i)
                    if adapts:
                        yield partial(launch_one, layer, i, adapted=True)
                    if fuses and pipeline.operations[i][1].role is Role.DECODE_ATTENTION:
                        yield partial(launch_one, layer, i, fused="together")
                        yield partial(launch_one, layer, i, fused="tiles")
            kept_counts = initial_sum_counts(pipeline) if pipeline.after_drop else sum_counts
            yield from self._after_drop(pipeline, kv, kept_counts)
            if adapts:
                yield from self._after_drop(pipeline, kv, kept_counts, adapted=True)
            yield partial(self._head, kept_counts, pipeline, num_rows)

    def sample(self, num_rows: int) -> None:
        """Sample `tokens` from the first rows of `logits`, and store each as its slot's last token.

        With several ranks this always takes the most likely token; for other sampling see `set_tokens`."""
        if self._collectives is None:
            super().sample(num_rows)
            return
        shard = sampling_shards.Shard(
            self.spec.vocabulary.start, self._collectives.rank, self._collectives.all_gather
        )  # fmt: skip
        with self._within(Graph.SAMPLE):
            best = sampling_shards.best_of(self.logits[:num_rows], shard)
        self.tokens[:num_rows].copy_(best.token)
        self._bad[:num_rows].copy_(~best.value.isfinite())
        self._remember(num_rows)

    def set_tokens(self, tokens: Tensor, bad: Tensor) -> None:
        """Store tokens `[S]` int64 that were sampled elsewhere. bad: rows that are not finite, `[S]` bool."""
        rows = len(tokens)
        self.tokens[:rows].copy_(tokens)
        self._bad[:rows].copy_(bad)
        if rows:
            self._remember(rows)

    def _embed(self, pipeline: Pipeline) -> None:
        column, count, tokens = self.inputs.column, self.inputs.count, pipeline.tokens
        ids = self._prepare(tokens)
        table = self.weights.embedding
        if self._collectives is not None:
            sums = self._layers.rank_sums
            assert sums is not None
            partial_sum, table = sums.partials[EMBEDDING_BUFFER][:tokens], sums.summed[:tokens]
            embed_shard(ids, self.weights.embedding, self.spec.vocabulary.start, out=partial_sum)
            self._collectives.reduce(
                partial_sum, table, self._layers.sumsq[:, :tokens], live=count["tokens"], add=False,
                num_sms=self._layers.num_sms,
            )  # fmt: skip
            ids = self._rows_in_order[:tokens]
        embed(
            ids, table, scale=self.spec.embedding_scale, position_table=self.weights.positions,
            positions=column["positions"], centred=self.spec.norm.centred, out=self.x[:tokens],
            sumsq=self._layers.sumsq[:, :tokens], **self._layers.embedding_outputs(pipeline),
        )  # fmt: skip
        if (images := self._layers.images) is not None:
            images.begin(self.x[:tokens], self._layers.sumsq[:1, :tokens], self._layers.embedding_outputs(pipeline))

    def _head(self, sum_counts: list[int], pipeline: Pipeline, num_rows: int) -> None:
        column, count, spec, weights = self.inputs.column, self.inputs.count, self.spec, self.weights
        layers = self._layers
        last = layers.kept if pipeline.after_drop else layers.whole
        sums = last.sumsq[: equal_sum_count(sum_counts), : pipeline.tokens]
        rows = self._rows[:num_rows]
        at = self._rows_in_order if pipeline.after_drop else column["logit_tokens"]  # sampled rows come first
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
        """Return the stream `[T, H]` after the last layer of a run; see `Assignment.output_rows`."""
        return (self._layers.kept if pipeline.after_drop else self._layers.whole).activations["x"]

    def hidden(self, pipeline: Pipeline, rows: Tensor) -> Tensor:
        """Return the states `[N, H]` after the final norm of rows `[N]` of `states`. Eager, because graphs compute only
        sampled rows."""
        w, norm, picked = self.weights, self.spec.norm, self.states(pipeline)[rows]
        sums = reference.row_sumsq(picked, norm.centred)
        return reference.final_norm(picked, sums, w.norm, norm.eps, norm_bias=w.norm_bias, centred=norm.centred)

    def layers(
        self, pipeline: Pipeline, kv: Tensor, only: Collection[NanoOperation] | None = None, *,
        drops_rows: bool = False, fused: Fused = "lists", adapted: bool = False,
    ) -> list[int]:  # fmt: skip
        """Run all layers on `x[: pipeline.tokens]`. Returns the number of partial sums of squares by block of tokens.

        only: launch only these operations of the period, to time them. drops_rows: leave out operations of the last
        layer that `_after_drop` runs. fused, adapted: see `forward`."""
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
        sum_counts = initial_sum_counts(pipeline)
        path = fused if only is None and not adapted and self.inputs.fuses(pipeline) else None
        events: dict[tuple[int, int], torch.cuda.Event] = {}
        entered = -1
        for layer, i in pipeline.unrolled():
            launch = self._layers.launch_of(pipeline, i, layer, kv, sum_counts)._replace(fused=path, adapted=adapted)
            nano = launch.nano
            if only is not None and nano not in only:
                continue
            if drops_rows and layer == pipeline.num_layers - 1:
                if launch.operation.name in pipeline.after_drop:
                    if i == pipeline.gate:
                        self.gates[layer].record(main)
                    continue
                launch = launch._replace(drops_rows=bool(pipeline.after_drop))
            turn = layer - int(nano.next_layer)
            stream = main if nano.lane == "compute" else self._streams[nano.lane]
            if layer != entered and layer in self.taps:
                self.taps[layer][: pipeline.tokens].copy_(self.x[: pipeline.tokens])
            entered = layer
            for edge in waits[i]:
                if (event := events.get((edge.before, turn + edge.distance))) is not None:
                    stream.wait_event(event)
            if i == pipeline.gate:
                self.gates[layer].record(stream)
            # With several lanes, programs that are launched early would wait on the SMs of another lane.
            with torch.cuda.stream(stream), dependent_launch(not lanes):
                self._layers.launch(launch)
            if i in awaited:
                event = events[i, turn] = torch.cuda.Event()
                event.record(stream)
        for lane in lanes:
            main.wait_stream(self._streams[lane])
        return sum_counts

    def _after_drop(
        self, pipeline: Pipeline, kv: Tensor, sum_counts: list[int], *, adapted: bool = False
    ) -> Iterator[Callable[[], None]]:
        """Yield the launches of the last layer after its attention, on the kept rows only, if rows are dropped. Updates
        `sum_counts`. Tiles are those for all rows, so that no bit of a row changes.
        """
        if not pipeline.after_drop:
            return
        if pipeline not in self._serial_of:
            self._serial_of[pipeline] = pipeline.serial(self.spec, self._layers.num_sms)
        serial, last, kept, t = self._serial_of[pipeline], pipeline.num_layers - 1, self._layers.kept, pipeline.tokens
        whole, early = self._layers.whole, len(pipeline.lanes) == 1

        def gather() -> None:
            assert kept.live is not None
            with dependent_launch(early):
                gather_rows(
                    whole.activations["x"][:t], slice_output(whole.attended, slice(0, t)),
                    self.inputs.column["kept_tokens"][:t], kept.live, x_out=kept.activations["x"][:t],
                    a_out=slice_output(kept.attended, slice(0, t)),
                )  # fmt: skip

        def launch_one(i: int) -> None:
            launch = self._layers.launch_of(serial, i, last, kv, sum_counts)
            launch = launch._replace(rows=kept, adapted=adapted)
            with dependent_launch(early):
                self._layers.launch(launch)

        yield gather
        for layer, i in serial.unrolled():
            if layer == last and serial.operations[i][1].name in pipeline.after_drop:
                yield partial(launch_one, i)
