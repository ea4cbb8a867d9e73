"""`--max-num-seqs auto`: the controller on simulated plants, its inputs, and the scheduler that obeys it."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
from harness import GREEDY, Harness
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from list_device import ListEngine

from weft.engine.config import Objective
from weft.engine.demo import MODEL_PATH
from weft.engine.scheduling.slot_limit import BACKOFF, LONG, START, SlotLimitControl, Window, _Level
from weft.engine.scheduling.slot_limit_keeper import Pace

SECONDS = 300
"""of a phase"""
SETTLED = 60
RAMP = 10
"""seconds of a phase in which it may be late: no request is preempted, and each cut at most halves the limit"""


@dataclass(frozen=True)
class Plant:
    """A load curve: the time between tokens / its limit is flat up to a knee and grows after it."""

    floor: float
    knee: float
    power: int
    """how sharp the knee is"""
    noise: float
    """standard deviation of a window's logarithm"""
    life: float
    """mean seconds of a request: how fast slots are freed"""

    def strain(self, running: float) -> float:
        return self.floor * float((1 + (running / self.knee) ** self.power) ** (1 / self.power))

    def rate(self, running: float) -> float:
        return running / self.strain(running)

    def best(self, capacity: int) -> int:
        """The fixed limit of the highest throughput whose windows keep the objective 99 times of 100."""
        kept = [b for b in range(1, capacity + 1) if math.log(self.strain(b)) <= -2.33 * self.noise]
        return max(kept, key=self.rate)


@dataclass
class Phase:
    best: int
    late: int
    """windows above the objective, except the first ten"""
    limits: int
    """limits that it served at in these windows; one it returns to counts again"""
    throughput: float
    """throughput relative to that of the best fixed limit, including the ramp"""
    moves: int
    """changes of the limit after its first minute"""


def serve(control: SlotLimitControl, plants: list[Plant], seed: int) -> list[Phase]:
    """One phase per plant; the queue is never empty."""
    rng, running, phases = random.Random(seed), 0.0, []
    for plant in plants:
        late = moves = 0
        limits = 1
        tokens = 0.0
        for second in range(SECONDS):
            num_slots = control.limit
            running = num_slots if running < num_slots else max(num_slots, running - running / plant.life)
            strain = plant.strain(running) * math.exp(rng.gauss(0, plant.noise))
            tokens += plant.rate(running)
            late += second >= RAMP and strain > 1
            reported = plant.rate(running) * math.exp(rng.gauss(0, plant.noise))
            control.observe(Window(strain, running, reported, short=True))
            moves += second >= SETTLED and control.limit != num_slots
            limits += second >= RAMP and control.limit != num_slots
        best = plant.best(control.capacity)
        phases.append(Phase(best, late, limits, tokens / (SECONDS * plant.rate(best)), moves))
    return phases


def a_plant(life: float, noise: float) -> st.SearchStrategy[Plant]:
    return st.builds(
        Plant,
        floor=st.floats(0.1, 0.4),
        knee=st.floats(math.log(8), math.log(256)).map(math.exp),
        power=st.sampled_from([1, 2, 4]),
        noise=st.just(noise),
        life=st.just(life),
    )


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    st.tuples(st.floats(0.5, 2.0), st.sampled_from([0.0, 0.005, 0.01])).flatmap(
        lambda of: st.tuples(*[a_plant(*of)] * 3)
    ),
    st.sampled_from([256, 1024]),
    st.integers(0, 1000),
)
def test_two_abrupt_shifts_keep_the_objective_and_the_throughput(
    plants: tuple[Plant, ...], capacity: int, seed: int
) -> None:
    bests = [plant.best(capacity) for plant in plants]
    # No request is preempted: lowering the limit takes as long as requests take to end.
    assume(max(a / b for a, b in pairwise(bests)) < 6)
    for phase in serve(SlotLimitControl(capacity), list(plants), seed):
        # It leaves a limit at the second late window, and forgets one in `LONG`.
        assert phase.late <= 2 * phase.limits + SECONDS // LONG, phase
        assert phase.throughput >= 0.95, phase
        assert phase.moves <= 6, phase


