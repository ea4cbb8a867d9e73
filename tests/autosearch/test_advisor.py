"""`weft advise`: its measurements, its conclusions and its output, on made-up engines and on the demo model."""

from __future__ import annotations

import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import ClassVar

import msgspec
import pytest
import torch
from made_curves import GIB, MACHINE, SLO, curve, point, times

from weft.autosearch.advisor import curve as curves
from weft.autosearch.advisor.activity import activity_of
from weft.autosearch.advisor.advice import advise, configuration
from weft.autosearch.advisor.concurrent_engines import ConcurrentEngines, combine
from weft.autosearch.advisor.curve import Curve, Point, ReplicaPoint
from weft.autosearch.advisor.engine_bench import spread
from weft.autosearch.advisor.optimal_batch import solve
from weft.autosearch.advisor.replicas import advise_replicas
from weft.autosearch.advisor.sweep import CLOSE, Sweep
from weft.autosearch.time_budget import TimeBudget
from weft.engine.config import EngineConfig, Objective
from weft.engine.errors import ConfigError, WeftError
from weft.server.config import ServeConfig
from weft.server.options import load


class MadeUp:
    """A bench that computes. `room` is the number of requests that fit its memory."""

    def __init__(self, capacity: int = 1024, room: int = 1 << 20, knee: float | None = None) -> None:
        self.capacity, self._room, self._knee = capacity, room, knee
        self.requested: list[int] = []
        self.now = 0.0

    def measure(self, bound: int) -> Point:
        self.requested.append(bound)
        self.now += 5.0
        batch = float(min(bound, self._room))
        if self._knee is None:
            return point(bound, batch=batch)
        step = 0.01 * max(1.0, batch / self._knee)
        return point(bound, batch=batch, output_per_s=batch / step, itl=times(step))


def sweep(bench: MadeUp, budget: float = 1e9, start: Curve | None = None, slo: list[Objective] = SLO) -> Sweep:
    begun = start or msgspec.structs.replace(curve(), points=())
    return Sweep(bench, begun, slo, 0.1, "throughput", TimeBudget(budget, clock=lambda: bench.now))


def test_the_sweep_ends_close_to_the_largest_limit_that_keeps_the_objective() -> None:
    bench = MadeUp()
    found = solve(sweep(bench).run(), SLO).best
    assert found is not None
    # itl p99 is 1.495 iterations: at most 117 requests.
    assert 117 / CLOSE <= found.point.bound <= 117
    assert bench.requested[:8] == [1, 2, 4, 8, 16, 32, 64, 128]
    assert len(bench.requested) < 20


def test_the_ascent_stops_where_the_curve_is_flat() -> None:
    bench = MadeUp(knee=40.0)
    ran = sweep(bench, slo=[])
    ran.run()
    assert ran.stopped == "the curve is flat"
    assert max(bench.requested) == 256


def test_the_ascent_stops_where_memory_is_full() -> None:
    bench = MadeUp(room=50)
    ran = sweep(bench, slo=[])
    ran.run()
    assert ran.stopped == "only 50 requests fit the KV pool"
    assert max(bench.requested) == 128


def test_when_time_is_up_the_sweep_returns_its_points() -> None:
    bench = MadeUp()
    ran = sweep(bench, budget=22.0)
    assert [p.bound for p in ran.run().points] == [1, 2, 4, 8]
    assert ran.stopped == "out of time"


def test_a_point_cut_short_is_dropped() -> None:
    bench, kept = MadeUp(), []
    begun = msgspec.structs.replace(curve(), points=())
    budget = TimeBudget(1e9, stop_requested=lambda: len(bench.requested) == 3)
    ran = Sweep(bench, begun, [], 0.1, "throughput", budget, kept.append)
    assert [p.bound for p in ran.run().points] == [1, 2]
    assert [[p.bound for p in reported.points] for reported in kept] == [[1], [1, 2]]
    assert ran.stopped == "ended early"


def test_known_points_are_not_measured_again() -> None:
    first, second = MadeUp(), MadeUp()
    begun = sweep(first, budget=22.0).run()
    whole = sweep(second, start=begun).run()
    assert not set(first.requested) & set(second.requested)
    assert whole == sweep(MadeUp()).run()


