"""`SimulatedEngine`: the real scheduler, pool and prefix index; iterations take what a profile says.

It is the loop of `engine.process` around `Engine.step` in virtual time: one iteration is launched ahead; what comes
while the loop waits for an iteration joins the one after the next.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.deploy.fleet.clock import Clock, Processor
from weft.deploy.fleet.profile import Features, IterationProfile
from weft.engine.config import Objective, kept_percentiles
from weft.engine.errors import RequestError
from weft.engine.memory.page_ledger import PageLedger
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.scheduling.chunk_keeper import ChunkKeeper
from weft.engine.scheduling.fairness import Fairness
from weft.engine.scheduling.pace import Pace
from weft.engine.scheduling.request import Request, check_request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slot_limit import SlotLimitControl
from weft.engine.scheduling.slot_limit_keeper import SlotLimitKeeper
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import EngineReady, EngineStats, Finish, SchedulerStats
from weft.engine.wire.sampling import SamplingParams

MODEL_ID = "simulated"
ANSWER, END = 1, 2
"""tokens: of every answer, and the one that ends it"""
VOCABULARY = 2**30


class EngineOptions(NamedTuple):
    """Of each engine."""

    page_size: int
    num_pages: int
    max_num_seqs: int
    """the most, where the bound adapts"""
    max_num_batched_tokens: int
    max_model_len: int
    prefix_caching: bool = True
    fair_prefill_share: float = 0.25
    depth: int = 1
    """iterations launched ahead"""
    itl_slo: Objective | None = None
    """what prompts computed beside decodes must leave them"""
    itl_slo_patience: float = 5.0
    keeps: tuple[Objective, ...] = ()
    """what the bound on running requests adapts to; none: it is fixed"""

    @property
    def seqs(self) -> str:
        """As the flag has it."""
        return f"auto:{self.max_num_seqs}" if self.keeps else str(self.max_num_seqs)


class Asked(NamedTuple):
    """A sequence as an engine gets it."""

    handle: int
    prompt: npt.NDArray[np.int32]
    output_tokens: int
    known: bool
    """the request says how long its answer will be; else it ends with an end token"""


class Heard(NamedTuple):
    """What an engine says of an iteration: columns over its rows, as `messages.Outputs`."""

    handles: list[int]
    tokens: list[int]
    finish: list[int]
    started: dict[int, int]
    """cached tokens by handle, of those that got their first token"""
    stats: EngineStats


class _Iteration:
    def __init__(self, batch: Batch, seconds: float) -> None:
        self.batch = batch
        self.seconds = seconds
        self.done = False


class SimulatedEngine:
    """One of a fleet. `on_outputs` is called when its process would send a message.

    Attributes:
    busy_seconds, joules: of all iterations; joules beyond those at rest.
    """

    def __init__(
        self,
        clock: Clock,
        processor: Processor,
        profile: IterationProfile,
        options: EngineOptions,
        on_outputs: Callable[[Heard], None],
    ) -> None:
        self.options = options
        self._clock = clock
        self._processor = processor
        self._profile = profile
        self._on_outputs = on_outputs
        pool = PagePool(options.num_pages, options.page_size, PrefixIndex(MODEL_ID))
        self.scheduler = Scheduler(
            SlotTable(options.max_num_seqs, options.max_model_len, options.page_size),
            pool,
            max_num_batched_tokens=options.max_num_batched_tokens,
            prefix_caching=options.prefix_caching,
            fairness=Fairness(options.fair_prefill_share),
        )
        if options.itl_slo is not None:
            self.scheduler.chunk_keeper = ChunkKeeper.of(
                options.itl_slo, kept_percentiles(options.keeps), profile.costs, self.scheduler.slots,
                most=options.max_num_batched_tokens, chunk_step=1, patience=options.itl_slo_patience,
                share=options.fair_prefill_share, clock=lambda: clock.now,
            )  # fmt: skip
        self._seat_keeper: SlotLimitKeeper | None = None
        if options.keeps:
            pace = Pace(options.keeps, self.scheduler.slots, clock.now)
            self._seat_keeper = SlotLimitKeeper(self.scheduler, pace, SlotLimitControl(options.max_num_seqs))
        self._ledger = PageLedger(pool.index)
        self._inbox: list[Asked] = []
        self._refused: list[int] = []
        self._asked: dict[int, Asked] = {}
        self._launched: deque[_Iteration] = deque()
        """not committed"""
        self._queue: deque[_Iteration] = deque()
        """on the device"""
        self._asleep = True
        self._waits = False
        self._ended = False
        self._arrivals = 0
        self._steps = 0
        self.iterations = 0
        self.busy_seconds = 0.0
        self.joules = 0.0
        self.computed_tokens = 0

    def ready(self) -> EngineReady:
        o = self.options
        return EngineReady(
            model_type="", num_parameters=0, dtype="", device="", vocab_size=VOCABULARY,
            max_model_len=o.max_model_len, page_size=o.page_size, num_pages=o.num_pages, max_num_seqs=o.max_num_seqs,
            max_num_batched_tokens=o.max_num_batched_tokens, eos_token_ids=(END,), load_seconds=0.0, model_id=MODEL_ID,
        )  # fmt: skip

    def send(self, asked: Asked) -> None:
        """A message for its process."""
        self._inbox.append(asked)
        if self._asleep:
            self._asleep = False
            self._clock.after(0.0, self._step)

    def kill(self) -> None:
        """It says nothing more."""
        self._ended = True

    # -- the loop

    def _step(self) -> None:
        if self._ended:
            return
        inbox, self._inbox = self._inbox, []
        for asked in inbox:
            self._add(asked)
        batch = self.scheduler.schedule(self._steps + 1)
        if self._refused:
            self._tell([], [], [], {})
        if batch is None and not self._launched:
            self._asleep = True
            if self._seat_keeper is not None:
                self._seat_keeper.rest(self._clock.now)
            return
        if batch is None:
            self._wait()
            return
        self._steps += 1
        features = Features.of(batch)
        iteration = _Iteration(batch, self._profile.seconds(features))
        self.joules += self._profile.joules(features)
        self._launched.append(iteration)
        self._clock.after(self._host(batch) / 2, lambda: self._launch(iteration))
        if len(self._launched) <= self.options.depth:
            self._clock.after(self._host(batch) / 2, self._step)
        else:
            self._clock.after(self._host(batch) / 2, self._wait)

    def _host(self, batch: Batch) -> float:
        """Half of it before the launch, half at the commit."""
        return (self._profile.host_ms + self._profile.host_request_ms * batch.num_requests) / 1e3

    def _add(self, asked: Asked) -> None:
        params = SamplingParams(
            max_tokens=asked.output_tokens if asked.known else None, ignore_eos=asked.known, temperature=0.0
        )
        pool = self.scheduler.pool
        try:
            limit = check_request(
                asked.prompt,
                params,
                max_model_len=self.options.max_model_len,
                vocab_size=VOCABULARY,
                max_tokens_in_pool=pool.capacity * pool.page_size,
            )
        except RequestError:
            self._refused.append(asked.handle)
            return
        self._arrivals += 1
        self._asked[asked.handle] = asked
        self.scheduler.add(
            Request(
                handle=asked.handle,
                token_ids=asked.prompt,
                prompt_len=len(asked.prompt),
                params=params,
                max_total_tokens=limit,
                priority=0,
                order=self._arrivals,
                arrival=self._clock.now,
                salt="",
                stop_ids=() if asked.known else (END,),
                seed=0,
            )
        )

    def _wait(self) -> None:
        """For the oldest iteration."""
        if self._launched[0].done:
            self._commit()
        else:
            self._waits = True

    def _commit(self) -> None:
        if self._ended:
            return
        iteration = self._launched.popleft()
        result = StepResult(iteration.batch, self._tokens(iteration.batch), None, (), iteration.seconds)
        if self._seat_keeper is not None:
            self._seat_keeper.committed(iteration.batch, self._clock.now)
        if self.scheduler.chunk_keeper is not None:
            self.scheduler.chunk_keeper.committed(result, first=False)
        events = self.scheduler.commit(result)
        self.iterations += 1
        handles, finish = events.handles.tolist(), events.finish.tolist()
        for handle, end in zip(handles, finish, strict=True):
            if end:
                del self._asked[handle]
        started = {s.handle: s.cached_tokens for s in events.started}

        def tell() -> None:
            if not self._ended:
                self._tell(handles, events.tokens.tolist(), finish, started)
                self._step()

        self._clock.after(self._host(iteration.batch) / 2, tell)

    def _tokens(self, batch: Batch) -> npt.NDArray[np.int32]:
        """What the rows sample: answers end where they shall."""
        s, slots = self.scheduler.slots, batch.sampling.slots
        tokens = np.full(len(slots), ANSWER, np.int32)
        for i in np.flatnonzero(~s.exact_output[slots]).tolist():
            slot = slots[i]
            asked = self._asked.get(int(s.handle[slot]))
            if asked is not None and s.known[slot] - s.prompt_len[slot] + 1 >= asked.output_tokens:
                tokens[i] = END
        return tokens

    def _tell(self, handles: list[int], tokens: list[int], finish: list[int], started: dict[int, int]) -> None:
        refused, self._refused = self._refused, []
        n = len(refused)
        stats = EngineStats(
            scheduler=SchedulerStats(waiting=self.scheduler.num_waiting), pages=self._ledger.take()
        )  # what front and router read of it
        self._on_outputs(Heard(handles + refused, tokens + [-1] * n, finish + [Finish.REFUSED] * n, started, stats))

    # -- the device

    def _launch(self, iteration: _Iteration) -> None:
        self._queue.append(iteration)
        if len(self._queue) == 1:
            self._begin()

    def _begin(self) -> None:
        batch, seconds = self._queue[0].batch, self._queue[0].seconds
        self.busy_seconds += seconds
        self.computed_tokens += batch.num_tokens
        prompt = batch.num_requests > batch.num_decodes
        self._processor.start(seconds + self._profile.gap_ms / 1e3, self._end, prompt=prompt, spreads=True)

    def _end(self) -> None:
        self._queue.popleft().done = True
        if self._ended:
            return
        if self._queue:
            self._begin()
        if self._waits:
            self._waits = False
            self._commit()
