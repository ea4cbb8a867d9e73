"""Which requests may go ahead of the head of the queue: short prompts, those that fit, higher priorities, tenants in
turn."""

from __future__ import annotations

import math
from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from list_device import ListEngine

from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.runner.iteration.batch import StepResult
from weft.engine.scheduling import fair_queue
from weft.engine.scheduling.admission import OutputLengths
from weft.engine.scheduling.fairness import MAX_OVERTAKEN, MAX_PREEMPTED, Fairness
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.sampling import SamplingParams


class Clock:
    """A scheduler without a device. Time is counted in iterations and in computed tokens."""

    def __init__(
        self, share: float, *, budget: int = 512, slots: int = 64, pages: int = 2000, prefix_caching: bool = False
    ) -> None:
        self.scheduler = Scheduler(
            SlotTable(slots, 2048, 16), PagePool(pages, 16, PrefixIndex("m")), max_num_batched_tokens=budget,
            prefix_caching=prefix_caching, fairness=Fairness(share),
        )  # fmt: skip
        self.budget = budget
        self.scheduler.output_lengths = OutputLengths(mean=0.0, weight=1e30)
        self.iterations = self.tokens = 0
        self.requests: list[Request] = []
        self.first: dict[int, int] = {}
        """iteration of the first token, by handle"""
        self.computed: dict[int, int] = {}
        """prompt tokens of the last iteration, by handle"""

    def add(self, prompt: int, output: int, priority: int = 0, tenant: int = 0, precedence: int = 0) -> Request:
        request = self.made(prompt, output, priority, tenant, precedence)
        self.scheduler.add(request)
        return request

    def made(self, prompt: int, output: int, priority: int = 0, tenant: int = 0, precedence: int = 0) -> Request:
        handle = len(self.requests)
        request = Request(
            handle=handle, token_ids=np.zeros(prompt, np.int32), prompt_len=prompt,
            params=SamplingParams(max_tokens=output), max_total_tokens=prompt + output, priority=priority,
            order=handle, arrival=0.0, salt="", stop_ids=(1,), seed=0, tenant=tenant,
            precedence=precedence,
        )  # fmt: skip
        self.requests.append(request)
        return request

    def step(self) -> bool:
        batch = self.scheduler.schedule(self.iterations + 1)
        if batch is None:
            return False
        self.iterations += 1
        self.tokens += batch.num_tokens
        self._check(batch.num_tokens)
        handles = self.scheduler.slots.handle[batch.slots[batch.num_decodes :]].tolist()
        self.computed = dict(zip(handles, batch.query_len[batch.num_decodes :].tolist(), strict=True))
        events = self.scheduler.commit(StepResult(batch, np.full(len(batch.sampled_rows), 7, np.int32), None, (), 0.0))
        for started in events.started:
            self.first[started.handle] = self.iterations
        return True

    def _check(self, num_tokens: int) -> None:
        scheduler = self.scheduler
        queue, s = scheduler._waiting, scheduler.slots
        if num_tokens < self.budget:
            assert not len(s.prefilling()), "a prompt waits beside room for it"
            assert not len(queue) or not s.num_open or queue.blocked == "pages"

    def run(self, until: Request | None = None, limit: int = 5000) -> None:
        for _ in range(limit):
            if until.ended if until is not None else not self.scheduler.num_requests:
                return
            assert self.step(), "nothing can run, and somebody waits"
        raise AssertionError("somebody starves")

    def waits(self, requests: list[Request], since: int) -> float:
        """Median number of iterations to the first token."""
        return median(self.first[r.handle] - since for r in requests)


def after_long_prompts(share: float) -> tuple[float, Clock]:
    clock = Clock(share)
    for _ in range(20):
        clock.add(1900, 40)
    for _ in range(3):
        clock.step()
    since = clock.iterations
    shorts = [clock.add(20, 8) for _ in range(10)]
    clock.run()
    return clock.waits(shorts, since), clock


def test_short_prompts_after_long_ones_wait_at_most_twice_as_long_as_with_decodes() -> None:
    alone = Clock(0.25)
    running = [alone.add(1900, 40) for _ in range(20)]
    while len(alone.first) < len(running):
        alone.step()
    since = alone.iterations
    shorts = [alone.add(20, 8) for _ in range(10)]
    alone.run()
    wait, clock = after_long_prompts(0.25)
    in_turn, as_they_came = after_long_prompts(0.0)
    assert wait <= 2 * alone.waits(shorts, since)
    assert in_turn > 70, "first come, first served they wait for all the long ones"
    assert clock.tokens == as_they_came.tokens
    assert clock.iterations <= 1.03 * as_they_came.iterations


