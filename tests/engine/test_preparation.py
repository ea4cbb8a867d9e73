"""A plan's pipelines prepared while serving: their order, failures, time slices and end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, Harness
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from weft.engine.runner.cpu import cpu_runner
from weft.engine.runner.device.preparation import (
    BUSY_SHARE,
    COMPILER_POLL_SECONDS,
    PipelineWork,
    Preparation,
    Stage,
    Step,
)
from weft.engine.wire.messages import PlanStats


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Compiler:
    """Returns the outcomes that the test sets."""

    def __init__(self) -> None:
        self.outcomes: dict[int, str] = {}
        self.stopped = False

    def outcome(self, pipeline: int) -> str | None:
        return self.outcomes.get(pipeline)

    def stop(self) -> None:
        self.stopped = True


class Pipelines:
    """Steps that take time and may fail; `done` is what happened, in order."""

    def __init__(self, clock: Clock, count: int, *, seconds: float = 0.004, loads: int = 3, captures: int = 2) -> None:
        self.clock, self.seconds = clock, seconds
        self.done: list[tuple[str, int]] = []
        self.failing: set[tuple[str, int]] = set()
        self.works = [
            PipelineWork(f"of {i}", lambda i=i: self._steps("load", i, loads),  # type: ignore[misc]
                         lambda i=i: self._steps("capture", i, captures), lambda i=i: self._take("enable", i))
            for i in range(count)
        ]  # fmt: skip

    def _steps(self, what: str, i: int, count: int) -> Iterator[Step]:
        for _ in range(count):
            yield lambda: self._take(what, i)

    def _take(self, what: str, i: int) -> None:
        self.clock.now += self.seconds
        if (what, i) in self.failing:
            raise RuntimeError(f"no {what}\nand a trace")
        self.done.append((what, i))

    def whole(self, i: int) -> list[tuple[str, int]]:
        return [("load", i)] * 3 + [("capture", i)] * 2 + [("enable", i)]


def finish(preparation: Preparation) -> None:
    for _ in range(1000):
        if preparation.done:
            return
        preparation.advance(busy=False)
    pytest.fail("it does not end")


def test_each_is_loaded_captured_and_enabled_before_the_next_is_started() -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 3)
    compiler.outcomes = dict.fromkeys(range(3), "")
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    assert preparation.stats == PlanStats(pipelines=3, serving=0, left_out=0)
    finish(preparation)
    assert pipelines.done == [*pipelines.whole(0), *pipelines.whole(1), *pipelines.whole(2)]
    assert preparation.stats == PlanStats(pipelines=3, serving=3, left_out=0)
    assert compiler.stopped
    assert preparation.pause is None


def test_nothing_is_done_before_the_kernels_exist_and_the_first_ready_is_first() -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 2)
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    for _ in range(5):
        assert not preparation.advance(busy=False)
    assert pipelines.done == []
    assert preparation.pause == COMPILER_POLL_SECONDS
    compiler.outcomes[1] = ""
    assert preparation.pause == 0.0
    while not pipelines.done or pipelines.done[-1] != ("enable", 1):
        preparation.advance(busy=False)
    compiler.outcomes[0] = ""
    finish(preparation)
    assert pipelines.done == [*pipelines.whole(1), *pipelines.whole(0)]


@pytest.mark.parametrize("what", ["load", "capture", "enable"])
def test_a_failing_step_drops_only_its_pipeline(what: str, capsys: pytest.CaptureFixture[str]) -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 3)
    compiler.outcomes = dict.fromkeys(range(3), "")
    pipelines.failing = {(what, 1)}
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    finish(preparation)
    assert [stage.value for stage in preparation.stages] == ["serving", "left out", "serving"]
    assert ("enable", 1) not in pipelines.done
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "weft: the serial plan serves; plan: 0 of 3 pipelines"
    assert lines[1] == "weft: plan: 1 of 3 pipelines"
    why = f"RuntimeError: no {what}"
    assert lines[2] == f"weft: plan: the pipeline of 1 is left out and the serial plan serves instead: {why}"
    assert lines[3].startswith("weft: plan: 2 of 3 pipelines, ")
    assert len(lines) == 4


def test_a_pipeline_whose_kernels_do_not_compile_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 2)
    compiler.outcomes = {0: "product_kernel did not compile", 1: ""}
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    finish(preparation)
    assert pipelines.done == pipelines.whole(1)
    assert preparation.stats == PlanStats(pipelines=2, serving=1, left_out=1)
    assert "serves instead: product_kernel did not compile" in capsys.readouterr().err


def test_each_end_is_reported_once() -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 3)
    compiler.outcomes = {0: "no", 1: "", 2: ""}
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    news = 0
    while not preparation.done:
        before = preparation.stats
        reported = preparation.advance(busy=False)
        assert reported == (preparation.stats != before)
        news += reported
    assert news == 3
    assert not preparation.advance(busy=False)


def test_with_requests_slices_keep_to_their_share_for_any_step_time() -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 4, seconds=0.3)  # a step is longer than a slice
    compiler.outcomes = dict.fromkeys(range(4), "")
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    begin, worked = clock.now, 0.0
    while not preparation.done:
        before = clock.now
        preparation.advance(busy=True)
        worked += clock.now - before
        assert worked <= BUSY_SHARE * (clock.now - begin) + 0.3 + 1e-6
        clock.now += 0.03  # an iteration
    assert preparation.stats.serving == 4


def test_without_requests_nothing_waits() -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 4)
    compiler.outcomes = dict.fromkeys(range(4), "")
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    begin = clock.now
    preparation.advance(busy=True)
    while not preparation.done:
        assert preparation.pause == 0.0
        preparation.advance(busy=False)
    assert clock.now - begin == pytest.approx(4 * 6 * pipelines.seconds)


def test_stopped_in_the_middle_it_takes_no_further_step() -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 2)
    compiler.outcomes = {0: "", 1: ""}
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    preparation.advance(busy=False)
    assert not preparation.done
    taken = list(pipelines.done)
    preparation.stop()
    preparation.stop()
    assert compiler.stopped
    assert not preparation.advance(busy=False)
    assert preparation.pause is None
    assert pipelines.done == taken


def test_a_plan_that_was_waited_for_serves_from_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    compiler = Compiler()
    preparation = Preparation((), compiler, serving=4)
    assert preparation.done
    assert compiler.stopped
    assert preparation.stats == PlanStats(pipelines=4, serving=4, left_out=0)
    assert capsys.readouterr().err == ""


class AnyOrder(RuleBasedStateMachine):
    """Kernels arrive, fail or never arrive, steps fail, requests run or not, a shutdown: in any order."""

    COUNT = 4

    def __init__(self) -> None:
        super().__init__()
        self.clock, self.compiler = Clock(), Compiler()
        self.pipelines = Pipelines(self.clock, self.COUNT)
        self.preparation = Preparation(self.pipelines.works, self.compiler, clock=self.clock)
        self.stopped = False
        self.last: list[Stage] = list(self.preparation.stages)

    @rule(i=st.integers(0, COUNT - 1), compiles=st.booleans())
    def compiled(self, i: int, compiles: bool) -> None:
        self.compiler.outcomes.setdefault(i, "" if compiles else "no")

    @rule(i=st.integers(0, COUNT - 1), what=st.sampled_from(["load", "capture", "enable"]))
    def will_fail(self, i: int, what: str) -> None:
        self.pipelines.failing.add((what, i))

    @rule(busy=st.booleans(), passed=st.floats(0, 0.5))
    def advance(self, busy: bool, passed: float) -> None:
        before, taken = self.preparation.stats, len(self.pipelines.done)
        reported = self.preparation.advance(busy=busy)
        assert reported == (self.preparation.stats != before)
        assert not self.stopped or len(self.pipelines.done) == taken
        self.clock.now += passed

    @precondition(lambda self: not self.stopped)
    @rule()
    def stop(self) -> None:
        self.preparation.stop()
        self.stopped = True
        self.last = list(self.preparation.stages)

    @invariant()
    def what_serves_is_whole_and_stays(self) -> None:
        for i, (before, now) in enumerate(zip(self.last, self.preparation.stages, strict=True)):
            done = [step for step in self.pipelines.done if step[1] == i]
            order = list(Stage)
            assert order.index(now) >= order.index(before)
            assert not before.final or now is before
            if now is Stage.SERVING:
                assert done == self.pipelines.whole(i)
                assert self.compiler.outcomes[i] == ""
            else:
                assert ("enable", i) not in done
            if now is Stage.COMPILING:
                assert not done
        under_way = [s for s in self.preparation.stages if s in (Stage.LOADING, Stage.CAPTURING)]
        assert len(under_way) <= 1
        self.last = list(self.preparation.stages)

    def teardown(self) -> None:
        for i in range(self.COUNT):
            self.compiler.outcomes.setdefault(i, "")
        finish(self.preparation)
        assert self.compiler.stopped


TestAnyOrder = AnyOrder.TestCase
TestAnyOrder.settings = settings(max_examples=40, stateful_step_count=30, deadline=None, derandomize=True)


def test_an_engine_runs_it_with_and_without_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, compiler = Clock(), Compiler()
    pipelines = Pipelines(clock, 2)
    preparation = Preparation(pipelines.works, compiler, clock=clock)
    monkeypatch.setattr(cpu_runner, "Preparation", lambda: preparation)
    harness = Harness("demo", num_pages=40, page_size=16, max_num_seqs=2, max_num_batched_tokens=64)
    engine = harness.engine
    first = engine.step()
    assert first is not None
    assert first.stats.plan == PlanStats(2, 0, 0)
    assert not engine.has_work
    assert engine.step() is None
    assert engine.pause == COMPILER_POLL_SECONDS
    compiler.outcomes[0] = ""
    assert engine.pause == 0.0
    reported: Any = [engine.step() for _ in range(20)]
    assert [outputs.stats.plan for outputs in reported if outputs is not None] == [PlanStats(2, 1, 0)]
    compiler.outcomes[1] = "no"

    def passes(_: int) -> None:
        clock.now += 1.0

    handle = harness.add(np.arange(10, 30), max_tokens=8, ignore_eos=True, **GREEDY)
    harness.run(passes)
    assert len(harness.tokens[handle]) == 8
    assert engine.stats().plan == PlanStats(2, 1, 1)
    assert engine.pause is None
    engine.close()
    assert compiler.stopped
