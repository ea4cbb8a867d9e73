"""Refinement follows the bench, never ends below its start, and places pipelines where they win."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest
from synthetic import LLAMA_8B, TYPICAL, SyntheticBench

from weft.autosearch import break_even
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.profiler import CONFIGS
from weft.autosearch.refine import Refiner, serial_for
from weft.engine.errors import ConfigError
from weft.engine.plans.plan import TOKEN_STEP, Edge, NanoOperation, Period, serial_period


def naive(sms: int = 24, cut: int = 1024) -> Period:
    """Two nano-batches half a layer apart, with attention on few SMs."""

    def op(name: str, half: int, ahead: bool = False) -> NanoOperation:
        lane = "memory" if name == "decode" else "compute"
        config = None if name in ("decode", "prefill") else CONFIGS[0]
        begin, end = (0, cut) if not half else (cut, 2048)
        return NanoOperation(name, begin, end, sms if name == "decode" else 132 - sms, lane, ahead, config)  # type: ignore[arg-type]

    first = [op(n, 0) for n in ("o", "gate_up", "down")] + [op(n, 0, True) for n in ("qkv", "decode", "prefill")]
    second = [op(n, 1) for n in ("o", "gate_up", "down")] + [op(n, 1, True) for n in ("qkv", "decode", "prefill")]
    return Period(2048, (*first, *second))


class Clock:
    """A second passes with every reading."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


class ScriptedBench(SyntheticBench):
    """The period takes the time that a function returns."""

    def __init__(self, ms: Callable[[Period], float]) -> None:
        super().__init__(LLAMA_8B)
        self._script = ms

    def period(self, period: Period, _: Load) -> Timing:
        self.calls += 1
        return Timing(self._script(period), 700.0, 1400.0)


def sms_of(period: Period, operation: str = "decode") -> list[int]:
    return [o.sms for o in period.operations if o.operation == operation]


def test_it_climbs_to_the_best_shares() -> None:
    bench = ScriptedBench(lambda p: 2 + sum(abs(n - 48) for n in sms_of(p)) / 100)
    refined = Refiner(bench, LLAMA_8B, TYPICAL, clock=Clock()).run([naive()], 10_000)
    assert refined is not None
    assert sms_of(refined.period) == [48, 48]
    assert refined.ms == pytest.approx(2.0)
    assert all("SMs" in text for text in refined.accepted)
    refined.period.check(LLAMA_8B, 132)


def test_it_finds_sizes_orders_lanes_and_configurations() -> None:
    def ms(period: Period) -> float:
        cut = abs(period.begins[1] - 1408) / 128
        swap = [o.operation for o in period.operations][-1] != "decode"
        wrong = sum(o.config != CONFIGS[3] for o in period.operations if o.operation == "down")
        lanes = sum(o.lane != "memory" for o in period.operations if o.operation == "prefill")
        return 2 + 0.1 * (cut + wrong + lanes + len(period.waits)) + 0.01 * swap

    period = msgspec.structs.replace(naive(), waits=(Edge(0, 4, 0),))
    refined = Refiner(ScriptedBench(ms), LLAMA_8B, TYPICAL, CONFIGS, clock=Clock()).run([period], 10_000)
    assert refined is not None
    assert refined.ms <= 2.01
    assert refined.period.begins == (0, 1408)
    refined.period.check(LLAMA_8B, 132)


def test_on_the_synthetic_machine_it_ends_faster_than_it_began() -> None:
    bench = SyntheticBench(LLAMA_8B)
    before = bench.period(naive(), TYPICAL).ms
    refined = Refiner(bench, LLAMA_8B, TYPICAL, clock=Clock()).run([naive(), naive(40)], 150)
    assert refined is not None
    assert refined.ms < before
    assert refined.ms == bench.period(refined.period, TYPICAL).ms


def test_noise_is_not_mistaken_for_progress() -> None:
    """Single measurements jump by a percent; medians taken in turn decide."""
    turn = iter(range(10_000))
    bench = ScriptedBench(lambda _: 2.0 + 0.02 * (next(turn) % 3))
    refined = Refiner(bench, LLAMA_8B, TYPICAL, clock=Clock()).run([naive()], 300)
    assert refined is not None
    assert len(refined.accepted) <= 1


def test_it_stops_with_its_budget_and_keeps_the_best_so_far() -> None:
    bench = ScriptedBench(lambda p: 2 + sum(abs(n - 48) for n in sms_of(p)) / 100)
    refined = Refiner(bench, LLAMA_8B, TYPICAL, clock=Clock()).run([naive(), naive(32)], 0)
    assert refined is not None
    assert sms_of(refined.period) == [32, 32]
    assert refined.tried == 2