@pytest.mark.parametrize("length", [1, 20, 100, 400])
def test_endless_short_prompts_leave_long_ones_their_share(length: int) -> None:
    clock = Clock(0.25, slots=2000, pages=20_000)
    long = clock.add(1900, 1)
    for _ in range(6):
        if long.ended:
            break
        for _ in range(2 + 128 // length):
            clock.add(length, 1)
        clock.step()
        assert clock.computed[long.handle] >= min(384, 1900 - 384 * (clock.iterations - 1))
    assert long.ended


@pytest.mark.parametrize(("share", "ended"), [(0.0, [0, 2]), (0.25, [2, 0]), (0.5, [2, 0])])
def test_without_a_share_requests_run_in_order_of_arrival(share: float, ended: list[int]) -> None:
    clock = Clock(share, budget=40)
    for prompt in (200, 200, 8):
        clock.add(prompt, 1)
    clock.run()
    assert [handle for handle in clock.first if handle != 1] == ended


def test_the_shortest_of_the_best_priority_has_the_share() -> None:
    clock = Clock(0.25, budget=40)
    clock.add(100, 1, priority=1)
    clock.add(60, 1)
    clock.add(30, 1)
    clock.add(4, 1, priority=1)
    clock.step()
    assert clock.computed == {2: 10, 1: 30}
    clock.run()


def test_with_an_empty_queue_the_share_goes_to_the_shortest_running_prompt() -> None:
    clock = Clock(0.25, budget=40)
    clock.add(200, 1)
    clock.add(60, 1)
    for _ in range(3):
        clock.step()
        assert clock.computed == {0: 30, 1: 10}
    clock.run()


def test_a_share_too_small_for_a_chunk_goes_to_the_head() -> None:
    engine = ListEngine(64, budget=8, chunk_step=8, prefix_caching=False, fairness=Fairness(0.5))
    long = engine.add([5] * 32, 1)
    for k in range(4):
        engine.add([6], 1)
        assert engine.step() == [long.handle], k
    engine.run()


def test_no_slot_is_given_early_to_a_request_that_gets_no_chunk() -> None:
    engine = ListEngine(100, slots=4, budget=32, chunk_step=8, prefix_caching=False)
    for length in (40, 40):
        engine.add([5] * length, 1)
    shorts = [engine.add([6] * 5, 1) for _ in range(2)]
    engine.launch()
    assert [r.waiting for r in shorts] == [False, True]
    engine.complete()
    engine.run()


# -- memory


def test_smaller_requests_overtake_a_head_that_lacks_pages_a_few_times() -> None:
    clock = Clock(0.0, pages=101)
    running = clock.add(1200, 60)
    clock.step()
    clock.step()
    clock.step()
    head = clock.add(1000, 1)
    small = [clock.add(10, 200) for _ in range(MAX_OVERTAKEN + 4)]
    for _ in range(6):
        clock.step()
    assert [r.waiting for r in small] == [False] * MAX_OVERTAKEN + [True] * 4
    assert (head.waiting, head.overtaken, clock.scheduler.fairness.overtaken) == (True, MAX_OVERTAKEN, MAX_OVERTAKEN)
    clock.run(until=running)
    clock.step()
    assert not head.waiting, "once passed so often, it is the next"
    clock.run()


def test_a_lower_priority_that_fits_overtakes_a_head_that_lacks_pages() -> None:
    clock = Clock(0.25, pages=101)
    clock.add(1200, 60)
    for _ in range(3):
        clock.step()
    head = clock.add(1000, 1, priority=-100)
    small = [clock.add(10, 2, priority=100) for _ in range(5)]
    for _ in range(4):
        clock.step()
    assert (head.waiting, [r.ended for r in small]) == (True, [True] * 5)
    clock.run()


# -- slots


def test_when_slots_are_scarce_the_shortest_get_their_share() -> None:
    clock = Clock(0.25, slots=1)
    for _ in range(8):
        clock.add(50, 3)
    clock.step()
    for _ in range(8):
        clock.add(20, 3)
    clock.run()
    order = [handle >= 8 for handle in clock.first]
    assert order[:9] == [False] * 4 + [True] + [False] * 3 + [True]


def test_a_higher_priority_preempts_the_youngest_of_the_lowest() -> None:
    engine = ListEngine(64, slots=3, prefix_caching=False)
    for priority in (2, 1, 2):
        engine.add([5 + priority] * 5, 9, priority=priority)
    engine.step()
    engine.step()
    better = engine.add([9] * 3, 2, priority=0)
    assert better.handle in engine.step()
    assert [r.waiting for r in engine.requests] == [False, False, True, False]
    assert engine.scheduler.fairness.preempted == engine.scheduler.preemptions == 1
    engine.run()
    assert [len(tokens) for tokens in engine.output.values()] == [9, 9, 9, 2]
    assert engine.scheduler.preemptions == 1


@pytest.mark.parametrize(("priority", "preempt"), [(1, True), (2, True), (0, False)])
def test_no_slot_is_preempted_by_an_equal_or_lower_priority_or_if_disabled(priority: int, preempt: bool) -> None:
    engine = ListEngine(64, slots=1, prefix_caching=False, fairness=Fairness(preempt=preempt))
    engine.add([5] * 5, 9, priority=1)
    engine.step()
    engine.add([9] * 3, 2, priority=priority)
    engine.run()
    assert engine.started == [0, 1]
    assert engine.scheduler.preemptions == 0


def test_no_more_slots_are_preempted_than_needed_and_none_while_one_is_coming() -> None:
    engine = ListEngine(64, slots=4, prefix_caching=False)
    for _ in range(4):
        engine.add([5] * 5, 9, priority=1)
    engine.step()
    engine.launch()
    for _ in range(2):
        engine.add([9] * 3, 2)
    engine.launch()
    assert engine.scheduler.fairness.preempted == 2
    engine.launch()
    assert engine.scheduler.fairness.preempted == 2, "their slots are held by the fence of a launched step"
    while engine.launched:
        engine.complete()
    engine.run()


def test_a_request_is_preempted_a_few_times_and_then_keeps_its_slot() -> None:
    engine = ListEngine(64, slots=1)
    worse = engine.add([5] * 5, 30, priority=1)
    for _ in range(200):
        if worse.ended:
            break
        if worse.slot >= 0:
            engine.add([9] * 3, 2)
        engine.step()
        engine.step()
    assert worse.preempted == MAX_PREEMPTED
    assert worse.ended
    engine.run()


def test_if_the_youngest_was_preempted_often_the_next_is_preempted() -> None:
    engine = ListEngine(64, slots=3, prefix_caching=False)
    worse = [engine.add([5] * 5, 9, priority=1) for _ in range(3)]
    engine.step()
    worse[2].preempted = MAX_PREEMPTED
    engine.add([9] * 3, 2)
    engine.step()
    assert [r.waiting for r in worse] == [False, True, False]
    engine.run()


def test_no_request_takes_a_slot_preempted_for_a_head_that_lacks_pages() -> None:
    engine = ListEngine(12, slots=2, prefix_caching=False)
    engine.add([5] * 9, 12, priority=1, stop=-9)
    engine.add([6], 4, priority=1, stop=-9)
    engine.step()
    better = engine.add([7] * 20, 1)
    engine.step()
    assert engine.scheduler.fairness.preempted == 1
    assert better.waiting
    for _ in range(3):
        engine.step()
        assert engine.requests[1].waiting
    engine.run()


# -- tenants


def test_a_flooding_tenant_does_not_delay_another() -> None:
    clock = Clock(0.0, slots=2)
    for _ in range(60):
        clock.add(20, 4, tenant=1)
    clock.step()
    others = [clock.add(20, 4, tenant=2) for _ in range(5)]
    clock.run()
    order = list(clock.first)
    assert max(order.index(r.handle) for r in others) <= 2 + 2 * len(others)


def test_turns_are_counted_in_tokens() -> None:
    clock = Clock(0.0, slots=1)
    clock.add(5, 1)
    clock.step()
    for _ in range(10):
        clock.add(400, 1, tenant=1)
    for _ in range(40):
        clock.add(99, 1, tenant=2)
    clock.run()
    tenants = [clock.requests[handle].tenant for handle in list(clock.first)[1:26]]
    assert tenants.count(2) == 20
    assert tenants.count(1) == 5


def test_output_beyond_the_expected_length_is_charged() -> None:
    clock = Clock(0.0, slots=1)
    clock.add(5, 1)
    clock.step()
    for _ in range(10):
        clock.add(10, 90, tenant=1)
    for _ in range(30):
        clock.add(10, 10, tenant=2)
    clock.run()
    tenants = [clock.requests[handle].tenant for handle in list(clock.first)[1:21]]
    assert tenants.count(1) in (3, 4)


def test_precedences_are_served_in_order_for_any_tenant_and_priority() -> None:
    clock = Clock(0.25, slots=1)
    for precedence, tenant in ((2, 1), (1, 1), (1, 2), (0, 1), (1, 1), (2, 2)):
        clock.add(20, 2, priority=-precedence, tenant=tenant, precedence=precedence)
    clock.run()
    assert [clock.requests[h].precedence for h in clock.first] == [0, 1, 1, 1, 2, 2]


def test_priorities_order_only_the_requests_of_their_tenant() -> None:
    clock = Clock(0.0, slots=1)
    for priority in (3, 1, 2, 0):
        clock.add(20, 2, priority=priority, tenant=1)
    for _ in range(4):
        clock.add(20, 2, priority=9, tenant=2)
    clock.run()
    order = [(clock.requests[h].tenant, clock.requests[h].priority) for h in clock.first]
    assert order == [(1, 0), (2, 9), (1, 1), (2, 9), (1, 2), (2, 9), (1, 3), (2, 9)]


def test_a_long_prompt_gets_its_turn_despite_short_ones_of_its_tenant_out_of_turn() -> None:
    clock = Clock(0.25, budget=100, slots=200, pages=5000)
    long = clock.add(600, 1, tenant=0)
    for _ in range(40):
        if long.ended:
            break
        for tenant in range(1, 6):
            clock.add(100, 1, tenant=tenant)
        for _ in range(3):
            clock.add(10, 1, tenant=0)
        clock.step()
    # Its turn comes after at most one request of each other tenant; then it gets three quarters of the iterations.
    assert long.ended


# -- no starvation

Arrival = tuple[int, int, int]
ARRIVALS = st.tuples(st.integers(1, 300), st.integers(1, 12), st.integers(0, 2))


def longest_wait(clock: Clock, there: list[Arrival], tracked: Arrival, stream: list[Arrival], share: float) -> int:
    """Upper bound on the iterations until the tracked request ends (decision 20), if requests are computed in sequence.

    Ahead of it are its own tenant's earlier requests and, for each of these and for itself, the other tenants' for as
    many tokens as `FairQueue` allows. Each of these requests can be overtaken `MAX_OVERTAKEN` times.
    """
    everybody = [*there, tracked, *stream]
    slots = clock.scheduler.slots.num_slots
    in_turn = (1 - share) * (clock.budget - slots)
    # Prompt and output, of the request in turn and of those that must end for it; once more after a preemption.
    each = 2 * (math.ceil(max(p for p, _, _ in everybody) / in_turn) + 2 * max(o for _, o, _ in everybody) + 2)
    turns = 1 + sum(tenant == tracked[2] for _, _, tenant in there)
    others = len({tenant for _, _, tenant in everybody} - {tracked[2]})
    tokens = fair_queue.MAX_AHEAD + 2 * max(p + o for p, o, _ in everybody)
    return turns * (1 + others * math.ceil(tokens / min(p for p, _, _ in everybody))) * (1 + MAX_OVERTAKEN) * each


@given(
    there=st.lists(ARRIVALS, max_size=6),
    tracked=st.tuples(st.integers(1, 600), st.integers(1, 12), st.integers(0, 2)),
    stream=st.lists(ARRIVALS, min_size=1, max_size=8),
    several=st.booleans(),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.9]),
    slots=st.integers(1, 4),
)
@settings(deadline=None, derandomize=True)
def test_every_request_ends_while_others_keep_arriving(
    there: list[Arrival], tracked: Arrival, stream: list[Arrival], several: bool, share: float, slots: int
) -> None:
    if not several:
        there, stream = [(p, o, 0) for p, o, _ in there], [(p, o, 0) for p, o, _ in stream]
        tracked = *tracked[:2], 0
    clock = Clock(share, budget=64, slots=slots, pages=42)
    for prompt, output, tenant in there:
        clock.add(prompt, output, tenant=tenant)
    request = clock.add(*tracked[:2], tenant=tracked[2])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fair_queue, "MAX_AHEAD", 200)
        for k in range(longest_wait(clock, there, tracked, stream, share)):
            if request.ended:
                return
            prompt, output, tenant = stream[k % len(stream)]
            if clock.scheduler.num_waiting < 200:
                clock.add(prompt, output, tenant=tenant)
            assert clock.step(), "nothing can run, and somebody waits"
    raise AssertionError("it starves")