def test_equation_2_uses_the_batch_that_ran() -> None:
    # The limit of 512 had memory for 300 requests.
    points = [point(2**i) for i in range(9)] + [point(512, batch=300.0)]
    made = curve(points)
    one = made.throughput(points[0]) / points[0].batch
    for epsilon in (0.05, 0.2, 0.5, 0.9):
        allowed = [p for p in points if made.throughput(p) / (p.batch * one) > epsilon]
        best = solve(made, [], epsilon, tie=0.0).best
        assert best is not None
        assert best.point == max(allowed, key=made.throughput)


def test_among_points_within_noise_the_smallest_is_chosen() -> None:
    points = [point(1), point(64), point(128, output_per_s=point(64).output_per_s * 1.005)]
    best = solve(curve(points)).best
    assert best is not None
    assert best.point.bound == 64


def test_without_batch_1_there_is_no_efficiency() -> None:
    with pytest.raises(ConfigError, match="batch 1 was not measured"):
        solve(curve([point(8), point(16)]))


def test_an_objective_that_no_point_keeps_is_reported() -> None:
    solution = solve(curve(), [Objective.parse("itl:p99:5ms")])
    assert solution.best is None
    assert solution.why_not == "no slot limit meets itl:p99:5ms: at 1 requests itl is 15.2 ms, the limit 5 ms"
    assert "above --epsilon 1: 1.00 at 1" in solve(curve(), [], 1.0).why_not


def test_least_joules_under_the_objective() -> None:
    best = solve(curve(), SLO, aim="energy").best
    assert best is not None
    kept = [p for p in curve().points if p.of(SLO[0]) <= 0.05]
    assert best.point.joules_per_token == min(p.joules_per_token or math.inf for p in kept)
    machine = msgspec.structs.replace(MACHINE, joules="", no_joules="only root may read it")
    unmetered = curve([point(1, joules_per_token=None), point(2, joules_per_token=None)], machine=machine)
    with pytest.raises(ConfigError, match="no joules were counted: only root may read it"):
        solve(unmetered, aim="energy")


def replicas(made: Curve, **tried: float) -> tuple[int, str]:
    """`n2=1.2`: two engines have 1.2 times the throughput of one at the best bound."""
    best = solve(made, SLO).best
    assert best is not None
    measured = tuple(
        ReplicaPoint(
            replicas=int(name[1:]), bound=best.point.bound, batch=1.0, itl=times(0.02),
            output_per_s=gain * best.point.output_per_s,
        )
        for name, gain in tried.items()
    )  # fmt: skip
    advice = advise_replicas(msgspec.structs.replace(made, replicas=measured), best)
    return advice.replicas, advice.reason


def test_no_replicas_if_the_device_is_never_idle() -> None:
    number, reason = replicas(curve())
    assert number == 1
    assert reason == "the device waits for the CPU 0.4% of the time: using all of it would gain at most 0.4%"


def test_no_replicas_on_a_predicted_gain() -> None:
    waiting = curve([point(2**i, idle_share=0.3) for i in range(10)])
    number, reason = replicas(waiting)
    assert number == 1
    assert "at most 43%, which was not measured" in reason


def test_replicas_on_a_measured_gain_only() -> None:
    # At its best limit one engine has 54 % of its throughput at the largest.
    assert replicas(curve(), n2=1.3, n4=2.2) == (4, "4 engines had 2.20 times the measured throughput of one")
    number, reason = replicas(curve(), n2=0.93)
    assert (number, reason) == (1, "2 engines had 0.93 times the measured throughput of one: nothing to gain")
    number, reason = replicas(curve(), n2=1.2)
    assert number == 1
    assert "one engine with more running requests reached" in reason
    small = msgspec.structs.replace(MACHINE, memory=12 * GIB)
    assert replicas(curve(machine=small), n4=2.2)[0] == 1


def test_replicas_are_compared_with_one_engine_measured_at_the_same_time() -> None:
    # The machine was slower when the curve was measured than when one and two engines were.
    number, reason = replicas(curve(), n1=1.9, n2=1.9)
    assert number == 1
    assert "1.00 times the measured throughput of one" in reason


