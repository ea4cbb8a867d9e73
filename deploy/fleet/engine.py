"""`SimulatedEngine`: the engine's loop, scheduler, pool and prefix index, on a runner and a clock that are simulated.

A profile determines iteration times. Requests that arrive while an iteration is awaited join the next launch.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.deploy.fleet.clock import Clock, Processor
from weft.deploy.fleet.profile import Features, IterationProfile
from weft.engine.config import Objective, kept_percentiles
from weft.engine.errors import RequestError
from weft.engine.memory.index_events import PageLedger
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.scheduling.chunk_keeper import ChunkKeeper
from weft.engine.scheduling.fairness import Fairness
from weft.engine.scheduling.listeners import Listener, Listeners
from weft.engine.scheduling.loop import Loop
from weft.engine.scheduling.request import Request, check_request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slot_limit import SlotLimitControl
from weft.engine.scheduling.slot_limit_keeper import Pace, SlotLimitKeeper
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import EngineReady, EngineStats, Finish, SchedulerStats
from weft.engine.wire.sampling import SamplingParams

MODEL_ID = "simulated"
ANSWER, END = 1, 2  # The token of every answer, and the token that ends it.
VOCABULARY = 2**30


class EngineOptions(NamedTuple):
    """The options of each engine."""

    page_size: int
    num_pages: int
    max_num_seqs: int  # The maximum, if the slot limit adapts.
    max_num_batched_tokens: int
    max_model_len: int
    prefix_caching: bool = True
    fair_prefill_share: float = 0.25
    depth: int = 1  # Iterations launched ahead.
    itl_slo: Objective | None = None  # The objective that chunks next to decodes must keep.
    itl_slo_patience: float = 5.0
    keeps: tuple[Objective, ...] = ()
    """The objectives that the slot limit adapts to; if empty, the limit is fixed."""
    state_pages: int = 0  # Pages of a request's recurrent states.
    chunk_step: int = 1  # Tokens at whose multiples prompts are cut.

    @property
    def seqs(self) -> str:
        """The value of `--max-num-seqs`."""
        return f"auto:{self.max_num_seqs}" if self.keeps else str(self.max_num_seqs)


class SimulatedRequest(NamedTuple):
    """A sequence as it is sent to an engine."""

    handle: int
    prompt: npt.NDArray[np.int32]
    output_tokens: int
    known: bool
    """The request sets the length of its answer; otherwise the answer ends with an end token."""
    key: int = 0
    salt: str = ""


class SimulatedOutputs(NamedTuple):
    """What an engine sends after an iteration: columns over its rows, as in `messages.Outputs`."""

    handles: list[int]
    tokens: list[int]
    finish: list[int]
    started: dict[int, int]  # Cached tokens by handle, of requests that got their first token.
    stats: EngineStats


class _Iteration:
    def __init__(self, batch: Batch, seconds: float) -> None:
        self.batch = batch
        self.seconds = seconds
        self.done = False


class _Device:
    """The runner of one engine: computes iterations in order on a shared processor."""

    def __init__(self, clock: Clock, processor: Processor, profile: IterationProfile) -> None:
        self.busy_seconds = 0.0
        self.joules = 0.0
        self.computed_tokens = 0
        self.on_end: Callable[[_Iteration], None] = lambda _: None
        self._clock, self._processor, self._profile = clock, processor, profile
        self._queue: deque[_Iteration] = deque()

    def half_host_seconds(self, batch: Batch) -> float:
        """The host's time before the launch of an iteration; its commit takes as long."""
        return (self._profile.host_ms + self._profile.host_request_ms * batch.num_requests) / 1e3 / 2

    def launch(self, batch: Batch) -> _Iteration:
        features = Features.of(batch)
        iteration = _Iteration(batch, self._profile.seconds(features))
        self.joules += self._profile.joules(features)
        self._clock.after(self.half_host_seconds(batch), lambda: self._enqueue(iteration))
        return iteration

    def _enqueue(self, iteration: _Iteration) -> None:
        self._queue.append(iteration)
        if len(self._queue) == 1:
            self.begin()

    def begin(self) -> None:
        """Start the first iteration of the queue, if there is one."""
        if not self._queue:
            return
        batch, seconds = self._queue[0].batch, self._queue[0].seconds
        self.busy_seconds += seconds
        self.computed_tokens += batch.num_tokens
        prompt = batch.num_requests > batch.num_decodes
        self._processor.start(seconds + self._profile.gap_ms / 1e3, self._end, prompt=prompt, spreads=True)

    def _end(self) -> None:
        iteration = self._queue.popleft()
        iteration.done = True
        self.on_end(iteration)


