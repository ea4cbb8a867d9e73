"""Requests whose prefix is in a lower tier: their waits, their results, and the state after an abort."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from list_device import ListEngine
from test_tier_machine import ListCopies, ListStore

from weft.engine.memory.cpu_transfer import CpuCopyEngine
from weft.engine.memory.loads import Loading
from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry
from weft.engine.memory.ssd_store import Outcome
from weft.engine.memory.tiers import Tiers
from weft.engine.scheduling.slots import Phase

PROMPT = [5, 6, 7, 8, 9, 10, 11]  # three full pages and a token


class TieredEngine(ListEngine):
    """An engine with a host pool whose copies end when the test decides. Every prefix is worth loading, up to
    `worthwhile`."""

    def __init__(self, capacity: int, *, slots: int = 4, ssd: bool = False) -> None:
        super().__init__(capacity, slots=slots)
        self.copies = ListCopies(self.device)
        self.ssd = ListStore(self.copies) if ssd else None
        self.tiers = Tiers(self.pool, self.copies, 5, self.ssd)
        self.worthwhile = 99
        self.tiers.speeds.worthwhile = lambda entries, *_: min(len(entries), self.worthwhile)  # type: ignore[method-assign]
        self.scheduler.tiers = self.scheduler.prefixes._tiers = self.tiers

    def end_copies(self, *, failed: bool = False) -> None:
        while self.copies.under_way:
            self.copies.under_way.pop(0).end(failed)
        while self.ssd is not None and self.ssd.under_way:
            self.ssd.end(self.ssd.under_way[0], Outcome.DONE)

    def step(self) -> list[int]:
        handles = super().step()
        self.end_copies()
        return handles

    def settle(self) -> None:
        self.tiers.pump()
        while self.tiers.num_transfers:
            self.end_copies()
            self.tiers.pump()

    def store(self, prompt: list[int]) -> list[PrefixEntry]:
        """Compute a prompt and leave its pages only on the host. Returns their entries."""
        self.add(prompt, 1)
        self.run()
        self.pool.evict_all()
        entries = list(self.pool.index.entries())
        assert all(entry.page == NOWHERE and entry.host >= 0 for entry in entries)
        stats = self.tiers.stats()["host"]
        assert (stats.bytes_in, stats.bytes_out) == (len(entries) * self.copies.sizes.page, 0)
        return entries


def test_a_request_runs_once_its_beginning_has_been_loaded() -> None:
    engine = TieredEngine(12)
    engine.store(PROMPT)
    before = engine.scheduler.prompt_tokens
    request = engine.add(PROMPT, 3)
    assert engine.launch() == []
    assert (engine.scheduler.slots.phase[request.slot], request.scheduled_at) == (Phase.LOADING, 0.0)
    assert request.loading is not None
    assert request.loading.remaining == 3
    assert engine.scheduler.stats().queue["load"] == 1
    assert engine.scheduler.prompt_tokens == before
    assert engine.launch() == [], "it is not started twice"
    engine.end_copies()
    assert engine.launch() == [request.handle]
    assert engine.launched[0].query_len.tolist() == [1]
    assert (engine.scheduler.slots.phase[request.slot], request.loading) == (Phase.DECODE, None)
    assert (request.hits, request.cached_tokens) == ((0, 6, 0), 6)
    assert engine.tiers.speeds.bytes_per_second["host"] == 3 * engine.copies.sizes.page, "each copy takes a second"
    assert engine.tiers.stats()["host"].bytes_out == 3 * engine.copies.sizes.page
    assert engine.scheduler.prompt_tokens == before + len(PROMPT)
    engine.complete()
    engine.run()


def test_a_request_whose_prefix_is_loaded_needs_only_its_own_pages() -> None:
    engine = TieredEngine(4)
    engine.store(PROMPT)
    request = engine.add(PROMPT, 1)
    engine.launch()
    assert (engine.scheduler.slots.phase[request.slot], engine.pool.num_held) == (Phase.LOADING, 4)
    engine.end_copies()
    engine.run()


def test_requests_that_wait_for_the_same_pages_share_them() -> None:
    engine = TieredEngine(12)
    engine.store(PROMPT)
    both = [engine.add(PROMPT, 2), engine.add(PROMPT, 2)]
    engine.launch()
    assert [engine.scheduler.slots.phase[r.slot] for r in both] == [Phase.LOADING, Phase.LOADING]
    assert len(engine.copies.under_way) == 1
    assert engine.pool.num_held == 3 + 2, "each has a page of its own beside them"
    engine.end_copies()
    assert sorted(engine.launch()) == [r.handle for r in both]
    engine.complete()
    engine.run()


def test_a_load_that_fails_is_a_miss_and_the_request_is_computed() -> None:
    engine = TieredEngine(12)
    engine.store(PROMPT)
    request = engine.add(PROMPT, 3)
    engine.launch()
    speed = engine.tiers.speeds.bytes_per_second["host"]
    engine.end_copies(failed=True)
    assert engine.launch() == [request.handle]
    assert engine.tiers.speeds.bytes_per_second["host"] == speed
    assert engine.tiers.stats()["host"].failures == 3
    assert engine.launched[0].query_len.tolist() == [7]
    assert request.hits == (0, 0, 0)
    engine.complete()
    engine.run()


def test_a_prefix_evicted_while_loading_serves_only_its_request() -> None:
    engine = TieredEngine(12)
    engine.store(PROMPT)
    request = engine.add(PROMPT, 1)
    engine.launch()
    engine.scheduler.reset_cache()
    engine.end_copies()
    assert engine.launch() == [request.handle]
    assert len(engine.pool.index) == 0
    engine.complete()
    engine.run()


def test_an_abort_while_loading_frees_the_slot_and_leaves_the_pages_to_the_copy() -> None:
    engine = TieredEngine(12, slots=1)
    engine.store(PROMPT)
    request = engine.add(PROMPT, 3)
    engine.launch()
    loading = request.loading
    assert loading is not None
    engine.scheduler.abort(request.handle)
    assert (loading.slot, request.loading, request.slot) == (-1, None, -1)
    assert engine.pool.num_held == 3
    other = engine.add([1, 2, 3], 4)
    assert engine.launch() == [other.handle]
    engine.complete()
    engine.end_copies()
    assert engine.launch() == [other.handle]
    assert engine.scheduler.slots.phase[other.slot] == Phase.DECODE
    engine.complete()
    engine.run()


def test_a_preemption_while_loading_is_served_by_the_same_load() -> None:
    engine = TieredEngine(12)
    engine.store(PROMPT)
    request = engine.add(PROMPT, 3)
    engine.launch()
    engine.scheduler._preempt_one()
    assert (request.waiting, len(engine.copies.under_way)) == (True, 1)
    assert engine.launch() == []
    assert len(engine.copies.under_way) == 1, "nothing is loaded twice"
    engine.end_copies()
    assert engine.launch() == [request.handle]
    engine.complete()
    engine.run()


def test_a_page_already_on_the_gpu_is_not_waited_for() -> None:
    engine = TieredEngine(14)
    first, second, third = engine.store(PROMPT)
    engine.worthwhile = 1
    one = engine.add(PROMPT[:3], 1)
    engine.launch()
    assert one.loading is not None
    # Another request computes the page while it is being loaded.
    (page,) = engine.pool.allocate(1)
    engine.device.kv[page] = engine.copies.host[first.host]
    engine.pool.adopt(first, int(page))
    engine.worthwhile = 99
    two = engine.add(PROMPT, 1)
    engine.scheduler.schedule(99)
    assert two.loading is not None
    assert (two.loading.remaining, *(engine.tiers.coming(e) is not None for e in (second, third))) == (2, True, True)
    engine.pool.release(np.array([page], np.int32))
    engine.end_copies()
    engine.run()


def test_a_chain_is_cut_where_loading_more_is_not_worth_it() -> None:
    engine = TieredEngine(14)
    engine.store(PROMPT)
    engine.worthwhile = 1
    engine.add(PROMPT[:3], 1)
    engine.launch()
    engine.end_copies()
    engine.run()
    # One page is on the GPU, two are on the host.
    request = engine.add(PROMPT, 1)
    assert engine.launch() == [request.handle]
    assert request.hits == (2, 0, 0)
    engine.complete()
    engine.run()


def test_a_page_is_used_when_it_is_published() -> None:
    engine = TieredEngine(12)
    engine.store([1, 2, 3])
    request = engine.add(PROMPT, 4)
    engine.launch()
    engine.complete()
    assert request.last_entry is not None
    assert request.last_entry.used == engine.pool.index.clock > 0
    engine.run()


def test_only_uncomputed_prompts_make_the_processor_busy() -> None:
    engine = TieredEngine(40)
    slots = engine.scheduler.slots
    for phase, scheduled in ((Phase.PREFILL, 3), (Phase.LOADING, 2), (Phase.DECODE, 20), (Phase.ENDING, 0)):
        request = engine.add([5] * 10, 1)
        slot = slots.assign(request, np.zeros(0, np.int32), 0)
        slots.phase[slot], slots.scheduled[slot] = phase, scheduled
    assert engine.scheduler.prefixes._busy_tokens() == 7 + 8


@pytest.mark.parametrize(("requested", "names"), [(False, {"host"}), (True, {"host", "ssd"})])
def test_a_requested_tier_that_is_unavailable_is_reported(requested: bool, names: set[str]) -> None:
    engine = TieredEngine(4)
    stats = Tiers(engine.pool, engine.copies, 5, None, ssd_configured=requested).stats()
    assert set(stats) == names
    assert not any(tier.failures for tier in stats.values())
    assert "ssd" not in stats or not stats["ssd"].up


def publish(engine: TieredEngine, *tokens: int) -> list[PrefixEntry]:
    """A chain of pages that are held on the GPU, and that the tiers have not seen."""
    made: list[PrefixEntry] = []
    key = engine.pool.index.root("")
    for token, page in zip(tokens, engine.pool.allocate(len(tokens)).tolist(), strict=True):
        raw = np.array([token, token], np.int32).tobytes()
        key = engine.pool.index.chain(key, raw)
        entry = engine.pool.index.publish(made[-1] if made else None, key, raw, "")
        assert entry is not None
        engine.pool.adopt(entry, page)
        made.append(entry)
    return made


def stored(engine: TieredEngine) -> list[int]:
    """Copies to the host in progress after published pages have been checked."""
    engine.tiers.begin_stores()
    return [page for copy in engine.copies.under_way for page, _ in copy.pairs]


def test_a_page_goes_to_the_host_once() -> None:
    engine = TieredEngine(12)
    first, second = publish(engine, 1, 2)
    for entry in (first, second, first):
        engine.tiers.published(entry)
    assert stored(engine) == [first.page, second.page]
    engine.tiers.published(second)
    assert stored(engine) == [first.page, second.page], "it is on its way"
    engine.settle()
    engine.tiers.published(second)
    assert stored(engine) == [], "it is there"


def test_a_page_whose_parent_is_not_there_does_not_go_to_the_host() -> None:
    engine = TieredEngine(12)
    first, second = publish(engine, 1, 2)
    engine.tiers.published(second)
    assert stored(engine) == []
    engine.tiers.published(first)
    engine.settle()
    engine.tiers.published(second)
    assert stored(engine) == [second.page]
    engine.settle()


def test_a_page_that_was_evicted_before_its_turn_does_not_go_to_the_host() -> None:
    engine = TieredEngine(12)
    (only,) = publish(engine, 1)
    engine.tiers.published(only)
    engine.pool.release(np.array([only.page], np.int32))
    engine.pool.evict_all()
    assert stored(engine) == []


def test_a_copy_to_the_host_that_fails_leaves_the_page_where_it_was() -> None:
    engine = TieredEngine(12)
    (only,) = publish(engine, 1)
    engine.tiers.published(only)
    assert stored(engine) == [only.page]
    engine.end_copies(failed=True)
    engine.tiers.pump()
    assert (only.page >= 0, only.host) == (True, NOWHERE)
    assert engine.tiers.stats()["host"].failures == 1
    assert engine.tiers.host.num_free == 5
    assert engine.pool.ref[only.page] == 1


def test_a_load_is_timed_under_its_source_tier() -> None:
    engine = TieredEngine(12, ssd=True)
    first, *_ = entries = engine.store(PROMPT)
    assert engine.tiers.take_load_seconds() == []
    while engine.tiers.ssd.unwritten:
        engine.tiers.ssd.start_writes(everything=True)
        engine.settle()
    assert all(entry.extent >= 0 for entry in entries)
    for entry in entries[1:]:
        engine.tiers._lose_host(entry)
    assert first.host >= 0
    request = engine.add(PROMPT, 1)
    engine.run()
    assert request.hits == (0, 2, 4)
    seconds = engine.tiers.take_load_seconds()
    assert sorted(tier for tier, _ in seconds) == ["host", "ssd", "ssd"]
    assert all(0 <= taken < 60 for _, taken in seconds)
    assert engine.tiers.take_load_seconds() == [], "each is told of once"


def test_the_first_slot_of_a_tier_is_reconsidered_like_any_other() -> None:
    engine = TieredEngine(12, ssd=True)
    (only,) = publish(engine, 1)
    requested: list[tuple[str, int]] = []
    engine.tiers.host.reconsider = lambda _, place: requested.append(("host", place))  # type: ignore[method-assign]
    engine.tiers.ssd.blocks.reconsider = lambda _, place: requested.append(("ssd", place))  # type: ignore[method-assign]
    engine.tiers._reconsider(only)
    assert requested == []
    only.host = only.extent = 0
    engine.tiers._reconsider(only)
    assert requested == [("host", 0), ("ssd", 0)]


def test_waiting_ends_with_the_awaited_copies() -> None:
    engine = TieredEngine(12)
    (out,) = publish(engine, 1)
    waits: list[tuple[list[bool], float]] = []
    engine.copies.wait = lambda copies, seconds: waits.append(([c.to_host for c in copies], seconds))  # type: ignore
    engine.tiers.wait(0.5)
    assert waits == [], "nothing moves"
    engine.tiers.published(out)
    assert stored(engine)
    engine.tiers.wait(0.5)
    assert waits.pop() == ([True], 0.5)
    engine.settle()
    (other,) = publish(engine, 2)
    engine.tiers.load([out], engine.pool.allocate(1).tolist(), Loading(0, [out]))
    engine.tiers.wait(0.5)
    assert waits.pop() == ([False], 0.5)
    engine.tiers.published(other)
    assert len(stored(engine)) == 2
    engine.tiers.wait(0.5)
    assert waits.pop() == ([False], 0.5), "what comes back has a request waiting"
    engine.settle()


def test_draining_returns_the_finished_waits() -> None:
    engine = TieredEngine(12)
    copies = CpuCopyEngine(torch.zeros(13, 4, dtype=torch.int32), 5)
    tiers = Tiers(engine.pool, copies, 5, None)
    (only,) = publish(engine, 1)
    tiers.published(only)
    tiers.begin_stores()
    assert tiers.drain() == []
    assert (tiers.num_transfers, only.host >= 0) == (0, True)
    waiting = Loading(0, [only])
    tiers.load([only], engine.pool.allocate(1).tolist(), waiting)
    assert tiers.drain() == [waiting]
    assert (waiting.remaining, waiting.failed, tiers.num_transfers) == (0, False, 0)
    copies.close()


def test_a_prefix_counts_as_used_when_its_request_is_admitted() -> None:
    engine = TieredEngine(12)
    entries = engine.store(PROMPT)
    before = engine.pool.index.clock
    engine.add(PROMPT, 1)
    engine.launch()
    assert [entry.used for entry in entries] == [before + 1] * 3
    engine.end_copies()
    engine.run()
