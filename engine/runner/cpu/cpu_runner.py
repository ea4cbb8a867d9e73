"""`CpuRunner`: runs iterations in order on a worker thread, with the reference implementations.

The worker thread acts as the GPU's stream: `launch` returns at once and scheduling overlaps with computing, because
torch releases the interpreter lock inside its kernels.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref
from collections.abc import MutableMapping
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.memory.cpu_transfer import CpuCopyEngine
from weft.engine.model.adapter import Adapter
from weft.engine.model.drafts.spec import DraftWeights
from weft.engine.model.spec import ModelSpec
from weft.engine.model.transformers_impl.spec import TransformersSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.engine.runner.cpu.drafts import make_drafter
from weft.engine.runner.cpu.drafts.drafter import CpuDrafter
from weft.engine.runner.device.collectives import Collectives
from weft.engine.runner.device.image_rows import ImagePool
from weft.engine.runner.device.preparation import Preparation
from weft.engine.runner.device.sampling import Sampling, Scores, pooled
from weft.engine.runner.iteration.batch import I32, UNDRAFTED, Batch, PromptLogprobs, StepResult, Verified
from weft.engine.runner.memory.host_arena import host_sleepable_memory
from weft.engine.runner.memory.sleep import SleepableMemory, Sleepless
from weft.engine.runner.options.footprint import GIB
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.backends import make_host_attention

if TYPE_CHECKING:
    from weft.engine.model.transformers_impl.module import TransformersModule


def _allocate(config: ResolvedConfig, sleepable: SleepableMemory | None) -> Tensor:
    """Allocate the KV pool, zeroed. Raises `OutOfMemory`."""
    assert config.num_pages is not None
    size = config.num_pages * config.kv.page_bytes
    if sleepable is not None:
        return config.kv.view(sleepable.allocate(size))
    try:
        # The system maps zeroed pages on first touch, so this takes no time, and unused pages take no memory.
        return config.kv.view(torch.from_numpy(np.zeros(size, np.uint8)))
    except (MemoryError, ValueError):  # ValueError: exceeds the address space
        raise OutOfMemory(f"{size / GIB:.1f} GiB of KV pages do not fit: lower --kv-cache-gib or --num-pages") from None


def _finish(jobs: queue.SimpleQueue[CpuInFlight | None], thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join()


class CpuInFlight:
    """An iteration on the worker thread."""

    nano_batches = 1

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def _resolve(self, result: StepResult | None, error: BaseException | None = None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def ends_within(self, seconds: float) -> bool:
        return self._done.wait(seconds)

    def wait(self) -> StepResult:
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class CpuRunner:
    """`Runner` on a CPU, also for one of several ranks."""

    def __init__(
        self, spec: ModelSpec, weights: Weights | TransformersModule, config: ResolvedConfig,
        collectives: Collectives | None = None, image_rows: ImagePool | None = None,
        draft: DraftWeights | None = None,
    ) -> None:  # fmt: skip
        """image_rows: the embeddings of images, if the model takes any. draft: weights of the model that drafts."""
        memory = host_sleepable_memory(config.cache_dir) if config.sleeps else None
        if memory is not None:
            tower = () if image_rows is None else image_rows.tensors()
            memory.adopt_weights((*weights.tensors(), *tower, *(() if draft is None else draft.tensors())))
        self.sleepable, self.preparation = memory or Sleepless(), Preparation()
        self.kv = _allocate(config, memory)
        self._executor: Any  # A `CpuExecutor`, or a class with its interface.
        if isinstance(spec, TransformersSpec):
            from weft.engine.model.transformers_impl.module import TransformersModule
            from weft.engine.runner.cpu.transformers_cpu import TransformersCpuExecutor

            assert isinstance(weights, TransformersModule)
            self._executor = TransformersCpuExecutor(spec, weights, self.kv, config)
        else:
            assert isinstance(weights, Weights)
            attention = make_host_attention(
                config.attention, config.attention_shape(spec), batch_invariant=config.batch_invariant,
                native=spec.packed is not None,
            )  # fmt: skip
            self._executor = CpuExecutor(
                spec, weights, self.kv, attention, states=config.states, invariant=config.batch_invariant,
                collectives=collectives, image_rows=image_rows, dtype=config.compute_dtype, adapts=config.adapters,
            )  # fmt: skip
        self._drafter: CpuDrafter | None = None
        if draft is not None:
            self._drafter = make_drafter(config, draft, self._executor, self.kv)
            self._executor.tap(self._drafter.taps)
        self._last_token = torch.zeros(config.max_num_seqs, dtype=torch.int64, device=config.device)
        self._sampling = Sampling(config.device, config.max_num_seqs, spec.vocabulary, collectives)
        self._num_threads = config.cpu_threads
        self._packed = config.packed
        self._last_end = 0.0
        self._queue: queue.SimpleQueue[CpuInFlight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="weft-runner", daemon=True)
        self._thread.start()
        # A thread inside torch during interpreter shutdown aborts the process, so it must end first.
        weakref.finalize(self, _finish, self._queue, self._thread)

    @property
    def num_pages(self) -> int:
        return self.kv.shape[0]

    @property
    def adapters(self) -> MutableMapping[int, Adapter] | None:
        return self._executor.adapters if isinstance(self._executor, CpuExecutor) else None

    def stage_adapter(self, adapter: Adapter, *_: object) -> Adapter:
        return adapter

    def copy_engine(self, slots: int) -> CpuCopyEngine:
        return CpuCopyEngine(self.kv, slots, self._packed)

    def launch(self, batch: Batch) -> CpuInFlight:
        in_flight = CpuInFlight(batch)
        self._queue.put(in_flight)
        return in_flight

    def close(self) -> None:
        """Finish all launched iterations and end the thread."""
        _finish(self._queue, self._thread)

    def _work(self) -> None:
        # The thread count applies to the calling thread. This must be the only OpenMP team: with several, threads sleep
        # between operations, and waking them costs as much as a small operation.
        torch.set_num_threads(self._num_threads)
        while (in_flight := self._queue.get()) is not None:
            try:
                with torch.inference_mode():
                    in_flight._resolve(self.run(in_flight.batch))
            except BaseException as error:
                in_flight._resolve(None, error)

    def run(self, batch: Batch) -> StepResult:
        """Run one iteration to its end. Raises errors of torch, after which the engine cannot continue."""
        begin = time.perf_counter()
        idle_seconds = begin - self._last_end if self._last_end else 0.0
        token_ids = torch.from_numpy(batch.token_ids.astype(np.int64))
        # Decodes read the token of an earlier iteration, unless the host knows it.
        unknown = np.flatnonzero(batch.token_ids[: batch.decode_tokens] == -1)
        slots = (np.repeat(batch.slots, batch.query_len) if batch.drafted else batch.slots)[unknown]
        token_ids[torch.from_numpy(unknown)] = self._last_token[torch.from_numpy(slots.astype(np.int64))]
        if self._drafter is not None and (batch.token_ids == UNDRAFTED).any():
            self._drafter.draft(batch, token_ids)
            batch = batch._replace(token_ids=token_ids.numpy().astype(np.int32))
        x, sumsq = self._executor.forward(self._executor.inputs(batch, token_ids))
        prompt_scores = [self._prompt_scores(x, sumsq, prompt) for prompt in batch.prompt_logprobs]
        states = pooled(
            batch, lambda rows: self._executor.hidden(x, sumsq, self._sampling.to_device(rows.astype(np.int64)))
        )
        tokens, nonfinite, scores, last = self._sample(x, sumsq, batch)
        if self._drafter is not None:
            self._drafter.follow(batch, token_ids, self._executor.tapped, last)
        self._last_end = time.perf_counter()
        return StepResult(
            batch, tokens.numpy().astype(np.int32), None if scores is None else scores.read(),
            tuple(s.read() for s in prompt_scores), self._last_end - begin, idle_seconds,
            nonfinite=nonfinite.numpy(), pooled=None if states is None else states.numpy(),
        )  # fmt: skip

    def _sample(self, x: Tensor, sumsq: Tensor, batch: Batch) -> tuple[Tensor, Tensor, Scores | None, I32]:
        """Return tokens `[S]` int64, rows that are not finite `[S]` bool, requested log-probabilities, and the last
        token `[R]` of each request that counts."""
        s, up = batch.sampling, self._sampling.to_device
        logits = self._executor.logits(x, sumsq, up(s.logit_tokens.astype(np.int64)))
        raw = self._sampling.raw_logits(logits, s)
        self._sampling.adjust(logits, batch)
        tokens, nonfinite = self._sampling.draw(logits, s)
        last = (np.cumsum(batch.query_len) - 1).astype(np.int32)
        if (verified := batch.verified) is None:
            self._last_token[up(s.slots.astype(np.int64))] = tokens
            self._sampling.count(tokens, s)
        else:
            verified = Verified(up(verified.first), up(verified.expected))
            ends = verified.ends(tokens, nonfinite)
            reached = verified.reached(ends)
            newest = reached & ends
            self._last_token[up(s.slots.astype(np.int64))[newest]] = tokens[newest]
            self._sampling.count(tokens, s, reached)
            ended = newest.numpy()
            last[batch.sampled_rows[ended]] = s.logit_tokens[ended]
        return tokens, nonfinite, self._sampling.scores(tokens, s, raw), last

    def _prompt_scores(self, x: Tensor, sumsq: Tensor, prompt: PromptLogprobs) -> Scores:
        return self._sampling.prompt_scores(prompt, prompt.token_rows, partial(self._executor.logits, x, sumsq))
