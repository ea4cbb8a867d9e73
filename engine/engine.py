"""`Engine`: serves requests synchronously with `add`, `abort` and `step() -> Outputs`. Tokens in, tokens out.

The engine process, the offline `LLM` and the benchmarks all drive it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path
from typing import TypeVar

from msgspec import structs

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, RequestError
from weft.engine.memory.index_events import IndexEvents, PageLedger
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.tier_setup import make_tiers, open_store, reopened
from weft.engine.model.adapter import Adapter, AdapterReader
from weft.engine.progress import Phases, Progress, notice
from weft.engine.ranks.group import OneRank, Ranks
from weft.engine.ranks.loading import Loading
from weft.engine.runner.device.compile_job import CompileJob
from weft.engine.runner.device.energy_meter import EnergyMeter, energy_counter
from weft.engine.runner.iteration.cost_shares import CostShares
from weft.engine.runner.options.budget import memory_budget
from weft.engine.scheduling import features
from weft.engine.scheduling.adapters import Adapters
from weft.engine.scheduling.chunk_keeper import ChunkKeeper
from weft.engine.scheduling.energy_ledger import EnergyLedger
from weft.engine.scheduling.events import Outbox
from weft.engine.scheduling.fairness import Fairness
from weft.engine.scheduling.grammars import Grammars
from weft.engine.scheduling.images import Images
from weft.engine.scheduling.late_launch import LateLaunch
from weft.engine.scheduling.listeners import Listener, Listeners
from weft.engine.scheduling.loop import Loop
from weft.engine.scheduling.model_drafter import ModelDrafter
from weft.engine.scheduling.request import Arrivals, Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slot_limit_keeper import SlotLimitKeeper
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.speculation import SpeculationKeeper, TextDrafter
from weft.engine.scheduling.states import StatePolicy
from weft.engine.scheduling.verification import Verification
from weft.engine.wire.kv_events import make_publisher
from weft.engine.wire.log_sink import dropped_lines
from weft.engine.wire.messages import AddRequest, EngineReady, EngineStats, Finish, LoadAdapter, Outputs
from weft.engine.wire.page_keys import adapter_salt
from weft.engine.wire.pixels import PixelShelf
from weft.engine.wire.sampling import DECODER_POOLING
from weft.engine.wire.weight_exchange import WeightExchange

Part = TypeVar("Part")
BLOCKED_SECONDS = 0.005
"""Seconds to wait for a load or a grammar, while nothing can be computed, before the caller looks for messages."""


class Engine:
    """Loads a model and serves requests one iteration at a time. Pass `compiling` and `ranks` if they have been started
    already; otherwise they are started here if needed. `exchange` holds weights shared with other engines. The
    constructor raises `WeftError`, with one clear line, if the model or the options cannot work."""

    def __init__(
        self, config: EngineConfig, progress: Progress | None = None, compiling: CompileJob | None = None,
        ranks: OneRank | None = None, exchange: WeightExchange | None = None,
    ) -> None:  # fmt: skip
        self.ranks = ranks or Ranks.begin(config)
        try:
            self._start(self.ranks.config, progress, compiling, exchange)
        except BaseException:
            self.ranks.stop(0.0)
            raise

    def _start(
        self,
        config: EngineConfig,
        progress: Progress | None,
        compiling: CompileJob | None,
        exchange: WeightExchange | None,
    ) -> None:
        begin = time.perf_counter()
        self.config = config
        loading = Loading(config, self.ranks, compiling)
        self.spec, self.ends = loading.spec, loading.ends
        own, resolved = loading.own, loading.resolved
        self.grammars = Grammars(config.tokenizer_path, self.spec.vocab_size, self.spec.eos_token_ids)
        phases = Phases(self.ranks.checked_progress(progress))
        # Opened before the model loads, so that a path or port in use is reported at once.
        store = open_store(config, resolved.kv, loading.model_id, own.shard_of, resolved.packed)
        self._publisher = make_publisher(config, config.share.engine)
        loaded = loading.run(phases, exchange, store)
        self.runner, self._weights = loaded.runner, loaded.weights
        num_pages = self.runner.num_pages
        # The context limit is what the pool can hold, so that a request that can never fit is refused on arrival.
        longest = min(resolved.max_model_len, (num_pages - 1 - resolved.states.reserved) * config.page_size)
        self.resolved = resolved = replace(resolved, num_pages=num_pages, max_model_len=longest)
        host_bytes = int(config.host_kv_gib * 2**30)
        self._memory = memory_budget(own, loaded.weights, resolved, host_bytes // own.shard_of.ranks)
        if loaded.images is not None:
            self._memory = structs.replace(
                self._memory,
                weights=self._memory.weights + loaded.images.tower.num_bytes,
                working=self._memory.working + loaded.images.num_bytes,
            )
        if loaded.draft is not None:
            self._memory = structs.replace(self._memory, weights=self._memory.weights + loaded.draft.num_bytes)
        pool = PagePool(num_pages, config.page_size, PrefixIndex(loading.model_id), config.pinned_cache_share)
        reopen = partial(reopened, config, resolved.kv, loading.model_id, own.shard_of, resolved.packed)
        self.tiers = make_tiers(
            config, resolved.kv, pool, loaded.store, self.runner.copy_engine, loaded.make_store, own.shard_of.ranks,
            resolved.packed, reopen=reopen,
        )  # fmt: skip
        self._image_rows, self._vision = loaded.images, loading.vision
        self.scheduler = self._scheduler_of(pool)
        self._work = self._cost_shares(loaded.weights.num_bytes)
        self._outbox = Outbox()
        self._energy = self._energy_charges()
        self.scheduler.chunk_keeper = self._chunk_keeper()
        self._arrivals = Arrivals(
            pool,
            max_model_len=longest,
            vocab_size=self.spec.vocab_size,
            eos_token_ids=self.spec.eos_token_ids,
            seed=config.seed,
        )
        self.adapters = self._adapters()
        self.listeners = Listeners(self._features())
        self.loop = Loop(self.scheduler, self.runner, self.listeners, depth=1 if config.async_scheduling else 0)
        phases.end()
        self.start_seconds = phases.seconds  # seconds of each phase of the start that reports progress
        self.load_seconds = time.perf_counter() - begin

    def _scheduler_of(self, pool: PagePool) -> Scheduler:
        config, resolved = self.config, self.resolved
        if (drafting := resolved.drafting) is not None and self._vision is not None:
            if drafting.by_model:
                raise ConfigError("a model cannot draft for one that takes images yet: use --speculation suffix")
            # Verified decodes of requests with images are not tested on GPUs.
            if resolved.device.type == "cuda" and config.speculation != "auto":
                raise ConfigError("speculation does not support models that take images on a GPU yet: leave it out")
            if resolved.device.type == "cuda":
                resolved = self.resolved = replace(resolved, drafting=None)
        slots = SlotTable(
            resolved.max_num_seqs, resolved.max_model_len, config.page_size, self.spec.kv_window, resolved.states.pages,
            replays=config.batch_invariant and not resolved.states.pages,
        )  # fmt: skip
        images = None
        if self._vision is not None and self._image_rows is not None:
            shelf = PixelShelf(config.share.pixels) if config.share.pixels else None
            images = Images(slots, self._vision, self._image_rows, shelf)
        self._drafter: TextDrafter | ModelDrafter | None = None
        if (options := resolved.drafting) is not None:
            self._drafter = (ModelDrafter if options.by_model else TextDrafter)(slots, options)
        self._verification = None
        if self._drafter is not None:
            most = resolved.max_sampled if resolved.device.type == "cuda" else None
            self._verification = Verification(slots, pool, self._drafter, most)
        return Scheduler(
            slots,
            pool,
            verification=self._verification,
            max_num_batched_tokens=resolved.max_num_batched_tokens,
            prefix_caching=config.prefix_caching,
            tiers=self.tiers,
            chunk_step=resolved.chunk_step(self.spec),
            fairness=Fairness(config.fair_prefill_share, preempt=config.priority_preemption),
            state_policy=StatePolicy(config.state_interval, config.batch_invariant, resolved.kv.page_bytes),
            images=images,
        )  # fmt: skip

    def _cost_shares(self, weight_bytes: int) -> CostShares:
        kv = self.resolved.kv
        token_bytes = kv.page_bytes // (kv.page_size * max(1, len(self.spec.windows)))
        own = self.spec.shard(0, self.config.tensor_parallel_size)
        return CostShares(own, weight_bytes, token_bytes, cuda=self.resolved.device.type == "cuda")

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
        notice(str(keeper))
        return keeper

    def _energy_charges(self) -> features.EnergyCharges | features.Unmetered:
        share = self.config.share
        if share.sharers > 1 or share.awake > 1:
            return features.Unmetered("several engines work on this device, and its counter does not separate them")
        try:
            meter = EnergyMeter(energy_counter(self.resolved.device, self.config.tensor_parallel_size))
        except (OSError, ValueError, ImportError) as error:
            return features.Unmetered(str(error))
        ledger = EnergyLedger(meter, self._work, self.scheduler.slots)
        return features.EnergyCharges(ledger, self._outbox, shares_device=share.models > 1)

    def _adapters(self) -> Adapters | None:
        """Load the configured adapters. Raises `WeftError`, one line."""
        config, memory = self.config, self.runner.adapters
        if not config.adapters:
            return None
        if memory is None:
            raise ConfigError(
                "LoRA adapters are supported for models with an implementation of weft's own; "
                f"this one runs on {self.resolved.device.type} as {self.spec.architecture}"
            )
        own = self.spec.shard(0, config.tensor_parallel_size)
        reader = AdapterReader(own, config.model_path, self.resolved.compute_dtype, config.max_lora_rank)

        def read(path: Path) -> tuple[str, Adapter]:
            digest, adapter = reader(path)
            return digest, self.runner.stage_adapter(adapter, path, digest)

        scheduler = self.scheduler
        made = Adapters(
            read, memory, config.max_loras, lambda: scheduler.count_by_adapter() + self.grammars.count_by_adapter(),
            self._queue, scheduler.withdraw, self._outbox, config.max_cpu_loras or 0,
        )  # fmt: skip
        for module in config.lora_modules:
            name, _, path = module.partition("=")
            made.load_now(LoadAdapter(name, str(Path(path).expanduser().absolute())))
        return made

    def _features(self) -> Iterator[Listener]:
        """Yield the features that are on, in the order in which hooks run."""
        config, index, outbox = self.config, self.scheduler.pool.index, self._outbox
        yield from given(self.adapters, lambda adapters: adapters)
        yield features.CompiledGrammars(self.grammars, self.scheduler, outbox)
        if self.resolved.late_launch:
            yield LateLaunch(self._work.costs)
        yield features.NonfiniteWarning(self.scheduler)
        yield from given(self.tiers, lambda tiers: features.TierTransfers(tiers, self.drain_in_flight))
        yield self._energy
        if config.adaptive_limit:
            # Ahead of the chunk keeper, which forgets the iteration.
            yield SlotLimitKeeper.of(config, self.scheduler)
        yield from given(self.scheduler.chunk_keeper, lambda keeper: keeper)
        if self._drafter is not None and self._verification is not None:
            yield SpeculationKeeper(self._drafter, self._verification, outbox)
        name = str if self.adapters is None else self.adapters.name
        yield from given(self._publisher, lambda to: features.KvEvents(IndexEvents(index, to, config.page_size, name)))
        if self.scheduler.images is not None and self._image_rows is not None:
            yield features.ImageCache(self.scheduler.images, self._image_rows)
        yield features.PlanPreparation(self.runner.preparation, lambda: self.has_work, outbox)

    def describe(self) -> EngineReady:
        resolved = self.resolved
        return EngineReady(
            model_type=self.spec.architecture, num_parameters=self.spec.num_parameters,
            dtype=str(resolved.compute_dtype).removeprefix("torch."), device=str(resolved.device),
            vocab_size=self.spec.vocab_size, max_model_len=resolved.max_model_len, page_size=self.config.page_size,
            num_pages=self.runner.num_pages, max_num_seqs=resolved.max_num_seqs, slot_limit=self.scheduler.slots.limit,
            max_num_batched_tokens=resolved.max_num_batched_tokens, eos_token_ids=self.spec.eos_token_ids,
            load_seconds=self.load_seconds, hidden_size=self.spec.hidden_size, memory=self._memory,
            energy_source=self._energy.source, energy_missing=self._energy.missing, plan=self.runner.preparation.stats,
            threads=resolved.cpu_threads if resolved.device.type == "cpu" else 0,
            model_id=self.scheduler.pool.index.model_id, prefetches=self.config.host_kv_gib > 0,
            recurrent=resolved.states.pages > 0, pixels=self.config.share.pixels,
            modalities=("text",) if self._image_rows is None else ("text", "image"),
        )  # fmt: skip

    def pages(self) -> bytes:
        """Return brief keys of the pages in the prefix index. From then on, `stats` reports the changes."""
        return self._page_reports.ledger.all()

    @cached_property
    def _page_reports(self) -> features.PageReports:
        reports = features.PageReports(PageLedger(self.scheduler.pool.index))
        self.listeners.add(reports)
        return reports

    # -- requests

    def add(self, message: AddRequest) -> None:
        """Queue a request. Raises `RequestError` if it can never be served."""
        params = message.params
        if params.pooling not in (None, *DECODER_POOLING):
            raise RequestError(f"{self.spec.architecture} is a decoder: it has no {params.pooling} pooling", "input")
        if params.pooling is not None and not self._weights.has_hidden_states:
            raise RequestError(f"{self.spec.architecture} does not expose its hidden states", "input")
        request = self._arrivals.request(message)
        if message.images:
            if self.scheduler.images is None:
                raise RequestError(f"{self.spec.architecture} takes text only here, not images", "images")
            self.scheduler.images.attach(request, message.images)
        if not message.adapter:
            self._queue(request)
        elif self.adapters is None:
            raise RequestError("this engine serves no adapters", "model")
        else:
            request.salt = adapter_salt(message.adapter, request.salt)
            self.adapters.begin(request, message.adapter)

    def _queue(self, request: Request) -> None:
        compiled = request.grammar is not None or request.bad_words is not None  # it comes back
        if compiled or (request.params.grammar is None and not request.params.bad_words):
            self.scheduler.add(request)
        else:
            self.grammars.begin(request)

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
        """End a request early. Idempotent; unknown handles are ignored."""
        if self.adapters is not None and (held := self.adapters.take(handle)) is not None:
            self.scheduler.add(held)
        if (request := self.grammars.take(handle)) is not None:
            self.scheduler.add(request)
        self.scheduler.abort(handle)

    def prefetch(self, names: tuple[bytes, ...]) -> None:
        """Load the pages of a conversation from the tiers, as far as pages are free, before its next turn arrives."""
        if not self.runner.sleepable.asleep:
            self.scheduler.prefetch(names)

    def reset_prefix_cache(self) -> None:
        self.scheduler.reset_cache()

    # -- sleeping

    def sleep(self) -> int:
        """Free the memory of weights and KV pages, and return its bytes. No request may be open. Pages that a lower
        tier holds stay there; the others are dropped. Raises `WeftError` or `OSError` if the engine cannot sleep; then
        only pages are lost."""
        assert not self.has_work
        sleepable = self.runner.sleepable
        sleepable.check()
        if sleepable.asleep:
            return sleepable.num_bytes
        self.drain_in_flight()
        if not self.runner.preparation.done:
            raise ConfigError("its plan is still being prepared")
        pool = self.scheduler.pool
        pool.evict_all()
        if pool.num_held:
            raise ConfigError(f"{pool.num_held} of its pages are in use")
        sleepable.sleep()
        for on_sleep in self.listeners.on_sleep:
            on_sleep()
        return sleepable.num_bytes

    def wake(self) -> int:
        """Allocate again what `sleep` freed, and return its bytes. If it raises `WeftError` or `OSError`, the process
        must end."""
        sleepable = self.runner.sleepable
        sleepable.wake()
        for on_wake in self.listeners.on_wake:
            on_wake()
        return sleepable.num_bytes

    # -- the loop

    def check(self) -> None:
        """Raise `RankLost` if another rank has ended."""
        self.ranks.check()

    @property
    def has_work(self) -> bool:
        """Requests are open, results are in flight, or events wait to be reported."""
        s = self.scheduler
        held = 0 if self.adapters is None else self.adapters.num_held
        waiting = s.num_requests or self.grammars.num_compiling or held
        return bool(waiting or self.loop.in_flight or s.has_events() or self._outbox.refused)

    def step(self) -> Outputs | None:
        """Schedule and launch the next iteration, then commit the one before it. Returns None if there is no news."""
        for on_step in self.listeners.on_step:
            on_step()
        outputs = self._iterate()
        for on_step_end in self.listeners.on_step_end:
            on_step_end()
        return outputs

    def _iterate(self) -> Outputs | None:
        in_flight = self.loop.due(self.loop.launch())
        if in_flight is None:
            return self._news()
        for on_wait in self.listeners.on_wait:
            on_wait(in_flight)
        return self._outbox.outputs(self.loop.commit(in_flight.wait()), self.stats())

    def _news(self) -> Outputs | None:
        """Return reports that no iteration brings. If there are none and nothing is in flight, wait a moment."""
        news = [has_news() for has_news in self.listeners.has_news]
        if any(news) or self._outbox.pipelines_changed or self._outbox.refused or self.scheduler.has_events():
            return self._outbox.outputs(self.scheduler.idle_events(), self.stats())
        if not self.loop.in_flight:
            any(on_blocked(BLOCKED_SECONDS) for on_blocked in self.listeners.on_blocked)
        return None

    def launch_at(self) -> float:
        """Return the `time.monotonic()` until which to delay the next `step` for late arrivals; 0 for no delay. There
        is no delay if a new request could not join anyway. The caller must wait: the next launch counts as delayed on
        purpose."""
        in_flight = self.loop.in_flight
        can_wait = len(in_flight) == self.loop.depth and self.scheduler.has_headroom
        running = in_flight[0].batch if can_wait else None
        return max((launch_at(running) for launch_at in self.listeners.launch_at), default=0.0)

    @property
    def pause(self) -> float | None:
        """Longest time in seconds before the next `step` while there is no work; None for any time."""
        pauses = [seconds for pause in self.listeners.pause if (seconds := pause()) is not None]
        return min(pauses, default=None)

    def idle(self) -> Outputs | None:
        """Idle tick, called while there is no work. Returns statistics if a feature has new ones."""
        now = time.monotonic()
        self.loop.totals.busy = False
        news = [on_idle(now) for on_idle in self.listeners.on_idle]
        return Outputs(stats=self.stats()) if any(news) else None

    def stats(self) -> EngineStats:
        """Return the scheduler's state and the figures of the last committed iteration."""
        totals = self.loop.totals
        return EngineStats(
            scheduler=self.scheduler.stats(
                compiling=self.grammars.num_compiling, adapter=0 if self.adapters is None else self.adapters.num_held
            ),
            iteration=totals.last,
            iterations=totals.iterations,
            iterations_pipelined=totals.pipelined,
            iterations_idle_seconds=totals.idle_seconds,
            log_lines_dropped=dropped_lines(),
            **{field: value for stats in self.listeners.stats for field, value in stats().items()},
        )

    def drain_in_flight(self) -> None:
        """Commit the launched iterations, so that their fences pass, and end all transfers."""
        while self.loop.in_flight:
            self.scheduler.commit(self.loop.in_flight.popleft().wait())
        for drain in self.listeners.drain:
            drain()

    def close(self) -> None:
        for close in self.listeners.close:
            close()
        self.runner.close()
        self.ranks.stop()


def given(part: Part | None, feature: Callable[[Part], Listener]) -> Iterator[Listener]:
    """Yield the feature of a part if the engine has that part."""
    if part is not None:
        yield feature(part)
