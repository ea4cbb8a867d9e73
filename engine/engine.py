"""`Engine`: a plain synchronous object: `add`, `abort`, `step() -> Outputs`. Tokens in, tokens out.

The engine process, the offline `LLM` and the benchmarks all drive this one.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, RequestError
from weft.engine.memory.index_events import IndexEvents
from weft.engine.memory.page_ledger import PageLedger
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.tier_setup import make_tiers, open_store
from weft.engine.model.weights import Weights
from weft.engine.progress import Phases, Progress
from weft.engine.ranks.group import Ranks
from weft.engine.ranks.loading import Loading
from weft.engine.runner.batch import Batch
from weft.engine.runner.budget import memory_budget
from weft.engine.runner.compile_job import CompileJob
from weft.engine.runner.energy_meter import EnergyMeter, energy_counter
from weft.engine.runner.iteration_totals import IterationTotals
from weft.engine.runner.runner import InFlight
from weft.engine.runner.work import Work
from weft.engine.scheduling.arrivals import Arrivals
from weft.engine.scheduling.chunk_keeper import ChunkKeeper
from weft.engine.scheduling.energy_ledger import EnergyLedger
from weft.engine.scheduling.fairness import Fairness
from weft.engine.scheduling.grammars import Grammars
from weft.engine.scheduling.late_launch import LateLaunch
from weft.engine.scheduling.outbox import Outbox
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slot_limit_keeper import SlotLimitKeeper
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.kv_events import make_publisher
from weft.engine.wire.log_sink import dropped_lines
from weft.engine.wire.messages import (
    AddRequest,
    EngineReady,
    EngineStats,
    Finish,
    Outputs,
    PageChanges,
    PlanStats,
)
from weft.engine.wire.shelf import Shelf

TIER_WAIT_SECONDS = 0.005
"""while nothing can be computed: how long to wait for a load before looking for messages again"""
LOAD_POLL_SECONDS = 0.002
"""while pages are fetched for a request that is on its way"""
REST_SECONDS = 1.0
"""between messages of an engine that has nothing to do"""
NONFINITE_LINE_SECONDS = 60.0
"""between lines in the log that say that logits were not finite"""


class Engine:
    """Loads the model and serves requests one iteration at a time.

    compiling: a job begun earlier, ranks: started earlier; else both are begun here if need be. shelf: of the weights
    that it shares with other engines. Raises `WeftError` from the constructor when the model or the options cannot
    work, each with one clear line.
    """

    def __init__(
        self,
        config: EngineConfig,
        progress: Progress | None = None,
        compiling: CompileJob | None = None,
        ranks: Ranks | None = None,
        shelf: Shelf | None = None,
    ) -> None:
        self.ranks = ranks or Ranks.begin(config)
        """the others of tensor parallelism"""
        try:
            self._start(self.ranks.config if self.ranks is not None else config, progress, compiling, shelf)
        except BaseException:
            if self.ranks is not None:
                self.ranks.stop(0.0)
            raise

    def _start(
        self, config: EngineConfig, progress: Progress | None, compiling: CompileJob | None, shelf: Shelf | None
    ) -> None:
        begin = time.perf_counter()
        self.config = config
        loading = Loading(config, self.ranks, compiling)
        self.spec, own, resolved = loading.spec, loading.own, loading.resolved
        # The vocabulary is read while the model loads.
        self.grammars = Grammars(config.tokenizer_path, self.spec.vocab_size, self.spec.eos_token_ids)
        phases = Phases(progress if self.ranks is None else self.ranks.watched(progress))
        # a path or a port that is taken is known before the model loads
        store = open_store(config, resolved.kv, loading.model_id, own.shard_of, resolved.packed)
        publisher = make_publisher(config, config.share.engine)
        loaded = loading.run(phases, shelf, stores=store is not None)
        self.runner, weights = loaded.runner, loaded.weights
        self._broad = None if isinstance(weights, Weights) else weights
        num_pages = self.runner.num_pages
        # A request that can never fit is refused at the door: the context limit is what the pool can hold.
        longest = min(resolved.max_model_len, (num_pages - 1) * config.page_size)
        self.resolved = resolved = replace(resolved, num_pages=num_pages, max_model_len=longest)
        host_bytes = int(config.host_kv_gib * 2**30)
        self._memory = memory_budget(own, weights, resolved, host_bytes // own.shard_of.ranks)
        index = PrefixIndex(loading.model_id)
        self._events = IndexEvents(index, publisher, config.page_size) if publisher is not None else None
        pool = PagePool(num_pages, config.page_size, index, config.pinned_cache_share)
        self.tiers = make_tiers(
            config,
            resolved.kv,
            pool,
            store if loaded.stores else None,
            self.runner.copy_engine,
            loaded.make_store,
            own.shard_of.ranks,
            resolved.packed,
        )
        self.scheduler = self._scheduler_of(pool)
        self._work = self._work_of(weights.num_bytes)
        self.energy, self._why_unmetered = self._metered()
        self.scheduler.chunk_keeper = self._chunk_keeper()
        self._seat_keeper = SlotLimitKeeper.of(config, self.scheduler) if config.adaptive_limit else None
        self._arrivals = Arrivals(
            pool,
            max_model_len=longest,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
            seed=config.seed,
        )
        self._begin_iterating()
        phases.end()
        self.start_seconds = phases.seconds
        """of each phase of the start that reports progress"""
        self.load_seconds = time.perf_counter() - begin

    def _begin_iterating(self) -> None:
        """What is kept from one iteration to the next."""
        self._told_at_rest = 0.0
        self._depth = 1 if self.config.async_scheduling else 0
        self._in_flight: deque[InFlight] = deque()
        self._late = LateLaunch(self._work.costs) if self._launches_late() else None
        self._held = False
        """the launch to come waits for what `launch_at` said"""
        self.on_commit: Callable[[Batch, float], None] | None = None
        """called with each iteration that is done and not committed yet, and `time.monotonic()`"""
        if self._seat_keeper is not None:
            self.on_commit = self._seat_keeper.committed
        self.on_wait: Callable[[InFlight], None] | None = None
        """called before an iteration's end is waited for"""
        self._step = 0
        self._notices = Outbox(self.tiers, plan_moved=self.pause is not None)
        self._totals = IterationTotals()
        self._page_ledger: PageLedger | None = None
        self._warned_nonfinite = 0
        self._quiet_until = 0.0

    def _launches_late(self) -> bool:
        """By default where it was measured: not on CPUs or shared GPUs, whose iterations vary, nor on several."""
        config = self.config
        if config.late_launch is not None:
            return config.late_launch
        alone = config.share.sharers == 1 and config.tensor_parallel_size == 1
        return alone and config.async_scheduling and self.resolved.device.type == "cuda"

    def _scheduler_of(self, pool: PagePool) -> Scheduler:
        config, resolved = self.config, self.resolved
        return Scheduler(
            SlotTable(resolved.max_num_seqs, resolved.max_model_len, config.page_size, self.spec.kv_window),
            pool,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
            tiers=self.tiers,
            chunk_step=resolved.chunk_step(self.spec),
            fairness=Fairness(config.fair_prefill_share, preempt=config.priority_preemption),
        )

    def _work_of(self, weight_bytes: int) -> Work:
        kv = self.resolved.kv
        token_bytes = kv.page_bytes // (kv.page_size * self.spec.num_layers)
        own = self.spec.shard(0, self.config.tensor_parallel_size)  # of whose bytes these are
        return Work(own, weight_bytes, token_bytes, cuda=self.resolved.device.type == "cuda")

    def _chunk_keeper(self) -> ChunkKeeper | None:
        config, resolved = self.config, self.resolved
        if (objective := config.itl_objective) is None:
            return None
        keeper = ChunkKeeper.of(
            objective, config.kept_percentiles, self._work.costs, self.scheduler.slots,
            most=resolved.max_num_batched_tokens, chunk_step=resolved.chunk_step(self.spec),
            patience=config.itl_slo_patience, share=config.fair_prefill_share,
        )  # fmt: skip
        if resolved.plan is not None:
            keeper.limit.cost.observe_plan(resolved.plan, self.spec.num_layers)
        print(f"weft: {keeper}", file=sys.stderr, flush=True)
        return keeper

    def _metered(self) -> tuple[EnergyLedger | None, str]:
        """Who charges requests for energy, or why nobody does."""
        if self.config.share.sharers > 1 or self.config.share.awake > 1:
            return None, "several engines work on this device: its counter does not tell whose work it was"
        ranks = self.config.tensor_parallel_size
        try:
            meter = EnergyMeter(energy_counter(self.resolved.device, ranks))
        except (OSError, ValueError, ImportError) as error:
            return None, str(error)
        return EnergyLedger(meter, self._work, self.scheduler.slots), ""

    def check(self) -> None:
        """Raises `RankLost` when another rank has ended: then this engine has, too."""
        if self.ranks is not None:
            self.ranks.check()

    def describe(self) -> EngineReady:
        resolved = self.resolved
        return EngineReady(
            model_type=self.spec.architecture,
            num_parameters=self.spec.num_parameters,
            dtype=str(resolved.compute_dtype).removeprefix("torch."),
            device=str(resolved.device),
            vocab_size=self.spec.vocab_size,
            max_model_len=resolved.max_model_len,
            page_size=self.config.page_size,
            num_pages=self.runner.num_pages,
            max_num_seqs=resolved.max_num_seqs,
            seats=self.scheduler.slots.limit,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            eos_token_ids=self.spec.eos_token_ids,
            load_seconds=self.load_seconds,
            hidden_size=self.spec.hidden_size,
            memory=self._memory,
            energy_source=self.energy.source if self.energy is not None else "",
            energy_missing=self._why_unmetered,
            plan=self._plan(),
            threads=resolved.cpu_threads if resolved.device.type == "cpu" else 0,
            model_id=self.scheduler.pool.index.model_id,
            prefetches=self.tiers is not None,
        )

    def pages(self) -> bytes:
        """Brief keys of the pages in the prefix index; from now on `stats` tells what comes and goes."""
        if self._page_ledger is None:
            self._page_ledger = PageLedger(self.scheduler.pool.index)
        return self._page_ledger.all()

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises `RequestError` when it can never be served."""
        params = message.params
        if params.pooling is not None and self._broad is not None and not self._broad.shows_states:
            raise RequestError(f"the code of {self.spec.architecture} does not show its hidden states", "input")
        request = self._arrivals.request(message)
        if params.grammar is None and not params.bad_words:
            self.scheduler.add(request)
        else:
            self.grammars.begin(request)

    def add_or_refuse(self, message: AddRequest) -> None:
        """As `add`, but a refusal becomes the request's terminal event."""
        if self.runner.resting is not None and self.runner.resting.asleep:
            self._notices.refuse(message.handle, "the model sleeps", Finish.BUSY)
            return
        try:
            self.add(message)
        except RequestError as error:
            self._notices.refuse(message.handle, str(error), Finish.REFUSED)

    def abort(self, handle: int) -> None:
        """End a request early. Idempotent; unknown handles are ignored."""
        if (request := self.grammars.take(handle)) is not None:
            self.scheduler.add(request)
        self.scheduler.abort(handle)

    def prefetch(self, names: tuple[bytes, ...]) -> None:
        """The next turn of a conversation is on its way: load its pages from the tiers, as far as there is room."""
        if self.runner.resting is None or not self.runner.resting.asleep:
            self.scheduler.prefetch(names)

    def doze(self) -> int:
        """Give the memory of weights and KV pages back. Returns its bytes. No request may be open.

        Pages that a lower tier has stay there; the others are forgotten. Raises `WeftError` or `OSError` where it
        cannot; then all is as it was, but for the pages.
        """
        assert not self.has_work
        resting = self.runner.resting
        if resting is None:
            raise ConfigError("its engine was not made to" if self.ranks is None else "ranks share it")
        if resting.asleep:
            return resting.num_bytes
        self.drain_in_flight()
        if self.pause is not None:
            raise ConfigError("its plan is still being prepared")
        pool = self.scheduler.pool
        pool.evict_all()
        if pool.num_held:
            raise ConfigError(f"{pool.num_held} of its pages are in use")
        resting.doze()
        if self.energy is not None and self.config.share.models > 1:
            self.energy.leave()
        return resting.num_bytes

    def rise(self) -> int:
        """Take the memory again, as it was before `doze`. Returns its bytes. Raises `WeftError` or `OSError`, after
        which only the process's end helps."""
        resting = self.runner.resting
        if resting is None:
            raise ConfigError("its engine was not made to")
        resting.rise()
        if self.energy is not None:
            self.energy.come_back()
        return resting.num_bytes

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_cache()

    @property
    def has_work(self) -> bool:
        """Requests are open, results are in flight, or events wait to be told."""
        s = self.scheduler
        waiting = s.num_requests or self.grammars.num_compiling
        return bool(waiting or self._in_flight or s.has_events() or self._notices.has_refusals)

    def step(self) -> Outputs | None:
        """Schedule and launch the next iteration, then commit the one before it. None when there is nothing to tell."""
        if (preparation := self.runner.preparation) is not None and preparation.advance(busy=self.has_work):
            self._notices.plan_moved = True
        outputs = self._iterate()
        if self._events is not None:
            self._events.flush()
        return outputs

    def _iterate(self) -> Outputs | None:
        begin = time.perf_counter()
        for request, refusal, how in self.grammars.compiled():
            if refusal is None:
                self.scheduler.add(request)
            else:
                self._notices.refuse(request.handle, refusal, how)
        batch = self.scheduler.schedule(self._step + 1)
        if batch is not None:
            self._step += 1
            if self._totals.launched(self._step) and self.energy is not None:
                self.energy.working(time.monotonic(), True)
            self._in_flight.append(self.runner.launch(batch))
        busy = time.perf_counter() - begin
        if self._late is not None and batch is not None:
            self._late.launched(batch, busy, late=self._held)
        if not self._in_flight or (batch is not None and len(self._in_flight) <= self._depth):
            due = self._notices.due()
            if due or self.scheduler.has_events():
                return self._notices.outputs(self.scheduler.idle_events(), self.stats(), {})
            if batch is None and not self.grammars.wait(TIER_WAIT_SECONDS) and self.tiers is not None:
                self.tiers.wait(TIER_WAIT_SECONDS)
            return None
        in_flight = self._in_flight.popleft()
        if self.on_wait is not None:
            self.on_wait(in_flight)
        result = in_flight.wait()
        begin = time.perf_counter()
        if self._late is not None:
            self._late.ended(result, time.monotonic())
        joules = self.energy.charge(result.batch, result.seconds) if self.energy is not None else {}
        if self.on_commit is not None:
            self.on_commit(result.batch, time.monotonic())
        if self.scheduler.chunk_keeper is not None:
            self.scheduler.chunk_keeper.committed(result, self._totals.is_first(result.batch.step))
        events = self.scheduler.commit(result)
        self._warn_of_nonfinite(begin)
        if self.tiers is not None:
            self.tiers.begin_stores()  # while the iteration just launched computes
        more = self.scheduler.num_requests > 0 or bool(self._in_flight)
        if self.energy is not None and not more:
            self.energy.working(time.monotonic(), False)
        self._totals.committed(result, busy + time.perf_counter() - begin, busy=more)
        return self._notices.outputs(events, self.stats(), joules)

    def launch_at(self) -> float:
        """`time.monotonic()` before which `step` need not be called, whoever comes meanwhile; 0: at once.

        Where there is no room for anybody else nothing is gained by waiting. Whoever asks waits: the next launch counts
        as one that was late on purpose.
        """
        self._held = False
        if self._late is None or len(self._in_flight) != self._depth or not self.scheduler.has_room:
            return 0.0
        at = self._late.at(self._in_flight[0].batch)
        self._held = at > time.monotonic()
        return at if self._held else 0.0

    @property
    def pause(self) -> float | None:
        """Seconds without work after which `step` still wants to be called; None: any number."""
        preparation = self.runner.preparation
        pause = None if preparation is None else preparation.pause
        loads = self.tiers is not None and self.tiers.num_loading > 0
        return min(pause or LOAD_POLL_SECONDS, LOAD_POLL_SECONDS) if loads else pause

    def rest(self) -> Outputs | None:
        """While there is no work: once a second what was drawn, if that is counted."""
        self._totals.busy = False
        if self._seat_keeper is not None:
            self._seat_keeper.rest(time.monotonic())
        now = time.monotonic()
        if self.energy is None or now - self._told_at_rest < REST_SECONDS:
            return None
        self._told_at_rest = now
        self.energy.working(now, False)
        self.energy.settle()
        return Outputs(stats=self.stats())

    def _warn_of_nonfinite(self, now: float) -> None:
        """One line in the log for all of a minute's requests that ended so."""
        total = self.scheduler.nonfinite_logits
        if total == self._warned_nonfinite or now < self._quiet_until:
            return
        print(
            f"weft: {total - self._warned_nonfinite} request(s) ended with 500 nonfinite_logits ({total} so far): "
            "the model computes NaN or inf; check the checkpoint, --dtype float16, and the device's memory",
            file=sys.stderr,
            flush=True,
        )
        self._warned_nonfinite, self._quiet_until = total, now + NONFINITE_LINE_SECONDS

    def stats(self) -> EngineStats:
        """The scheduler's state and the last committed iteration's figures."""
        totals = self._totals
        return EngineStats(
            scheduler=self.scheduler.stats(compiling=self.grammars.num_compiling),
            iteration=totals.last,
            load_seconds=self.tiers.take_load_seconds() if self.tiers is not None else [],
            iterations=totals.iterations,
            iterations_pipelined=totals.pipelined,
            iterations_idle_seconds=totals.idle_seconds,
            log_lines_dropped=dropped_lines(),
            energy=self.energy.stats() if self.energy is not None else None,
            plan=self._plan(),
            pages=self._page_ledger.take() if self._page_ledger is not None else PageChanges(),
        )

    def _plan(self) -> PlanStats:
        preparation = self.runner.preparation
        return preparation.stats if preparation is not None else PlanStats()

    def drain_in_flight(self) -> None:
        """Commit what is still in flight although nobody waits for it, so that its fences pass; end all transfers."""
        while self._in_flight:
            self.scheduler.commit(self._in_flight.popleft().wait())
        if self.tiers is not None:
            self.tiers.drain()

    def close(self) -> None:
        """End the runner and the tiers; what only the host holds is written to the SSD, as far as time allows."""
        if self.tiers is not None:
            self.drain_in_flight()
            self.tiers.close()
        if self._events is not None:
            self._events.close()
        self.grammars.close()
        if self.energy is not None:
            self.energy.close()
        self.runner.close()
        if self.ranks is not None:
            self.ranks.stop()
