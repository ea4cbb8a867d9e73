"""`CudaRunner`: runs iterations from captured graphs, one per token bucket and plan period, without host waits.

An iteration is two graphs: the model up to the logits, and sampling. Logit biases, penalties and log-probabilities are
ordinary launches between them, in batches that need them. A request's last token stays on the device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.memory.cuda_transfer import CudaCopyEngine
from weft.engine.model.adapter import Adapter
from weft.engine.model.drafts.eagle3 import Eagle3Head, Eagle3Weights
from weft.engine.model.drafts.spec import DraftWeights
from weft.engine.model.spec import ModelSpec
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.weights import Weights
from weft.engine.plans.pipeline import Pipeline
from weft.engine.progress import Progress, notice
from weft.engine.runner.cuda.adapter_slots import AdapterSlots
from weft.engine.runner.cuda.cuda_eagle3 import CudaEagle3
from weft.engine.runner.cuda.cuda_executor import CudaExecutor
from weft.engine.runner.cuda.cuda_inputs import INVARIANT_SPLIT_TOKENS, device_inputs
from weft.engine.runner.cuda.cuda_layers import CudaLayers
from weft.engine.runner.cuda.layer_launch import Fused
from weft.engine.runner.device.collectives import RankGroup
from weft.engine.runner.device.compile_job import CompileJob
from weft.engine.runner.device.image_rows import ImagePool
from weft.engine.runner.device.preparation import PipelineWork, Preparation, Step
from weft.engine.runner.device.sampling import Sampling, Scores, pooled
from weft.engine.runner.iteration.attention_lists import AttentionGrid
from weft.engine.runner.iteration.attention_path import AttentionPath, describe_paths
from weft.engine.runner.iteration.batch import UNDRAFTED, Batch, PromptLogprobs, StepResult
from weft.engine.runner.iteration.nano import Assignment
from weft.engine.runner.iteration.pipelines import Pipelines
from weft.engine.runner.memory.cuda_arena import DriverFailed, cuda_sleepable_memory
from weft.engine.runner.memory.sleep import SleepableMemory, Sleepless
from weft.engine.runner.options.budget import MemoryUsage, bytes_for_pages
from weft.engine.runner.options.footprint import GIB
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention import break_evens
from weft.kernels.attention.backend import AttentionBackend, HostAttention
from weft.kernels.attention.backends import make_host_attention
from weft.kernels.attention.triton_backend import PER_SM, TritonAttention
from weft.kernels.common.gpu import gpu
from weft.kernels.reference import layer as reference

if TYPE_CHECKING:
    from weft.engine.model.transformers_impl.module import TransformersModule

RESERVE_BYTES = GIB
"""Memory to leave free for graphs, and for workspaces of batches with penalties or log-probabilities."""
POLL_SECONDS = 2e-5
"""Seconds between polls of an iteration that uses several ranks. Waiting for the device would hide a lost rank."""
PIPELINE_BYTES = 64 << 20
"""Memory to leave free for each pipeline whose kernels are loaded after the pool is allocated."""
FUSED_PATHS: dict[str, Fused] = {"pod_together": "together", "pod_tiles": "tiles"}
"""Attention paths with separate graphs."""


def _no_progress(phase: str, done: int, total: int) -> None:
    """Ignore progress."""


class _Graphs(NamedTuple):
    model: torch.cuda.CUDAGraph  # Empty if the model runs eagerly.
    sample: torch.cuda.CUDAGraph
    others: dict[Fused, torch.cuda.CUDAGraph]
    """The model with other variants of fused attention, if it is fused; `model` is then the variant "lists"."""
    adapted: torch.cuda.CUDAGraph | None = None  # The model with LoRA adapters, if iterations may have any.

    @classmethod
    def empty(cls, *, fused: bool, adapted: bool) -> _Graphs:
        others = {variant: torch.cuda.CUDAGraph() for variant in FUSED_PATHS.values()} if fused else {}
        with_adapters = torch.cuda.CUDAGraph() if adapted else None
        return cls(torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph(), others, with_adapters)

    def of(self, path: AttentionPath | None, *, adapted: bool = False) -> torch.cuda.CUDAGraph:
        """Return the model's graph for this attention path. adapted: for an iteration with LoRA adapters."""
        if adapted and self.adapted is not None:
            return self.adapted
        variant = _variant(path)
        return self.model if variant is None else self.others.get(variant, self.model)


