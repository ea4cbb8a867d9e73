"""`CpuRunner`: runs iterations on the torch twins, in order, on a thread of its own.

`launch` returns at once. On the CPU the worker thread plays the part of the GPU's stream, so that scheduling really
overlaps with computing; torch releases the interpreter lock inside its kernels.
"""

from __future__ import annotations

import queue
import threading
import time
import weakref

import numpy as np
import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.memory.cpu_transfer import CpuCopyEngine
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights
from weft.engine.runner.batch import PROMPT_LOGPROB_ROWS, Batch, Logprobs, PromptLogprobs, SamplingInputs, StepResult
from weft.engine.runner.cpu_executor import CpuExecutor, CpuInputs
from weft.engine.runner.resolve import GIB, ResolvedConfig
from weft.kernels import sampling
from weft.kernels.attention_backends import make_host_attention


def _allocate(config: ResolvedConfig) -> Tensor:
    """The pool, zeroed. Raises `OutOfMemory`."""
    assert config.num_pages is not None
    size = config.num_pages * config.kv.page_bytes
    try:
        # Pages of zeros that the system maps on first touch: starting costs nothing, idle memory is not taken.
        return config.kv.view(torch.from_numpy(np.zeros(size, np.uint8)))
    except (MemoryError, ValueError):  # ValueError: more than an address can say
        raise OutOfMemory(f"{size / GIB:.1f} GiB of KV pages do not fit: lower --kv-cache-gib or --num-pages") from None


def _finish(jobs: queue.SimpleQueue[CpuInFlight | None], thread: threading.Thread) -> None:
    jobs.put(None)
    thread.join()


