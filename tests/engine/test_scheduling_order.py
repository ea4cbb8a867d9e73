"""The order of service and preemption: the highest priority (the lowest number) first, then the first to arrive."""

from __future__ import annotations

import pytest
from list_device import ListEngine

from weft.engine.scheduling.request import Request


def waiting(engine: ListEngine) -> list[int]:
    return [r.handle for r in engine.requests if r.waiting]


def test_a_higher_priority_is_served_first_and_equal_ones_in_order_of_arrival() -> None:
    engine = ListEngine(16, slots=1, prefix_caching=False)
    for priority in (1, 0, 2, 0, -3, 1):
        engine.add([5, 6, 7], 2, priority=priority)
    engine.run()
    assert engine.started == [4, 1, 3, 0, 5, 2]


def test_a_running_prompt_continues_before_a_higher_priority_starts() -> None:
    # Prompts are cut at multiples of 4. The remainder of the first budget admits a request, but gives it no token.
    engine = ListEngine(32, budget=6, chunk_step=4, prefix_caching=False)
    engine.add([1] * 5, 1)
    worse = engine.add([2] * 8, 1, priority=1)
    assert engine.step() == [0]
    assert worse.slot >= 0
    assert engine.step() == [1]  # four of its eight tokens; two are left of the budget
    better = engine.add([3] * 8, 1, priority=0)
    engine.launch()
    assert engine.launched.pop().query_len.tolist() == [4]
    assert better.slot >= 0


def test_running_prompts_continue_in_order_of_priority_then_of_arrival() -> None:
    engine = ListEngine(32, slots=6, budget=64, prefix_caching=False)
    requests = [engine.add([1] * 8, 1, priority=priority) for priority in (2, 1, 1, 0)]
    # Admitted, without a computed token, as while their cached prefixes were still loading.
    for _ in requests:
        assert engine.scheduler._admit(engine.scheduler._waiting.head()) is not None  # type: ignore[arg-type]
    assert [r.handle for r in sorted(requests, key=lambda r: r.slot)] == [3, 1, 2, 0]
    swap_rows(engine, requests[3], requests[0])
    engine.scheduler.max_num_batched_tokens = 20
    assert engine.launch() == [3, 1, 2]
    assert engine.launched[0].query_len.tolist() == [8, 8, 4]


def swap_rows(engine: ListEngine, a: Request, b: Request) -> None:
    """Swap the rows of two requests that have not started, so that rows do not reflect arrival."""
    s = engine.scheduler.slots
    for column in (s.handle, s.priority, s.order, s.page_table, s.num_pages, s.token_ids):
        column[[a.slot, b.slot]] = column[[b.slot, a.slot]]
    s.request[a.slot], s.request[b.slot] = b, a
    a.slot, b.slot = b.slot, a.slot


@pytest.mark.parametrize(
    ("priorities", "victims"),
    [
        ((0, 0, 0), [2, 1, 0]),
        ((1, 0, 0), [0, 2, 1]),
        ((0, 1, 1), [2, 1, 0]),
        ((2, 1, 2), [2, 0, 1]),
        ((-1, -2, -1), [2, 0, 1]),
    ],
)
def test_the_youngest_of_the_lowest_priority_is_preempted(priorities: tuple[int, ...], victims: list[int]) -> None:
    engine = ListEngine(32, prefix_caching=False)
    for priority in priorities:
        engine.add([5, 6, 7], 4, priority=priority)
    engine.step()
    gone: list[int] = []
    while engine.scheduler.num_running:
        engine.scheduler._preempt_one()
        (new,) = set(waiting(engine)) - set(gone)
        gone.append(new)
    assert gone == victims
    assert engine.scheduler.preemptions == 3
    engine.run()


def test_when_memory_runs_out_the_lowest_priority_is_preempted_and_resumes_last() -> None:
    engine = ListEngine(9, prefix_caching=False)
    # Each holds two pages of two tokens; all three want a third one, and later a fourth.
    for priority in (0, 2, 1):
        engine.add([5, 6, 7], 5, priority=priority, stop=-9)
    while not engine.scheduler.preemptions:
        assert engine.step()
    assert waiting(engine) == [1]
    last = engine.add([5, 6, 7], 5, priority=3)
    engine.run()
    assert [len(tokens) for tokens in engine.output.values()] == [5, 5, 5, 5]
    assert engine.requests[1].ended
    assert last.ended
    assert engine.started[-1] == last.handle


