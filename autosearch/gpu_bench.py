"""`GpuBench`: the `Bench` of a GPU: some layers of the model with random weights, captured and run for a while."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.autosearch.bench_protocol import Load, Timing
from weft.engine.errors import OutOfMemory
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import load_weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import MAX_NANO_BATCHES, NanoOperation, Period
from weft.engine.runner.batch import Batch, SamplingInputs
from weft.engine.runner.cuda_executor import CudaExecutor
from weft.engine.runner.cuda_inputs import DeviceInputs, Layout
from weft.kernels.attention import AttentionShape
from weft.kernels.attention_triton import PER_SM, TritonAttention
from weft.kernels.measure import Meter, sustained

LAYERS = 16
"""of the model that is measured: at the first and the last of them a pipeline is not full, as in a whole model"""


def batch_of(load: Load, page_size: int) -> Batch:
    """A synthetic iteration: decodes of `context` tokens give or take a quarter, then whole prompts and a piece."""
    rng = np.random.default_rng(0)
    spread = rng.uniform(0.75, 1.25, load.decodes)
    decodes = np.maximum(1, load.context * spread / spread.mean() if load.decodes else spread).astype(np.int32)
    chunks: list[int] = []
    while sum(chunks) < load.prefill_tokens:
        chunks.append(min(max(1, load.prompt), load.prefill_tokens - sum(chunks)))
    query_len = np.array([1] * load.decodes + chunks, np.int32)
    kv_len = np.concatenate((decodes, np.array(chunks, np.int32)))
    pages = -(-kv_len // page_size)
    first = 1 + np.cumsum(pages) - pages
    # pages of a request lie anywhere in a pool that has been in use for a while
    shuffled = np.concatenate(([0], 1 + rng.permutation(int(pages.sum())))).astype(np.int32)
    column = np.arange(int(pages.max()))
    at = np.minimum(first[:, None] + column, int(pages.sum()))
    table = np.where(column < pages[:, None], shuffled[at], 0).astype(np.int32)
    positions = np.concatenate([np.arange(k - q, k) for q, k in zip(query_len, kv_len, strict=True)]).astype(np.int32)
    rows = np.repeat(np.arange(len(query_len)), query_len)
    slots = np.arange(len(query_len), dtype=np.int32)
    none: Any = np.zeros(0, np.int32)
    return Batch(
        step=1, num_decodes=load.decodes, slots=slots, epochs=slots, query_len=query_len, kv_len=kv_len,
        token_ids=np.zeros(load.tokens, np.int32), positions=positions,
        slot_mapping=table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size,
        page_table=table, sampled_rows=none, sampling=SamplingInputs.none(),
        count_resets=(), prompt_logprobs=(),
    )  # fmt: skip


class GpuBench:
    """See `bench_protocol.Bench`. `seconds`: of each measurement, its second half is what counts."""

    def __init__(
        self,
        spec: ModelSpec,
        *,
        layers: int = LAYERS,
        max_tokens: int = 2048,
        max_context: int = 8192,
        page_size: int = 64,
        seconds: float = 0.5,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
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
            self._executor = CudaExecutor(self.spec, weights, self._inputs, dtype, attention)
            self._start = torch.randn(max_tokens, spec.hidden_size, device=device, dtype=dtype)
        self._kv = torch.zeros(0, device=device, dtype=dtype)
        self._batches: dict[Load, Batch] = {}
        self._meter = Meter()

    def close(self) -> None:
        self._meter.close()

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
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            with torch.cuda.stream(stream):
                graph.replay()
                begin.record()
                graph.replay()
                end.record()
            end.synchronize()
            alone.append(max(begin.elapsed_time(end), 0.01))
        started = time.monotonic()
        origin = torch.cuda.Event(enable_timing=True)
        origin.record()
        ends: list[list[torch.cuda.Event]] = [[], []]
        for stream in streams:
            stream.wait_event(origin)
        # replays of each in turn, as many as last about equally long; the host stays ahead by the queue's depth
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
        # the second half of the time in which both were busy
        last = min(t[-1] for t in times)
        first = last / 2
        mhz, watts = self._meter.mean(started + (time.monotonic() - started) / 2)
        result = []
        for t in times:
            done = np.interp([first, last], [0.0, *t], np.arange(len(t) + 1))
            result.append(Timing(float((last - first) / (done[1] - done[0])) / self._layers, watts, mhz))
        return result[0], result[1]

    # -- how

    def _launch(self, pipeline: Pipeline, only: tuple[NanoOperation, ...] | None) -> Callable[[], object]:
        def launch() -> None:
            if only is None:  # the residual stream would grow from run to run
                self._executor.x[: pipeline.tokens].copy_(self._start[: pipeline.tokens])
            self._executor.layers(pipeline, self._kv, only)

        return launch

    def _graph(self, launch: Callable[[], object]) -> torch.cuda.CUDAGraph:
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        with torch.inference_mode():
            with torch.cuda.stream(stream):
                launch()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, stream=stream):
                launch()
        return graph

    def _sustain(self, pipeline: Pipeline, load: Load, launch: Callable[[], object], layers: int) -> Timing:
        self._send(pipeline, load)
        with torch.inference_mode():
            s = sustained([launch], self._meter, self.seconds)
        return Timing(s.ms / layers, s.watts, s.mhz)

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
                try:
                    self._kv = torch.empty(self.layout.shape(pages), device=self._start.device, dtype=self.layout.dtype)
                except torch.OutOfMemoryError:
                    raise OutOfMemory(
                        f"no room on the GPU for {load.kv_tokens:,} KV tokens of {spec.num_layers} layers: "
                        "give a workload of shorter requests or a smaller --tokens"
                    ) from None
                for part in self._kv.view(-1).chunk(64):
                    part.normal_()
            torch.cuda.synchronize()
            self._executor.fill(self._start)
            self._inputs.send(batch, pipeline, num_kv_heads=spec.num_kv_heads, group=spec.heads_per_kv, per_sm=PER_SM)
            # in an engine the graph itself applies the updates
            table = torch.from_numpy(batch.page_table)
            self._inputs.page_table[: table.shape[0], : table.shape[1]].copy_(table)
            torch.cuda.synchronize()

    def _around(self, load: Load, *ops: NanoOperation) -> Pipeline:
        """Contains `ops` and attention for the rest of the dense batch, so that tokens have their places."""
        attention = [o.name for o in self.spec.layer_operations() if o.role.attends]
        ranges = {(o.begin, o.end) for o in ops if o.operation in attention}
        edges = sorted({0, load.tokens} | {e for r in ranges for e in r})
        filled = list(ops)
        for begin, end in pairwise(edges):
            for name in attention:
                if not any(o.operation == name and (o.begin, o.end) == (begin, end) for o in ops):
                    filled.append(NanoOperation(name, begin, end, 1))
        return Pipeline(Period(load.tokens, tuple(filled)), self.spec)
