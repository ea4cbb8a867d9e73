"""No tenant holds every slot, or all memory, for longer than a bound while another one waits. Time is counted in
iterations."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from list_device import ListEngine
from machines import machine_settings
from test_fairness import Clock

from weft.engine.scheduling.fairness import MOST, PATIENCE, Fairness
from weft.engine.scheduling.kept_slots import KEPT, MAX_PAUSED, KeptSlots
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.waiting import WaitingQueue

FENCES = 3  # iterations until a slot that was yielded is in use


def waited(clock: Clock, request: Request, most: int) -> int:
    """Run until the first token. Returns the iterations until then."""
    begin = clock.iterations
    while request.handle not in clock.first:
        assert clock.iterations - begin <= most, "it waits for longer than the bound"
        assert clock.step()
    return clock.iterations - begin


def running(clock: Clock) -> Counter[int]:
    s = clock.scheduler.slots
    return Counter(s.tenant[s.running()].tolist())


def flooded(slots: int, requests: int, output: int, *, pages: int = 20_000, prefix_caching: bool = True) -> Clock:
    """Tenant 1 holds every slot and has more requests in the queue."""
    clock = Clock(0.25, slots=slots, pages=pages, prefix_caching=prefix_caching)
    for _ in range(requests):
        clock.add(20, output, tenant=1)
    for _ in range(PATIENCE + 8):
        clock.step()
    assert running(clock) == {1: slots}
    return clock


def test_a_tenant_without_a_slot_gets_one_from_a_tenant_with_all() -> None:
    clock = flooded(16, 32, 1800)
    other = clock.add(20, 30, tenant=2)
    assert waited(clock, other, PATIENCE + FENCES) >= PATIENCE
    assert clock.scheduler.fairness.yielded == 1
    assert running(clock) == {1: 15, 2: 1}
    clock.run()


@pytest.mark.parametrize("priority", [-1, -1000, 5])
def test_priorities_of_a_tenant_take_no_turn_from_another(priority: int) -> None:
    clock = Clock(0.25, slots=8)
    for _ in range(32):
        clock.add(10, 60, priority=priority, tenant=1)
    clock.step()
    others = [clock.add(10, 5, tenant=2) for _ in range(8)]
    for _ in range(200):
        if all(r.ended for r in others):
            return
        for _ in range(32 - clock.scheduler.num_requests):
            clock.add(10, 60, priority=priority, tenant=1)
        clock.step()
    raise AssertionError("they starve")


def test_a_better_precedence_keeps_its_slots() -> None:
    clock = Clock(0.25, slots=4)
    for _ in range(4):
        clock.add(20, 300, tenant=1, precedence=-1)
    clock.step()
    other = clock.add(20, 5, tenant=2)
    for _ in range(290):
        clock.step()
    assert (other.waiting, clock.scheduler.preemptions) == (True, 0)
    clock.run()


def test_a_worse_precedence_yields_no_slot_to_its_like_while_a_better_one_waits() -> None:
    clock = Clock(0.25, slots=2)
    for _ in range(2):
        clock.add(20, 300, tenant=1, precedence=9)
    clock.step()
    worse = clock.add(20, 5, tenant=2, precedence=9)
    better = clock.add(20, 5, tenant=3)
    clock.run(until=better)
    assert worse.waiting
    waited(clock, worse, PATIENCE + FENCES)
    clock.run()


def test_a_tenant_alone_yields_nothing() -> None:
    alone, both = Clock(0.25, slots=4), Clock(0.25, slots=4)
    for clock in (alone, both):
        for k in range(40):
            clock.add(20, 100 + k, tenant=1, priority=k % 3)
    alone.run()
    assert alone.scheduler.fairness.yielded == 0
    assert alone.scheduler.preemptions == 0
    both.scheduler.fairness.patience = 10**9
    both.run()
    assert (alone.iterations, alone.tokens) == (both.iterations, both.tokens)


def test_tenants_with_one_slot_each_keep_it() -> None:
    clock = Clock(0.25, slots=4)
    for tenant in range(4):
        clock.add(20, 1500, tenant=tenant)
    clock.step()
    late = [clock.add(20, 5, tenant=tenant) for tenant in range(4, 12)]
    for _ in range(1000):
        clock.step()
    assert clock.scheduler.preemptions == 0
    clock.run()
    assert all(r.ended for r in late)


def test_with_more_tenants_than_slots_each_gets_one_in_its_turn() -> None:
    clock = flooded(4, 12, 1800)
    others = [clock.add(20, 40, tenant=2 + k) for k in range(12)]
    for request in others:
        waited(clock, request, 2 * PATIENCE + 12 // 3 * (40 + FENCES))
    assert clock.scheduler.fairness.yielded <= 12
    assert running(clock)[1] >= 1
    clock.run(limit=20_000)


def test_a_tenant_gets_a_slot_although_more_run_than_a_lowered_limit_allows() -> None:
    clock = flooded(8, 12, 600)
    clock.scheduler.limit_running(6)
    waited(clock, clock.add(20, 5, tenant=2), 4 * PATIENCE)
    clock.scheduler.check()
    clock.run()


@pytest.mark.parametrize("adapters", [(0, 1), (1, 0), (1, 2)])
def test_tenants_with_different_adapters_take_turns(adapters: tuple[int, int]) -> None:
    clock = Clock(0.25, slots=4, pages=20_000, prefix_caching=True)
    for _ in range(8):
        clock.add(20, 200, tenant=1).adapter = adapters[0]
    for _ in range(PATIENCE + 8):
        clock.step()
    other = clock.add(20, 5, tenant=2)
    other.adapter = adapters[1]
    assert waited(clock, other, PATIENCE + FENCES) >= PATIENCE
    clock.run()


@pytest.mark.parametrize("prefix_caching", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_the_only_slot_changes_hands(prefix_caching: bool) -> None:
    clock = flooded(1, 3, 1800, prefix_caching=prefix_caching)
    other = clock.add(20, 900, tenant=2)
    assert waited(clock, other, MOST * PATIENCE + FENCES) >= PATIENCE
    clock.run(limit=20_000)
    assert clock.requests[0].yielded >= 2
    assert max(r.yielded for r in clock.requests) <= 3, "each time it runs for twice as long"


def test_a_tenant_that_holds_all_memory_yields_some() -> None:
    clock = Clock(0.25, slots=8, pages=201)
    for _ in range(4):
        clock.add(700, 1000, tenant=1)
    for _ in range(PATIENCE + 10):
        clock.step()
    held = running(clock)[1]
    other = clock.add(600, 5, tenant=2)
    waited(clock, other, PATIENCE + 2 * FENCES)
    assert (held, running(clock)[1]) == (4, 3)
    clock.run()


def test_a_large_prompt_waits_for_as_long_as_it_takes() -> None:
    """So that large prompts, one after the other, get at most half of the iterations out of turn."""
    clock = Clock(0.25, budget=24, slots=4)
    for _ in range(4):
        clock.add(20, 1900, tenant=1)
    for _ in range(PATIENCE + 8):
        clock.step()
    other = clock.add(1440, 1, tenant=2)
    waits = -clock.iterations
    while other.waiting:
        assert clock.step()
    waits += clock.iterations
    assert 1440 / 24 <= waits <= 1440 / 24 + FENCES
    clock.run()


def test_if_memory_runs_out_the_tenant_with_the_most_slots_loses_one() -> None:
    engine = ListEngine(64, prefix_caching=False, slots=4)
    for tenant in (2, 1, 1, 3):
        engine.add([5, 6, 7], 4, tenant=tenant, priority=9 if tenant == 3 else 0)
    engine.step()
    gone = []
    while engine.scheduler.num_running:
        engine.scheduler._preempt_one()
        (new,) = {r.handle for r in engine.requests if r.waiting} - set(gone)
        gone.append(new)
    assert gone == [2, 3, 1, 0]
    engine.run()


def test_a_prompt_in_progress_keeps_its_place_for_any_priorities_of_others() -> None:
    clock = Clock(0.0, budget=40)
    clock.add(100, 1, tenant=1, priority=5)
    clock.step()
    clock.add(100, 1, tenant=2, priority=-5)
    clock.add(100, 1, tenant=1, priority=-5)
    clock.step()
    assert clock.computed == {0: 40}
    clock.run()


# -- what it costs


def cost(patience: int, pause: int, *, prefix_caching: bool) -> tuple[int, int, int, int]:
    """Tenant 1 keeps 16 slots busy with answers of 1,800 tokens; tenant 2 has one request after the other, with
    `pause` iterations between them. Returns the iterations until 60,000 tokens are generated, the tokens computed, the
    slots yielded, and the longest wait of tenant 2."""
    clock = Clock(0.25, slots=16, pages=20_000, prefix_caching=prefix_caching)
    clock.scheduler.fairness.patience = patience
    last: Request | None = None
    ended, came, longest = -pause, 0, 0
    while clock.scheduler.generation_tokens < 60_000:
        while clock.scheduler.num_waiting < 4:
            clock.add(20, 1800, tenant=1)
        if last is not None and last.ended:
            last, ended = None, clock.iterations
        if last is None and clock.iterations - ended >= pause:
            last, came = clock.add(20, 30, tenant=2), clock.iterations
        clock.step()
        if last is not None:
            longest = max(longest, clock.first.get(last.handle, clock.iterations) - came)
    return clock.iterations, clock.tokens, clock.scheduler.fairness.yielded, longest


@pytest.mark.parametrize(
    ("prefix_caching", "pause", "yields", "more"),
    [(True, 0, 1, 1.01), (True, KEPT + 1, 5, 1.01), pytest.param(False, 0, 1, 1.05, marks=pytest.mark.nightly)],
)
def test_two_tenants_lose_few_iterations_and_tokens(prefix_caching: bool, pause: int, yields: int, more: float) -> None:
    """A tenant that pauses costs tokens that are computed again, but no slot is empty for it, and it waits no longer
    than one that does not."""
    iterations, tokens, yielded, longest = cost(PATIENCE, pause, prefix_caching=prefix_caching)
    iterations_without, tokens_without, none, _ = cost(10**9, pause, prefix_caching=prefix_caching)
    assert none == 0
    assert yielded == yields if yields == 1 else yielded >= yields
    assert iterations <= iterations_without + 2 * FENCES
    assert tokens <= more * tokens_without
    assert longest <= 2 * PATIENCE


# -- a slot that was yielded is kept for a moment


def yielded_once(slots: int = 4) -> tuple[Clock, Request]:
    """A tenant's only request has just ended, in a slot that another one yielded."""
    clock = flooded(slots, 3 * slots, 400)
    first = clock.add(20, 5, tenant=2)
    clock.run(until=first)
    assert clock.scheduler.fairness.yielded == 1
    return clock, first


