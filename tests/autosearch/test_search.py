"""The whole search on a synthetic machine, with and without a bench."""

from __future__ import annotations

import io
import re
import sys
import time
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest
from rich.console import Console
from synthetic import LLAMA_8B, TYPICAL, SyntheticBench, spec_of, target_for

from weft.autosearch import dense_batch, gantt, pipeline_structure, search, two_stage_search
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Profile
from weft.autosearch.profiler import Grid, Profiler, configs_of
from weft.autosearch.refine import without_overlap
from weft.autosearch.report import report
from weft.autosearch.time_budget import TimeBudget
from weft.engine.errors import ConfigError
from weft.engine.model.parts import Quantization
from weft.engine.plans.plan import Period, Plan

pytestmark = pytest.mark.slow


@pytest.mark.usefixtures("quick")
def test_a_search_with_a_bench_measures_what_it_reports(recorded: Profile) -> None:
    bench = SyntheticBench(LLAMA_8B)
    result = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, bench, TimeBudget(600, clock=bench.clock)).run(
        "1024:512"
    )
    assert result.measured
    dense = [line.load for line in result.lines if line.load.endswith("tokens")]
    assert dense == ["2048 tokens", "1920 tokens"]
    lines = {line.stage.split(",")[0]: line for line in result.lines if line.load == "typical"}
    assert list(lines) == ["stage I", "serial", "nano-batches in sequence", "stage II", "refined"]
    serial, second, refined = (lines[s] for s in ("serial", "stage II", "refined"))
    assert serial.measured is not None
    assert second.measured is not None
    assert refined.measured is not None
    # the bench is the machine that the profile was recorded on
    assert serial.measured.ms == pytest.approx(serial.predicted_ms, rel=0.01)
    assert second.measured.ms == pytest.approx(second.predicted_ms, rel=0.03)
    assert refined.measured.ms <= second.measured.ms < serial.measured.ms
    # cutting alone costs; only overlap wins
    assert lines["nano-batches in sequence"].measured.ms >= serial.measured.ms * 0.999  # type: ignore[union-attr]
    for period in result.plan.periods:
        period.check(LLAMA_8B, 132)
        assert period.figures["gain"] == pytest.approx(
            period.figures["serial_measured_ms"] / period.figures["measured_ms"], abs=1e-5
        )
        assert period.figures["gain"] > 1
    assert result.plan.period_for(result.plan.dense_batch, TYPICAL.kv_tokens) is not None


@pytest.mark.usefixtures("quick")
def test_there_is_no_pipeline_if_overlap_cannot_win() -> None:
    bench = SyntheticBench(LLAMA_8B, compute_slowdown=2.5, guest_slowdown=2.5)
    profiler = Profiler(bench, LLAMA_8B, TYPICAL, Grid.coarse(TYPICAL, 132), lambda *_: None)
    machine = Machine(profiler.run(target_for(LLAMA_8B), 100), LLAMA_8B)
    result = search.Search(machine, TYPICAL, bench, TimeBudget(1000, clock=bench.clock)).run("1024:512")
    assert result.plan.periods == ()
    assert "the serial plan runs" in gantt.summary(result.plan)


@pytest.mark.usefixtures("quick")
def test_a_pipeline_that_won_by_noise_is_dropped_and_reported(recorded: Profile) -> None:
    class Lucky(SyntheticBench):
        last = False

        def period(self, period: Period, load: Load) -> Timing:
            timing = super().period(period, load)
            return timing._replace(ms=timing.ms * (1.5 if self.last else 0.9)) if len(period.operations) > 6 else timing

        def record_line(self, text: str, _: float | None = None) -> None:
            self.last |= "final measurement" in text

    bench = Lucky(LLAMA_8B)
    budget = TimeBudget(600, bench.record_line, clock=bench.clock)
    result = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, bench, budget).run("1024:512")
    assert result.plan.periods == ()
    assert result.plan.dense_batch == 0
    printed = io.StringIO()
    report(result, Console(file=printed, width=200))
    lines = [text for text in printed.getvalue().splitlines() if "dropped" in text]
    assert lines
    for line in lines:
        assert re.fullmatch(
            r"dropped: \d+ tokens, [\d,]+ KV tokens: gain 0\.\d+ when measured again, the serial plan runs", line
        )


