"""The searching process of an idle engine: it yields to requests, checks what it finds, and continues after its end."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic import LLAMA_8B, TYPICAL, SyntheticBench, target_for

from weft.autosearch import background_search
from weft.autosearch.background_search import farthest, load_of, one_at_a_time
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.gated_bench import GatedBench
from weft.autosearch.synthetic_batch import batch_of
from weft.engine.errors import ConfigError
from weft.engine.plans.found import FoundPlans
from weft.engine.plans.plan import NanoOperation, Period, serial_period
from weft.engine.scheduling.plan_search import Found, News, Spent
from weft.engine.scheduling.search_process import SearchOrder
from weft.engine.wire.search_gate import SearchGate

TARGET = target_for(LLAMA_8B)
ORDER = SearchOrder("{}", 0, 2048, 1024, 400.0)


class CheckedBench(SyntheticBench):
    """A bench whose pipelines give the serial plan's states, or wrong ones; each measurement takes two seconds."""

    wrong = 0.0

    def outputs(self, period: Period, load: Load) -> torch.Tensor:
        right = torch.randn(load.tokens, 8, generator=torch.Generator().manual_seed(0))
        if len(period.begins) > 1 or len({op.lane for op in period.operations}) > 1:
            right[load.tokens // 2] *= 1 + self.wrong
        return right


class Steps:
    """A clock of a bench's measurements, and a gate that requests close."""

    def __init__(self, bench: CheckedBench) -> None:
        self.bench, self.gate, self.slept = bench, SearchGate.create(), 0.0
        self.gate.open()

    def clock(self) -> float:
        return self.bench.clock() + self.slept

    def sleep(self, seconds: float) -> None:
        self.slept += seconds
        self.gate.open()

    @property
    def gated(self) -> GatedBench:
        return GatedBench(self.gate, clock=self.clock, sleep=self.sleep)


def searched(bench: CheckedBench, cache: Path, steps: Steps | None = None) -> tuple[Found, list[News]]:
    news: list[News] = []
    steps = steps or Steps(bench)
    found = background_search.background_search(
        ORDER, LLAMA_8B, FoundPlans(cache, TARGET), TARGET, steps.gated, lambda _: bench, news.append
    )
    return found, news


@pytest.mark.nightly
@pytest.mark.usefixtures("quick")
def test_it_finds_a_plan_saves_it_and_finds_it_again(tmp_path: Path) -> None:
    bench = CheckedBench(LLAMA_8B)
    found, news = searched(bench, tmp_path)
    assert found.plan.periods
    for period in found.plan.periods:
        period.check(LLAMA_8B, 132)
        assert period.tokens <= 2048
        assert period.figures["gain"] > 1
    assert found.plan.dense_batch in (0, 2048)  # the engine's: no other is searched
    last = news[-1]
    assert isinstance(last, Spent)
    assert 0 < last.seconds <= 1.2 * ORDER.seconds
    assert last.joules == pytest.approx(690 * last.seconds, rel=0.3)
    calls = bench.calls
    again, _ = searched(bench, tmp_path)
    assert again.plan == found.plan
    assert bench.calls == calls


@pytest.mark.nightly
@pytest.mark.usefixtures("quick")
def test_pipelines_with_other_states_are_dropped_and_the_serial_plan_is_the_result(tmp_path: Path) -> None:
    bench = CheckedBench(LLAMA_8B)
    bench.wrong = 0.2
    found, _ = searched(bench, tmp_path)
    assert found.plan.periods == ()
    assert FoundPlans(tmp_path, TARGET).load() == found.plan


@pytest.mark.nightly
@pytest.mark.usefixtures("quick")
def test_a_search_that_was_killed_continues_from_its_measurements(tmp_path: Path) -> None:
    class Killed(CheckedBench):
        left = 40

        def alone(self, op: NanoOperation, load: Load) -> Timing:
            self.left -= 1
            if self.left < 0:
                raise KeyboardInterrupt
            return super().alone(op, load)

    with pytest.raises(KeyboardInterrupt):
        searched(Killed(LLAMA_8B), tmp_path)
    whole = CheckedBench(LLAMA_8B)
    found, _ = searched(whole, tmp_path)
    fresh = CheckedBench(LLAMA_8B)
    searched(fresh, tmp_path / "other")
    assert found.plan.periods
    assert fresh.calls - whole.calls >= 30


def test_a_measurement_that_a_request_disturbs_is_repeated_and_waiting_costs_no_time() -> None:
    bench = CheckedBench(LLAMA_8B)
    steps = Steps(bench)
    gated = steps.gated.over(bench)
    alone = bench.alone

    def disturbed(op: NanoOperation, load: Load) -> Timing:
        timing = alone(op, load)
        if bench.calls < 3:
            steps.gate.close()
        return timing

    bench.alone = disturbed  # type: ignore[method-assign]
    timing = gated.alone(NanoOperation("qkv", 0, 2048, 132), TYPICAL)
    assert (bench.calls, gated.disturbed) == (3, 2)
    assert timing.watts == 690
    assert gated.clock() == bench.clock() == 6.0
    assert steps.slept > 0
    assert gated.joules == 690 * 6.0  # what was repeated was drawn, too


def test_work_in_short_pieces_ends_at_once_when_the_gate_closes() -> None:
    """With threads, as with an engine: the time from closing the gate to the end of the work is one piece."""
    gate = SearchGate.create()
    gated = GatedBench(gate)
    pieces: list[float] = []
    enough, done = threading.Event(), threading.Event()

    def work() -> int:
        while not enough.is_set():
            gated.check()
            pieces.append(time.monotonic())
            time.sleep(0.005)
        return len(pieces)

    gate.open()
    thread = threading.Thread(target=lambda: (gated.undisturbed(work), done.set()), daemon=True)
    thread.start()
    while len(pieces) < 3:
        time.sleep(0.001)
    gate.close()
    closed = time.monotonic()
    time.sleep(0.2)
    assert not done.is_set()
    assert sum(at > closed for at in pieces) <= 1
    enough.set()
    gate.open()
    assert done.wait(60)
    assert gated.disturbed == 1


def test_two_searches_for_the_same_plan_take_turns(tmp_path: Path) -> None:
    found, waits = FoundPlans(tmp_path, TARGET), []
    inside, leave = threading.Event(), threading.Event()

    def first() -> None:
        with one_at_a_time(found, lambda: None):
            inside.set()
            leave.wait(60)

    thread = threading.Thread(target=first)
    thread.start()
    assert inside.wait(60)

    def waiting() -> None:
        waits.append(1)
        leave.set()

    with one_at_a_time(FoundPlans(tmp_path, TARGET), waiting):
        assert waits
    thread.join()


def test_a_folder_that_cannot_be_used_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "plans").write_text("a file")
    with pytest.raises(ConfigError, match="cannot use"), one_at_a_time(FoundPlans(tmp_path, TARGET), lambda: None):
        pass


