"""`CudaRunner`: a captured graph for each token bucket and plan period, inputs through a pinned ring, no host waits.

An iteration is two graphs: the model up to the logits, and sampling. Between them go, as ordinary launches and only in
batches that ask for them, logit biases, penalties and log-probabilities. A request's last token stays on the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.memory.cuda_transfer import CudaCopyEngine
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import serial_period
from weft.engine.progress import Progress
from weft.engine.runner.batch import Batch, PromptLogprobs, StepResult
from weft.engine.runner.cuda_executor import INVARIANT_PART_TOKENS, CudaExecutor
from weft.engine.runner.cuda_inputs import DeviceInputs, Layout
from weft.engine.runner.resolve import GIB, ResolvedConfig
from weft.engine.runner.sampling import Sampling, Scores
from weft.kernels import reference, resident
from weft.kernels.attention import AttentionBackend, HostAttention
from weft.kernels.attention_backends import make_host_attention
from weft.kernels.attention_triton import PER_SM, TritonAttention
from weft.kernels.sampler import sample, sample_scratch

RESERVE_BYTES = GIB
"""left free beside the KV pool: graphs, and the workspaces of batches with penalties or log-probabilities"""


def token_buckets(max_tokens: int) -> list[int]:
    """Sizes of the captured graphs: powers of two, then steps of 128, 256 or an eighth, up to the dense batch."""
    sizes = [1, 2, 4, 8, 16, 32, 64, 128, 256]
    while sizes[-1] < max_tokens:
        step = 128 if sizes[-1] < 1024 else max(256, sizes[-1] // 8 // 256 * 256)
        sizes.append(sizes[-1] + step)
    return sorted({min(s, max_tokens) for s in sizes})


def _no_progress(phase: str, done: int, total: int) -> None:
    """Nobody watches the start."""


class _Graphs(NamedTuple):
    model: torch.cuda.CUDAGraph
    """empty with an attention back end that plans on the host: the model then runs as ordinary launches"""
    sample: torch.cuda.CUDAGraph


class CudaInFlight:
    """An iteration on the GPU's stream: an event and the pinned buffers that its results arrive in."""

    def __init__(self, batch: Batch, before: torch.cuda.Event | None, nano_batches: int, num_slots: int) -> None:
        self.batch = batch
        self._nano_batches = nano_batches
        self.sampled = torch.empty(2, num_slots, dtype=torch.int64, pin_memory=True)
        """tokens, and 1 for rows whose logits were no numbers; the first rows are the batch's"""
        self.scores: Scores | None = None
        self.prompt_scores: list[Scores] = []
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self._before = before

    def wait(self) -> StepResult:
        self.end.synchronize()
        tokens, bad = self.sampled[:, : len(self.batch.sampled_rows)].numpy()
        return StepResult(
            self.batch,
            tokens.astype(np.int32),
            None if self.scores is None else self.scores.read(),
            tuple(scores.read() for scores in self.prompt_scores),
            self.begin.elapsed_time(self.end) / 1e3,
            self._before.elapsed_time(self.begin) / 1e3 if self._before is not None else 0.0,
            self._nano_batches,
            bad.astype(np.bool_),
        )


