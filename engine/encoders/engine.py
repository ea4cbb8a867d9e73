"""`EncoderEngine`: has `Engine`'s interface for encoders. It computes whole sequences in batches bounded by tokens.

Requests wait in the same fair queue as those of decoders. One batch runs at a time, so that everything that arrives
meanwhile forms the next one, sorted by length.
"""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import numpy as np
import torch

from weft.engine.config import EngineConfig
from weft.engine.encoders.runner import EncoderBatch, EncoderRunner, Encoding, Job
from weft.engine.errors import ConfigError, RequestError
from weft.engine.model.encoders import EncoderSpec, load_encoder, read_encoder
from weft.engine.progress import Phases, Progress, notice
from weft.engine.runner.memory.host_arena import host_sleepable_memory
from weft.engine.runner.memory.sleep import SleepableMemory, Sleepless
from weft.engine.runner.options.budget import RUNTIME_BYTES
from weft.engine.runner.options.footprint import Footprint
from weft.engine.scheduling.adapters import Adapters
from weft.engine.scheduling.events import Events, Outbox
from weft.engine.scheduling.listeners import Listeners
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.waiting import WaitingQueue
from weft.engine.wire.log_sink import dropped_lines
from weft.engine.wire.messages import (
    AddRequest,
    EngineReady,
    EngineStats,
    Finish,
    IterationStats,
    MemoryBudget,
    Outputs,
    SchedulerStats,
    Started,
)
from weft.engine.wire.sampling import SamplingParams
from weft.kernels.common.gpu import gpu, gpu_device

BATCH_TOKENS = {"cpu": 4096, "cuda": 32768}  # default of --max-num-batched-tokens
MAX_SEQUENCES = {"cpu": 256, "cuda": 1024}  # default of --max-num-seqs: sequences of a batch
NOT_FINITE = "the model's states are not finite (NaN or inf): its weights or this device's results cannot be used"