def test_states_are_compared_row_by_row() -> None:
    right = torch.randn(64, 16, generator=torch.Generator().manual_seed(1))
    assert farthest(right, right) == 0.0
    assert farthest(right, right.bfloat16().float()) < background_search.FAR
    wrong = right.clone()
    wrong[63] = right[0]
    assert farthest(right, wrong) > background_search.FAR
    wrong[63, 3] = float("nan")
    assert farthest(right, wrong) == float("inf")


def test_a_pipeline_is_checked_at_the_load_at_which_it_was_measured() -> None:
    period = serial_period(LLAMA_8B, 2048, 132)
    load = load_of(period, "1024:512", mixed=True)
    assert (load.tokens, load.decodes, load.prompt) == (2048, 683, 1024)
    decodes = load_of(period, "1024:512", mixed=False)
    assert (decodes.tokens, decodes.decodes, decodes.prefill_tokens) == (2048, 2048, 0)


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 900), st.integers(1, 300), st.integers(1, 6))
def test_decodes_share_pages_that_are_read_only_and_no_page_is_written_twice(
    tokens: int, decodes: int, context: int, prompt: int, pools: int
) -> None:
    load = Load(tokens, min(decodes, tokens), context, prompt)
    whole = batch_of(load, 16)
    written = len(np.unique(whole.slot_mapping // 16))
    most = written + 2 + 40 * (pools - 1)
    few = batch_of(load, 16, most)
    assert few.page_table.shape == whole.page_table.shape
    assert np.array_equal(few.page_table == 0, whole.page_table == 0)
    assert few.page_table.max() < max(most, whole.page_table.max() + 1)
    assert len(np.unique(few.slot_mapping)) == tokens
    read = np.setdiff1d(few.page_table, few.slot_mapping // 16)
    at = np.searchsorted(np.cumsum(few.query_len), np.arange(tokens), side="right")
    for page in np.unique(few.slot_mapping // 16):  # a page that is written belongs to one request
        owners = np.unique(np.nonzero(few.page_table == page)[0])
        assert list(owners) == list(np.unique(at[few.slot_mapping // 16 == page]))
    assert 0 not in few.slot_mapping // 16
    assert len(read) <= most


def test_a_pool_too_small_for_what_is_written_is_refused() -> None:
    with pytest.raises(ConfigError, match="writes"):
        batch_of(Load(256, 256, 100, 1), 16, 200)
