"""An iteration that is launched late includes requests that arrive before it, and the device hardly waits."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from harness import GREEDY, Harness
from hypothesis import given, settings
from hypothesis import strategies as st
from list_device import ListEngine
from pydantic import ValidationError

from weft.engine.config import EngineConfig
from weft.engine.demo import MODEL_PATH
from weft.engine.llm import LLM
from weft.engine.runner.iteration.cost_shares import Costs
from weft.engine.scheduling.fairness import Fairness
from weft.engine.scheduling.late_launch import KNOWN, MARGINS, LateLaunch

COSTS = Costs(16e9, 16e9 / 150, 4096.0, 109.0, {None: 32})


def batch(step: int, decodes: int, prompt: int = 0) -> Any:
    """`prompt`: tokens of a prompt that is computed with the decodes."""
    query = np.array([1] * decodes + [prompt] * bool(prompt), np.int32)
    return SimpleNamespace(
        step=step, num_decodes=decodes, query_len=query, kv_len=query + 400, num_tokens=int(query.sum())
    )


class Plant:
    """A device, the host's time for an iteration, and arrivals per second."""

    def __init__(self, late: bool, seed: int, host: float = 0.8e-3, noise: float = 0.01) -> None:
        self.late = LateLaunch(COSTS) if late else None
        self._rng, self._host, self._noise = np.random.default_rng(seed), host, noise
        self.waits: list[float] = []
        self.idle = 0.0

    def run(self, iterations: int, length: Any, hiccup: float = 0.0, prompt: Any = lambda _: 0) -> float:
        """Mean seconds from an arrival to the start of its iteration. length: of iteration i; prompt: prompt tokens in
        it."""
        rng, arrivals = self._rng, np.sort(self._rng.uniform(0, iterations * length(0), iterations * 2))
        begun, came, ended = 0.0, 0, 0.0
        running, seconds, idle = batch(0, 50), length(0), 0.0
        for i in range(1, iterations):
            at = max(begun, self.late.at(running)) if self.late is not None else begun
            there = at + self._host * (1 + 0.2 * rng.random()) + (hiccup if rng.random() < 0.01 else 0.0)
            following = batch(i, 50, prompt(i))
            if self.late is not None:
                self.late.delayed = at > begun
                self.late.on_launch(following, there - at)
            joined = int(np.searchsorted(arrivals, at))
            ended = begun + seconds
            if self.late is not None:
                result: Any = SimpleNamespace(batch=running, seconds=seconds, idle_seconds=idle)
                self.late.on_result(result, max(ended, there))
            idle = max(0.0, there - ended)
            self.idle += idle
            begun = max(ended, there)
            self.waits += [begun - a for a in arrivals[came:joined]]
            came = joined
            running, seconds = following, length(i) * (1 + self._noise * rng.standard_normal())
        return float(np.mean(self.waits))


@pytest.mark.parametrize("seed", range(3))
def test_requests_wait_for_one_iteration_less(seed: int) -> None:
    early, late = Plant(False, seed), Plant(True, seed)
    assert early.run(2000, lambda _: 8e-3) == pytest.approx(12e-3, rel=0.05)
    assert late.run(2000, lambda _: 8e-3) < 6.5e-3
    assert late.idle < 0.005 * 2000 * 8e-3


def test_iterations_that_become_shorter_and_longer_cost_little() -> None:
    late = Plant(True, 1)
    late.run(3000, lambda i: 8e-3 * (1 + 0.3 * np.sin(i / 40)))
    assert late.idle < 0.01 * 3000 * 8e-3


def test_a_host_with_hiccups_gets_more_time() -> None:
    late = Plant(True, 2)
    late.run(3000, lambda _: 8e-3, hiccup=3e-3)
    assert late.idle < 0.01 * 3000 * 8e-3
    assert late.late is not None
    assert MARGINS[0] <= late.late.margins[False] <= MARGINS[1]


@pytest.mark.parametrize("seed", range(3))
def test_after_prompts_too_requests_wait_for_one_iteration_less(seed: int) -> None:
    """Every sixth iteration has a prompt, of another size each time, and takes three to five times as long."""

    def prompt(i: int) -> int:
        return 700 + 97 * (i % 13) if i % 6 == 0 else 0

    def length(i: int) -> float:
        return 8e-3 + 17e-6 * prompt(i)

    early, late = Plant(False, seed, noise=0.03), Plant(True, seed, noise=0.03)
    before, after = early.run(3000, length, prompt=prompt), late.run(3000, length, prompt=prompt)
    mean = float(np.mean([length(i) for i in range(3000)]))
    assert before > 1.3 * mean
    assert after < 0.75 * before
    assert late.idle < 0.005 * 3000 * mean


def test_nothing_waits_before_iterations_of_its_kind_are_known() -> None:
    late = LateLaunch(COSTS)
    for step in range(KNOWN - 1):
        result: Any = SimpleNamespace(batch=batch(step, 3), seconds=5e-3, idle_seconds=0.0)
        late.on_result(result, 1.0)
    assert late.at(batch(KNOWN, 3)) == 0
    late.on_result(SimpleNamespace(batch=batch(KNOWN, 3), seconds=5e-3, idle_seconds=0.0), 1.0)  # type: ignore[arg-type]
    assert 1.0 < late.at(batch(KNOWN + 1, 3)) < 1.005
    assert late.at(batch(KNOWN + 1, 3, prompt=500)) == 0
    for step in range(KNOWN):
        result = SimpleNamespace(batch=batch(step, 3, prompt=500), seconds=15e-3, idle_seconds=0.0)
        late.on_result(result, 2.0)
    assert 2.01 < late.at(batch(30, 3, prompt=500)) < 2.015
    assert 2.0 < late.at(batch(31, 3)) < 2.005