@pytest.mark.usefixtures("quick")
def test_without_ortools_the_search_names_the_package_to_install(
    recorded: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    for name in [
        n
        for n in sys.modules
        if n.startswith(("ortools", "weft.autosearch.structure_search", "weft.autosearch.resource_"))
    ]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ortools", None)
    monkeypatch.delattr("weft.autosearch.structure_search", raising=False)
    monkeypatch.delattr("weft.autosearch.resource_assignment", raising=False)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[search\]'"):
        search.Search(Machine(recorded, LLAMA_8B), TYPICAL, None, TimeBudget(5)).run("1024:512")


def test_decodes_alone_fill_the_pool_in_halves_of_whole_steps() -> None:
    dense = TYPICAL._replace(tokens=1920, decodes=640)
    small, large = dense_batch.decode_batches(dense, 1024, 908_190)  # memory for 709 of the workload's requests
    assert (small.tokens, small.decodes, small.context) == (768, 768, 908_190 // 768)
    assert (large.tokens, large.decodes, large.context) == (1024, 1024, 908_190 // 1024)
    assert [b.context for b in dense_batch.decode_batches(dense, 1024, None)] == [dense.context]
    assert dense_batch.decode_batches(dense._replace(tokens=512), 1024, None) == []
    assert dense_batch.decode_batches(dense, 0, 908_190) == []


@pytest.mark.usefixtures("quick")
def test_decodes_alone_are_searched_too(recorded: Profile) -> None:
    bench = SyntheticBench(LLAMA_8B)
    budget = TimeBudget(600, clock=bench.clock)
    result = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, bench, budget, max_num_seqs=1024).run("x")
    decodes = [p for p in result.plan.periods if p.tokens == 1024]
    assert decodes
    assert all(p.figures["gain"] > 1 and p.min_tokens <= 1024 for p in decodes)
    measured = {line.stage: line.measured for line in result.lines if line.load == "1024 decodes" and line.measured}
    assert measured["serial"].ms > min(t.ms for t in measured.values())


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("measured", [True, False])
def test_a_start_plan_competes(recorded: Profile, plan: Plan, measured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense_batch, "DENSE_STEPS", 1)
    known = msgspec.structs.replace(plan.periods[0], min_tokens=1, min_kv_tokens=0)
    bad = without_overlap(known, 132)  # the solver found only this one

    def found(*start: Period) -> list[Period]:
        kept = two_stage_search.StageStore(
            {"typical, 2048 tokens": two_stage_search.StageResults(99.0, 1.0, [pipeline_structure.Candidate(9.0, bad)])}
        )  # fmt: skip
        machine, budget = Machine(recorded, LLAMA_8B), TimeBudget(1000, clock=clock)
        one = search.Search(machine, TYPICAL, bench, budget, known=start, store=kept)
        return [msgspec.structs.replace(p, figures={}) for p in one.run("x").plan.periods]

    monkeypatch.setattr(search.Refiner, "moves", lambda *_: iter(()))
    bench = SyntheticBench(LLAMA_8B) if measured else None
    clock = bench.clock if bench is not None else time.monotonic
    assert found() == []
    assert [p.operations for p in found(known)] == [known.operations]


@pytest.mark.usefixtures("quick")
def test_a_search_ends_in_its_time(recorded: Profile) -> None:
    class Slow(SyntheticBench):
        now = 0.0

        def period(self, period: Period, load: Load) -> Timing:
            self.now += 1.0
            return super().period(period, load)

    bench = Slow(LLAMA_8B)
    budget = TimeBudget(400.0, clock=lambda: bench.now)
    search.Search(Machine(recorded, LLAMA_8B), TYPICAL, bench, budget, max_num_seqs=1024).run("x")
    assert 200 < bench.now <= 400


@pytest.mark.nightly
def test_the_solver_keeps_to_its_time_and_every_load_gets_a_share(
    recorded: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a clock that each step of the solver moves by 10 s: all of them would take far longer."""

    class Steps:
        now = 0.0
        loads: ClassVar[list[str]] = []
        shares: ClassVar[list[float]] = []

        def __call__(self, text: str, share: float | None = None) -> None:
            if "stage I" in text:
                self.now += 10.0
                self.loads.append(text.partition(":")[0])
            if share is not None:
                self.shares.append(share)

    monkeypatch.setattr(two_stage_search, "EFFORT", 0.02)
    steps = Steps()
    budget = TimeBudget(600.0, steps, clock=lambda: steps.now)
    search.Search(Machine(recorded, LLAMA_8B), TYPICAL, None, budget, max_num_seqs=1024).run("x")
    assert steps.now <= 600.0
    counts = Counter(steps.loads)
    assert len(counts) >= dense_batch.DENSE_STEPS + len(search.LOADS) - 1
    assert max(counts.values()) <= 3 * min(counts.values())
    assert steps.shares == sorted(steps.shares)
    assert 0 <= steps.shares[0] < 0.1


@pytest.mark.usefixtures("quick")
def test_a_stopped_search_leaves_the_best_so_far(recorded: Profile) -> None:
    lines: list[str] = []

    def note(text: str, _: float | None = None) -> None:
        lines.append(text)

    budget = TimeBudget(1e6, note, lambda: "1920" in " ".join(lines))
    result = search.Search(Machine(recorded, LLAMA_8B), TYPICAL, None, budget, max_num_seqs=1024).run("x")
    assert result.plan.periods
    assert result.plan.made.endswith("ended early")
    assert not [text for text in lines if "decodes" in text and "stage" in text]


@pytest.mark.usefixtures("quick")
def test_a_model_whose_kv_fills_the_gpu_is_searched_at_the_batch_it_can_run() -> None:
    spec = spec_of(5120, 13824, 40, 40, 40)
    bench = SyntheticBench(spec)
    bench.memory = 140 * 10**9
    profiler = Profiler(bench, spec, TYPICAL, Grid.coarse(TYPICAL, 132), lambda *_: None)
    recorded = profiler.run(target_for(spec), 100)
    bench.calls = 0
    budget = TimeBudget(400, clock=bench.clock)
    result = search.Search(Machine(recorded, spec), TYPICAL, bench, budget, max_num_seqs=1024).run("x")
    measured = {line.load for line in result.lines if line.load.endswith("tokens")}
    assert measured == {"384 tokens", "256 tokens"}  # about 100 decodes and the prefill that keeps up with them
    for period in result.plan.periods:
        period.check(spec, 132)


def test_a_search_tries_the_tiles_of_the_models_number_format() -> None:
    eight = configs_of(replace(LLAMA_8B, quantization=Quantization("fp8")))
    assert all(config.special and config.depth == 128 for config in eight)
    assert not set(eight) & set(configs_of(LLAMA_8B))