@pytest.mark.parametrize("pause", [0, 1, KEPT - 1])
def test_a_request_that_follows_at_once_has_the_slot_of_the_last(pause: int) -> None:
    clock, _ = yielded_once()
    for _ in range(5):
        for _ in range(pause):
            clock.step()
        clock.run(until=clock.add(20, 5, tenant=2))
        assert clock.scheduler.fairness.yielded == 1
    assert running(clock) == {1: 3}
    clock.scheduler.check()
    clock.run(limit=20_000)


def test_a_slot_is_not_kept_for_long_nor_again_in_vain() -> None:
    clock, _ = yielded_once()
    for _ in range(KEPT + 2):
        clock.step()
    assert running(clock) == {1: 4}
    late = clock.add(20, 5, tenant=2)
    assert waited(clock, late, PATIENCE + FENCES) >= PATIENCE
    clock.run(limit=20_000)


def kept(clock: Clock) -> bool:
    """Send a request of the other tenant, wait for its end, and return whether its slot is kept."""
    clock.run(until=clock.add(20, 5, tenant=2))
    clock.step()
    return clock.scheduler.slots.kept == 1


def test_a_slot_is_kept_if_the_last_pause_was_short_enough() -> None:
    clock, _ = yielded_once(8)
    clock.step()
    assert clock.scheduler.slots.kept == 1, "the first pause is not known yet"
    for _ in range(2):
        for _ in range(KEPT + 1):
            clock.step()
        assert not kept(clock)
        assert running(clock) == {1: 8}, "its slot is used at once"
    assert kept(clock), "it has returned in time"
    assert kept(clock)
    assert clock.scheduler.fairness.yielded == 4
    clock.run(limit=20_000)


