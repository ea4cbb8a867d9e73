"""`--itl-slo`: the forecast and the limit on simulated devices, the scheduler that obeys them, and an engine."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, Harness
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule
from list_device import ListEngine
from pydantic import ValidationError

from weft.engine.config import EngineConfig, Objective
from weft.engine.demo import MODEL_PATH
from weft.engine.runner.iteration.batch import StepResult
from weft.engine.runner.iteration.cost_shares import Costs
from weft.engine.scheduling.chunk_keeper import LEAST_SHARE, ChunkKeeper
from weft.engine.scheduling.chunk_limit import ChunkLimit
from weft.engine.scheduling.iteration_cost import SUDDEN, IterationCost, Load
from weft.engine.scheduling.slot_limit import SlotLimitControl
from weft.engine.scheduling.slot_limit_keeper import Pace, SlotLimitKeeper

LAYERS = 32
COSTS = Costs(16e9, 16e9 / 150, 4096.0, 109.0, {None: LAYERS})
"""about Llama-3-8B in 16 bits on a GPU"""
MOST = 2048
P99 = Objective("itl", 99.0, 0.02)


@dataclass(frozen=True)
class Plant:
    """A device that differs from the forecast's model: other units, another knee, steps."""

    floor: float
    """seconds of an iteration of few tokens"""
    knee: int
    slope: float
    """ratio of the time to that of a straight line from zero through the knee"""
    attention: float
    """compared with the time at 4 TB/s and 500 TFLOP/s"""
    steps: int
    """tokens are padded up to multiples of this"""
    noise: float
    """standard deviation of the logarithm"""
    hiccups: float
    """fraction of iterations that take 2 to 6 times as long"""

    def seconds(self, load: Load) -> float:
        tokens = -(-load.tokens // self.steps) * self.steps
        dense = self.floor * (1 + self.slope * max(0, tokens - self.knee) / self.knee)
        return dense + self.attention * (load.seen * 4096 / 4e12 + load.pairs * 16384 / 5e14)

    def measured(self, load: Load, rng: random.Random) -> float:
        hiccup = rng.uniform(2, 6) if rng.random() < self.hiccups else 1.0
        return self.seconds(load) * math.exp(rng.gauss(0, self.noise)) * hiccup


PLANTS = st.builds(
    Plant,
    floor=st.floats(0.004, 0.012),
    knee=st.sampled_from([64, 150, 300]),
    slope=st.floats(0.4, 1.2),
    attention=st.floats(0.5, 2.0),
    steps=st.sampled_from([1, 1, 64]),
    noise=st.sampled_from([0.0, 0.01, 0.03]),
    hiccups=st.sampled_from([0.0, 0.003]),
)


@dataclass
class Phase:
    late: int
    """limited iterations that exceed the limit by more than noise"""
    cut: int
    sizes: list[float]
    """tokens of prompts, relative to those that would just have kept the limit without noise"""
    fewest: int


def serve(limit: ChunkLimit, plants: list[Plant], seed: int, iterations: int = 260) -> list[Phase]:
    """Endless prompts with 64 decodes of 1,000 tokens; one phase per plant."""
    rng, phases = random.Random(seed), []
    for plant in plants:
        phase, context, left = Phase(0, 0, [], MOST), 0, 0
        for at in range(iterations):
            if not left:
                context, left = 0, rng.choice([300, 2000, 8000, 16000])
            decodes = Load(64 + rng.randint(-2, 2), 64e3 * LAYERS)
            room, want = limit.headroom(decodes, 0.0), min(left, MOST - decodes.tokens)
            fits = limit.fits(decodes, room.target, context, want)
            taken = min(want, max(fits, room.least))
            load = Load(decodes.tokens + taken, decodes.seen, limit.pairs(context, taken), 1)
            seconds = plant.measured(load, rng)
            cut = taken < want and fits >= room.least
            limit.observe(load, seconds, "slo" if cut else "")
            if taken < want:
                phase.fewest = min(phase.fewest, taken)
            if cut and at >= 60:
                phase.cut += 1
                phase.late += limit.limit < seconds < 1.6 * plant.seconds(load)
                phase.sizes.append(taken / best(plant, limit, decodes, context, want))
            context, left = context + taken, left - taken
        phases.append(phase)
    return phases


def best(plant: Plant, limit: ChunkLimit, decodes: Load, context: int, want: int) -> int:
    low, high = limit.least, want + 1
    while high - low > 1:
        middle = (low + high) // 2
        load = Load(decodes.tokens + middle, decodes.seen, limit.pairs(context, middle), 1)
        low, high = (middle, high) if plant.seconds(load) <= limit.limit else (low, middle)
    return low


def a_limit(objective: Objective = P99, cost: IterationCost | None = None) -> ChunkLimit:
    return ChunkLimit(objective, cost or IterationCost(COSTS), COSTS, least=128, most=MOST, patience=5.0)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(st.tuples(PLANTS, PLANTS), st.floats(1.6, 3.0), st.integers(0, 1000))
def test_iterations_keep_the_limit_and_are_nearly_as_large_as_it_allows(
    plants: tuple[Plant, Plant], room: float, seed: int
) -> None:
    least = max(plant.seconds(Load(64 + 128, 64e3 * LAYERS, 128 * 16e3 * LAYERS, 1)) for plant in plants)
    limit = a_limit(P99._replace(limit=room * least))
    for phase, plant in zip(serve(limit, list(plants), seed), plants, strict=True):
        assert phase.fewest >= 128
        if phase.cut < 50:
            continue
        assert phase.late <= 0.03 * phase.cut + 3, phase
        assert np.mean(phase.sizes) >= (0.75 if plant.noise < 0.03 and plant.steps == 1 else 0.5), phase
        assert np.std(phase.sizes[-100:]) <= 0.2, phase  # it does not swing


def seconds_kept(limit: ChunkLimit, seconds: float) -> float:
    """The share of seconds whose p99 keeps the limit, with endless prompts and iterations that sometimes vary by a
    tenth."""
    plant, rng = Plant(0.008, 150, 0.8, 1.0, 1, 0.01, 0.0), random.Random(5)
    decodes, window, kept, now = Load(400, 400 * 700.0 * LAYERS), list[float](), list[bool](), 0.0
    while now < seconds:
        taken = limit.fits(decodes, limit.headroom(decodes, 0.0).target, 0, MOST - decodes.tokens)
        load = Load(decodes.tokens + taken, decodes.seen, limit.pairs(0, taken), 1)
        took = plant.measured(load, rng) * (math.exp(rng.uniform(0.05, 0.15)) if rng.random() < 0.004 else 1.0)
        limit.observe(load, took, "slo")
        window.append(took)
        now += took
        if sum(window) >= 1.0:
            kept.append(float(np.percentile(window, 99)) <= limit.limit)
            window = []
    return float(np.mean(kept[10:]))


def test_each_second_keeps_a_percentile_objective() -> None:
    def kept(*, each_second: bool) -> float:
        objective = P99._replace(limit=0.04)
        cost = IterationCost(COSTS)
        return seconds_kept(
            ChunkLimit(objective, cost, COSTS, least=128, most=MOST, patience=5.0, each_second=each_second), 400.0
        )

    assert kept(each_second=True) >= 0.99 > kept(each_second=False)


def test_without_noise_the_size_converges() -> None:
    plant = Plant(0.006, 150, 0.8, 1.0, 1, 0.0, 0.0)
    limit = a_limit()
    serve(limit, [plant] * 3, 0)
    decodes = Load(64, 64e3 * LAYERS)
    sizes = []
    for _ in range(50):
        taken = limit.fits(decodes, limit.target, 4000, MOST)
        load = Load(64 + taken, decodes.seen, limit.pairs(4000, taken), 1)
        limit.observe(load, plant.seconds(load), "slo")
        sizes.append(taken)
    assert max(sizes) - min(sizes) <= 0.05 * min(sizes)
    assert 0.85 * best(plant, limit, decodes, 4000, MOST) <= sizes[-1] <= best(plant, limit, decodes, 4000, MOST)


def measured(cost: IterationCost, plant: Plant, times: int, chunk: int = 512, factor: float = 1.0) -> Load:
    load = Load(64 + chunk, 64e3 * LAYERS, chunk * 4e3 * LAYERS, 1 if chunk else 0)
    for _ in range(times):
        cost.observe(load, factor * plant.seconds(load))
    return load


STEADY = Plant(0.006, 150, 0.8, 1.0, 1, 0.0, 0.0)


def test_there_is_no_forecast_before_a_measurement() -> None:
    limit = a_limit()
    assert limit.cost.seconds(Load(1)) == math.inf
    room = limit.headroom(Load(64), 0.0)
    assert limit.fits(room.decodes, room.target, 0, 500) == 0
    assert room.least == 128  # prompts then get this


def test_one_measurement_gives_the_unit_of_all() -> None:
    cost = IterationCost(COSTS)
    cost.observe(Load(2048, 0.0, 2048 * 1024 * LAYERS, 1), 0.05)
    decodes = cost.seconds(Load(64, 64e3 * LAYERS))
    assert 0.001 < decodes < 0.02


@pytest.mark.parametrize("seconds", [0.0, -1.0, math.nan, math.inf])
def test_an_invalid_time_is_not_a_measurement(seconds: float) -> None:
    cost = IterationCost(COSTS)
    assert cost.observe(Load(10), seconds) == 0.0
    assert cost.measured == 0


def test_an_hour_of_decodes_does_not_erase_the_cost_of_prompts() -> None:
    cost = IterationCost(COSTS)
    load = measured(cost, STEADY, 100)
    before = cost.seconds(load)
    measured(cost, STEADY, 5000, chunk=0)
    assert cost.seconds(load) == pytest.approx(before, rel=0.02)


def test_one_hung_iteration_changes_next_to_nothing() -> None:
    cost = IterationCost(COSTS)
    load = measured(cost, STEADY, 100)
    before = cost.seconds(load)
    measured(cost, STEADY, 1, factor=50)
    assert cost.seconds(load) == pytest.approx(before, rel=0.03)
    assert cost.shifts == 0


@pytest.mark.parametrize("factor", [0.4, 3.0])
def test_a_changed_device_is_followed_soon(factor: float) -> None:
    cost = IterationCost(COSTS)
    measured(cost, STEADY, 100)
    load = measured(cost, STEADY, SUDDEN + 6, factor=factor)
    assert cost.shifts == 1
    assert cost.seconds(load) == pytest.approx(factor * STEADY.seconds(load), rel=0.25)


def test_a_slow_drift_is_followed() -> None:
    cost, worst = IterationCost(COSTS), 0.0
    measured(cost, STEADY, 50)
    for i in range(500):
        factor = 1 + i / 500
        load = measured(cost, STEADY, 1, factor=factor)
        worst = max(worst, abs(cost.seconds(load) / (factor * STEADY.seconds(load)) - 1))
    assert worst < 0.1


def test_a_longer_context_leaves_a_smaller_chunk() -> None:
    limit = a_limit()
    serve(limit, [STEADY], 1)
    decodes = Load(64, 64e3 * LAYERS)
    sizes = [limit.fits(decodes, limit.target, context, MOST) for context in (0, 8000, 64000)]
    assert sizes[0] > sizes[1] > sizes[2] > 0


def test_a_waiting_prompt_gets_more_up_to_the_dense_batch() -> None:
    limit = a_limit()
    least = [limit.headroom(Load(64), waited).least for waited in (0.0, 5.0, 6.0, 7.5, 10.0, 100.0)]
    assert least == [128, 128, 512, 1088, MOST, MOST]
    assert [limit.headroom(Load(64), waited).waited for waited in (5.0, 5.1)] == [False, True]


@pytest.mark.parametrize(
    ("given", "kept"),
    [("50ms", "itl:p99:50ms"), ("p95:0.1s", "itl:p95:100ms"), ("itl:mean:20ms", "itl:mean:20ms"), (None, None)],
)
def test_values(given: str | None, kept: str | None) -> None:
    assert EngineConfig(itl_slo=given).itl_slo == kept


@pytest.mark.parametrize(
    ("given", "why"),
    [
        ("soon", "is not a time such as 50ms"),
        ("ttft:p99:1s", "is not the time between tokens"),
        ("p101:1s", "p101"),
        ("p99:0ms", "is not a time"),
        ("itl:p99:50ms:more", "MEASURE:STATISTIC:LIMIT"),
    ],
)
def test_values_that_are_refused(given: str, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        EngineConfig(itl_slo=given)


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ({"slo": ["itl:p99:40ms", "itl:p95:30ms", "itl:mean:10ms"]}, "itl:p95:30ms"),
        ({"slo": ["itl:p99:40ms"], "itl_slo": "60ms"}, "itl:p99:60ms"),
        ({"slo": ["itl:mean:20ms"]}, "None"),
        ({"slo": ["itl:p99:40ms"], "max_num_seqs": 64}, "None"),
    ],
)
def test_prompts_are_cut_to_a_percentile_within_the_limit(given: dict[str, Any], kept: str) -> None:
    assert str(EngineConfig.model_validate({"max_num_seqs": "auto", **given}).itl_objective) == kept


