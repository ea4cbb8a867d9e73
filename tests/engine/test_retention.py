"""Retained pages are evicted last, in every tier; their number is limited; requests never wait for them."""

from __future__ import annotations

import time
from collections import Counter
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from list_device import ListEngine
from test_pages import cached, entries, make
from test_prefix_reuse import TieredEngine
from test_scheduler_machine import MAX_LEN, SchedulerMachine
from test_tier_machine import TierMachine

from weft.engine.memory.block_allocator import BlockAllocator
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry
from weft.engine.memory.tiers import Tiers
from weft.engine.wire.messages import Retention

FOR_EVER = 1e9
"""seconds"""


def test_retained_pages_outlast_all_others() -> None:
    pool = make(8)
    cached(pool, 1, 2, 3)
    assert pool.retain(entries(pool, 1, 2, 3), [FOR_EVER] * 3) == 3
    cached(pool, 4, 5, 6, 7)  # used later
    pool.release(pool.allocate(5))
    pool.check()
    assert len(entries(pool, 1, 2, 3)) == 3
    assert not entries(pool, 4)


def test_retained_pages_are_evicted_when_no_others_are_left() -> None:
    pool = make(8)
    cached(pool, 1, 2, 3)
    pool.retain(entries(pool, 1, 2, 3), [FOR_EVER] * 3)
    pages = pool.allocate(7)
    assert len(entries(pool, 1, 2, 3)) == 1, "the last pages of a chain go first"
    assert len(pool.retention) == 1
    pool.release(pages)
    pool.check()


def test_no_more_is_retained_than_the_share() -> None:
    pool = make(8)
    cached(pool, 1, 2, 3)
    cached(pool, 11, 12, 13)
    assert pool.retain(entries(pool, 1, 2, 3), [FOR_EVER] * 3) == 3
    assert pool.retain(entries(pool, 11, 12, 13), [FOR_EVER] * 3) == 3
    pool.check()
    assert [bool(e.retained_until) for e in entries(pool, 1, 2, 3)] == [True, False, False], "the oldest, its end first"
    assert pool.retention.displaced == 2
    cached(pool, 21)
    assert pool.retain(entries(pool, 1, 2, 3)[:1], [FOR_EVER]) == 1
    cached(pool, 31, 32, 33, 34)
    pool.check()
    assert entries(pool, 1), "renewed"


def test_of_a_chain_longer_than_the_share_the_beginning_is_retained() -> None:
    pool = make(6)
    cached(pool, 1, 2, 3, 4, 5)
    assert pool.retain(entries(pool, 1, 2, 3, 4, 5), [FOR_EVER] * 5) == 3
    pool.check()
    assert [bool(e.retained_until) for e in entries(pool, 1, 2, 3, 4, 5)] == [True] * 3 + [False] * 2


def test_a_share_of_zero_retains_nothing() -> None:
    engine = ListEngine(8)
    engine.pool.retention.limit = 0
    request = engine.add([1, 2, 3, 4, 5], retention=(Retention(5, 60.0),))
    engine.run()
    assert request.retained_tokens == 0


def test_retention_ends_with_its_time_and_the_longest_counts() -> None:
    pool = make(8)
    cached(pool, 1, 2, 3)
    chain = entries(pool, 1, 2, 3)
    pool.retain(chain, [30.0, 10.0, 10.0])
    pool.retain(chain[:2], [20.0, 20.0])
    for now, left in ((9.9, 3), (10.0, 2), (19.9, 2), (20.0, 1), (29.9, 1), (30.0, 0)):
        pool.retention.expire(now)
        pool.check()
        assert len(pool.retention) == left, now
    pages = cached(pool, 4, 5, 6, 7)
    pool.release(pool.allocate(5))
    assert not entries(pool, 1, 2, 3), "like any other page"
    assert len(pages) == 4


def test_clearing_the_cache_clears_retention() -> None:
    pool = make(8)
    cached(pool, 1, 2, 3)
    pool.retain(entries(pool, 1, 2, 3), [FOR_EVER] * 3)
    pool.index.clear()
    pool.forget()
    pool.check()
    assert (len(pool.retention), pool.num_free) == (0, 8)


PROMPT = [5, 6, 7, 8, 9, 10, 11]  # three full pages and a token


@pytest.mark.parametrize(("tokens", "kept"), [(7, 6), (6, 6), (5, 4), (2, 2), (1, 0)])
def test_whole_pages_up_to_the_mark_are_kept(tokens: int, kept: int) -> None:
    engine = ListEngine(10)
    request = engine.add(PROMPT, 2, retention=(Retention(tokens, 60.0),))
    engine.run()
    assert request.retained_tokens == kept
    for i in range(12, 40, 7):
        engine.add([*range(i, i + 7)], 2)
        engine.run()
    again = engine.add(PROMPT, 1)
    engine.run()
    assert again.cached_tokens == kept


def test_several_marks_have_their_own_times() -> None:
    engine = ListEngine(12)
    engine.add(PROMPT, 1, retention=(Retention(2, 3600.0), Retention(7, 300.0)))
    engine.run()
    until = [e.retained_until - time.monotonic() for e in engine.pool.index.entries()]
    assert [round(seconds / 300) for seconds in until] == [12, 1, 1]


