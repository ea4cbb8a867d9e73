"""The search for a plan by an idle engine: its state machine, its trial's statistic, its files and its process."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace
from test_plan import SPEC, TARGET, two_halves

from weft.autosearch import plan_show
from weft.engine.config import EngineConfig, Share
from weft.engine.errors import ConfigError
from weft.engine.plans import found as found_plans
from weft.engine.plans.choose import choose_plan
from weft.engine.plans.found import MOST_BEGUN, FoundPlans, Trials, Verdict, kept_plan
from weft.engine.plans.plan import Plan, model_key
from weft.engine.plans.trial import LOOKS, MOST_LOST, Trial, Work, planned
from weft.engine.runner.device.preparation import Preparation, Stage
from weft.engine.runner.options import plan_search as search_options
from weft.engine.runner.options.plan_search import searches
from weft.engine.runner.options.resolve import resolve
from weft.engine.scheduling.plan_search import ATTEMPTS, BUDGET_SECONDS, Failed, Found, News, PlanSearch, Spent, State
from weft.engine.scheduling.search_process import SearchOrder, SearchProcess
from weft.engine.wire.search_gate import SearchGate

PLAN = Plan(TARGET, "1024:512", (two_halves(), replace(two_halves(), min_kv_tokens=5000, max_kv_tokens=9000)))


class FakeSearcher:
    def __init__(self) -> None:
        self.queue: list[News] = []
        self.ended: str | None = None
        self.stopped = False

    def news(self) -> Sequence[News]:
        taken, self.queue = self.queue, []
        return taken

    def stop(self) -> None:
        self.stopped = True


class FakePreparation(Preparation):
    def __init__(self, pipelines: int) -> None:
        self.stages = [Stage.COMPILING] * pipelines

    def become(self, *stages: Stage) -> None:
        self.stages = list(stages)


class FakeRecorder:
    def __init__(self) -> None:
        self.outcome: str | None = None
        self.written: list[Trials] = []
        self.disk = ""

    def record(self, trials: Trials) -> None:
        self.written.append(trials)
        self.outcome = self.disk


class Rig:
    """A search with fakes, a clock that stands still, and requests that come when the test says so."""

    def __init__(self, mode: Any = "now") -> None:
        self.now, self.busy, self.step = 0.0, False, 0
        self.searchers: list[FakeSearcher] = []
        self.starts: Callable[[], None] = lambda: None
        self.gate, self.recorder = SearchGate.create(), FakeRecorder()
        self.preparation: FakePreparation | None = None
        self.chooses: Callable[[int, Any], bool] | None = None
        self.search = PlanSearch(
            mode, self._start, self.gate, self, self.recorder,  # type: ignore[arg-type]
            lambda: self.busy, clock=lambda: self.now,
        )  # fmt: skip

    def _start(self) -> FakeSearcher:
        self.starts()
        self.searchers.append(FakeSearcher())
        return self.searchers[-1]

    def adopt(self, plan: Plan) -> Preparation:
        self.preparation = FakePreparation(len(plan.periods))
        return self.preparation

    def try_pipelines(self, chooses: Callable[[int, Any], bool]) -> None:
        self.chooses = chooses

    def tick(self, seconds: float = 0.1, *, busy: bool = False) -> None:
        self.now += seconds
        self.busy = busy
        self.search.on_step()

    def until_found(self, plan: Plan = PLAN, trials: Trials | None = None) -> None:
        self.tick()
        self.tick()
        self.searchers[-1].queue.append(Found(plan, trials or Trials("x")))
        self.tick()

    def until_trying(self) -> None:
        self.until_found()
        assert self.preparation is not None
        self.preparation.become(*[Stage.SERVING] * len(PLAN.periods))
        self.tick()

    def iterate(self, number: int, seconds: Callable[[bool], float]) -> bool:
        """Run one iteration that pipeline `number` fits. Returns whether the pipeline ran it."""
        assert self.chooses is not None
        self.step += 1
        batch = SimpleNamespace(step=self.step, num_tokens=512, num_decodes=4, kv_len=np.full(4, 500))
        used = self.chooses(number, batch)
        self.search.on_result(SimpleNamespace(batch=batch, seconds=seconds(used)), self.now)  # type: ignore[arg-type]
        return used


# -- the state machine


def test_a_found_plan_that_wins_on_requests_is_kept_and_recorded() -> None:
    rig = Rig()
    rig.until_trying()
    assert rig.search.state is State.TRYING
    assert [t.begun for t in rig.recorder.written] == [1]
    rng = np.random.default_rng(0)
    ran: list[bool] = []
    while rig.search.state is State.TRYING and len(ran) < 4000:
        for number, gain in ((0, 1.05), (1, 0.97)):
            ran.append(rig.iterate(number, lambda used, g=gain: rng.normal(0.06, 0.0006) / (g if used else 1.0)))
    assert rig.search.state is State.KEPT
    last = rig.recorder.written[-1]
    assert (last.begun, {i: v.kept for i, v in last.verdicts.items()}) == (0, {0: True, 1: False})
    assert last.verdicts[0].gain == pytest.approx(1.05, abs=0.005)
    assert [rig.iterate(0, lambda _: 0.05) for _ in range(6)] == [True] * 6
    assert [rig.iterate(1, lambda _: 0.05) for _ in range(6)] == [False] * 6
    stats = rig.search.stats()["search"]
    assert stats.states == {"kept": 1}
    assert list(stats.gains.values()) == [last.verdicts[0].gain]


def test_a_plan_that_does_not_win_leaves_the_serial_plan() -> None:
    rig = Rig()
    rig.until_trying()
    rng = np.random.default_rng(1)
    for _ in range(4 * LOOKS[-1]):
        for number in (0, 1):
            rig.iterate(number, lambda _: rng.normal(0.06, 0.0006))
    assert rig.search.state is State.SERIAL
    assert not any(rig.iterate(0, lambda _: 0.05) for _ in range(6))


def test_the_gate_is_open_only_while_the_engine_is_idle_and_closes_before_an_iteration() -> None:
    rig = Rig("idle")
    rig.tick(4.9)
    assert not rig.searchers
    rig.tick(busy=True)
    rig.tick(4.9)
    assert not rig.searchers  # a request came: 5 s begin again
    rig.tick(5.1)
    rig.tick()
    assert rig.gate.is_open
    rig.tick(0.001, busy=True)
    assert not rig.gate.is_open
    assert rig.gate.closings == 1
    rig.tick(0.0)
    rig.tick(4.9)
    assert not rig.gate.is_open
    rig.tick(0.2)
    assert rig.gate.is_open
    rig.search.close()
    assert not rig.gate.is_open
    assert rig.searchers[-1].stopped


@pytest.mark.parametrize("how", ["no process", "dies", "says so", "hangs", "adopt", "left out", "disk"])
def test_a_search_that_fails_leaves_the_serial_plan_and_a_closed_gate(how: str, monkeypatch: Any) -> None:
    rig = Rig()

    def no_process() -> None:
        raise OSError("no memory")

    def no_plan(_: Plan) -> Preparation:
        raise RuntimeError("CUDA error")

    if how == "no process":
        rig.starts = no_process
    if how == "adopt":
        monkeypatch.setattr(rig, "adopt", no_plan)
    if how in ("adopt", "left out", "disk"):
        rig.recorder.disk = "read-only file system" if how == "disk" else ""
        rig.until_found()
        if how != "adopt":
            assert rig.preparation is not None
            stage = Stage.LEFT_OUT if how == "left out" else Stage.SERVING
            rig.preparation.become(*[stage] * len(PLAN.periods))
    for _ in range(12):
        rig.tick(BUDGET_SECONDS / 3 if how == "hangs" else 0.1)
        if rig.searchers and how == "dies":
            rig.searchers[-1].ended = "the process ended with status 1"
        if rig.searchers and how == "says so":
            rig.searchers[-1].queue.append(Failed("too little memory"))
    assert rig.search.state is State.FAILED
    assert rig.chooses is None
    assert not rig.gate.is_open
    assert all(searcher.stopped for searcher in rig.searchers)
    assert len(rig.searchers) == {"no process": 0, "dies": ATTEMPTS}.get(how, 1)
    assert rig.search.pause() is None


def test_a_search_ends_while_the_model_sleeps_and_begins_again() -> None:
    rig = Rig()
    for _ in range(3):
        rig.tick()
        rig.tick()
        assert rig.gate.is_open
        rig.search.on_sleep()
        assert rig.searchers[-1].stopped
        assert not rig.gate.is_open
        rig.tick(60)
        assert rig.search.state is State.WAITING
        rig.search.on_wake()
    assert len(rig.searchers) == 3


def test_a_plan_in_whose_trials_engines_have_died_is_not_tried() -> None:
    rig = Rig()
    rig.until_found(trials=Trials("x", begun=MOST_BEGUN))
    assert rig.search.state is State.FAILED
    assert rig.preparation is None


def test_an_earlier_verdict_holds_without_a_new_trial() -> None:
    rig = Rig()
    rig.until_found(trials=Trials("x", verdicts={0: Verdict(False, 0.99), 1: Verdict(False, 0.98)}))
    assert rig.search.state is State.SERIAL
    rig = Rig()
    rig.until_found(replace(PLAN, periods=()))
    assert rig.search.state is State.SERIAL


EVENTS = st.sampled_from(
    ["idle", "long", "busy", "spent", "found", "empty", "fails", "dies", "ready", "left out", "sleep", "wake", "trial"]
)


@settings(max_examples=150, deadline=None)
@given(st.lists(EVENTS, max_size=60), st.sampled_from(["idle", "now"]), st.booleans())
def test_in_any_order_of_events_requests_come_first(events: list[str], mode: str, disk: bool) -> None:
    """The gate is closed whenever a request is open, the model sleeps or nothing searches; final states are final; no
    pipeline runs before the disk knows; at most two processes end without a result."""
    rig = Rig(mode)
    rig.recorder.disk = "" if disk else "read-only"
    asleep, died, final = False, 0, None
    for event in events:
        searcher = rig.searchers[-1] if rig.searchers and not rig.searchers[-1].stopped else None
        match event:
            case "idle" | "long":
                rig.tick(0.06 if event == "idle" else 6.0)
            case "busy":
                rig.tick(0.01, busy=True)
            case "sleep" if not rig.busy:
                asleep = True
                rig.search.on_sleep()
            case "wake":
                asleep = False
                rig.search.on_wake()
            case "spent" if searcher:
                searcher.queue.append(Spent(10.0, 5000.0, "x"))
            case "found" | "empty" if searcher:
                searcher.queue.append(Found(PLAN if event == "found" else replace(PLAN, periods=()), Trials("x")))
            case "fails" if searcher:
                searcher.queue.append(Failed("why"))
            case "dies" if searcher and searcher.ended is None:
                searcher.ended, died = "it died", died + 1
            case "ready" | "left out" if rig.preparation:
                rig.preparation.become(*[Stage.SERVING if event == "ready" else Stage.LEFT_OUT] * len(PLAN.periods))
            case "trial" if rig.chooses:
                rig.iterate(0, lambda used: 0.05 if used else 0.06)
        state = rig.search.state
        assert not rig.gate.is_open or (not rig.busy and not asleep and state is State.SEARCHING)
        assert sum(not each.stopped for each in rig.searchers) <= 1
        if state is not State.SEARCHING:
            assert all(each.stopped for each in rig.searchers)
        if rig.chooses is not None:
            assert disk
            assert rig.recorder.written[0].begun == 1
        if final is not None:
            assert state is final
        final = state if state.final else None
        assert rig.search.stats()["search"].states == {state.value: 1}
    assert died <= ATTEMPTS + len([e for e in events if e == "sleep"])


# -- the statistic


def tried(gain: float, noise: float, seed: int, drift: float = 0.0) -> bool | None:
    trial, rng = Trial(), np.random.default_rng(seed)
    for step in range(4 * LOOKS[-1]):
        used = trial.launched(step, Work(512, 2000))
        seconds = 0.05 * np.exp(rng.normal(0.0, noise) + drift * step) / (gain if used else 1.0)
        trial.ended(step, seconds)
    return trial.kept


def test_a_gain_beyond_the_noise_is_kept_and_no_gain_is_not() -> None:
    assert all(tried(1.03, 0.01, seed) for seed in range(40))
    assert not any(tried(0.98, 0.01, seed) for seed in range(40))
    # no gain at all: three standard errors at four looks
    assert sum(bool(tried(1.0, 0.01, seed)) for seed in range(300)) <= 3


def test_clocks_that_fall_steadily_decide_nothing() -> None:
    assert not any(tried(1.0, 0.001, seed, drift=2e-4) for seed in range(20))
    assert all(tried(1.02, 0.001, seed, drift=2e-4) for seed in range(20))


def test_iterations_alternate_in_pairs_and_unlike_ones_are_no_pair() -> None:
    trial = Trial()
    assert [trial.launched(i, Work(512, 2000)) for i in range(8)] == [planned(i) for i in range(8)]
    assert [planned(i) for i in range(4)] == [False, True, True, False]
    for i in range(8):
        trial.ended(i, 0.05)
    assert trial.pairs == 4
    trial.launched(8, Work(512, 2000))
    trial.launched(9, Work(512, 2100))
    trial.ended(8, 0.05)
    trial.ended(9, 0.05)
    assert trial.pairs == 4
    trial.launched(10, Work(512, 2000))
    trial.launched(11, Work(512, 2000))
    trial.ended(10, float("nan"))
    trial.ended(11, 0.05)
    assert trial.pairs == 4


def test_a_trial_without_pairs_ends() -> None:
    trial = Trial()
    for step in range(3 * MOST_LOST):
        trial.launched(step, Work(512, 2000 + 100 * (step % 2)))
        trial.ended(step, 0.05)
    assert trial.kept is False


# -- the files


def test_only_pipelines_that_won_serve_at_the_next_start(tmp_path: Path) -> None:
    found = FoundPlans(tmp_path, TARGET)
    assert found.load() is None
    assert kept_plan(tmp_path, TARGET) is None
    found.save(PLAN)
    assert found.load() == PLAN
    assert kept_plan(tmp_path, TARGET) is None  # not tried yet
    trials = replace(found.trials(), begun=1, verdicts={1: Verdict(True, 1.04), 0: Verdict(False, 0.9)})
    found.record(trials)
    assert found.trials() == trials
    kept = kept_plan(tmp_path, TARGET)
    assert kept is not None
    assert kept.periods == PLAN.periods[1:]
    found.save(replace(PLAN, made="again"))
    assert found.trials().verdicts == {}  # of another plan
    for other in ({"gpu": "H100"}, {"kernels": "bda"}, {"dtype": "float16"}, {"model": "x"}, {"sms": 114}):
        assert kept_plan(tmp_path, replace(TARGET, **other)) is None


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b"\xff\x00", b'{"format":"weft-plan","version":99}'])
@pytest.mark.parametrize("which", ["plan", "trials"])
def test_a_damaged_file_is_as_none(content: bytes, which: str, tmp_path: Path) -> None:
    found = FoundPlans(tmp_path, TARGET)
    found.save(PLAN)
    found.record(replace(found.trials(), verdicts={0: Verdict(True, 1.1)}))
    file = found.file if which == "plan" else found.file.with_suffix(".trials")
    file.write_bytes(content)
    assert kept_plan(tmp_path, TARGET) is None
    assert (found.load() is None) == (which == "plan")
    found.save(PLAN)
    assert found.load() == PLAN


def test_a_start_uses_what_an_earlier_search_found_if_no_plan_is_shipped(tmp_path: Path, monkeypatch: Any) -> None:
    here = replace(TARGET, model=model_key(SPEC))
    found = FoundPlans(tmp_path, here)
    found.save(replace(PLAN, target=here))
    found.record(replace(found.trials(), verdicts={0: Verdict(True, 1.1)}))
    plan = choose_plan("auto", SPEC, here, None, tmp_path)
    assert plan is not None
    assert plan.periods == PLAN.periods[:1]
    assert choose_plan("serial", SPEC, here, None, tmp_path) is None
    assert choose_plan("auto", SPEC, here, None, None) is None
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(found_plans, "FOLDER", "file")  # not a folder
    assert choose_plan("auto", SPEC, here, None, tmp_path) is None


def test_found_plans_are_listed_with_their_trials(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert plan_show.main([]) == 0
    assert "no plans in" in capsys.readouterr().out
    found = FoundPlans(tmp_path / "weft", TARGET)
    found.save(PLAN)
    found.record(replace(found.trials(), verdicts={0: Verdict(True, 1.04, 0.003, 64)}))
    (found.folder / "a.json").write_text("{")
    assert plan_show.main([]) == 0
    listed = capsys.readouterr().out
    assert "pipeline 1, 384 to 512 tokens: kept: +4.0 % ± 0.3 % on requests, 64 pairs" in listed
    assert "pipeline 2, 384 to 512 tokens: not decided on requests yet" in listed
    assert "not used: " in listed


# -- the process


def _process(tmp_path: Path, monkeypatch: Any, code: str) -> SearchProcess:
    (tmp_path / "fake_search.py").write_text(code)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    order = SearchOrder("{}", SearchGate.create().fd, 512, 16, 1.0)
    return SearchProcess(order, "fake_search")


def _until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_reports_news_among_other_lines_and_how_it_ended(tmp_path: Path, monkeypatch: Any) -> None:
    process = _process(
        tmp_path, monkeypatch,
        "import sys\nprint('a library')\nprint('{\"type\":\"spent\",\"seconds\":2}', flush=True)\nsys.exit(7)",
    )  # fmt: skip
    news: list[News] = []
    _until(lambda: bool(news.extend(process.news())) or process.ended is not None)
    assert news == [Spent(2.0)]
    assert process.ended == "the process ended with status 7"
    process.stop()


def test_a_process_is_ended_without_waiting_for_it(tmp_path: Path, monkeypatch: Any) -> None:
    process = _process(tmp_path, monkeypatch, "import time\nprint('x', flush=True)\ntime.sleep(600)")
    assert process.ended is None
    process.stop()
    _until(lambda: process._process.poll() is not None)
    process.stop()


# -- the option


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"device": "cpu"}, "--search idle: plans need a GPU"),
        ({"device": "cpu", "search": "now"}, "--search now: plans need a GPU"),
    ],
)
def test_a_search_that_cannot_run_is_refused_in_one_line(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(EngineConfig(**{"search": "idle", **options}), SPEC)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "has not been tested on a GPU yet"),
        ({"plan": "serial"}, "--plan serial excludes a plan"),
        ({"enforce_eager": True}, "leave out --enforce-eager"),
        ({"batch_invariant": True}, "--batch-invariant"),
        ({"share": Share(sharers=2)}, "several engines share this GPU"),
        ({"search": "off"}, ""),
    ],
)
def test_options_that_exclude_a_search_are_named(options: dict[str, Any], message: str) -> None:
    config = EngineConfig(**{"search": "idle", **options})
    bf16 = torch.bfloat16
    if not message:
        assert not searches(config, SPEC, bf16, bf16, "triton", cuda=True, planned=False)
        return
    with pytest.raises(ConfigError, match=message):
        searches(config, SPEC, bf16, bf16, "triton", cuda=True, planned=False)


def test_an_engine_with_a_plan_searches_for_none(monkeypatch: Any) -> None:
    monkeypatch.setattr(search_options, "RUNS_ON_GPUS", True)
    config, bf16 = EngineConfig(search="idle"), torch.bfloat16
    assert not searches(config, SPEC, bf16, bf16, "triton", cuda=True, planned=True)
    assert searches(config, SPEC, bf16, bf16, "triton", cuda=True, planned=False)