def test_pauses_of_many_tenants_do_not_grow_memory() -> None:
    slots = KeptSlots(WaitingQueue())
    for tenant in range(3 * MAX_PAUSED):
        slots._pauses(tenant, tenant)
    assert list(slots._paused) == list(range(2 * MAX_PAUSED, 3 * MAX_PAUSED))


def test_a_slot_is_not_kept_while_another_tenant_has_none() -> None:
    clock, _ = yielded_once()
    clock.add(20, 5, tenant=3)
    for _ in range(KEPT - 2):
        clock.step()
    assert running(clock).total() == 4, "the slot is empty"
    clock.run(limit=20_000)


def test_a_slot_is_not_kept_from_a_better_precedence() -> None:
    clock = flooded(4, 12, 400)
    for _ in range(2):
        clock.add(20, 300, tenant=3, precedence=-1)  # it takes slots
    clock.run(until=clock.add(20, 5, tenant=2))
    assert clock.scheduler.fairness.yielded == 1
    assert waited(clock, clock.add(20, 5, tenant=3, precedence=-1), 2 * FENCES)
    clock.run(limit=20_000)


def test_a_slot_is_not_kept_for_a_tenant_that_got_none_from_another() -> None:
    clock = Clock(0.25, slots=2)
    clock.run(until=[clock.add(20, output, tenant=tenant) for tenant, output in ((1, 50), (2, 5))][1])
    for _ in range(3):
        clock.add(20, 50, tenant=1)
    clock.step()
    assert running(clock) == {1: 2}
    clock.run()