def test_patience_without_a_limit_is_refused() -> None:
    with pytest.raises(ValidationError, match="itl_slo_patience needs itl_slo"):
        EngineConfig(itl_slo_patience=3)
    assert EngineConfig(**EngineConfig().model_dump()).itl_slo is None


# -- the scheduler with the limit


class Timed:
    """A scheduler on a device of lists. A plant sets the time of iterations, on a clock that only they advance."""

    def __init__(self, plant: Plant, objective: Objective, budget: int = 64, patience: float = 1.0) -> None:
        self.engine = ListEngine(600, slots=6, page_size=4, budget=budget)
        self.step = 0
        self.before_commit: Callable[[StepResult], object] = lambda _: None
        self.scheduler, self.now, self.plant = self.engine.scheduler, 0.0, plant
        self.keeper = self.scheduler.chunk_keeper = ChunkKeeper.of(
            objective, (), Costs(8.0, 1.0, 1e-3, 1e-5, {None: 1}), self.scheduler.slots, most=budget, chunk_step=1,
            patience=patience, share=0.25, clock=lambda: self.now,
        )  # fmt: skip
        self.least = max(1, budget // LEAST_SHARE)

    def iterate(self) -> tuple[int, int, str]:
        """Decodes, tokens of prompts, and the reason for their limit."""
        scheduler = self.scheduler
        line, waits = scheduler._prefills.in_turn(), scheduler.num_waiting
        slots = [r.slot for r in line]
        in_turn = line[:1] and not line[0].early  # otherwise the running one is ahead of it
        left = [int(scheduler.slots.target[slot] - scheduler.slots.scheduled[slot]) for slot in slots]
        self.step += 1
        batch = scheduler.schedule(self.step)
        if batch is None:
            return 0, 0, ""
        formed = self.keeper._formed[batch.step]
        seconds = self.plant.seconds(formed.load)
        prompt = batch.num_tokens - batch.num_decodes
        self.now += seconds
        result = StepResult(batch, np.full(len(batch.sampled_rows), 7, np.int32), None, (), seconds)
        self.before_commit(result)
        self.keeper.on_result(result, self.now)
        scheduler.commit(result)
        if line:
            # Some of a prompt's tokens are always computed; for the head of the queue, three quarters of the limit.
            first = dict(zip(batch.slots.tolist(), batch.query_len.tolist(), strict=True)).get(slots[0], 0)
            room = self.engine.scheduler.max_num_batched_tokens - batch.num_decodes
            assert prompt >= min(sum(left), self.least, room), "prompts are starved"
            assert not in_turn or first >= min(left[0], self.least, 0.75 * room), "the first in line is starved"
        assert line or waits or not formed.bound
        return batch.num_decodes, prompt, formed.bound


SMALL = Plant(0.01, 8, 1.0, 0.0, 1, 0.0, 0.0)
"""per token above eight: 1.25 ms"""


class ChunkMachine(RuleBasedStateMachine):
    """Arrivals, aborts, preemptions and a changing device, in random orders."""

    def __init__(self) -> None:
        super().__init__()
        self.timed = Timed(SMALL, Objective("itl", 99.0, 0.03))
        self.handles: list[int] = []
        self.since: dict[int, float] = {}

    @rule(tokens=st.integers(1, 300), output=st.integers(1, 30), seed=st.integers(0, 3))
    def arrive(self, tokens: int, output: int, seed: int) -> None:
        """Prompts with common beginnings: some of them are in the prefix index."""
        prompt = [2 + (i * (seed + 1)) % 7 for i in range(tokens)]
        self.handles.append(self.timed.engine.add(prompt, output).handle)

    @rule(times=st.integers(1, 20))
    def go_on(self, times: int) -> None:
        for _ in range(times):
            self.timed.iterate()
            line = self.timed.scheduler._prefills.in_turn()
            waiting = {line[0].handle} if line else set()
            self.since = {h: self.since.get(h, self.timed.now) for h in waiting}
            for since in self.since.values():
                # twice the patience, then 300 tokens with the whole dense batch except decodes, and a late iteration
                longest = 2.0 + 8 * self.timed.plant.seconds(Load(64, chunks=1))
                assert self.timed.now - since <= longest, "first in line for too long"

    @rule(at=st.integers(0, 100))
    def abort(self, at: int) -> None:
        if self.handles:
            self.timed.scheduler.abort(self.handles[at % len(self.handles)])

    @rule()
    def preempt(self) -> None:
        if len(self.timed.scheduler.slots.running()):
            self.timed.scheduler._preempt_one()

    @rule(factor=st.sampled_from([0.5, 1.0, 2.0, 5.0]))
    def change_the_device(self, factor: float) -> None:
        """At 5, decodes alone exceed the limit."""
        self.timed.plant = replace(SMALL, floor=factor * SMALL.floor)

    @invariant()
    def all_is_well(self) -> None:
        self.timed.scheduler.check()
        limit = self.timed.keeper.limit
        assert 0 < limit.target <= limit.limit
        assert len(self.timed.keeper._formed) <= 1
        assert len(self.timed.keeper._since) <= self.timed.scheduler.slots.num_slots

    def teardown(self) -> None:
        for _ in range(5000):
            if not self.timed.scheduler.num_requests:
                return
            self.timed.iterate()
        raise AssertionError("prompts do not come to an end")


ChunkMachine.TestCase.settings = settings(
    max_examples=25, stateful_step_count=15, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestChunkMachine = ChunkMachine.TestCase


def test_a_long_prompt_is_cut_to_the_limit_only_with_decodes() -> None:
    timed = Timed(SMALL, Objective("itl", 99.0, 0.03))
    timed.engine.add([2] * 5, 100)
    assert timed.iterate() == (0, 5, "")
    timed.engine.add(list(range(2, 22)) * 20, 4)
    seen = [timed.iterate() for _ in range(40)]
    cut = [prompt for _, prompt, bound in seen if bound == "slo"]
    assert len(cut) >= 5
    assert max(SMALL.seconds(Load(1 + prompt, chunks=1)) for prompt in cut[2:]) <= 0.03
    assert max(cut) > 16
    assert timed.keeper.bounds["slo"] >= len(cut)
    alone = Timed(SMALL, Objective("itl", 99.0, 0.03))
    alone.engine.add(list(range(2, 22)) * 10, 1)
    assert [alone.iterate()[1] for _ in range(4)] == [64, 64, 64, 8]


def test_if_decodes_alone_are_late_prompts_still_make_progress() -> None:
    timed = Timed(replace(SMALL, floor=0.1), Objective("itl", 99.0, 0.03), patience=1e9)
    timed.engine.add([2] * 5, 200)
    timed.iterate()
    timed.engine.add(list(range(2, 22)) * 5, 4)
    seen = [timed.iterate() for _ in range(10)]
    assert {(prompt, bound) for _, prompt, bound in seen} == {(timed.least, "least")}


def test_only_uncached_tokens_count() -> None:
    timed = Timed(SMALL, Objective("itl", 99.0, 0.03))
    prompt = list(range(2, 22)) * 5
    timed.engine.add(prompt, 1)
    while timed.scheduler.num_requests:
        timed.iterate()
    timed.engine.add([3] * 5, 100)
    timed.iterate()
    timed.engine.add(prompt, 4)
    assert timed.iterate() == (1, 4, "")  # 96 of 100 tokens are cached


def test_the_tighter_of_two_objectives_is_kept() -> None:
    slots = ListEngine(10).scheduler.slots
    keeper = ChunkKeeper.of(
        Objective("itl", 99.0, 0.1), [Objective("itl", 95.0, 0.04)], COSTS, slots, most=64, chunk_step=1, patience=1.0,
        share=0.25,
    )  # fmt: skip
    assert keeper.limit.limit == 0.04


def test_slots_adapt_to_decodes_and_not_to_prompts_that_fill_the_remainder() -> None:
    timed = Timed(SMALL, Objective("itl", 99.0, 0.03))
    scheduler = timed.scheduler
    seen: list[float] = []
    pace = Pace([Objective("itl", 99.0, 0.03)], scheduler.slots, 0.0)
    keeper = SlotLimitKeeper(scheduler, pace, SlotLimitControl(6))
    reported = pace.window
    pace.window = lambda gaps, *more: seen.extend(gaps.tolist()) or reported(gaps, *more)  # type: ignore[method-assign]
    timed.before_commit = lambda result: keeper.on_result(result, timed.now)
    timed.engine.add([2] * 5, 100)
    timed.iterate()
    timed.engine.add(list(range(2, 22)) * 20, 1)
    sized: list[float] = []
    for _ in range(20):
        before = timed.now
        if timed.iterate()[2] == "slo":
            sized.append(seen[-1] / (timed.now - before))
    assert sized[-1] < 0.6  # of about 28 ms, the time of the decode and the minimum of prompt tokens


def test_the_forecast_starts_with_a_plans_figures() -> None:
    figures: dict[str, Any] = {"measured_ms": 1.5, "kv_tokens": 4e5}
    plan: Any = SimpleNamespace(periods=[SimpleNamespace(tokens=2048, figures=figures)])
    keeper = ChunkKeeper.of(
        P99, (), COSTS, ListEngine(10).scheduler.slots, most=MOST, chunk_step=1, patience=1.0, share=0.25
    )  # fmt: skip
    keeper.limit.cost.observe_plan(plan, LAYERS)
    assert keeper.limit.cost.seconds(Load(2048, 4e5 * LAYERS, chunks=1)) == pytest.approx(0.048, rel=0.1)


def test_an_engine_limits_chunks_and_answers_the_same() -> None:
    prompts = [list(range(5, 15)), list(range(20, 220))]

    def answers(**options: Any) -> tuple[list[list[int]], Any]:
        harness = Harness(MODEL_PATH, page_size=16, num_pages=200, max_num_batched_tokens=128, **options)
        harness.add(prompts[0], max_tokens=60, ignore_eos=True, **GREEDY)
        for _ in range(5):
            harness.step()
        harness.add(prompts[1], max_tokens=5, ignore_eos=True, **GREEDY)
        harness.run()
        return list(harness.tokens.values()), harness.engine.stats().scheduler

    plain, without = answers()
    cut, stats = answers(itl_slo="1us", itl_slo_patience=3600)
    assert cut == plain
    assert without.chunks_cut == {}
    assert stats.chunks_cut["least"] >= 20  # 200 tokens, 8 at once
    assert stats.prefill_tokens == without.prefill_tokens