def test_a_preempted_request_stays_ahead_of_later_ones() -> None:
    engine = ListEngine(16, slots=1, prefix_caching=False)
    first = engine.add([5, 6, 7], 6)
    engine.step()
    engine.step()
    later = engine.add([5, 6, 7], 1)
    engine.scheduler._preempt_one()
    assert engine.step() == [first.handle]
    engine.run()
    assert engine.started == [first.handle, later.handle]


def test_more_decodes_than_the_budget_are_cut_to_the_first_ones() -> None:
    engine = ListEngine(32, slots=5, prefix_caching=False)
    for priority in (1, 0, 2, 1, 0):
        engine.add([5, 6, 7], 9, priority=priority)
    engine.step()
    engine.scheduler.max_num_batched_tokens = 3
    # Rows in the slot table's order: the two of priority 0 and the older one of priority 1.
    assert sorted(engine.step()) == [0, 1, 4]
    engine.scheduler.max_num_batched_tokens = 5
    assert sorted(engine.step()) == [0, 1, 2, 3, 4]
    engine.run()


def test_decodes_precede_prompts_and_leave_them_the_rest_of_the_budget() -> None:
    engine = ListEngine(32, budget=8, prefix_caching=False)
    engine.add([5, 6, 7], 9)
    engine.add([6, 7, 8], 9)
    engine.step()
    engine.add([1] * 20, 1, priority=-1)
    handles = engine.launch()
    assert handles[-1] == 2
    assert engine.launched[0].query_len.tolist() == [1, 1, 6]
    engine.complete()
    engine.run()


def test_no_request_is_admitted_to_a_full_iteration() -> None:
    engine = ListEngine(32, budget=4, prefix_caching=False)
    first, second = engine.add([5, 6, 7, 8], 2), engine.add([6, 7, 8, 9], 2)
    assert engine.step() == [first.handle]
    assert (second.waiting, engine.pool.num_held) == (True, 2)
    engine.run()


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"capacity": 32, "slots": 1}, "slots"),
        ({"capacity": 3}, "pages"),
        ({"capacity": 3, "budget": 5}, "pages"),
        ({"capacity": 32, "budget": 4}, "tokens"),
        ({"capacity": 32, "budget": 6, "chunk_step": 4}, "tokens"),
    ],
)
def test_the_queue_records_what_its_head_lacked(options: dict[str, int], reason: str) -> None:
    engine = ListEngine(prefix_caching=False, **options)  # type: ignore[arg-type]
    for _ in range(4):
        engine.add([5, 6, 7, 8], 2)
    engine.step()
    queue = engine.scheduler.stats().queue
    assert {name for name, count in queue.items() if count} == {reason}
    assert sum(queue.values()) == engine.scheduler.num_waiting > 0
    engine.run()


def test_siblings_wait_for_their_leader_only_until_its_prompt_is_computed() -> None:
    engine = ListEngine(32)
    engine.add([5, 6, 7, 8, 9], 4)
    held = engine.add([5, 6, 7, 8, 9], 1, leader=0)
    assert held.held
    assert engine.step() == [0]
    assert not held.held
    late = engine.add([5, 6, 7, 8, 9], 1, leader=0)
    assert not late.held
    assert sorted(engine.step()) == [0, 1, 2]
    assert [held.hits.gpu, late.hits.gpu] == [4, 4]
    engine.run()


def test_without_prefix_caching_no_sibling_waits() -> None:
    engine = ListEngine(32, prefix_caching=False)
    engine.add([5, 6, 7, 8, 9], 4)
    assert not engine.add([5, 6, 7, 8, 9], 1, leader=0).held
    engine.run()


def test_a_sibling_that_can_share_no_page_does_not_wait() -> None:
    engine = ListEngine(32)
    engine.add([5, 6], 4)
    assert not engine.add([5, 6], 1, leader=0).held, "a page of two tokens leaves none of them to compute"
    engine.add([5, 6, 7], 4)
    assert engine.add([5, 6, 7], 1, leader=2).held
    engine.run()