def test_a_tenant_that_preempts_its_own_requests_takes_no_kept_slot() -> None:
    clock, _ = yielded_once()
    for _ in range(3):
        clock.add(20, 5, priority=-1, tenant=1)
    clock.step()
    assert clock.scheduler.slots.kept == 1
    assert clock.scheduler.slots.limit - clock.scheduler.num_running >= 1
    clock.run(limit=20_000)


# -- the bound, for any order of arrivals


class SlotMachine(RuleBasedStateMachine):
    """Several tenants send and abort requests. Every iteration, a tenant that waits without a slot in the first
    precedence is compared with what the others have, found by looking at all requests."""

    PATIENCE, TENANTS = 2, 4
    yields = 0

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(0.25, budget=64, slots=3, pages=300, prefix_caching=True)
        self.clock.scheduler.fairness = Fairness(patience=self.PATIENCE)
        self.clock.scheduler._prefills._fairness = self.clock.scheduler.fairness
        self.stuck: Counter[int] = Counter()

    @rule(
        prompt=st.integers(1, 100), output=st.integers(1, 400), priority=st.integers(-1, 1),
        tenant=st.integers(0, TENANTS - 1), precedence=st.sampled_from([0, 0, 0, 1]), copies=st.integers(1, 6),
    )  # fmt: skip
    def add(self, prompt: int, output: int, priority: int, tenant: int, precedence: int, copies: int) -> None:
        for _ in range(copies):
            self.clock.add(prompt, output, priority, tenant, precedence)

    @rule(limit=st.integers(1, 3))
    def limit(self, limit: int) -> None:
        self.clock.scheduler.limit_running(limit)

    @precondition(lambda self: self.clock.requests)
    @rule(pick=st.integers(0, 999))
    def abort(self, pick: int) -> None:
        self.clock.scheduler.abort(self.clock.requests[pick % len(self.clock.requests)].handle)
        self.clock.scheduler.idle_events()

    @rule(steps=st.integers(1, 60))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            if not self.clock.step():
                return
            self._compare()

    def _compare(self) -> None:
        requests = [r for r in self.clock.requests if not r.ended]
        slots = Counter(r.tenant for r in requests if r.slot >= 0)
        waiting = [r for r in requests if r.slot < 0]
        first = min((r.precedence for r in waiting), default=0)
        mine = [r for r in requests if r.slot >= 0 and r.precedence >= first]
        donors = Counter(r.tenant for r in mine)
        longest = max((r.yielded for r in requests), default=0)
        for tenant in range(self.TENANTS):
            waits = any(r.tenant == tenant and r.precedence == first for r in waiting) and not slots[tenant]
            most = max((count for other, count in donors.items() if other != tenant), default=0)
            open_slots = self.clock.scheduler.slots.num_open
            if not waits or open_slots or not (most > 1 or (most == 1 and slots.total() == 1)):
                self.stuck[tenant] = 0
                continue
            self.stuck[tenant] += 1
            one = MOST * self.PATIENCE << longest
            assert self.stuck[tenant] <= MOST * self.PATIENCE + (self.TENANTS - 1) * (one + FENCES)

    @invariant()
    def nothing_is_lost(self) -> None:
        self.clock.scheduler.check()

    def teardown(self) -> None:
        self.clock.scheduler.limit_running(3)
        self.clock.run(limit=100_000)
        type(self).yields += self.clock.scheduler.fairness.yielded


class TestSlotMachine(SlotMachine.TestCase):  # type: ignore[misc]
    settings = machine_settings(40, 25, daily=14)

    def runTest(self) -> None:
        super().runTest()
        assert SlotMachine.yields > 20  # by day; 50 in a whole run
