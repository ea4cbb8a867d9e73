"""`GpuBench`: the `Bench` of a GPU. It captures some layers of the model with random weights and replays them."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.synthetic_batch import batch_of
from weft.engine.errors import OutOfMemory
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import load_weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import MAX_NANO_BATCHES, NanoOperation, Period
from weft.engine.ranks.peer_memory import PeerMemory
from weft.engine.runner.cuda.cuda_executor import CudaExecutor
from weft.engine.runner.cuda.cuda_inputs import DeviceInputs
from weft.engine.runner.cuda.cuda_layers import CudaLayers
from weft.engine.runner.cuda.peer_collectives import PeerCollectives, PeerLayout
from weft.engine.runner.device.collectives import Collectives, Graph, SingleRank
from weft.engine.runner.iteration.attention_lists import AttentionGrid
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.input_layout import Layout
from weft.kernels.attention.backend import AttentionShape
from weft.kernels.attention.triton_backend import PER_SM, TritonAttention
from weft.kernels.tuning.measure import Meter, sustained

LAYERS = 16
"""Number of layers to measure. As in a full model, the pipeline is not full in the first and last ones."""


class GpuBench:
    """Implements `Bench`. Only the second half of the `seconds` of each measurement counts."""

    def __init__(
        self, spec: ModelSpec, *, layers: int = LAYERS, max_tokens: int = 2048, max_context: int = 8192,
        page_size: int = 64, seconds: float = 0.5, dtype: torch.dtype = torch.bfloat16, host: Collectives | None = None,
    ) -> None:  # fmt: skip
        """host: collectives of this rank, if all ranks measure together on benches like this."""
        device = torch.device("cuda", torch.cuda.current_device())
        layers = min(layers, spec.num_layers)
        self.spec = replace(spec, num_layers=layers, vocab_size=256)
        properties = torch.cuda.get_device_properties(device)
        self.num_sms, self.memory = properties.multi_processor_count, properties.total_memory
        self.page_size, self.seconds, self._layers = page_size, seconds, layers
        self.layout = KvLayout.of(self.spec, page_size, dtype)
        weights = load_weights(self.spec, Path(), device=device, dtype=dtype, max_positions=max_context, dummy_seed=0)
        layout = Layout.of(max_tokens, max_tokens, spec.heads_per_kv, MAX_NANO_BATCHES)
        with torch.inference_mode():
            self._inputs = DeviceInputs(layout, device, max_tokens, -(-max_context // page_size))
            shape = AttentionShape(spec.num_heads, spec.num_kv_heads, spec.head_dim, page_size, dtype, device)
            attention = TritonAttention(shape, self.num_sms)
            self._host: Collectives = host or SingleRank()
            self._collectives = None if host is None else self._of_ranks(host, max_tokens, dtype, device)
            self._executor = CudaExecutor(
                CudaLayers(self.spec, weights, self._inputs, dtype, attention, collectives=self._collectives)
            )  # fmt: skip
            self._start = torch.randn(max_tokens, spec.hidden_size, device=device, dtype=dtype)
        self._kv = torch.zeros(0, device=device, dtype=dtype)
        self._batches: dict[Load, Batch] = {}
        self._meter = Meter(self._host.ranks if self._host.rank == 0 else 1)

    def close(self) -> None:
        self._meter.close()

    def abort_waits(self) -> None:
        """Abort waits for another rank that has ended. Any thread may call this."""
        if self._collectives is not None:
            self._collectives.abort_waits()

    def _of_ranks(
        self, host: Collectives, max_tokens: int, dtype: torch.dtype, device: torch.device
    ) -> Any:  # fmt: skip
        """Create `PeerCollectives`. Subclasses may wrap them."""
        sizes = PeerLayout(self.spec, max_tokens, 1, dtype)
        return PeerCollectives(PeerMemory(sizes.total, device, host), host.rank, host.ranks, sizes)

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        pipeline = self._around(load, op)
        return self._sustain(pipeline, load, self._launch(pipeline, (op,)), self._layers)

    def period(self, period: Period, load: Load) -> Timing:
        pipeline = Pipeline(period, self.spec)
        return self._sustain(pipeline, load, self._launch(pipeline, None), self._layers)

    def pair(self, a: NanoOperation, b: NanoOperation, load: Load) -> tuple[Timing, Timing]:
        pipeline = self._around(load, a, b)
        self._send(pipeline, load)
        graphs = [self._graph(self._launch(pipeline, (op,))) for op in (a, b)]
        streams = [torch.cuda.Stream(priority=0), torch.cuda.Stream(priority=-1)]
        alone = []
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
                alone.append(max(_milliseconds(graph, 1), 0.01))
        alone = self._agreed(*alone)
        started = time.monotonic()
        origin = torch.cuda.Event(enable_timing=True)
        origin.record()
        ends: list[list[torch.cuda.Event]] = [[], []]
        for stream in streams:
            stream.wait_event(origin)
        # alternate replays so that both streams have equally much work; the host runs ahead by the queue's depth
        counts = [0.0, 0.0]
        while max(c * t for c, t in zip(counts, alone, strict=True)) < self.seconds * 1e3:
            i = min((0, 1), key=lambda i: counts[i] * alone[i])
            with torch.cuda.stream(streams[i]):
                graphs[i].replay()
                event = torch.cuda.Event(enable_timing=True)
                event.record()
            ends[i].append(event)
            counts[i] += 1
        torch.cuda.synchronize()
        times = [[origin.elapsed_time(e) for e in e_list] for e_list in ends]
        # second half of the time in which both were busy
        last = min(t[-1] for t in times)
        first = last / 2
        mhz, watts = self._meter.mean(started + (time.monotonic() - started) / 2)
        result = []
        for t in times:
            done = np.interp([first, last], [0.0, *t], np.arange(len(t) + 1))
            result.append(Timing(float((last - first) / (done[1] - done[0])) / self._layers, watts, mhz))
        return result[0], result[1]

    def _launch(self, pipeline: Pipeline, only: tuple[NanoOperation, ...] | None) -> Callable[[], object]:
        def launch() -> None:
            if only is None:  # otherwise the residual stream would grow with each run
                self._executor.x[: pipeline.tokens].copy_(self._start[: pipeline.tokens])
            with inside():
                self._executor.layers(pipeline, self._kv, only)

        collectives = self._collectives
        sums = any(op.role is Role.NETWORK and (only is None or nano in only) for nano, op in pipeline.operations)
        # ranks synchronize in one graph at a time: in a pair only one graph has collectives
        inside = partial(collectives.inside, Graph.MODEL) if collectives is not None and sums else nullcontext
        return launch

    def _graph(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                launch()
            torch.cuda.synchronize()
            # threads of vendor collectives query events during the capture
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
                launch()
        return graph

    def _sustain(self, pipeline: Pipeline, load: Load, launch: Callable[[], object], layers: int) -> Timing:
        self._send(pipeline, load)
        if self._collectives is not None:
            s = self._sustain_together(self._graph(launch))
        else:
            with torch.inference_mode():
                s = sustained([launch], self._meter, self.seconds)
        return Timing(s.ms / layers, s.watts, s.mhz)

    def _sustain_together(self, graph: torch.cuda.CUDAGraph) -> Timing:
        """Like `sustained`, with equally many replays on all ranks. An extra replay would wait forever."""
        (ms,) = self._agreed(_milliseconds(graph, 2))
        half = max(2, round(self.seconds / 2 * 1e3 / max(ms, 0.01)))
        _milliseconds(graph, half)
        begun = time.monotonic()
        ms = _milliseconds(graph, half)
        mhz, watts = self._meter.mean(begun)
        return Timing(ms, watts, mhz)

    def _agreed(self, *values: float) -> list[float]:
        """Return the values of rank 0."""
        return list(self._host.all_gather(torch.tensor(values, dtype=torch.float64))[0].tolist())

    def _send(self, pipeline: Pipeline, load: Load) -> None:
        if load not in self._batches:
            self._batches[load] = batch_of(load, self.page_size)
        batch = self._batches[load]
        spec = self.spec
        pages = int(batch.page_table.max()) + 1
        with torch.inference_mode():
            if self._kv.numel() == 0 or self._kv.shape[0] < pages:
                self._kv = torch.empty(0, device=self._start.device)
                torch.cuda.empty_cache()
                with suppress(torch.OutOfMemoryError):
                    self._kv = torch.empty(self.layout.shape(pages), device=self._start.device, dtype=self.layout.dtype)
                # all ranks must fail together
                if not self._host.all_gather(torch.tensor([self._kv.numel()])).all():
                    raise OutOfMemory(
                        f"too little GPU memory for {load.kv_tokens:,} KV tokens of {spec.num_layers} layers: "
                        "use a workload of shorter requests or a smaller --tokens"
                    )
                for chunk in self._kv.view(-1).chunk(64):
                    chunk.normal_()
            torch.cuda.synchronize()
            self._executor.fill(self._start)
            self._inputs.send(batch, pipeline, AttentionGrid(spec.num_kv_heads, spec.heads_per_kv, PER_SM))
            # in an engine the graph applies the updates
            table = torch.from_numpy(batch.page_table)
            self._inputs.page_table[: table.shape[0], : table.shape[1]].copy_(table)
            torch.cuda.synchronize()

    def _around(self, load: Load, *ops: NanoOperation) -> Pipeline:
        """Build a pipeline of `ops` plus attention for the other tokens, so that every token is assigned."""
        attention = [o.name for o in self.spec.layer_operations() if o.role.attends]
        ranges = {(o.begin, o.end) for o in ops if o.operation in attention}
        edges = sorted({0, load.tokens} | {e for r in ranges for e in r})
        filled = list(ops)
        for begin, end in pairwise(edges):
            for name in attention:
                if not any(o.operation == name and (o.begin, o.end) == (begin, end) for o in ops):
                    filled.append(NanoOperation(name, begin, end, 1))
        return Pipeline(Period(load.tokens, tuple(filled)), self.spec)


def _milliseconds(graph: torch.cuda.CUDAGraph, times: int) -> float:
    """Mean time of a replay in ms."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    for _ in range(times):
        graph.replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / times
