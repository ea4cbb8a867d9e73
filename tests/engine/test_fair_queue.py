"""`FairQueue` and `WaitingQueue` compared with plain lists that are searched linearly."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from machines import machine_settings

from weft.engine.scheduling import fair_queue
from weft.engine.scheduling.fair_queue import MAX_AHEAD, MAX_PAUSED, FairQueue
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.waiting import OVERTAKING, WaitingQueue
from weft.engine.wire.sampling import SamplingParams


@given(st.lists(st.integers(1, 100), min_size=20, max_size=80), st.integers(2, 5))
@settings(max_examples=100)
def test_waiting_tenants_differ_by_at_most_one_cost(costs: list[int], tenants: int) -> None:
    turns = FairQueue()
    for tenant in range(tenants):
        turns.join(tenant, tenant)
    service = [0] * tenants
    for cost in costs:
        tenant = turns.first()
        turns.serve(tenant, cost)
        service[tenant] += cost
        assert max(service) - min(service) <= max(costs)


def test_among_equals_the_first_to_arrive_goes_first() -> None:
    turns = FairQueue()
    for tenant, order in ((1, 9), (2, 3), (3, 5)):
        turns.join(tenant, order)
    got = []
    while len(got) < 3:
        got.append(turns.first())
        turns.serve(got[-1], 10)
    assert got == [2, 3, 1]


def test_a_pause_accumulates_no_turns() -> None:
    turns = FairQueue()
    turns.join(1, 1)
    for _ in range(100):
        turns.serve(1, 10)
    turns.join(2, 2)
    got = []
    for _ in range(6):
        got.append(turns.first())
        turns.serve(got[-1], 10)
    assert got.count(1) == 3


def test_a_pause_does_not_forgive_service_ahead_of_turn() -> None:
    turns = FairQueue()
    turns.join(1, 1)
    turns.join(2, 2)
    turns.serve(1, 100)
    turns.leave(1)
    turns.join(1, 3)
    for _ in range(10):
        assert turns.first() == 2
        turns.serve(2, 10)
    turns.serve(2, 1)
    assert turns.first() == 1


def test_a_refund_moves_the_turn_forward() -> None:
    turns = FairQueue()
    turns.join(1, 1)
    turns.join(2, 2)
    turns.serve(1, 100)
    turns.serve(2, 50)
    turns.charge(1, -60)
    assert turns.first() == 1
    turns.serve(1, 5)
    assert turns.first() == 1
    turns.charge(7, 5)
    turns.serve(1, 6)
    assert turns.first() == 2


def test_service_out_of_turn_is_charged_to_the_requests_after_it() -> None:
    turns = FairQueue()
    turns.join(1, 1)
    turns.join(2, 2)
    turns.charge(1, 100)
    assert turns.first() == 1, "the first in line keeps its tag"
    turns.serve(1, 10)
    for _ in range(11):
        assert turns.first() == 2
        turns.serve(2, 10)
    assert turns.first() == 1


def test_a_tenants_debt_is_limited() -> None:
    turns = FairQueue()
    turns.join(1, 1)
    turns.join(2, 2)
    for _ in range(100):
        turns.charge(1, MAX_AHEAD)
    turns.serve(1, 1)
    turns.serve(2, MAX_AHEAD)
    assert turns.first() == 2
    turns.serve(2, 2)
    assert turns.first() == 1
    turns.leave(2)
    turns.join(2, 3)
    assert turns.first() == 1, "what was had in turn is held against it, however much"


SERVED = st.lists(st.tuples(st.booleans(), st.integers(0, 3), st.integers(1, 400)), max_size=300)


@given(SERVED, st.integers(0, 3))
def test_between_two_turns_other_tenants_get_at_most_the_documented_amount(
    served: list[tuple[bool, int, int]], pauses: int
) -> None:
    """Holds for any charges out of turn, and for tenants that leave and return often."""
    turns, limit, largest = FairQueue(), 500, 400
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_queue, "MAX_AHEAD", limit)
        for tenant in range(4):
            turns.join(tenant, tenant)
        others = {tenant: [0] * 4 for tenant in range(4)}
        for k, (early, tenant, cost) in enumerate(served):
            if early:
                turns.charge(tenant, cost)
                continue
            if tenant == pauses:
                turns.leave(tenant)
                turns.join(tenant, 10 + k)
                others[tenant] = [0] * 4
            first = turns.first()
            turns.serve(first, cost)
            others[first] = [0] * 4
            for waits, had in others.items():
                had[first] += cost * (waits != first)
                assert max(had) <= limit + 2 * largest


def test_many_tenants_over_time_do_not_grow_memory() -> None:
    turns = FairQueue()
    turns.join(-1, 0)
    for tenant in range(10 * MAX_PAUSED):
        turns.join(tenant, tenant)
        turns.serve(tenant, 5)
        turns.leave(tenant)
        turns.charge(-1, 1)
        assert len(turns._accounts) <= MAX_PAUSED + 2
        assert len(turns._heap) <= 68
    assert turns.first() == -1


def request(handle: int, priority: int, length: int, tenant: int, precedence: int = 0) -> Request:
    return Request(
        handle=handle, token_ids=np.zeros(length, np.int32), prompt_len=length, params=SamplingParams(max_tokens=1),
        max_total_tokens=length + 1, priority=priority, order=handle, arrival=0.0, salt="", stop_ids=(), seed=0,
        tenant=tenant, precedence=precedence,
    )  # fmt: skip


def test_a_promoted_tenant_is_next_and_pays() -> None:
    turns = FairQueue()
    for tenant in (1, 2, 3):
        turns.join(tenant, tenant)
    turns.promote(3)
    assert turns.first() == 3
    turns.charge(3, -5)
    turns.charge(1, 5)
    assert turns.first() == 3
    turns.serve(3, 10)
    got = []
    for _ in range(4):
        got.append(turns.first())
        turns.serve(got[-1], 8)
    assert got == [1, 2, 3, 2]


class LinearQueue:
    """The order of `WaitingQueue` by its description: lists that are searched from end to end."""

    def __init__(self) -> None:
        self.waiting: list[Request] = []
        self.slots: Counter[int] = Counter()
        self.since: dict[tuple[int, int], int] = {}
        """by precedence and tenant that waits without a slot: the step since which that is so"""
        self.now: dict[int, float] = {}
        self.accounts: dict[tuple[int, int], float] = {}
        self.tags: dict[tuple[int, int], tuple[float, int]] = {}
        self.step = 0

    def of(self, precedence: int, tenant: int) -> list[Request]:
        found = [r for r in self.waiting if (r.precedence, r.tenant) == (precedence, tenant)]
        return sorted(found, key=lambda r: (r.priority, r.order))

    def best(self, precedence: int) -> list[Request]:
        """Requests that have the best priority of their tenant."""
        tenants = {r.tenant for r in self.waiting if r.precedence == precedence}
        firsts = {tenant: self.of(precedence, tenant)[0].priority for tenant in tenants}
        return [r for r in self.waiting if r.precedence == precedence and r.priority == firsts[r.tenant]]

    def precedences(self) -> list[int]:
        return sorted({r.precedence for r in self.waiting})

    def head(self) -> Request:
        first = self.precedences()[0]
        _, tenant = min((tag, tenant) for (precedence, tenant), tag in self.tags.items() if precedence == first)
        return self.of(first, tenant)[0]

    def join(self, key: tuple[int, int], order: int) -> None:
        account = self.accounts[key] = max(self.accounts.get(key, 0.0), self.now.get(key[0], 0.0))
        self.tags[key] = account, order

    def push(self, request: Request) -> None:
        key = request.precedence, request.tenant
        if not self.of(*key):
            self.join(key, request.order)
            if not self.slots[request.tenant]:
                self.since[key] = self.step
        self.waiting.append(request)

    def charge(self, key: tuple[int, int], cost: float) -> None:
        account = self.accounts[key]
        self.accounts[key] = account = min(account + cost, max(account, self.now.get(key[0], 0.0) + MAX_AHEAD))
        if account < self.tags[key][0]:
            self.join(key, self.tags[key][1])

    def take(self, request: Request, cost: float) -> None:
        key = request.precedence, request.tenant
        tag, order = self.tags[key]
        first = min(t for (precedence, _), t in self.tags.items() if precedence == request.precedence)
        if request is not self.of(*key)[0]:
            self.charge(key, cost)
        else:
            if (tag, order) == first:
                self.now[key[0]] = max(self.now.get(key[0], 0.0), tag)
                self.accounts[key] += cost
            else:
                self.charge(key, cost)
            self.join(key, order)
        self.remove(request)
        self.slots[request.tenant] += 1
        self.since = {at: since for at, since in self.since.items() if at[1] != request.tenant}

    def remove(self, request: Request) -> None:
        self.waiting.remove(request)
        key = request.precedence, request.tenant
        if not self.of(*key):
            del self.tags[key]
            self.since.pop(key, None)
        if key[0] not in self.precedences():
            self.now.pop(key[0], None)
            self.accounts = {k: account for k, account in self.accounts.items() if k[0] != key[0]}

    def freed(self, tenant: int) -> None:
        self.slots[tenant] -= 1
        if not self.slots[tenant]:
            self.since |= {key: self.step for key in self.tags if key[1] == tenant}


class QueueMachine(RuleBasedStateMachine):
    """Random orders of arrivals, admissions, preemptions, ends and promotions."""

    def __init__(self) -> None:
        super().__init__()
        self.queue, self.plain = WaitingQueue(), LinearQueue()
        self.running: list[Request] = []
        self.made = 0

    @rule(
        precedence=st.integers(-1, 1), tenant=st.integers(0, 3), priority=st.integers(-2, 2), length=st.integers(1, 6)
    )
    def push(self, precedence: int, tenant: int, priority: int, length: int) -> None:
        self.made += 1
        self._push(request(self.made, priority, length, tenant, precedence))

    def _push(self, new: Request) -> None:
        self.queue.push(new)
        self.plain.push(new)

    @precondition(lambda self: self.plain.waiting)
    @rule(which=st.sampled_from(["head", "head", "shortest", "any"]), pick=st.integers(0, 99), cost=st.integers(0, 5))
    def take(self, which: str, pick: int, cost: int) -> None:
        waiting = self.plain.waiting
        taken = {"head": self.queue.head(), "shortest": self.queue.shortest()}.get(which, waiting[pick % len(waiting)])
        assert taken is not None
        self.queue.take(taken, cost)
        self.plain.take(taken, cost)
        self.running.append(taken)

    @precondition(lambda self: self.plain.waiting)
    @rule(pick=st.integers(0, 99))
    def end_waiting(self, pick: int) -> None:
        gone = self.plain.waiting[pick % len(self.plain.waiting)]
        self.queue.end(gone)
        self.plain.remove(gone)

    @precondition(lambda self: self.running)
    @rule(pick=st.integers(0, 99), preempted=st.booleans())
    def leave_slot(self, pick: int, preempted: bool) -> None:
        gone = self.running.pop(pick % len(self.running))
        self.queue.freed(gone.tenant)
        self.plain.freed(gone.tenant)
        if preempted:
            gone.token_ids = np.append(gone.token_ids, np.int32(7))
            self._push(gone)

    @precondition(lambda self: self.plain.tags)
    @rule(pick=st.integers(0, 99), cost=st.integers(-5, 5))
    def settle(self, pick: int, cost: int) -> None:
        key = sorted(self.plain.tags)[pick % len(self.plain.tags)]
        self.queue.settle(request(0, 0, 1, key[1], key[0]), cost)
        if cost:
            self.plain.charge(key, cost)

    @precondition(lambda self: self.plain.tags)
    @rule(pick=st.integers(0, 99))
    def promote(self, pick: int) -> None:
        key = sorted(self.plain.tags)[pick % len(self.plain.tags)]
        self.queue.promote(request(0, 0, 1, key[1], key[0]))
        self.plain.tags[key] = -math.inf, self.plain.tags[key][1]

    @rule()
    def next_step(self) -> None:
        self.plain.step += 1
        self.queue.step += 1

    @invariant()
    def it_finds_the_same(self) -> None:
        queue, plain = self.queue, self.plain
        assert (len(queue), queue.num_requests) == (len(plain.waiting), len(plain.waiting))
        assert queue.num_tokens == sum(len(r.token_ids) for r in plain.waiting)
        head, shortest = queue.head(), queue.shortest()
        if not plain.waiting:
            assert head is shortest is None
            assert queue.longest_without_slot() is None
            return
        assert head is plain.head()
        assert shortest is not None
        first = plain.best(head.precedence)
        assert shortest in first
        assert len(shortest.token_ids) == min(len(r.token_ids) for r in first)
        own = plain.of(head.precedence, head.tenant)
        assert queue.num_like(head) == sum(r.priority == head.priority for r in own)
        overtaking = [len(r.token_ids) for r in queue.overtaking(head)]
        wanted = [plain.best(precedence) for precedence in plain.precedences()]
        wanted += [[r for r in own if r.priority == p] for p in sorted({r.priority for r in own})[1:OVERTAKING]]
        assert overtaking == [min(len(r.token_ids) for r in each) for each in wanted]
        self._without_slot_is_the_same(head)

    def _without_slot_is_the_same(self, head: Request) -> None:
        since = {t: step for (precedence, t), step in self.plain.since.items() if precedence == head.precedence}
        found = self.queue.longest_without_slot()
        assert (found is None) == (not since)
        if found is not None:
            waiting, step = found
            assert since[waiting.tenant] == step == min(since.values())
            assert waiting is self.plain.of(head.precedence, waiting.tenant)[0]


TestQueueMachine = QueueMachine.TestCase
TestQueueMachine.settings = machine_settings(150, 60, daily=50)


def test_requests_removed_out_of_order_are_not_kept() -> None:
    queue = WaitingQueue()
    long = request(0, 0, 900, 0)
    queue.push(long)
    for handle in range(1, 5000):
        queue.push(request(handle, 0, 5, 0))
        queue.take(queue.shortest(), 5.0)  # type: ignore[arg-type]
    first = queue._queues[0]
    level = first.tenants[0].best
    assert max(len(first._shortest), len(level.by_arrival._heap), len(level.by_length._heap)) <= 66
    for handle in range(5000, 9000):
        queue.push(request(handle, 0, 1000, 0))
        queue.take(queue.head(), 5.0)  # type: ignore[arg-type]
    assert max(len(first._shortest), len(level.by_arrival._heap), len(level.by_length._heap)) <= 66


def test_only_a_few_priorities_are_searched() -> None:
    queue = WaitingQueue()
    for handle in range(100):
        queue.push(request(handle, handle, 5, 0))
    head = queue.head()
    assert head is not None
    assert [r.priority for r in queue.overtaking(head)] == [0, 1, 2, 3]


def test_siblings_are_held_until_their_leader_has_started() -> None:
    queue = WaitingQueue()
    leader, *siblings = (request(handle, 0, 5, 0) for handle in range(4))
    queue.push(leader)
    for sibling in siblings:
        queue.hold(sibling, leader)
    assert (len(queue), queue.num_requests, queue.by_reason()["sibling"]) == (1, 4, 3)
    queue.take(leader, 5.0)
    leader.slot, leader.begun = 0, True
    queue.release_siblings(leader)
    assert (len(queue), queue.num_requests, queue.by_reason()["sibling"]) == (3, 3, 0)
    assert queue.head() is siblings[0]


def test_siblings_of_an_ended_leader_wait_for_the_first_of_them() -> None:
    queue = WaitingQueue()
    leader, *siblings = (request(handle, 0, 5, 0) for handle in range(4))
    queue.push(leader)
    for sibling in siblings:
        queue.hold(sibling, leader)
    leader.ended = True
    queue.end(leader)
    queue.release_siblings(leader)
    assert (len(queue), queue.num_requests, queue.by_reason()["sibling"]) == (1, 3, 2)
    assert queue.head() is siblings[0]