class SimulatedEngine:
    """One engine of a fleet. It calls `on_outputs` when its process would send a message."""

    def __init__(
        self, clock: Clock, processor: Processor, profile: IterationProfile, options: EngineOptions,
        on_outputs: Callable[[SimulatedOutputs], None],
    ) -> None:  # fmt: skip
        self.options = options
        self._clock = clock
        self._on_outputs = on_outputs
        pool = PagePool(options.num_pages, options.page_size, PrefixIndex(MODEL_ID))
        self.scheduler = Scheduler(
            SlotTable(options.max_num_seqs, options.max_model_len, options.page_size, state_pages=options.state_pages),
            pool,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefix_caching=options.prefix_caching,
            chunk_step=options.chunk_step,
            fairness=Fairness(options.fair_prefill_share),
        )
        self.listeners = Listeners(self._features(profile))
        self.device = _Device(clock, processor, profile)
        self.device.on_end = self._ended_on_device
        self.loop = Loop(self.scheduler, self.device, self.listeners, depth=options.depth, clock=lambda: clock.now)
        self._ledger = PageLedger(pool.index)
        self._inbox: list[SimulatedRequest] = []
        self._refused: list[int] = []
        self._open: dict[int, SimulatedRequest] = {}
        self._idle = True
        self._awaited: _Iteration | None = None
        self._ended = False
        self._arrivals = 0

    def _features(self, profile: IterationProfile) -> Iterator[Listener]:
        options, clock, slots = self.options, self._clock, self.scheduler.slots
        if options.keeps:
            pace = Pace(options.keeps, slots, clock.now)
            yield SlotLimitKeeper(self.scheduler, pace, SlotLimitControl(options.max_num_seqs))
        if options.itl_slo is not None:
            self.scheduler.chunk_keeper = ChunkKeeper.of(
                options.itl_slo, kept_percentiles(options.keeps), profile.costs, slots,
                most=options.max_num_batched_tokens, chunk_step=options.chunk_step, patience=options.itl_slo_patience,
                share=options.fair_prefill_share, clock=lambda: clock.now,
            )  # fmt: skip
            yield self.scheduler.chunk_keeper

    def ready(self) -> EngineReady:
        o = self.options
        return EngineReady(
            model_type="", num_parameters=0, dtype="", device="", vocab_size=VOCABULARY,
            max_model_len=o.max_model_len, page_size=o.page_size, num_pages=o.num_pages, max_num_seqs=o.max_num_seqs,
            max_num_batched_tokens=o.max_num_batched_tokens, eos_token_ids=(END,), load_seconds=0.0, model_id=MODEL_ID,
            recurrent=o.state_pages > 0,
        )  # fmt: skip

    def send(self, request: SimulatedRequest) -> None:
        """Deliver a message to the engine's process."""
        self._inbox.append(request)
        if self._idle:
            self._idle = False
            self._clock.after(0.0, self._step)

    def kill(self) -> None:
        """End the process: it sends nothing more."""
        self._ended = True

    def _step(self) -> None:
        if self._ended:
            return
        inbox, self._inbox = self._inbox, []
        for request in inbox:
            self._add(request)
        batch = self.loop.launch()
        due = self.loop.due(batch)
        if self._refused:
            self._report([], [], [], {})
        if batch is None:
            if due is not None:
                self._wait(due)
                return
            self._idle = True
            for on_idle in self.listeners.on_idle:
                on_idle(self._clock.now)
            return
        after = self.device.half_host_seconds(batch)
        self._clock.after(after, self._step if due is None else lambda: self._wait(due))

    def _add(self, sent: SimulatedRequest) -> None:
        params = SamplingParams(
            max_tokens=sent.output_tokens if sent.known else None, ignore_eos=sent.known, temperature=0.0
        )
        pool = self.scheduler.pool
        try:
            limit = check_request(
                sent.prompt, params, max_model_len=self.options.max_model_len, vocab_size=VOCABULARY,
                max_tokens_in_pool=pool.capacity * pool.page_size,
            )  # fmt: skip
        except RequestError:
            self._refused.append(sent.handle)
            return
        self._arrivals += 1
        self._open[sent.handle] = sent
        self.scheduler.add(
            Request(
                handle=sent.handle, token_ids=sent.prompt, prompt_len=len(sent.prompt), params=params,
                max_total_tokens=limit, priority=0, order=self._arrivals, arrival=self._clock.now, salt=sent.salt,
                stop_ids=() if sent.known else (END,), seed=0, tenant=sent.key,
            )
        )  # fmt: skip

    def _wait(self, iteration: _Iteration) -> None:
        if iteration.done:
            self._commit(iteration)
        else:
            self._awaited = iteration

    def _ended_on_device(self, iteration: _Iteration) -> None:
        if self._ended:
            return
        self.device.begin()
        if iteration is self._awaited:
            self._awaited = None
            self._commit(iteration)

    def _commit(self, iteration: _Iteration) -> None:
        if self._ended:
            return
        batch = iteration.batch
        events = self.loop.commit(StepResult(batch, self._tokens(batch), None, (), iteration.seconds))
        handles, finish = events.handles.tolist(), events.finish.tolist()
        for handle, end in zip(handles, finish, strict=True):
            if end:
                del self._open[handle]
        started = {s.handle: s.cached_tokens for s in events.started}

        def report() -> None:
            if not self._ended:
                self._report(handles, events.tokens.tolist(), finish, started)
                self._step()

        self._clock.after(self.device.half_host_seconds(batch), report)

    def _tokens(self, batch: Batch) -> npt.NDArray[np.int32]:
        """Return the sampled token of each row: answers of unknown length end with `END`."""
        s, slots = self.scheduler.slots, batch.sampling.slots
        tokens = np.full(len(slots), ANSWER, np.int32)
        for i in np.flatnonzero(~s.exact_output[slots]).tolist():
            slot = slots[i]
            sent = self._open.get(int(s.handle[slot]))
            if sent is not None and s.known[slot] - s.prompt_len[slot] + 1 >= sent.output_tokens:
                tokens[i] = END
        return tokens

    def _report(self, handles: list[int], tokens: list[int], finish: list[int], started: dict[int, int]) -> None:
        refused, self._refused = self._refused, []
        n = len(refused)
        # The only statistics that front and router read.
        stats = EngineStats(scheduler=SchedulerStats(waiting=self.scheduler.num_waiting), pages=self._ledger.take())
        self._on_outputs(
            SimulatedOutputs(handles + refused, tokens + [-1] * n, finish + [Finish.REFUSED] * n, started, stats)
        )