class CudaRunner:
    """The runner of one GPU (see `runner.Runner`). Everything a graph points at is allocated here, once."""

    def __init__(
        self, spec: ModelSpec, weights: Weights, config: ResolvedConfig, progress: Progress | None = None
    ) -> None:
        self.spec, self.weights, self.config = spec, weights, config
        report = progress or _no_progress
        device = config.device
        self._device = device
        self.stream = torch.cuda.Stream(device)
        """where iterations run, one behind the other"""
        num_sms = torch.cuda.get_device_properties(device).multi_processor_count
        t, s = config.max_num_batched_tokens, config.max_num_seqs
        sizes = token_buckets(t)
        self._serial = [Pipeline(serial_period(spec, size, num_sms), spec) for size in sizes]
        self._decoding = [
            Pipeline(serial_period(spec, size, num_sms, decode_only=True), spec) for size in sizes if size <= 64
        ]
        planned = config.plan.periods if config.plan is not None else ()
        self._planned = {id(period): Pipeline(period, spec) for period in planned}
        pipelines = tuple(self._planned.values())
        nano_batches = max((len(p.nano_batches) for p in pipelines), default=1)
        with torch.cuda.device(device), torch.cuda.stream(self.stream), torch.inference_mode():
            self._part_tokens = INVARIANT_PART_TOKENS if config.batch_invariant else 0
            parts = s * -(-config.max_model_len // INVARIANT_PART_TOKENS) if config.batch_invariant else 1024
            layout = Layout.of(t, s, spec.heads_per_kv, nano_batches, parts)
            self._inputs = DeviceInputs(layout, device, s, -(-config.max_model_len // config.kv.page_size))
            shape = config.attention_shape(spec)
            self._host_attention: HostAttention[Any] | None = None
            if config.attention == "triton":
                attention: AttentionBackend[Any] = TritonAttention(shape, num_sms)
            else:
                attention = self._host_attention = make_host_attention(
                    config.attention, shape, batch_invariant=config.batch_invariant
                )
            self._executor = CudaExecutor(
                spec, weights, self._inputs, config.compute_dtype, attention, invariant=config.batch_invariant
            )
            # together, so that they come to the host in one transfer
            self._sampled = torch.zeros(2, s, dtype=torch.int64, device=device)
            self._tokens, self._bad = self._sampled
            self._candidates = sample_scratch(s, device)
            self._last_end: torch.cuda.Event | None = None
            self._sampling = Sampling(device, s, spec.vocab_size)
            # A pool of two pages serves the warm-up, which loads every kernel; what is left then is measured.
            self.kv = self._allocate(2)
            self._warm_up((*self._serial, *self._decoding, *pipelines), report)
            self.kv = self._allocate(self._measure_pages())
            every = (*reversed(self._serial), *self._decoding, *pipelines)
            self._graphs = {}
            for done, pipeline in enumerate(every):
                report("capturing graphs", done, len(every))
                self._graphs[id(pipeline)] = self._capture(pipeline)
            self.stream.synchronize()

    @property
    def num_pages(self) -> int:
        return self.kv.shape[0]

    def copy_engine(self, slots: int) -> CudaCopyEngine:
        return CudaCopyEngine(self.kv, slots, self._executor.gates)

    def _allocate(self, pages: int) -> Tensor:
        try:
            return torch.zeros(self.config.kv.shape(pages), dtype=self.config.kv.dtype, device=self._device)
        except torch.OutOfMemoryError:
            raise OutOfMemory(
                f"{pages} KV pages do not fit the GPU: lower --num-pages, --kv-cache-gib or --gpu-memory-utilization"
            ) from None

    def _measure_pages(self) -> int:
        config, page_bytes = self.config, self.config.kv.page_bytes
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self._device)
        room = int(total * config.gpu_memory_utilization) - (total - free) - RESERVE_BYTES
        # Pages that the running requests could never fill are of use as prefix cache alone; they are kept all the same.
        pages = config.num_pages or room // page_bytes
        if pages < 2 or pages * page_bytes > free:
            raise OutOfMemory(
                f"after weights and buffers {max(room, 0) / GIB:.1f} GiB are left for KV pages of "
                f"{page_bytes / 2**20:.1f} MiB: raise --gpu-memory-utilization or use a smaller model"
            )
        return int(pages)

    def _warm_up(self, pipelines: Sequence[Pipeline], report: Progress) -> None:
        for done, pipeline in enumerate(pipelines):
            report("compiling kernels", done, len(pipelines))
            if self._host_attention is None:
                self._model(pipeline)
            self._sample(pipeline)

    def _capture(self, pipeline: Pipeline) -> _Graphs:
        graphs = _Graphs(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph())
        if self._host_attention is None:
            with torch.cuda.graph(graphs.model, stream=self.stream):
                self._model(pipeline)
        with torch.cuda.graph(graphs.sample, stream=self.stream):
            self._sample(pipeline)
        return graphs

    def _model(self, pipeline: Pipeline) -> None:
        self._executor.forward(pipeline, self.kv, min(pipeline.tokens, self.config.max_num_seqs))

    def _sample(self, pipeline: Pipeline) -> None:
        n = min(pipeline.tokens, self.config.max_num_seqs)
        tokens, arguments = self._tokens[:n], self._inputs.sampler_arguments(n)
        sample(self._executor.logits[:n], **arguments, out=tokens, bad=self._bad[:n], scratch=self._candidates[:n])
        slots = self._inputs.column["slots"][:n]
        resident.remember(tokens, slots, self._inputs.count["sampled"], self._executor.last_token)

    def _pipeline(self, batch: Batch) -> Pipeline:
        """The plan's pipeline for this iteration, or the serial plan where the search found no better."""
        if self.config.plan is not None:
            kv_tokens = int(batch.kv_len[: batch.num_decodes].sum())
            if (period := self.config.plan.period_for(batch.num_tokens, kv_tokens)) is not None:
                return self._planned[id(period)]
        if batch.num_decodes == batch.num_requests and batch.num_tokens <= self._decoding[-1].tokens:
            return next(p for p in self._decoding if p.tokens >= batch.num_tokens)
        return next(p for p in self._serial if p.tokens >= batch.num_tokens)

    def launch(self, batch: Batch) -> CudaInFlight:
        pipeline = self._pipeline(batch)
        graphs, s, logits = self._graphs[id(pipeline)], batch.sampling, self._executor.logits
        with torch.cuda.stream(self.stream), torch.inference_mode():
            in_flight = CudaInFlight(batch, self._last_end, len(pipeline.nano_batches), len(self._tokens))
            in_flight.begin.record()
            assigned = self._inputs.send(
                batch, pipeline, num_kv_heads=self.spec.num_kv_heads, group=self.spec.heads_per_kv, per_sm=PER_SM,
                part_tokens=self._part_tokens,
            )  # fmt: skip
            if self._host_attention is None:
                graphs.model.replay()
            else:
                self._executor.steps = [self._host_attention.prepare(batch)]
                self._model(pipeline)
            in_flight.prompt_scores = [self._prompt_scores(asked, assigned.places) for asked in batch.prompt_logprobs]
            raw = self._sampling.asked(logits, s)
            self._sampling.adjust(logits, batch)
            graphs.sample.replay()
            self._sampling.count(self._tokens, s)
            in_flight.sampled.copy_(self._sampled, non_blocking=True)
            in_flight.scores = self._sampling.scores(self._tokens, s, raw)
            in_flight.end.record()
        self._last_end = in_flight.end
        return in_flight

    def close(self) -> None:
        self.stream.synchronize()

    def _prompt_scores(self, asked: PromptLogprobs, places: np.ndarray | None) -> Scores:
        """Eager: the graph computed logits of sampled rows only."""
        w, eps, x = self.weights, self.spec.rms_norm_eps, self._executor.x

        def logits_of(rows: Tensor) -> Tensor:
            picked = x[rows]
            return reference.lm_head(picked, picked.float().square().sum(-1), w.norm, w.lm_head, eps)

        rows = asked.token_rows if places is None else places[asked.token_rows]
        return self._sampling.prompt_scores(asked, rows, logits_of)