class CpuInFlight:
    """An iteration on the worker thread."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self._done = threading.Event()
        self._result: StepResult | None = None
        self._error: BaseException | None = None

    def _resolve(self, result: StepResult | None, error: BaseException | None = None) -> None:
        self._result, self._error = result, error
        self._done.set()

    def wait(self) -> StepResult:
        self._done.wait()
        if self._error is not None:
            raise self._error
        assert self._result is not None
        return self._result


class _Counts:
    """Resident token counts of requests with penalties, one row a slot. Made when the first such request comes."""

    def __init__(self, num_slots: int, vocab_size: int, device: torch.device) -> None:
        self.prompt_seen = torch.zeros(num_slots, vocab_size, dtype=torch.bool, device=device)
        self.output = torch.zeros(num_slots, vocab_size, dtype=torch.int32, device=device)


class CpuRunner:
    """The runner of a CPU (see `runner.Runner`)."""

    def __init__(self, spec: ModelSpec, weights: Weights, config: ResolvedConfig) -> None:
        self.kv = _allocate(config)
        self._attention = make_host_attention(config.attention, config.attention_shape(spec))
        self._executor = CpuExecutor(spec, weights, self.kv, self._attention)
        self._num_slots = config.max_num_seqs
        self._device = config.device
        self._last_token = torch.zeros(self._num_slots, dtype=torch.int64, device=self._device)
        self._counts: _Counts | None = None
        self._num_threads = config.cpu_threads
        self._last_end = 0.0
        self._queue: queue.SimpleQueue[CpuInFlight | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="weft-runner", daemon=True)
        self._thread.start()
        # A thread inside torch while the interpreter shuts down aborts the process: let it finish first.
        weakref.finalize(self, _finish, self._queue, self._thread)

    @property
    def num_pages(self) -> int:
        return self.kv.shape[0]

    def copy_engine(self, slots: int) -> CpuCopyEngine:
        return CpuCopyEngine(self.kv, slots)

    def launch(self, batch: Batch) -> CpuInFlight:
        in_flight = CpuInFlight(batch)
        self._queue.put(in_flight)
        return in_flight

    def close(self) -> None:
        """Finish what was launched and end the thread."""
        _finish(self._queue, self._thread)

    def _work(self) -> None:
        # The thread count belongs to the calling thread. This must be the only team: OpenMP lets the threads of several
        # teams sleep between operations, and waking them costs as much as a small operation.
        torch.set_num_threads(self._num_threads)
        while (in_flight := self._queue.get()) is not None:
            try:
                with torch.inference_mode():
                    in_flight._resolve(self.run(in_flight.batch))
            except BaseException as error:
                in_flight._resolve(None, error)

    def run(self, batch: Batch) -> StepResult:
        """One iteration, start to end. Raises whatever torch raises; the engine cannot go on after that."""
        begin = time.perf_counter()
        idle_seconds = begin - self._last_end if self._last_end else 0.0
        token_ids = torch.from_numpy(batch.token_ids.astype(np.int64))
        # Decodes read the token that an earlier iteration left on the device.
        d = batch.num_decodes
        token_ids[:d] = self._last_token[torch.from_numpy(batch.slots[:d].astype(np.int64))]
        inputs = CpuInputs(
            token_ids,
            torch.from_numpy(batch.positions.astype(np.int64)),
            torch.from_numpy(batch.slot_mapping),
            self._attention.prepare(batch),
        )
        x, sumsq = self._executor.forward(inputs)
        prompt_logprobs = tuple(self._prompt_logprobs(x, sumsq, asked) for asked in batch.prompt_logprobs)
        self._reset_counts(batch)
        tokens, logprobs = self._sample(x, sumsq, batch.sampling)
        self._last_end = time.perf_counter()
        return StepResult(batch, tokens, logprobs, prompt_logprobs, self._last_end - begin, idle_seconds)

    def _sample(self, x: Tensor, sumsq: Tensor, s: SamplingInputs) -> tuple[np.ndarray, Logprobs | None]:
        if not len(s.slots):
            return np.zeros(0, np.int32), None
        slots = torch.from_numpy(s.slots.astype(np.int64))
        raw = self._executor.logits(x, sumsq, torch.from_numpy(s.logit_tokens.astype(np.int64)))
        logits = raw
        if s.counted.any():
            logits = self._penalized(raw, s)
        if len(s.bias_rows):
            # Log-probabilities are the model's own: taken before anything is added to the logits.
            logits = raw.clone() if logits is raw else logits
            where = (torch.from_numpy(s.bias_rows.astype(np.int64)), torch.from_numpy(s.bias_ids.astype(np.int64)))
            logits.index_put_(where, torch.from_numpy(s.bias_values), accumulate=True)
        if len(s.mask_rows):
            logits = raw.clone() if logits is raw else logits
            sampling.allow_only(logits, torch.from_numpy(s.mask_rows.astype(np.int64)), torch.from_numpy(s.masks))
        if s.temperature.any():
            tokens = sampling.sample(
                logits,
                torch.from_numpy(s.temperature),
                torch.from_numpy(s.top_k),
                torch.from_numpy(s.top_p),
                torch.from_numpy(s.min_p),
                torch.from_numpy(s.uniform),
            )
        else:
            tokens = logits.argmax(-1)
        self._last_token[slots] = tokens
        if s.counted.any():
            counts = self._resident_counts()
            rows = torch.from_numpy(np.flatnonzero(s.counted))
            one = torch.ones((), dtype=torch.int32)
            counts.output.index_put_((slots[rows], tokens[rows]), one, accumulate=True)
        logprobs = None
        if (s.logprobs >= 0).any():
            rows = torch.from_numpy(np.flatnonzero(s.logprobs >= 0))
            logprobs = self._logprobs(raw[rows], tokens[rows], int(s.logprobs.max()), rows.numpy())
        return tokens.numpy().astype(np.int32), logprobs

    def _penalized(self, logits: Tensor, s: SamplingInputs) -> Tensor:
        counts = self._resident_counts()
        rows = torch.from_numpy(np.flatnonzero(s.counted))
        slots = torch.from_numpy(s.slots.astype(np.int64))[rows]
        out = logits.clone()
        out[rows] = sampling.apply_penalties(
            logits[rows],
            counts.prompt_seen[slots],
            counts.output[slots],
            torch.from_numpy(s.presence)[rows],
            torch.from_numpy(s.frequency)[rows],
            torch.from_numpy(s.repetition)[rows],
        )
        return out

    def _resident_counts(self) -> _Counts:
        if self._counts is None:
            self._counts = _Counts(self._num_slots, self._executor.spec.vocab_size, self._device)
        return self._counts

    def _reset_counts(self, batch: Batch) -> None:
        for reset in batch.count_resets:
            counts = self._resident_counts()
            counts.prompt_seen[reset.slot] = False
            counts.prompt_seen[reset.slot, torch.from_numpy(reset.prompt.astype(np.int64))] = True
            output = torch.from_numpy(reset.output.astype(np.int64))
            counts.output[reset.slot] = torch.bincount(output, minlength=self._executor.spec.vocab_size)

    def _prompt_logprobs(self, x: Tensor, sumsq: Tensor, asked: PromptLogprobs) -> Logprobs:
        parts = []
        for start in range(0, len(asked.tokens), PROMPT_LOGPROB_ROWS):
            rows = torch.from_numpy(asked.tokens[start : start + PROMPT_LOGPROB_ROWS].astype(np.int64))
            targets = torch.from_numpy(asked.targets[start : start + PROMPT_LOGPROB_ROWS].astype(np.int64))
            logits = self._executor.logits(x, sumsq, rows)
            parts.append(self._logprobs(logits, targets, asked.top, np.arange(start, start + len(rows))))
        return Logprobs(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    @staticmethod
    def _logprobs(logits: Tensor, tokens: Tensor, top: int, rows: np.ndarray) -> Logprobs:
        ranks, ids, values = sampling.logprobs_of(logits, tokens, top)
        return Logprobs(rows.astype(np.int32), ranks.numpy(), ids.numpy(), values.numpy())