def test_one_window_in_a_thousand_is_late() -> None:
    """On random plants, always the same. Above, noise alone may make any number of windows late."""
    late = windows = 0
    for seed in range(150):
        rng = random.Random(seed)
        life, noise = rng.uniform(0.5, 2.0), rng.choice([0.005, 0.01])
        plants = [
            Plant(rng.uniform(0.1, 0.4), math.exp(rng.uniform(2, 5.5)), rng.choice([1, 2, 4]), noise, life)
            for _ in range(3)
        ]
        bests = [plant.best(1024) for plant in plants]
        if max(a / b for a, b in pairwise(bests)) < 6:
            for phase in serve(SlotLimitControl(1024), plants, seed):
                assert phase.late <= 0.01 * (SECONDS - RAMP), (seed, phase)
                late += phase.late
                windows += SECONDS - RAMP
    assert windows > 90_000
    assert late / windows < 0.001


def test_without_noise_it_converges() -> None:
    control = SlotLimitControl(1024)
    phases = serve(control, [Plant(0.3, 60.0, 2, 0.0, 1.0)] * 3, 0)
    assert [phase.moves for phase in phases[1:]] == [0, 0]
    assert phases[-1].best - 4 <= control.limit <= phases[-1].best


def feed(control: SlotLimitControl, count: int, strain: float, rate: float = 100.0, **more: object) -> None:
    for _ in range(count):
        num_slots = control.limit
        control.observe(Window(strain, **{"running": float(num_slots), "rate": rate, "short": True, **more}))  # type: ignore[arg-type]


def test_the_limit_is_not_raised_while_the_queue_is_empty() -> None:
    control = SlotLimitControl(1024)
    feed(control, 50, 0.1, running=3.0, short=False)
    assert control.limit == START


def test_a_window_with_too_few_samples_changes_nothing() -> None:
    control = SlotLimitControl(1024)
    feed(control, 50, math.nan)
    assert control.limit == START


def test_one_late_second_is_ignored() -> None:
    control = SlotLimitControl(64, start=64)
    feed(control, 20, 0.7)
    feed(control, 1, 1.1)
    feed(control, 20, 0.7)
    assert control.limit == 64


def test_lateness_that_fewer_slots_do_not_reduce_is_ignored() -> None:
    """Time between tokens caused by long prompts, or by another process: it costs no throughput."""
    control = SlotLimitControl(256, start=128)
    feed(control, 60, 1.5)
    assert control.changes["out_of_reach"] == 1
    assert control.limit == 128


def test_a_harmful_raise_is_reverted() -> None:
    control = SlotLimitControl(256, start=32)
    for _ in range(40):
        num_slots = control.limit
        rate = 100.0 if num_slots <= 64 else 50.0
        control.observe(Window(0.3 + num_slots / 1000, float(num_slots), rate, short=True))
    assert control.changes["worse"] == 1
    assert control.limit == 64


def test_a_limit_that_was_late_is_retried_less_and_less_often() -> None:
    control, seen = SlotLimitControl(64, start=40), []
    for _ in range(BACKOFF * 40):
        num_slots = control.limit
        seen.append(num_slots)
        # Looks like headroom up to 39, and is late at 40: a line through two points does not predict that.
        control.observe(Window(0.5 if num_slots < 40 else 1.04, float(num_slots), 100.0, short=True))
    assert sum(a < b for a, b in pairwise(seen)) < 20
    assert sum(num_slots >= 40 for num_slots in seen) < 0.02 * len(seen)


def test_a_cut_that_stays_late_drops_what_smaller_limits_showed_before() -> None:
    """A shift right after a change has nothing at this limit to compare with."""
    control = SlotLimitControl(256, start=98)
    control._levels = {limit: _Level(math.log(limit / 100), 100.0, n=9) for limit in (16, 32, 64, 88, 92, 94)}
    windows = 0
    while control.limit > 30:
        feed(control, 1, control.limit / 30)
        windows += 1
    assert windows < RAMP


def test_two_late_windows_after_a_raise_revert_it_even_if_it_still_settles() -> None:
    control = SlotLimitControl(64, start=16)
    while control.limit == 16:
        feed(control, 1, 0.5)
    feed(control, 2, 1.005)
    assert control.limit < 32
    assert control.changes["late"] == 1


def test_noise_between_two_limits_near_the_objective_does_not_double_the_limit() -> None:
    control = SlotLimitControl(1024, start=93)
    control._settling, control._variance = 0, 0.01**2
    control._levels = {91: _Level(math.log(0.94), 100.0, n=7)}
    feed(control, 2, 0.93)
    assert 93 < control.limit <= 100