def _variant(path: AttentionPath | None) -> Fused | None:
    return None if path is None else FUSED_PATHS.get(path.path)


class CudaInFlight:
    """An iteration on the GPU's stream: its events, and pinned buffers for its results."""

    def __init__(
        self, batch: Batch, before: torch.cuda.Event | None, nano_batches: int, num_slots: int,
        check: Callable[[], None] | None = None,
    ) -> None:  # fmt: skip
        """check: see `RankGroup`; None for a single rank."""
        self.batch = batch
        self._check = check
        self.nano_batches = nano_batches
        self.sampled = torch.empty(2, num_slots, dtype=torch.int64, pin_memory=True)
        """Tokens, and 1 for rows whose logits are not finite. The first rows are the batch's."""
        self.token_ids: Tensor | None = None  # Those of decodes, if the device made drafts.
        self.attention: AttentionPath | None = None
        self.scores: Scores | None = None
        self.prompt_scores: list[Scores] = []
        self.pooled: Tensor | None = None
        self.begin = torch.cuda.Event(enable_timing=True)
        self.end = torch.cuda.Event(enable_timing=True)
        self._before = before

    def ends_within(self, seconds: float) -> bool:
        if self._check is None:
            return True  # polling would use a core and the interpreter's lock
        end = time.monotonic() + seconds
        while not self.end.query():
            self._check()
            if time.monotonic() > end:
                return False
            time.sleep(POLL_SECONDS)
        return True

    def wait(self) -> StepResult:
        while self._check is not None and not self.ends_within(1.0):
            pass
        self.end.synchronize()
        tokens, bad = self.sampled[:, : len(self.batch.sampled_rows)].numpy()
        batch = self.batch
        if self.token_ids is not None:
            ids, drafted = batch.token_ids.copy(), np.flatnonzero(batch.token_ids == UNDRAFTED)
            ids[drafted] = self.token_ids.numpy()[drafted]
            batch = batch._replace(token_ids=ids)
        return StepResult(
            batch, tokens.astype(np.int32), None if self.scores is None else self.scores.read(),
            tuple(scores.read() for scores in self.prompt_scores), self.begin.elapsed_time(self.end) / 1e3,
            self._before.elapsed_time(self.begin) / 1e3 if self._before is not None else 0.0, self.nano_batches,
            bad.astype(np.bool_), None if self.pooled is None else self.pooled.numpy(), self.attention,
        )  # fmt: skip