class Nvml:
    """The part of NVML's Python package for GPM that is called here."""

    NVMLError = RuntimeError
    NVML_GPM_METRICS_GET_VERSION, NVML_GPM_METRIC_SM_UTIL = 1, 2
    NVML_GPM_METRIC_SM_OCCUPANCY, NVML_GPM_METRIC_DRAM_BW_UTIL = 3, 10
    percent: ClassVar = {10: 61.0, 2: 80.0, 3: 12.0}

    def __init__(self, supported: bool = True) -> None:
        self.supported = supported

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        return uuid

    def nvmlGpmQueryDeviceSupport(self, _handle: str) -> SimpleNamespace:
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> object:
        return object()

    def nvmlGpmSampleGet(self, _handle: str, _sample: object) -> None: ...

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        return SimpleNamespace(metrics=[SimpleNamespace(nvmlReturn=0, value=0.0) for _ in range(8)])

    def nvmlGpmMetricsGet(self, requested: SimpleNamespace) -> None:
        for metric in requested.metrics[: requested.numMetrics]:
            metric.value = self.percent[metric.metricId]


def test_activity_is_the_drivers_value_or_the_reason_for_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert activity_of(torch.device("cpu")) == (None, "a CPU has no such counters")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(uuid="1"))
    monkeypatch.setitem(sys.modules, "pynvml", Nvml())
    activity, why = activity_of(torch.device("cuda"))
    assert activity is not None
    assert (activity.end(), why) == ((0.61, 0.8, 0.12), "")
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(supported=False))
    assert activity_of(torch.device("cuda"))[1] == "this GPU has no GPM metrics (Hopper and later do)"


def test_parallel_engines_are_reported_as_one() -> None:
    both = combine([point(8), point(8, itl=times(0.05))])
    assert (both.replicas, both.bound, both.batch) == (2, 8, 16.0)
    assert both.output_per_s == 2 * point(8).output_per_s
    assert 0.0116 < both.itl.at(25.0) < both.itl.at(75.0) <= 0.05


def test_the_configuration_is_accepted_by_serve(tmp_path: Path) -> None:
    advice = advise(curve(), SLO, 0.1, "throughput")
    file = tmp_path / "weft.yaml"
    file.write_text(configuration(advice, {"model_preset": "opt-1.3b", "load_format": "dummy", "seed": 3}))
    config = load(ServeConfig, {}, file)
    best = advice.solution.best
    assert best is not None
    assert (config.max_num_seqs, config.model_preset, config.seed) == (best.point.bound, "opt-1.3b", 3)
    assert config.replicas == 1


def test_a_file_of_points_round_trips(tmp_path: Path) -> None:
    file = tmp_path / "points.json"
    curves.save(curve(), file)
    assert curves.load(file) == curve()
    assert not list(tmp_path.glob("*.new"))
    file.write_text('{"format": "weft-curve-1"}')
    with pytest.raises(ConfigError, match="not a points file"):
        curves.load(file)


def test_points_of_another_setup_name_the_difference() -> None:
    assert curve().differs(curve([point(1)])) == ""
    assert "workload '9:9'" in curve().differs(curve(workload="9:9"))
    assert "prompt 9.0, this is 161.0" in curve().differs(curve(prompt=9.0))  # a file of lengths has changed
    assert "machine 'B'" in curve().differs(curve(machine=msgspec.structs.replace(MACHINE, name="B")))


def test_a_lower_limit_keeps_requests_of_all_ages() -> None:
    assert spread(range(8), 4) == [0, 2, 4, 6]
    assert spread(range(5), 3) == [0, 1, 3]
    assert spread(range(3), 8) == [0, 1, 2]


@pytest.mark.nightly
def test_started_engines_are_measured_in_any_number_at_any_limit() -> None:
    config = EngineConfig(device="cpu", page_size=8, cpu_threads=2)
    with ConcurrentEngines(config, most=2, bound=4, pages=64, lengths=[(6, 8)], seconds=0.05) as engines:
        found = [engines.measure(number, bound) for number, bound in ((1, 4), (2, 2), (2, 4), (1, 2))]
    assert [(p.replicas, p.bound) for p in found] == [(1, 4), (2, 2), (2, 4), (1, 2)]
    for p in found:
        assert 0 < p.batch <= p.replicas * p.bound + 1e-9
        assert p.output_per_s > 0


@pytest.mark.nightly
def test_one_of_several_engines_that_cannot_start_is_a_one_line_error() -> None:
    with pytest.raises(WeftError, match="a concurrent engine ended with status 1; see its error above"):
        ConcurrentEngines(EngineConfig(model="/nowhere", device="cpu"), 2, 4, 64, [(6, 8)], 0.05)
