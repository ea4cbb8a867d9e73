"""An interrupted search resumes where it stopped, with its measurements and the solver's results."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
from synthetic import CONFIG, LLAMA_8B, TYPICAL, SyntheticBench, target_for

from weft.autosearch import command, dense_batch, two_stage_search
from weft.autosearch.accelerators import accelerator
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.formula_profile import formula_profile
from weft.autosearch.journal import Journal
from weft.autosearch.machine import Machine
from weft.autosearch.profile import cache_path
from weft.autosearch.refine import serial_for
from weft.autosearch.time_budget import TimeBudget
from weft.autosearch.two_stage_search import LoadSolver, StageResults, StageStore
from weft.engine.errors import ConfigError, RankLost
from weft.engine.plans.plan import NanoOperation, Period, load_plan
from weft.server.daemon import cli

SERIAL = serial_for(LLAMA_8B, TYPICAL, 132)


class Counted(SyntheticBench):
    """No two measurements are equal; some of them lose the card."""

    def __init__(self, ends: Collection[tuple[str, int]] = ()) -> None:
        """ends: kinds of measurements, and the number of the one that fails."""
        super().__init__(LLAMA_8B)
        self._ends, self.requested = ends, Counter[str]()

    def _next(self, what: str) -> None:
        self.requested[what] += 1
        if (what, self.requested[what]) in self._ends:
            raise RankLost("rank 1: gone")

    def alone(self, op: NanoOperation, load: Load) -> Timing:
        self._next("alone")
        if op.sms > self.num_sms:
            raise ConfigError("more SMs than there are")
        return super().alone(op, load)

    def period(self, period: Period, load: Load) -> Timing:
        self._next("period")
        return super().period(period, load)._replace(watts=float(self.calls))

    def close(self) -> None: ...


def test_a_search_forgets_abandoned_journals(tmp_path: Path) -> None:
    old, solved, young, other = (tmp_path / name for name in ("a.measured", "a.solved", "b.measured", "c.json"))
    for file, age in ((old, 31), (solved, 31), (young, 29), (other, 31)):
        file.write_bytes(b"")
        os.utime(file, (time.time() - age * 86400,) * 2)
    Journal(Counted(), tmp_path / "c.measured")
    assert sorted(tmp_path.iterdir()) == [young, other]


def test_each_measurement_is_made_once_and_repeats_are_kept_apart(tmp_path: Path) -> None:
    bench, file = Counted(), tmp_path / "measured"
    first = Journal(bench, file)
    first.seconds = 0.2
    found = [first.period(SERIAL, TYPICAL) for _ in range(2)]
    assert [t.watts for t in found] == [1.0, 2.0]
    a, b = NanoOperation("gate_up", 0, 2048, 100), NanoOperation("decode", 0, 2048, 32, "memory")
    both = first.pair(a, b, TYPICAL)
    with pytest.raises(ConfigError, match="more SMs"):
        first.alone(NanoOperation("gate_up", 0, 2048, 133), TYPICAL)
    with file.open("ab") as out:
        out.write(b'\n{"key": "\xff"}\n{"key": "torn')  # its writer was killed
    again = Journal(bench, file)
    again.seconds = 0.2
    before = bench.calls
    assert [again.period(SERIAL, TYPICAL) for _ in range(2)] == found
    assert again.pair(a, b, TYPICAL) == both
    with pytest.raises(ConfigError, match="more SMs"):
        again.alone(NanoOperation("gate_up", 0, 2048, 133), TYPICAL)
    assert (again.known, again.reused, bench.calls) == (4, 4, before)
    assert again.period(SERIAL, TYPICAL).watts == before + 1  # a third time
    again.seconds = 1.0
    again.period(SERIAL, TYPICAL)  # for longer
    assert bench.calls == before + 2
    assert Journal(bench, file).known == 6  # after the torn line too


def test_a_folder_that_cannot_be_created_is_reported_before_any_measurement(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="set XDG_CACHE_HOME"):
        Journal(Counted(), tmp_path / "file" / "searches" / "some.measured")


@pytest.mark.slow
@pytest.mark.usefixtures("quick")
def test_a_search_resumes_and_then_forgets_its_journal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dense_batch, "DENSE_STEPS", 1)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    bench, target = Counted({("alone", 30), ("period", 6)}), target_for(LLAMA_8B)
    solved: list[Load] = []
    predict = two_stage_search.search_pipelines

    def noted(machine: Machine, load: Load, *others: Any) -> StageResults:
        solved.append(load)
        return predict(machine, load, *others)

    monkeypatch.setattr(two_stage_search, "search_pipelines", noted)
    monkeypatch.setattr(command, "num_gpus", lambda: 1)
    monkeypatch.setattr(command, "open_gpu", lambda *_, **__: (bench, target))
    plan = tmp_path / "plan.json"
    argv = ["search", "--model", str(tmp_path / "model"), "--out", str(plan), "--budget-seconds", "60"]
    assert cli.main(argv) == 1  # while a profile is recorded
    assert "rank 1: gone" in capsys.readouterr().err
    measured = bench.calls
    assert measured >= 29
    assert not solved
    assert cli.main(argv) == 1  # while pipelines are measured
    assert f"with {measured} measurements" in capsys.readouterr().err
    before, measured = len(solved), bench.calls
    assert before
    assert cli.main(argv) == 0
    assert f"with {measured} measurements" in capsys.readouterr().err
    assert len(solved) == before
    assert load_plan(plan).target == target
    assert not list(cache_path(target).parent.parent.glob("searches/*"))  # the next one starts from scratch


@pytest.mark.nightly
@pytest.mark.usefixtures("quick")
def test_loads_solved_in_parallel_have_the_same_pipelines_as_in_sequence(
    monkeypatch: pytest.MonkeyPatch
) -> None:  # fmt: skip
    monkeypatch.setattr(two_stage_search, "EFFORT", 0.02)
    loads = [(f"{n}", TYPICAL._replace(tokens=n, decodes=n // 3)) for n in (256, 384)]
    machine = Machine(formula_profile(LLAMA_8B, TYPICAL, accelerator("h200")), LLAMA_8B)
    kept: list[int] = []

    def solved(workers: int) -> dict[str, StageResults]:
        found = StageStore(save=lambda _: kept.append(workers))
        one = LoadSolver(machine, TimeBudget(1e6), found, len(loads), measured=False, workers=workers)
        one.solve(loads)
        return found.stages

    assert solved(1) == solved(2)
    assert kept == [1, 1, 2, 2]