def test_an_engine_reports_how_long_it_may_wait_and_answers_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Acts as its process: requests that arrive until then are admitted before the next step."""
    monkeypatch.setattr(LateLaunch, "at", lambda *_: time.monotonic() + 2e-3)
    texts, waited = [], 0
    for late in (False, True):
        harness = Harness(MODEL_PATH, page_size=16, num_pages=100, late_launch=late)
        first = harness.add(list(range(5, 15)), max_tokens=60, ignore_eos=True, **GREEDY)
        second = None
        while harness.engine.has_work:
            at = harness.engine.launch_at()
            assert late or not at
            if at > time.monotonic():
                waited += 1
                time.sleep(max(0.0, at - time.monotonic()))
                if second is None:
                    second = harness.add(list(range(5, 35)), max_tokens=5, ignore_eos=True, **GREEDY)
            harness.step()
        texts.append(harness.tokens[first])
        assert second is None or len(harness.tokens[second]) == 5
    assert texts[0] == texts[1]
    assert waited > 5


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next iteration could always wait."""
    monkeypatch.setattr(LateLaunch, "at", lambda *_: time.monotonic() + 1e3)


def seen(harness: Harness, steps: int) -> list[bool]:
    """For each of the next steps: whether it could wait."""
    waits = []
    for _ in range(steps):
        waits.append(harness.engine.launch_at() > 0)
        harness.step()
    return waits


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(
    ("num_slots", "requests", "waits"), [(3, 2, True), (2, 2, False), (2, 5, False)], ids=["room", "seats", "queue"]
)
def test_an_engine_does_not_wait_for_requests_without_a_free_slot(num_slots: int, requests: int, waits: bool) -> None:
    harness = Harness(MODEL_PATH, page_size=16, num_pages=100, late_launch=True, max_num_seqs=num_slots)
    for _ in range(requests):
        harness.add(list(range(5, 15)), max_tokens=20, ignore_eos=True, **GREEDY)
    harness.step()
    assert seen(harness, 15) == [waits] * 15
    harness.run()


@pytest.mark.usefixtures("patient")
@pytest.mark.parametrize(("slo", "full"), [({}, 6), ({"itl_slo": "1us", "itl_slo_patience": 3600}, 100)])
def test_an_engine_does_not_wait_while_prompts_fill_its_iterations(slo: dict[str, Any], full: int) -> None:
    """An objective leaves them 2 tokens an iteration of 32."""
    options = {"late_launch": True, "max_num_batched_tokens": 32, "fair_prefill_share": 0, **slo}
    harness = Harness(MODEL_PATH, page_size=16, num_pages=100, **options)
    harness.add([5], max_tokens=150, ignore_eos=True, **GREEDY)
    harness.step()
    assert seen(harness, 5) == [True] * 5
    harness.add(list(range(5, 205)), max_tokens=5, ignore_eos=True, **GREEDY)
    assert seen(harness, full + 5) == [False] * full + [True] * 5


@pytest.mark.usefixtures("patient")
def test_a_launch_does_not_wait_while_requests_need_pages() -> None:
    harness = Harness(MODEL_PATH, page_size=16, num_pages=8, late_launch=True, prefix_caching=False)
    for _ in range(2):
        harness.add(list(range(5, 55)), max_tokens=40, ignore_eos=True, **GREEDY)
    harness.step()
    assert harness.engine.stats().scheduler.queue["pages"] == 1
    assert seen(harness, 10) == [False] * 10
    harness.run()


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.one_of(st.none(), st.tuples(st.integers(1, 40), st.integers(1, 6))), max_size=20), st.integers(1, 5),
    st.sampled_from([6, 12, 24]), st.booleans(),
)  # fmt: skip
def test_headroom_means_that_an_arriving_request_joins_the_next_iteration(
    events: list[tuple[int, int] | None], slots: int, budget: int, ahead: bool
) -> None:
    """Requests (prompt, output) arrive between iterations (None)."""
    engine = ListEngine(2000, slots=slots, budget=budget, prefix_caching=False, fairness=Fairness(0.0))
    for event in events:
        if event is not None:
            engine.add([3] * event[0], event[1])
            continue
        engine.launch()
        while len(engine.launched) > ahead:
            engine.complete()
    room = engine.scheduler.has_headroom
    assert room == (engine.add([7], 1).handle in engine.launch())


@pytest.mark.usefixtures("patient")
def test_an_iteration_after_an_idle_period_is_not_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """The device was idle because there was no request."""
    late: list[bool] = []
    monkeypatch.setattr(LateLaunch, "on_launch", lambda self, *_: late.append(self.delayed))
    harness = Harness(MODEL_PATH, page_size=16, num_pages=100, late_launch=True)
    for _ in range(2):
        harness.add([5], max_tokens=4, ignore_eos=True, **GREEDY)
        while harness.engine.has_work:
            seen(harness, 1)
    assert late == 2 * [False, True, True, True]


def test_an_engine_without_a_process_never_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    requested: list[object] = []
    monkeypatch.setattr(LateLaunch, "at", lambda *_: requested.append(_) or 0.0)
    llm = LLM("demo", progress=False, late_launch=True, page_size=16, num_pages=100)
    assert len(llm.generate(["1 2 3"] * 3, progress=False)) == 3
    assert not requested


def test_without_launch_ahead_no_launch_is_late() -> None:
    with pytest.raises(ValidationError, match="late_launch needs async_scheduling"):
        EngineConfig(late_launch=True, async_scheduling=False)