def test_a_request_as_large_as_the_pool_runs_despite_retention() -> None:
    engine = ListEngine(10)
    for i in (0, 10):
        engine.add([*range(i, i + 5)], 1, retention=(Retention(5, 60.0),))
        engine.run()
    assert len(engine.pool.retention) == 4
    engine.add([*range(30, 48)], 2)
    engine.run()
    assert len(engine.output[2]) == 2


def test_the_host_evicts_retained_pages_last() -> None:
    engine = TieredEngine(12)
    kept = engine.store(PROMPT)  # three of five slots
    engine.pool.retain(kept, [FOR_EVER] * 3)
    for i in range(20, 60, 5):
        engine.add([*range(i, i + 5)], 1)
        engine.run()
    assert all(entry.host >= 0 for entry in kept)
    engine.pool.evict_all()
    again = engine.add(PROMPT, 1)
    engine.run()
    assert again.cached_tokens == 6
    engine.pool.retention.expire(2 * FOR_EVER)
    for i in range(60, 100, 5):
        engine.add([*range(i, i + 5)], 1)
        engine.run()
    engine.pool.evict_all()
    assert all(entry.host == NOWHERE for entry in kept), "like any other"


def test_slots_of_retained_entries_are_available_when_there_are_no_others() -> None:
    lost: list[PrefixEntry] = []

    def lose(entry: PrefixEntry) -> None:
        lost.append(entry)
        places.forget(entry.host)

    places = BlockAllocator(3, lambda _: True, lose)
    made = [PrefixEntry(bytes([i]), None, b"", "") for i in range(3)]
    for used, (entry, retained_until) in enumerate(zip(made, (9.0, 0.0, 9.0), strict=True)):
        place = places.take()
        assert place is not None
        entry.host, entry.retained_until, entry.used = place, retained_until, used
        places.settle(place, entry)
        places.unpin(place)
    for _ in range(3):
        assert places.take() is not None
        places.check()
    assert [made.index(entry) for entry in lost] == [1, 0, 2]
    assert places.take() is None


class RetentionMachine(TierMachine):
    """The tier machine, whose requests have their prompts kept, whose pages become idle and are fetched ahead."""

    seen: ClassVar[Counter[str]] = Counter()

    def make_tiers(self, pool: PagePool) -> Tiers | None:
        pool.retention.limit = 3
        tiers = super().make_tiers(pool)
        assert tiers is not None
        self.idle_after = 99
        tiers._idle = SimpleNamespace(idle=lambda _now, clock: max(-1, clock - self.idle_after))  # type: ignore[assignment]
        return tiers

    @rule(uses=st.sampled_from([99, 3, 0]))
    def pages_are_idle_after_some_uses_of_others(self, uses: int) -> None:
        self.idle_after = uses

    @rule(handle=SchedulerMachine.requests)
    def a_next_turn_is_announced(self, handle: int) -> None:
        self.scheduler.prefetch((str(handle).encode(),))

    @rule(
        target=SchedulerMachine.requests,
        prompt=st.lists(st.integers(2, 3), min_size=2, max_size=11),
        tokens=st.lists(st.integers(0, 12), min_size=1, max_size=3),
        seconds=st.sampled_from([0.0, FOR_EVER]),
        more=st.integers(1, 6),
    )
    def submit_kept(self, prompt: list[int], tokens: list[int], seconds: float, more: int) -> int:
        retention = tuple(Retention(n, seconds) for n in tokens)
        handle = self._submit(prompt, more, 0, "", False, retention=retention)
        self.some_time_passes([(False, 0, 0)] * 3)
        return handle

    @rule(target=SchedulerMachine.requests, handle=SchedulerMachine.requests)
    def the_next_turn_is_kept(self, handle: int) -> int:
        history = [*[*self.prompts[handle][0], *self.output[handle]][: MAX_LEN - 6], 2]
        return self._submit(history, 3, 0, self.salts[handle], False, retention=(Retention(len(history), FOR_EVER),))

    @rule(far=st.booleans())
    def retention_ends(self, far: bool) -> None:
        self.scheduler.pool.retention.expire(1e12 if far else time.monotonic())

    @rule()
    def the_cache_is_reset(self) -> None:
        if len(self.prompts) % 7 == 3:
            self.scheduler.reset_cache()

    @invariant()
    def retention_is_within_its_limit(self) -> None:
        pool: PagePool = self.scheduler.pool
        assert len(pool.retention) <= 3
        self.seen["retained"] += len(pool.retention) > 0
        self.seen["displaced"] += pool.retention.displaced > 0
        stats = self.tiers.stats()
        self.seen["spilled"] += stats["ssd"].spilled + stats["host"].spilled > 0
        self.seen["prefetched"] += stats["ssd"].prefetched + stats["host"].prefetched > 0
        self.seen["full"] += pool.num_free == 0

    def teardown(self) -> None:
        super().teardown()
        self.scheduler.check()


class TestRetentionMachine(RetentionMachine.TestCase):  # type: ignore[misc]
    settings = settings(
        max_examples=100,
        stateful_step_count=50,
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )

    def runTest(self) -> None:
        super().runTest()
        few = [
            kind
            for kind in ("retained", "displaced", "full", "spilled", "prefetched")
            if RetentionMachine.seen[kind] < 10
        ]
        assert not few, f"hardly ever {few}: {RetentionMachine.seen}"
