"""A search ends within its budget, or at once when it is stopped, with a plan of what it has measured by then."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest
from synthetic import LLAMA_8B, TYPICAL, SyntheticBench, target_for
from test_journal import Counted

from weft.autosearch import (
    command,
    dense_batch,
    gantt,
    profile,
    resource_assignment,
    search,
    structure_search,
    two_stage_search,
)
from weft.autosearch.accelerators import accelerator
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.formula_profile import formula_profile
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Profile
from weft.autosearch.profiler import CONFIGS, Grid, Profiler
from weft.autosearch.refine import OutOfTime, serial_for
from weft.autosearch.time_budget import TimeBudget
from weft.autosearch.timed_bench import TimedBench
from weft.autosearch.two_stage_search import LoadSolver, StageResults, StageStore, search_pipelines
from weft.engine.plans.plan import Period, Plan, load_plan
from weft.server.daemon import cli

pytestmark = pytest.mark.slow

MEASURING, COMPILING = 1.1, 24.0
"""seconds of a measurement, and of a compilation before it, as in a search of FP8 GEMMs on an H200"""


class Slow(SyntheticBench):
    """Time passes only with measurements. Kernels that it has not seen are compiled first."""

    def __init__(self) -> None:
        super().__init__(LLAMA_8B)
        self.now, self.ended_at = 0.0, 10**9
        self._met: set[tuple[bool, bool]] = set()

    def clock(self) -> float:
        return self.now

    def stop_requested(self) -> bool:
        """The search is stopped while a certain measurement runs."""
        return self.calls >= self.ended_at

    def period(self, period: Period, load: Load) -> Timing:
        self.now += MEASURING
        kinds = {(op.config is not None, op.sms == self.num_sms) for op in period.operations}
        if not kinds <= self._met:
            self.now += COMPILING
            self._met |= kinds
        return super().period(period, load)


class Solved:
    """Replaces `search_pipelines`: one structure for each load, for which the solver uses all of its time."""

    def __init__(self, bench: Slow) -> None:
        self.bench, self.seconds = bench, dict[Load, float]()

    def __call__(
        self, machine: Machine, load: Load, progress: Callable[[str, float], None], seconds: float, *_: object
    ) -> StageResults:
        self.seconds[load] = seconds
        progress("stage II", 0.5)
        self.bench.now += seconds
        if load not in _STAGES:
            _STAGES[load] = search_pipelines(machine, load, seconds=0.0)
        return _STAGES[load]


_STAGES: dict[Load, StageResults] = {}


@pytest.fixture(scope="module")
def recorded() -> Profile:
    profiler = Profiler(SyntheticBench(LLAMA_8B), LLAMA_8B, TYPICAL, Grid.coarse(TYPICAL, 132), lambda *_: None)
    return profiler.run(target_for(LLAMA_8B), 100)


class Run:
    """A search with the given bench."""

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, recorded: Profile, budget_s: float, ended_at: int = 10**9
    ) -> None:
        self.bench = Slow()
        self.bench.ended_at = ended_at
        self.solved = Solved(self.bench)
        self.plans: list[Plan] = []
        self.shares: list[tuple[float, float]] = []
        """(fraction of the budget that has passed, reported fraction)"""
        monkeypatch.setattr(two_stage_search, "search_pipelines", self.solved)

        def report(_: str, share: float | None = None) -> None:
            assert share is not None
            self.shares.append((self.bench.now / budget_s, share))

        budget = TimeBudget(budget_s, report, self.bench.stop_requested, self.bench.clock)
        one = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, self.bench, budget, max_num_seqs=1024)
        self.result = one.run("x", self.plans.append)


def assert_won(plan: Plan) -> None:
    for period in plan.periods:
        figures = period.figures
        assert figures["gain"] == pytest.approx(figures["serial_measured_ms"] / figures["measured_ms"], abs=1e-5)
        assert figures["gain"] > 1
        assert period.min_kv_tokens <= figures["kv_tokens"] < period.max_kv_tokens


@pytest.mark.parametrize("budget_s", [60.0, 125.0, 300.0])
def test_compiling_kernels_does_not_exceed_the_remaining_time(
    monkeypatch: pytest.MonkeyPatch, recorded: Profile, budget_s: float
) -> None:
    run = Run(monkeypatch, recorded, budget_s)
    assert 0.8 * budget_s < run.bench.now <= budget_s
    assert_won(run.result.plan)
    left_out = [note for note in run.result.notes if "not compared" in note]
    if budget_s == 60:  # most of it goes by compiling
        assert left_out == ["out of time, not compared with the serial plan: light, heavy, 1024 decodes"]
        return
    assert not left_out
    assert {p.tokens for p in run.result.plan.periods} >= {run.result.load.tokens, 1024}
    assert run.plans[-1].periods == run.result.plan.periods


def test_the_solver_has_time_for_every_load_although_kernels_compile_meanwhile(
    monkeypatch: pytest.MonkeyPatch, recorded: Profile
) -> None:
    run = Run(monkeypatch, recorded, 125.0)
    assert len(run.solved.seconds) >= dense_batch.DENSE_STEPS + len(search.LOADS) - 1
    assert max(run.solved.seconds.values()) < 3 * min(run.solved.seconds.values())


def test_the_reported_share_is_that_of_the_time(monkeypatch: pytest.MonkeyPatch, recorded: Profile) -> None:
    run = Run(monkeypatch, recorded, 125.0)
    assert [share for _, share in run.shares] == pytest.approx([passed for passed, _ in run.shares])


def test_a_stopped_search_measures_nothing_more_and_keeps_the_winners_in_the_plan(
    monkeypatch: pytest.MonkeyPatch, recorded: Profile
) -> None:
    whole = Run(monkeypatch, recorded, 300.0)
    counts = []
    for ended_at in (1, 5, 15, 40, whole.bench.calls // 2, whole.bench.calls - 5):
        run = Run(monkeypatch, recorded, 300.0, ended_at)
        assert run.bench.calls == ended_at
        assert run.result.plan.made.endswith("ended early")
        assert_won(run.result.plan)
        if not run.result.plan.periods:
            assert gantt.summary(run.result.plan).startswith("the search was ended before")
        counts.append(len(run.result.plan.periods))
    assert counts[0] == 0
    assert counts[2] > 0  # before anything was measured for its bounds
    assert counts[-1] >= len(whole.result.plan.periods)


def test_loads_solved_in_parallel_all_count_for_the_share(monkeypatch: pytest.MonkeyPatch, recorded: Profile) -> None:
    both, shares = threading.Barrier(2), list[float]()

    def half(_: Machine, __: Load, progress: Callable[[str, float], None], *___: object) -> StageResults:
        progress("stage I", 0.5)
        both.wait(240)
        progress("stage II", 0.5)
        return StageResults(1.0, 1.0, [])

    monkeypatch.setattr(two_stage_search, "search_pipelines", half)
    machine, budget = Machine(recorded, LLAMA_8B), TimeBudget(1e6, lambda _, share=None: shares.append(share))
    one = LoadSolver(machine, budget, StageStore(), 10, measured=False, workers=2)
    one.solve([("a", TYPICAL), ("b", TYPICAL._replace(tokens=1024))])
    assert 2 * 0.5 / 10 * two_stage_search.SHARE in [pytest.approx(s) for s in shares]


# -- stopping early


def test_a_stopped_solver_starts_no_other_structure(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(formula_profile(LLAMA_8B, TYPICAL, accelerator("h200")), LLAMA_8B)
    solve, calls = structure_search.solve, list[float]()

    def counted(*arguments: object) -> object:
        calls.append(0.0)
        return solve(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(structure_search, "solve", counted)
    (found,) = structure_search.search(machine, TYPICAL, 32, 0.1, stop_requested=lambda: bool(calls))
    monkeypatch.setattr(resource_assignment.ResourceAssignment, "solve", lambda *_: pytest.fail("solved"))
    assert resource_assignment.assign(machine, found.period, TYPICAL, 0.1, stop_requested=lambda: True).ms > 0


@pytest.mark.usefixtures("quick")
def test_a_search_stopped_while_profiling_ends_and_keeps_no_profile(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bench, target = Counted(), target_for(LLAMA_8B)
    monkeypatch.setattr(command, "num_gpus", lambda: 1)
    monkeypatch.setattr(command, "open_gpu", lambda *_, **__: (bench, target))
    monkeypatch.setattr(
        command.SearchBar, "stop_requested", property(lambda _: bench.calls >= 30, lambda *_: None), raising=False
    )
    out = tmp_path / "p.json"
    out.write_text("the plan of another day")
    assert cli.main(["search", "--model", str(model), "--out", str(out)]) == 1
    assert "ended before there was a plan to write; run the same command to continue" in capsys.readouterr().err
    assert bench.calls < 40
    assert out.read_text() == "the plan of another day"
    assert not profile.cache_path(target).exists()


@pytest.mark.usefixtures("quick")
def test_a_killed_search_leaves_its_plan(
    recorded: Profile, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dense_batch, "DENSE_STEPS", 1)
    recorded.save(profile.cache_path(recorded.target))
    out, partial = tmp_path / "p.json", tmp_path / "p.json.partial"
    left: list[Plan] = []

    class Mortal(Counted):
        def period(self, period: Period, load: Load) -> Timing:
            if partial.exists():
                left.append(load_plan(partial))
            return super().period(period, load)

    bench = Mortal({("period", 30)})
    monkeypatch.setattr(command, "num_gpus", lambda: 1)
    monkeypatch.setattr(command, "open_gpu", lambda *_, **__: (bench, recorded.target))
    monkeypatch.setattr(search.Refiner, "moves", lambda *_: iter(()))
    argv = ["search", "--model", str(model), "--out", str(out), "--budget-seconds", "60"]
    assert cli.main(argv) == 1  # the card is lost
    assert left
    assert load_plan(partial).periods
    assert_won(load_plan(partial))
    assert not out.exists()
    assert cli.main(argv) == 0
    assert load_plan(out).periods
    assert not list(tmp_path.glob("p.json?*"))


@pytest.mark.usefixtures("quick")
def test_a_plan_path_that_is_a_link_writes_its_target_and_keeps_the_link(
    recorded: Profile, model: Path, tmp_path: Path
) -> None:
    recorded.save(tmp_path / "profile.json")
    out = tmp_path / "link.json"
    out.symlink_to(tmp_path / "plan.json")
    given = ["--profile", str(tmp_path / "profile.json"), "--predict-only", "--out", str(out)]
    assert cli.main(["search", "--model", str(model), *given]) == 0
    assert out.is_symlink()
    assert load_plan(tmp_path / "plan.json").periods
    assert not list(tmp_path.glob("*.partial*"))


# -- `TimedBench`


def test_a_measurement_that_would_not_end_in_time_is_not_started(recorded: Profile) -> None:
    bench = Slow()
    timely = TimedBench(
        bench, Machine(recorded, LLAMA_8B), TimeBudget(100.0, stop_requested=bench.stop_requested, clock=bench.clock)
    )
    serial = serial_for(LLAMA_8B, TYPICAL, 132)
    pipeline = _pipeline(recorded)
    with timely.until(10.0):
        timely.period(serial, TYPICAL)  # 25 s: no caller could know
        with pytest.raises(OutOfTime):
            timely.period(serial, TYPICAL)
    timely.period(pipeline, TYPICAL)  # compiles
    timely.period(pipeline, TYPICAL)
    assert bench.now == pytest.approx(3 * MEASURING + 2 * COMPILING)
    bench.now = 76.0
    first, *others = pipeline.operations
    other = msgspec.structs.replace(first, config=CONFIGS[2])
    with pytest.raises(OutOfTime):  # it would compile again
        timely.period(msgspec.structs.replace(pipeline, operations=(other, *others)), TYPICAL)
    timely.period(pipeline, TYPICAL)
    bench.now = 99.0
    with pytest.raises(OutOfTime):
        timely.period(pipeline, TYPICAL)
    assert timely.over


def test_the_record_answers_measured_points_exactly_and_others_in_proportion(recorded: Profile) -> None:
    bench, machine = Slow(), Machine(recorded, LLAMA_8B)
    timely = TimedBench(bench, machine, TimeBudget(1000.0, clock=bench.clock))
    pipeline, serial = _pipeline(recorded), serial_for(LLAMA_8B, TYPICAL, 132)
    light = TYPICAL._replace(context=640)
    for factor in (1.2, 1.4, 1.3):
        timely.record.add(pipeline, TYPICAL, Timing(factor * machine.period(pipeline, TYPICAL).ms, 1.0, 1.0))
    timely.record.add(serial, TYPICAL, Timing(1.1 * machine.period(serial, TYPICAL).ms, 1.0, 1.0))
    record = timely.record
    assert record.loads(pipeline) == [TYPICAL]
    assert record.measured(pipeline, light) is None
    assert record.period(pipeline, TYPICAL).ms == pytest.approx(1.3 * machine.period(pipeline, TYPICAL).ms)
    assert record.period(pipeline, light).ms == pytest.approx(1.3 * machine.period(pipeline, light).ms)
    fewer = TYPICAL._replace(tokens=1024)
    short = serial_for(LLAMA_8B, fewer, 132)  # never measured: any value is as good
    assert record.period(short, fewer).ms == pytest.approx(1.1 * machine.period(short, fewer).ms)


def _pipeline(recorded: Profile) -> Period:
    if TYPICAL not in _STAGES:
        _STAGES[TYPICAL] = search_pipelines(Machine(recorded, LLAMA_8B), TYPICAL, seconds=0.0)
    return _STAGES[TYPICAL].choices[0].period