def test_pipelines_that_the_gpu_cannot_run_are_skipped() -> None:
    def ms(period: Period) -> float:
        if sms_of(period) != [24, 24]:
            raise ConfigError("not here")
        return 2.0

    refined = Refiner(ScriptedBench(ms), LLAMA_8B, TYPICAL, clock=Clock()).run([naive(40), naive()], 500)
    assert refined is not None
    assert sms_of(refined.period) == [24, 24]
    assert Refiner(ScriptedBench(ms), LLAMA_8B, TYPICAL, clock=Clock()).run([naive(40)], 500) is None


def heavy_and_light(period: Period, load: Load) -> float:
    """Serial: 1 + kv; a light pipeline wins from 0.4 to 1.0, a heavy one from 1.0 to 1.8 (of the typical KV)."""
    kv = load.kv_tokens / TYPICAL.kv_tokens
    if len(period.operations) == 6:
        return (1 + kv) * load.tokens / 2048 / (1 - break_even.MIN_GAIN)
    if sms_of(period)[0] == 24:
        return 1.4 if kv <= 1.0 else 1.4 + 2 * (kv - 1)
    return 1.8 if kv <= 1.0 else 1.4 + 1.4 * (kv - 1) + (10 if kv > 1.8 else 0)


class LoadBench(SyntheticBench):
    def period(self, period: Period, load: Load) -> Timing:
        return Timing(heavy_and_light(period, load), 1.0, 1.0)


def test_pipelines_are_placed_where_they_win() -> None:
    factors = tuple(k / 10 for k in range(1, 21))
    light, heavy = break_even.place(LoadBench(LLAMA_8B), LLAMA_8B, [naive(24), naive(48)], TYPICAL, factors=factors)
    kv = TYPICAL.kv_tokens
    assert sms_of(light.period) == [24, 24]
    assert sms_of(heavy.period) == [48, 48]
    assert light.period.min_kv_tokens / kv == pytest.approx(0.4, abs=0.01)
    assert heavy.period.min_kv_tokens / kv == pytest.approx(1.0, abs=0.05)
    assert light.period.max_kv_tokens == heavy.period.min_kv_tokens
    assert heavy.period.max_kv_tokens / kv == pytest.approx(1.8, abs=0.05)
    # with fewer tokens the serial plan gets shorter and the padded pipeline does not, but both fill whole steps
    assert light.period.min_tokens == 1536 - TOKEN_STEP + 1
    assert light.period.min_kv_tokens < light.load.kv_tokens < light.period.max_kv_tokens


def test_beyond_the_measured_range_the_serial_plan_runs() -> None:
    class Fast(SyntheticBench):
        def period(self, period: Period, _: Load) -> Timing:
            return Timing(2.0 if len(period.operations) == 6 else 1.0, 1.0, 1.0)

    (placed,) = break_even.place(Fast(LLAMA_8B), LLAMA_8B, [naive()], TYPICAL)
    assert placed.period.min_kv_tokens == TYPICAL.decodes * round(TYPICAL.context * break_even.KV_FACTORS[0])
    assert placed.period.max_kv_tokens == TYPICAL.decodes * round(TYPICAL.context * break_even.KV_FACTORS[-1]) + 1
    assert placed.period.min_tokens == round(2048 * break_even.TOKEN_SHARES[0]) - TOKEN_STEP + 1


@pytest.mark.parametrize("room", [0.6, 1.1, 1.7, 3.0])
def test_no_more_kv_is_planned_than_the_device_holds(room: float) -> None:
    measured = []

    class Fast(SyntheticBench):
        def period(self, period: Period, load: Load) -> Timing:
            measured.append(load)
            return Timing(2.0 if len(period.operations) == 6 else 1.0, 1.0, 1.0)

    capacity = round(room * TYPICAL.kv_tokens)
    (placed,) = break_even.place(Fast(LLAMA_8B), LLAMA_8B, [naive()], TYPICAL, capacity=capacity)
    # as many decodes in each, so that a KV count stands for one load
    assert {load.decodes for load in measured} == {TYPICAL.decodes}
    assert placed.period.min_kv_tokens < placed.period.max_kv_tokens <= capacity + 1
    assert placed.period.max_kv_tokens > min(capacity, 2 * TYPICAL.kv_tokens) - TYPICAL.decodes


def test_a_pipeline_that_never_wins_is_dropped() -> None:
    class Slow(SyntheticBench):
        def period(self, period: Period, _: Load) -> Timing:
            return Timing(1.0 if len(period.operations) == 6 else 0.999, 1.0, 1.0)  # less than the required gain

    assert break_even.place(Slow(LLAMA_8B), LLAMA_8B, [naive()], TYPICAL) == []
    assert break_even.place(Slow(LLAMA_8B), LLAMA_8B, [], TYPICAL) == []


def test_the_serial_plan_is_padded_to_a_bucket() -> None:
    assert serial_for(LLAMA_8B, Load(1900, 1, 1, 1), 132) == serial_period(LLAMA_8B, 1920, 132)