class EncoderEngine:
    """Loads an encoder and serves requests one batch at a time. Raises `WeftError`, one line."""

    tiers = None  # there are no pages to keep
    adapters: Adapters | None = None

    def __init__(self, config: EngineConfig, progress: Progress | None = None) -> None:
        begin = time.perf_counter()
        self.config, phases = config, Phases(progress)
        self.spec = read_encoder(config.model_path)
        if config.adapters:
            raise ConfigError(f"{self.spec.architecture} is an encoder, and LoRA adapters need a decoder")
        notice(f"{self.spec.architecture}: an encoder, computed by transformers' code")
        self._device = _device_of(config)
        self._dtype = _dtype_of(config, self.spec, self._device)
        self.max_model_len = _length_of(config, self.spec)
        size = self.spec.num_parameters * self._dtype.itemsize
        Footprint(config, self._device, self._device.type == "cuda", 1, size, config.share.sharers).check_weights(
            self._dtype
        )
        kind = self._device.type
        self._max_tokens = max(config.max_num_batched_tokens or BATCH_TOKENS[kind], self.max_model_len)
        self._max_seqs = config.sequence_limit or MAX_SEQUENCES[kind]
        self._threads = config.cpu_threads or len(os.sched_getaffinity(0))
        phases("loading weights", 0, size)
        with ThreadPoolExecutor(1) as loader:  # an OpenMP team left on this thread would slow down the runner's
            module = loader.submit(load_encoder, self.spec, config.model_path, self._device, self._dtype).result()
        tensors = [*module.parameters(), *module.buffers()]
        self._weight_bytes = sum({t.data_ptr(): t.nbytes for t in tensors}.values())
        sleepable = _sleepable(config, self._device)
        if isinstance(sleepable, SleepableMemory):
            sleepable.adopt_weights(tensors)
        classifies = self.spec.classifies
        self.runner = EncoderRunner(module, self._device, self._threads, sleepable, classifies=classifies)
        self.listeners = Listeners()
        self._queue, self._open, self._outbox = WaitingQueue(), dict[int, Request](), Outbox()
        self._batch: tuple[Encoding, list[Request]] | None = None
        self._aborted: list[int] = []
        self._arrived = self._step = self._prompt_tokens = self._computed_tokens = self._nonfinite = 0
        self._running = 0
        self._last, self._last_end = IterationStats(), 0.0
        phases.end()
        self.load_seconds = time.perf_counter() - begin

    def describe(self) -> EngineReady:
        spec = self.spec
        return EngineReady(
            model_type=spec.architecture, num_parameters=spec.num_parameters,
            dtype=str(self._dtype).removeprefix("torch."), device=str(self._device), vocab_size=spec.vocab_size,
            max_model_len=self.max_model_len, page_size=self.config.page_size, num_pages=0,
            max_num_seqs=self._max_seqs, slot_limit=self._max_seqs, max_num_batched_tokens=self._max_tokens,
            eos_token_ids=(), load_seconds=self.load_seconds, hidden_size=spec.hidden_size,
            memory=MemoryBudget(weights=self._weight_bytes, working=self._working_bytes()),
            energy_missing="encoders are not metered", tasks=spec.tasks, labels=spec.labels,
            threads=self._threads if self._device.type == "cpu" else 0,
        )  # fmt: skip

    def _working_bytes(self) -> int:
        config = self.spec.config
        width = 6 * self.spec.hidden_size + 2 * int(getattr(config, "intermediate_size", 4 * self.spec.hidden_size))
        return RUNTIME_BYTES + self._max_tokens * width * self._dtype.itemsize

    # -- requests

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises `RequestError` if it can never be served."""
        ids, params = np.frombuffer(message.prompt_token_ids, np.int32), message.params
        if message.images:
            raise RequestError(f"{self.spec.architecture} takes text only, not images", "images")
        self._check(ids, params)
        self._arrived += 1
        request = Request(
            handle=message.handle, token_ids=ids, prompt_len=len(ids), params=params, max_total_tokens=len(ids),
            priority=message.priority, order=self._arrived, arrival=time.monotonic(), salt="", stop_ids=(), seed=0,
            tenant=message.tenant, precedence=message.precedence, segment=message.segment,
        )  # fmt: skip
        self._open[request.handle] = request
        self._queue.push(request)

    def _check(self, ids: np.ndarray, params: SamplingParams) -> None:
        name = self.spec.architecture
        if params.pooling is None:
            raise RequestError(f"{name} is an encoder: it generates no text", "model")
        if (params.pooling == "head") != self.spec.classifies:
            raise RequestError(f"{name} {'only classifies' if self.spec.classifies else 'has no classes'}", "model")
        if not 0 < len(ids) <= self.max_model_len:
            raise RequestError(f"the input has {len(ids)} tokens of at most {self.max_model_len}", "input")
        if int(ids.min()) < 0 or int(ids.max()) >= self.spec.vocab_size:
            raise RequestError(f"the input has a token id outside 0 … {self.spec.vocab_size - 1}", "input")

    def add_or_refuse(self, message: AddRequest) -> None:
        """Queue a request, or report its refusal with the next outputs."""
        if self.runner.sleepable.asleep:
            self._outbox.refuse(message.handle, "the model sleeps", Finish.BUSY)
            return
        try:
            self.add(message)
        except RequestError as error:
            self._outbox.refuse(message.handle, str(error), Finish.REFUSED)

    def abort(self, handle: int) -> None:
        """End a request early. Idempotent; unknown handles are ignored. A batch in flight skips it if it still can."""
        request = self._open.pop(handle, None)
        if request is None:
            return
        if request.slot < 0:
            self._queue.end(request)
        request.ended = True
        self._aborted.append(handle)

    def prefetch(self, _names: tuple[bytes, ...]) -> None:
        """There are no pages to fetch."""

    def reset_prefix_cache(self) -> None:
        """There is no cache."""

    def pages(self) -> bytes:
        return b""

    # -- sleeping

    def sleep(self) -> int:
        """Free the memory of the weights, and return its bytes. Raises `WeftError` or `OSError` if that fails."""
        assert not self.has_work
        self.runner.sleepable.check()
        self.runner.sleepable.sleep()
        return self.runner.sleepable.num_bytes

    def wake(self) -> int:
        """Take the memory again. If it raises `WeftError` or `OSError`, the process must end."""
        self.runner.sleepable.wake()
        return self.runner.sleepable.num_bytes

    # -- the loop

    def check(self) -> None:
        """There are no other ranks."""

    @property
    def has_work(self) -> bool:
        return bool(self._open or self._batch or self._aborted or self._outbox.refused)

    def launch_at(self) -> float:
        return 0.0

    @property
    def pause(self) -> float | None:
        return None

    def idle(self) -> Outputs | None:
        return None

    def step(self) -> Outputs | None:
        """Compute the next batch and return its results. Returns None if there is nothing to do or report."""
        for on_step in self.listeners.on_step:
            on_step()
        outputs = self._iterate()
        for on_step_end in self.listeners.on_step_end:
            on_step_end()
        return outputs

    def _iterate(self) -> Outputs | None:
        requests = self._take()
        if not requests:
            if self._aborted or self._outbox.refused:
                return self._outbox.outputs(self._with_aborts(Events.none()), self.stats())
            return None
        self._step += 1
        jobs = [Job(r.token_ids, r.segment, r.params.pooling or "mean", partial(getattr, r, "ended")) for r in requests]
        encoding = self.runner.launch(EncoderBatch(self._step, jobs))
        self._batch = encoding, requests
        for on_wait in self.listeners.on_wait:
            on_wait(encoding)  # type: ignore[arg-type]  # a batch of another kind, with the same figures
        begin = time.perf_counter()
        arrays, seconds = encoding.wait()
        self._batch = None
        idle = begin - self._last_end if self._last_end else 0.0
        self._last_end = time.perf_counter()
        batch = encoding.batch
        self._last = IterationStats(
            tokens=batch.num_tokens, requests=batch.num_requests, seconds=seconds, idle_seconds=max(0.0, idle)
        )
        self._computed_tokens += batch.num_tokens
        return self._outbox.outputs(self._with_aborts(self._events(requests, arrays)), self.stats())

    def _take(self) -> list[Request]:
        """Take requests in their fair order, up to the limits of a batch."""
        taken: list[Request] = []
        tokens, now = 0, time.monotonic()
        self._queue.step = self._step + 1
        while len(taken) < self._max_seqs and (head := self._queue.head()) is not None:
            if taken and tokens + head.prompt_len > self._max_tokens:
                break
            self._queue.take(head, head.prompt_len)
            head.slot, head.scheduled_at = len(taken), now
            tokens += head.prompt_len
            taken.append(head)
        self._queue.blocked = "slots" if len(taken) == self._max_seqs else "tokens"
        self._prompt_tokens += tokens
        self._running = len(taken)
        return taken

    def _events(self, requests: list[Request], arrays: list[np.ndarray | None]) -> Events:
        """Return the terminal events of a batch's requests that are still open."""
        now, events = time.monotonic(), Events.none()
        for request, array in zip(requests, arrays, strict=True):
            request.slot = -1
            self._queue.freed(request.tenant)
            if request.ended or array is None:
                continue
            request.ended = True
            del self._open[request.handle]
            if not np.isfinite(array).all():
                self._nonfinite += 1
                events.errors[request.handle] = NOT_FINITE
                continue
            waited = request.scheduled_at - request.arrival
            events.started.append(Started(request.handle, 0, waited, now - request.scheduled_at))
            events.pooled[request.handle] = np.ascontiguousarray(array, np.float32).tobytes()
        self._running = 0
        events = events.with_ends(list(events.errors), Finish.NONFINITE)
        return events.with_ends(list(events.pooled), Finish.LENGTH)

    def _with_aborts(self, events: Events) -> Events:
        aborted, self._aborted = self._aborted, []
        return events.with_ends(aborted, Finish.ABORT)

    def stats(self) -> EngineStats:
        queue = self._queue
        return EngineStats(
            scheduler=SchedulerStats(
                running=self._running, slot_limit=self._max_seqs, waiting=queue.num_requests, queue=queue.by_reason(),
                prompt_tokens=self._prompt_tokens, prefill_tokens=self._computed_tokens,
                nonfinite_logits=self._nonfinite,
            ),
            iteration=self._last, iterations=self._step, log_lines_dropped=dropped_lines(),
            **{field: value for stats in self.listeners.stats for field, value in stats().items()},
        )  # fmt: skip

    def close(self) -> None:
        for close in self.listeners.close:
            close()
        self.runner.close()