def test_lowering_the_limit_preempts_no_request_and_slots_are_not_refilled() -> None:
    engine = ListEngine(400, slots=6, prefix_caching=False)
    scheduler = engine.scheduler
    for _ in range(12):
        engine.add([5, 6, 7], 12)
    engine.step()
    assert scheduler.num_running == 6
    scheduler.limit_running(2)
    most = 6
    while scheduler.num_requests:
        engine.step()
        assert scheduler.num_running <= most
        most = max(2, scheduler.num_running)
    assert scheduler.preemptions == 0
    assert most == 2
    engine.run()


def test_a_higher_priority_waits_rather_than_preempt_for_no_gain() -> None:
    engine = ListEngine(400, slots=4, prefix_caching=False)
    worse = [engine.add([5, 6, 7], 8, priority=1) for _ in range(4)]
    engine.step()
    engine.scheduler.limit_running(2)
    better = engine.add([5, 6, 7], 2, priority=0)
    engine.step()
    assert all(request.slot >= 0 for request in worse)
    assert better.slot < 0
    engine.run()
    assert engine.scheduler.preemptions == 0


def test_a_raised_limit_is_used_at_once() -> None:
    engine = ListEngine(400, slots=6, prefix_caching=False)
    engine.scheduler.limit_running(1)
    for _ in range(6):
        engine.add([5, 6, 7], 20)
    engine.step()
    assert engine.scheduler.num_running == 1
    assert engine.scheduler.short_of_slots
    engine.scheduler.limit_running(6)
    engine.step()
    assert engine.scheduler.num_running == 6
    engine.run()


def test_a_late_limit_with_a_mean_below_a_smaller_one_is_cut_by_one() -> None:
    """The line through the two levels never reaches the objective."""
    control = SlotLimitControl(64, start=20)
    control._levels = {10: _Level(-0.5, 100.0, n=5)}
    assert control._fewer(_Level(-0.6, 100.0, n=5, late=2)) == 19


@pytest.mark.parametrize("limit", [0, 7])
def test_limits_outside_the_slots_are_refused(limit: int) -> None:
    with pytest.raises(ValueError, match="must be 1 to 6"):
        ListEngine(40, slots=6).scheduler.limit_running(limit)


def test_gaps_are_those_between_a_requests_own_tokens() -> None:
    engine = ListEngine(400, slots=4, prefix_caching=False)
    pace = Pace([Objective.parse("itl:max:2s")], engine.scheduler.slots, 0.0)
    engine.add([5, 6, 7], 30)
    gaps: list[list[float]] = []
    for second in range(1, 6):
        engine.launch()
        gaps.append(pace.committed(engine.launched[0], float(second)).tolist())
        engine.complete()
        if second == 2:
            engine.add([5, 6], 30)
        if second == 3:
            engine.scheduler._preempt_one()  # the younger one
    assert gaps == [[], [1.0], [1.0], [1.0], [1.0, 1.0]]


def test_a_window_ends_with_enough_gaps_to_have_one_beyond_the_percentile() -> None:
    pace = Pace([Objective.parse("itl:p99:10ms")], ListEngine(40).scheduler.slots, 0.0)
    assert pace.window(np.full(50, 0.02), 4, True, 1.5) is None
    window = pace.window(np.full(50, 0.02), 2, True, 2.0)
    assert window is not None
    assert (window.strain, window.running, window.rate, window.short) == (pytest.approx(2.0), 3.0, 50.0, True)
    assert pace.window(np.full(3, 0.02), 4, True, 2.5) is None
    late = pace.window(np.full(3, 0.02), 4, False, 8.0)
    assert late is not None
    assert math.isnan(late.strain)


def test_an_engine_starts_with_few_slots_and_reports_their_number() -> None:
    harness = Harness(MODEL_PATH, max_num_seqs="auto:40", slo=["itl:mean:1us"], page_size=16, num_pages=200)
    assert harness.engine.describe().max_num_seqs == 40
    for _ in range(30):
        harness.add([5, 6, 7], max_tokens=20, ignore_eos=True, **GREEDY)
    outputs = harness.step() or harness.step()
    assert outputs is not None
    assert (outputs.stats.scheduler.slot_limit, outputs.stats.scheduler.running) == (START, START)
    assert set(outputs.stats.scheduler.slot_limit_changes.values()) == {0}
    harness.run()