class CudaRunner:
    """`Runner` on one GPU. It allocates everything that graphs use once, when it is created."""

    def __init__(
        self, spec: ModelSpec, weights: Weights | TransformersModule, config: ResolvedConfig,
        progress: Progress | None = None, compiling: CompileJob | None = None, rank_group: RankGroup | None = None,
        image_rows: ImagePool | None = None, draft: DraftWeights | None = None,
    ) -> None:  # fmt: skip
        """compiling: compiles pipelines that are not waited for; None: all kernels are in the cache. rank_group: the
        other ranks, which must create their runners at once and launch the same iterations in the same order.
        image_rows: the embeddings of images, if the model takes any. draft: weights of the model that drafts."""
        self._draft_weights = draft
        self.spec, self.weights, self.config = spec, weights, config
        self._grid = AttentionGrid(
            spec.num_kv_heads, spec.heads_per_kv, PER_SM, INVARIANT_SPLIT_TOKENS if config.batch_invariant else 0,
            config.kv.page_size,
        )  # fmt: skip
        self._rank_group, self._image_rows = rank_group, image_rows
        report = progress or _no_progress
        device = config.device
        self._device = device
        self.stream = torch.cuda.Stream(device)  # Stream of all iterations.
        here = gpu(device)
        assert here is not None
        self._pipelines = Pipelines(
            spec, config.max_num_batched_tokens, here.sms, config.plan, self._grid.undivided
        )  # fmt: skip
        memory = self._make_sleepable_memory() if config.sleeps else None
        self.sleepable = memory or Sleepless()
        with torch.cuda.device(device), torch.cuda.stream(self.stream), torch.inference_mode():
            vision = None if image_rows is None else image_rows.vision
            self._inputs = device_inputs(spec, config, self._pipelines.nano_batches, vision)
            self._host_attention: HostAttention[Any] | None = None
            # Why the model runs eagerly; "" if it is captured.
            self._eager = "--enforce-eager" if config.enforce_eager else ""
            self._adapters: AdapterSlots | None = None
            if config.adapter_slots:
                self._adapters = AdapterSlots(
                    spec, config.adapter_slots, config.adapter_rank, config.compute_dtype, device
                )
            self._executor = self._make_executor(here.sms)
            layout = self._inputs.layout
            notice(describe_paths(config.attention, cuts=layout.prefill_slots > 0, pod=layout.pod))
            if layout.pod == "auto" and layout.prefill_slots:
                of = break_evens.TableKey.here(*config.attention_shape(spec)[:4])
                self._inputs.break_evens, message = break_evens.read(config.cache_dir, of)
                notice(message)
            self._last_end: torch.cuda.Event | None = None
            self._sampling = Sampling(
                device, config.max_num_seqs, spec.vocabulary, None if rank_group is None else rank_group.device
            )
            # The warm-up loads every kernel with a pool of two pages. Then the free memory is measured.
            self.kv = self._allocate(2)
            self._drafter = self._make_drafter(here.sms)
            later = [] if config.wait_for_plan else self._pipelines.planned
            now = self._pipelines.serial if later else list(self._pipelines)
            self._reserve = RESERVE_BYTES + len(later) * PIPELINE_BYTES
            self._warm_up(now, report)
            if image_rows is not None and image_rows.device.type == "cuda":
                self._reserve += image_rows.warm_up()
            self.kv = self._allocate(self._measure_pages(), memory)
            if self._drafter is not None:
                self._drafter.attach(self.kv, self._executor.last_token)
                sizes = [pipeline.tokens for pipeline in self._pipelines.decoding]
                self._drafter.capture(self.stream, self._executor, sizes)
            self._graphs: dict[int, _Graphs] = {}
            for done, pipeline in enumerate(now):
                report("capturing graphs", done, len(now))
                self._graphs[id(pipeline)] = self._capture(pipeline)
            self.stream.synchronize()
            self._capture_stream = torch.cuda.Stream(device)  # Stream for captures while `stream` has work.
        if later:
            self._pipelines.disable_planned()
        works = [self._pipeline_work(pipeline) for pipeline in later]
        self.preparation = Preparation(works, compiling, serving=len(self._pipelines.planned) - len(works))

    def _make_executor(self, num_sms: int) -> Any:
        """Return a `CudaExecutor`, or a class with its interface."""
        spec, weights, config = self.spec, self.weights, self.config
        if isinstance(spec, TransformersSpec):
            from weft.engine.model.transformers_impl.module import TransformersModule
            from weft.engine.runner.cuda.transformers_cuda import TransformersCudaExecutor

            assert isinstance(weights, TransformersModule)
            return TransformersCudaExecutor(spec, weights, self._inputs, config)
        assert isinstance(weights, Weights)
        shape, scales = config.attention_shape(spec), weights.kv_page_scales(spec, config.kv.dtype)
        attention: AttentionBackend[Any]
        if config.attention == "triton":
            attention = TritonAttention(shape, num_sms, scales, batch_invariant=config.batch_invariant)
        else:
            self._eager = f"the {config.attention} attention back end plans on the host"
            attention = self._host_attention = make_host_attention(
                config.attention, shape, batch_invariant=config.batch_invariant
            )
        layers = CudaLayers(
            spec, weights, self._inputs, config.compute_dtype, attention, invariant=config.batch_invariant,
            collectives=None if self._rank_group is None else self._rank_group.device, kv_scales=scales,
            images=None if self._image_rows is None else self._image_rows.rows,
            adapters=self._adapters,
        )  # fmt: skip
        return CudaExecutor(layers)

    def _make_drafter(self, num_sms: int) -> CudaEagle3 | None:
        config, weights = self.config, self.weights
        if self._draft_weights is None:
            return None
        assert isinstance(config.draft, Eagle3Head)
        assert isinstance(self._draft_weights, Eagle3Weights)
        assert isinstance(weights, Weights)
        drafter = CudaEagle3(
            config.draft, self._draft_weights, weights.embedding, config, self._inputs, self._sampling, num_sms
        )
        self._executor.taps = dict(zip(drafter.taps, drafter.tapped.chunk(len(drafter.taps), -1), strict=True))
        return drafter

    @property
    def num_pages(self) -> int:
        return self.kv.shape[0]

    @property
    def adapters(self) -> MutableMapping[int, Adapter] | None:
        return self._adapters

    def stage_adapter(self, adapter: Adapter, *_: object) -> Adapter:
        return adapter if self._adapters is None else self._adapters.stage(adapter)

    def copy_engine(self, slots: int) -> CudaCopyEngine:
        return CudaCopyEngine(self.kv, slots, self._executor.gates, self.config.packed)

    def _make_sleepable_memory(self) -> SleepableMemory | None:
        """Return sleepable memory that holds the weights, or None if the driver does not support it."""
        with torch.cuda.device(self._device):
            try:
                sleepable = cuda_sleepable_memory(self._device)
                own = () if self._draft_weights is None else self._draft_weights.tensors()
                sleepable.adopt_weights((*self.weights.tensors(), *own))
                if self._image_rows is not None:
                    sleepable.adopt_weights(self._image_rows.tensors())
            except (OSError, AttributeError, DriverFailed) as error:
                notice(f"the model cannot release its memory to sleep: {error}")
                return None
            torch.cuda.synchronize()
            torch.cuda.empty_cache()  # the weights' old memory
        return sleepable

    def _allocate(self, pages: int, sleepable: SleepableMemory | None = None) -> Tensor:
        if sleepable is not None:
            pool = self.config.kv.view(sleepable.allocate(pages * self.config.kv.page_bytes))
            return pool.zero_()
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
        own = torch.cuda.memory_reserved(self._device) + self.sleepable.num_bytes
        usage = MemoryUsage(total, free, own, self.weights.num_bytes if config.common_weights else 0)
        room = bytes_for_pages(config, usage, self._reserve)
        # Other processes, or weights that are being replaced, may leave less memory free.
        if config.sharers > 1 and config.num_pages is None and free - self._reserve < room:
            notice(
                f"this engine may use {room / GIB:.1f} GiB for KV pages, but only {free / GIB:.1f} GiB of GPU memory "
                "are free: using those"
            )
            room = free - self._reserve
        # Pages beyond the need of running requests serve as prefix cache.
        pages = config.num_pages or room // page_bytes
        if self._rank_group is not None:  # every rank holds a shard of each page
            room, free, pages = self._rank_group.host.all_gather(torch.tensor([room, free, pages])).amin(0).tolist()
        if pages < 2 or pages * page_bytes > free:
            raise OutOfMemory(
                f"after weights and buffers {max(room, 0) / GIB:.1f} GiB are left for KV pages of "
                f"{page_bytes / 2**20:.1f} MiB: raise --gpu-memory-utilization"
                f"{', lower --replicas' if config.sharers > 1 else ''} or use a smaller model"
            )
        return int(pages)

    def _warm_up(self, pipelines: list[Pipeline], report: Progress) -> None:
        """Load every kernel, which a capture cannot do, and compile missing ones."""
        allocated = torch.cuda.memory_allocated(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        for done, pipeline in enumerate(pipelines):
            report("loading kernels", done, len(pipelines))
            if self._host_attention is None:
                self._executor.touch(pipeline, self.kv, self._max_sampled(pipeline))
            self._executor.sample(self._max_sampled(pipeline))
        if self.spec.native:
            return
        pipeline = pipelines[0]
        self._eager = self._eager or self._executor.blocks_capture(pipeline, self.kv, self._max_sampled(pipeline))
        how = f"eagerly on the GPU: {self._eager}" if self._eager else "in captured graphs"
        notice(f"{self.spec.architecture}: transformers' code runs {how}")
        # `transformers`' code allocates activations: once for all graphs, and once for eager runs.
        self._reserve += 2 * (torch.cuda.max_memory_allocated(self._device) - allocated)
        self._graph_memory = torch.cuda.graph_pool_handle()

    def _capture(self, pipeline: Pipeline) -> _Graphs:
        graphs = self._new_graphs(pipeline)
        if self.config.enforce_eager:
            return graphs
        if not self._eager:
            # Graphs of `transformers`' code allocate. They run in sequence, so they share that memory.
            memory = None if self.spec.native else self._graph_memory
            with torch.cuda.graph(graphs.model, memory, stream=self.stream):
                self._run_model(pipeline)
        for variant, graph in graphs.others.items():
            with torch.cuda.graph(graph, stream=self.stream):
                self._run_model(pipeline, fused=variant)
        if graphs.adapted is not None:
            with torch.cuda.graph(graphs.adapted, stream=self.stream):
                self._run_model(pipeline, adapted=True)
        with torch.cuda.graph(graphs.sample, stream=self.stream):
            self._executor.sample(self._max_sampled(pipeline))
        return graphs

    # -- preparing a pipeline of the plan between iterations

    def _pipeline_work(self, pipeline: Pipeline) -> PipelineWork:
        rows = self._max_sampled(pipeline)
        graphs = self._new_graphs(pipeline)

        def load() -> Iterator[Step]:
            for launch in self._executor.touches(pipeline, self.kv, rows):
                yield partial(self._launch_empty, launch)
            yield partial(self._launch_empty, partial(self._executor.sample, rows))

        def capture() -> Iterator[Step]:
            yield partial(self._capture_while_running, graphs.model, partial(self._run_model, pipeline))
            for variant, graph in graphs.others.items():
                yield partial(self._capture_while_running, graph, partial(self._run_model, pipeline, fused=variant))
            yield partial(self._capture_while_running, graphs.sample, partial(self._executor.sample, rows))

        def enable() -> None:
            self._graphs[id(pipeline)] = graphs
            self._pipelines.enable(pipeline)

        period = pipeline.period
        return PipelineWork(f"for {period.min_tokens} to {period.tokens} tokens", load, capture, enable)

    def _launch_empty(self, launch: Callable[[], None]) -> None:
        """Launch with inputs of no tokens, after the iterations launched so far. The last iteration's inputs would
        repeat it and overwrite tokens sampled since."""
        with torch.cuda.device(self._device), torch.cuda.stream(self.stream), torch.inference_mode():
            self._inputs.clear()
            launch()

    def _capture_while_running(self, graph: torch.cuda.CUDAGraph, launch: Callable[[], None]) -> None:
        """Capture without `torch.cuda.graph`, which would wait for the iterations in flight. The capture is local to
        this thread, which launches nothing else meanwhile; other threads may copy pages."""
        with torch.cuda.device(self._device), torch.cuda.stream(self._capture_stream), torch.inference_mode():
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                launch()
            finally:
                graph.capture_end()

    def _max_sampled(self, pipeline: Pipeline) -> int:
        """Return the maximum of rows that sample."""
        return min(pipeline.tokens, self.config.max_sampled)

    def _new_graphs(self, pipeline: Pipeline) -> _Graphs:
        adapted = self._adapters is not None and not self._eager and pipeline.is_serial
        return _Graphs.empty(fused=not self._eager and self._inputs.fuses(pipeline), adapted=adapted)

    def _run_model(self, pipeline: Pipeline, **how: Any) -> None:
        """how: `fused`, for an executor with fused attention, and `adapted`, for one with adapters."""
        self._executor.forward(pipeline, self.kv, self._max_sampled(pipeline), **how)

    def launch(self, batch: Batch) -> CudaInFlight:
        pipeline = self._pipelines.of(batch)
        graphs, s, logits = self._graphs[id(pipeline)], batch.sampling, self._executor.logits
        tokens = self._executor.tokens
        with torch.cuda.stream(self.stream), torch.inference_mode():
            check = None if self._rank_group is None else self._rank_group.check
            in_flight = CudaInFlight(batch, self._last_end, len(pipeline.nano_batches), len(tokens), check)
            in_flight.begin.record()
            adapters = None if batch.adapters is None else self._adapters
            if adapters is not None:
                adapters.wait_for_copies(self.stream)
            assigned = self._inputs.send(batch, pipeline, self._grid, adapters)
            undrafted = self._drafter is not None and bool((batch.token_ids == UNDRAFTED).any())
            if self._drafter is not None and undrafted:
                self._drafter.draft(batch)
                in_flight.token_ids = torch.empty(batch.decode_tokens, dtype=torch.int32, pin_memory=True)
                in_flight.token_ids.copy_(self._inputs.column["token_ids"][: batch.decode_tokens], non_blocking=True)
            in_flight.attention = None if self._host_attention is not None else self._inputs.attention
            if not self._eager:
                graphs.of(in_flight.attention, adapted=adapters is not None).replay()
            else:
                if self._host_attention is not None:
                    self._executor.set_steps([self._host_attention.prepare(batch)])
                variant = _variant(in_flight.attention)
                how: dict[str, Any] = {} if variant is None else {"fused": variant}
                self._run_model(pipeline, **(how if adapters is None else {"adapted": True}))
            in_flight.prompt_scores = [
                self._prompt_scores(prompt, assigned, pipeline) for prompt in batch.prompt_logprobs
            ]
            states = pooled(batch, lambda rows: self._hidden(rows, assigned, pipeline))
            if states is not None:
                (in_flight.pooled,) = self._sampling.to_host([states])
            raw = self._sampling.raw_logits(logits, s)
            self._sampling.adjust(logits, batch, self._executor.ids if undrafted else None)
            if self._rank_group is not None and s.columns["temperature"].any():
                self._executor.set_tokens(*self._sampling.draw(logits[: len(s.slots)], s))
            elif self.config.enforce_eager:
                self._executor.sample(self._max_sampled(pipeline))
            else:
                graphs.sample.replay()
            self._sampling.count(tokens, s, self._executor.reached if batch.drafted else None)
            in_flight.sampled.copy_(self._executor.sampled, non_blocking=True)
            in_flight.scores = self._sampling.scores(tokens, s, raw)
            in_flight.end.record()
            if self._drafter is not None:
                self._drafter.follow(batch, self._executor, pipeline.tokens)
                self._drafter.draft_ahead(batch)
                self._last_end = torch.cuda.Event(enable_timing=True)
                self._last_end.record()
            else:
                self._last_end = in_flight.end
        return in_flight

    def logits_of(self, batch: Batch) -> Tensor:
        """Run a batch, with its own tokens for decodes, and return logits `[S, V]` of rows that sample. For tests."""
        decodes = batch.num_decodes
        tokens = torch.from_numpy(batch.token_ids[:decodes]).to(self._device).long()
        with torch.cuda.stream(self.stream):
            self._executor.last_token[torch.from_numpy(batch.slots[:decodes]).to(self._device).long()] = tokens
        self.launch(batch).wait()
        return self._executor.logits[: len(batch.sampled_rows)].clone()

    def close(self) -> None:
        self.preparation.stop()
        self.stream.synchronize()

    def _hidden(self, rows: np.ndarray, assigned: Assignment, pipeline: Pipeline) -> Tensor:
        """Return states after the final norm of token rows `[N]` of the batch."""
        at = self._sampling.to_device(assigned.output_rows(rows).astype(np.int64))
        if isinstance(self.weights, Weights):
            return self._executor.hidden(pipeline, at)
        return self._executor.hidden_of(pipeline, self.kv, at)

    def _prompt_scores(self, prompt: PromptLogprobs, assigned: Assignment, pipeline: Pipeline) -> Scores:
        """Score a prompt eagerly, because the graph computes only logits of sampled rows."""
        w, spec = self.weights, self.spec

        def logits_of(rows: Tensor) -> Tensor:
            if not isinstance(w, Weights):
                return self._executor.logits_of(pipeline, self.kv, rows).float()
            picked = self._executor.states(pipeline)[rows]
            return reference.lm_head(
                picked, reference.row_sumsq(picked, spec.norm.centred), w.norm, w.lm_head, spec.norm.eps,
                norm_bias=w.norm_bias, centred=spec.norm.centred, bias=w.head_bias, scale=spec.logits_scale,
                softcap=spec.logits_softcap,
            )  # fmt: skip

        return self._sampling.prompt_scores(prompt, assigned.output_rows(prompt.token_rows), logits_of)