def _device_of(config: EngineConfig) -> torch.device:
    if config.device == "cpu" or (config.device == "auto" and gpu() is None):
        return torch.device("cpu")
    if gpu() is None:
        raise ConfigError("--device cuda: no CUDA device is visible; use --device cpu")
    return gpu_device()


def _dtype_of(config: EngineConfig, spec: EncoderSpec, device: torch.device) -> torch.dtype:
    """Raises `ConfigError`."""
    if config.dtype != "auto":
        dtype: torch.dtype = getattr(torch, config.dtype)
        if device.type == "cpu" and dtype == torch.float16:
            raise ConfigError("--dtype float16 needs a GPU; use float32 or bfloat16 on a CPU")
        return dtype
    if device.type == "cpu":
        return torch.float32
    return torch.float16 if spec.dtype == "float16" else torch.bfloat16


def _length_of(config: EngineConfig, spec: EncoderSpec) -> int:
    """Return the longest input in tokens. Raises `ConfigError`."""
    if (asked := config.max_model_len) is not None and asked > spec.positions:
        raise ConfigError(f"--max-model-len {asked} is more than the model's {spec.positions} positions")
    return asked or spec.max_tokens


def _sleepable(config: EngineConfig, device: torch.device) -> SleepableMemory | Sleepless:
    if not config.share.sleeps:
        return Sleepless()
    if device.type == "cpu":
        return host_sleepable_memory(config.cache_path)
    from weft.engine.runner.memory.cuda_arena import cuda_sleepable_memory

    return cuda_sleepable_memory(device)
