"""`FairQueue` and `WaitingQueue` compared with plain lists that are searched linearly."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.scheduling import fair_queue
from weft.engine.scheduling.fair_queue import MAX_AHEAD, MAX_PAUSED, FairQueue
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.waiting import WaitingQueue
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


def request(handle: int, priority: int, length: int, tenant: int) -> Request:
    return Request(
        handle=handle, token_ids=np.zeros(length, np.int32), prompt_len=length, params=SamplingParams(max_tokens=1),
        max_total_tokens=length + 1, priority=priority, order=handle, arrival=0.0, salt="", stop_ids=(), seed=0,
        tenant=tenant,
    )  # fmt: skip


Step = tuple[str, int, int, int]
STEPS = st.tuples(
    st.sampled_from(["push", "push", "push", "head", "shortest", "end", "again"]),
    st.integers(0, 2), st.integers(1, 6), st.integers(0, 30),
)  # fmt: skip


@given(st.lists(STEPS, max_size=120), st.booleans())
@settings(max_examples=150, deadline=None)
def test_a_queue_finds_the_same_as_a_linear_search(steps: list[Step], several: bool) -> None:
    queue, waiting, gone = WaitingQueue(), list[Request](), list[Request]()
    served: dict[tuple[int, int], int] = {}
    made = 0
    for what, priority, length, pick in steps:
        if what == "push":
            made += 1
            waiting.append(request(made, priority, length, pick % 3 if several else 0))
            queue.push(waiting[-1])
        elif what == "again" and gone:
            waiting.append(gone.pop(pick % len(gone)))
            waiting[-1].slot = -1
            queue.push(waiting[-1])
        elif waiting and what in ("head", "shortest", "end"):
            taken = {"head": queue.head(), "shortest": queue.shortest(), "end": waiting[pick % len(waiting)]}[what]
            assert taken is not None
            waiting.remove(taken)
            if what == "end":
                taken.ended = True
                queue.end(taken)
            else:
                taken.slot = 0
                queue.take(taken, 0.0 if pick % 2 else 3.0)
                gone.append(taken)
                served[taken.priority, taken.tenant] = 1
        assert (len(queue), queue.num_requests) == (len(waiting), len(waiting))
        assert queue.num_tokens == sum(len(r.token_ids) for r in waiting)
        if not waiting:
            assert queue.head() is queue.shortest() is None
            continue
        best = [r for r in waiting if r.priority == min(r.priority for r in waiting)]
        head, shortest = queue.head(), queue.shortest()
        assert head is not None
        assert shortest is not None
        assert shortest in best
        assert len(shortest.token_ids) == min(len(r.token_ids) for r in best)
        assert head is min((r for r in best if r.tenant == head.tenant), key=lambda r: r.order)
        if not several:
            assert head is min(best, key=lambda r: r.order)
        assert queue.num_of_priority(head) == len(best)
        shortest_by_priority = list(queue.shortest_by_priority())
        assert [r.priority for r in shortest_by_priority] == sorted({r.priority for r in waiting})
        for r in shortest_by_priority:
            assert len(r.token_ids) == min(len(o.token_ids) for o in waiting if o.priority == r.priority)


def test_requests_removed_out_of_order_are_not_kept() -> None:
    queue = WaitingQueue()
    long = request(0, 0, 900, 0)
    queue.push(long)
    for handle in range(1, 5000):
        queue.push(request(handle, 0, 5, 0))
        queue.take(queue.shortest(), 5.0)  # type: ignore[arg-type]
    rank = queue._queues[0]
    assert len(rank._tenants[0]._heap) <= 66
    assert len(rank.shortest._heap) <= 66
    for handle in range(5000, 9000):
        queue.push(request(handle, 0, 1000, 0))
        queue.take(queue.head(), 5.0)  # type: ignore[arg-type]
    assert len(queue._queues[0].shortest._heap) <= 66


def test_only_a_few_priorities_are_searched() -> None:
    queue = WaitingQueue()
    for handle in range(100):
        queue.push(request(handle, handle, 5, 0))
    assert [r.priority for r in queue.shortest_by_priority()] == [0, 1, 2, 3]


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
