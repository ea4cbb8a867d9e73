"""Energy counters and how their joules are charged to requests."""

from __future__ import annotations

import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness

from weft.engine.config import Share
from weft.engine.engine import Engine
from weft.engine.model.directory import read_spec
from weft.engine.runner.device.energy_meter import EnergyMeter, RaplCounter, Reading, energy_counter
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.cost_shares import CostShares
from weft.engine.scheduling.energy_ledger import EnergyLedger
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams


def zone(root: Path, name: str, microjoules: int, span: int = 1_000_000) -> Path:
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "energy_uj").write_text(f"{microjoules}\n")
    (folder / "max_energy_range_uj").write_text(f"{span - 1}\n")
    return folder / "energy_uj"


def test_packages_are_added_up_and_a_counter_may_wrap_around(tmp_path: Path) -> None:
    first, second = zone(tmp_path, "intel-rapl:0", 900_000), zone(tmp_path, "intel-rapl:1", 10)
    zone(tmp_path, "intel-rapl:0:0", 5)  # a part of the first
    counter = RaplCounter(tmp_path)
    first.write_text("950000")
    assert counter.joules() == pytest.approx(0.05)
    first.write_text("50000")  # past its end
    second.write_text("500010")
    assert counter.joules() == pytest.approx(0.15 + 0.5)


def test_the_gpus_of_all_ranks_are_added_up(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = {"GPU-a": 1000, "GPU-b": 20_000, "GPU-c": 300_000}
    nvml = SimpleNamespace(
        NVMLError=RuntimeError, nvmlInit=lambda: None, nvmlDeviceGetHandleByUUID=lambda name: name,
        nvmlDeviceGetTotalEnergyConsumption=lambda name: drawn[name],
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: SimpleNamespace(uuid="abc"[d.index]))
    first = torch.device("cuda", 0)
    assert energy_counter(first).joules() == 1.0
    assert energy_counter(first, 2).joules() == 21.0
    assert energy_counter(torch.device("cuda", 1), 2).joules() == 320.0


def test_a_machine_without_a_counter_reports_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="lists no CPU package"):
        RaplCounter(tmp_path)


class Failing:
    source = "test"
    reads = 0

    def joules(self) -> float:
        self.reads += 1
        if self.reads > 3:
            raise OSError("the driver has gone")
        return 5.0 * self.reads


def test_a_counter_that_fails_later_ends_the_meter_and_keeps_its_readings(capsys: pytest.CaptureFixture[str]) -> None:
    meter = EnergyMeter(Failing(), period=0.001)
    meter._thread.join(240)
    assert (meter.why, meter.latest.joules) == ("the driver has gone", 10.0)
    assert capsys.readouterr().err == "weft: energy is no longer measured: the driver has gone\n"
    meter.close()


class Plant:
    """A device under an engine's ledger, in its own time: draws `rest` watts when idle, and `work` watts more at
    work."""

    source, why = "test", ""

    def __init__(self, rest: float = 90.0, work: float = 600.0) -> None:
        self.now, self.total = 100.0, 0.0
        self.rest, self.work = rest, work
        self.latest = Reading(self.now, 0.0)

    def passes(self, seconds: float, working: bool) -> None:
        while seconds > 1e-12:
            step = min(seconds, self.latest.time + 0.1 - self.now)
            self.now += step
            self.total += step * (self.rest + self.work * working)
            seconds -= step
            if self.now >= self.latest.time + 0.1 - 1e-9:
                self.latest = Reading(self.now, self.total)

    def close(self) -> None:
        pass


def batch(slots: list[int], query: list[int], kv: list[int]) -> Batch:
    values: dict[str, Any] = dict.fromkeys(Batch._fields)
    return Batch(**{
        **values,
        "slots": np.array(slots, np.int32),
        "epochs": np.zeros(len(slots), np.int32),
        "query_len": np.array(query, np.int32),
        "kv_len": np.array(kv, np.int32),
        "token_ids": np.zeros(sum(query), np.int32),
    })  # fmt: skip


@pytest.fixture(scope="module")
def work(tiny_model: Callable[[str], Path]) -> CostShares:
    spec = read_spec(tiny_model("llama2"))
    return CostShares(spec, spec.num_parameters * 4, 256, cuda=False)


def ledger_on(plant: Plant, work: CostShares, slots: int = 64) -> EnergyLedger:
    table = SlotTable(slots, 64, 16)
    table.metered[:] = True
    table.handle[:] = np.arange(slots)
    return EnergyLedger(plant, work, table)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(4))
def test_requests_and_idle_energy_add_up_to_the_counter(work: CostShares, seed: int) -> None:
    """Ten minutes of bursts and pauses, iterations of 2 ms to 3 s, gaps between them, and power that drifts."""
    rng, plant = random.Random(seed), Plant()
    ledger = ledger_on(plant, work)
    while plant.now < 700:
        ledger.working(plant.now, True)
        usual = rng.choice([0.002, 0.02, 0.3, 3.0])
        plant.work = rng.uniform(100, 700)
        for _ in range(rng.randint(1, 60)):
            rows = rng.randint(1, 64)
            seconds = usual * rng.uniform(0.5, 1.5)
            plant.passes(seconds, True)
            plant.passes(seconds * rng.uniform(0, 0.1), True)  # the host's turn
            ledger.charge(batch(rng.sample(range(64), rows), [1] * rows, [50] * rows), seconds)
        ledger.working(plant.now, False)
        plant.passes(rng.choice([0.01, 1.0, 8.0]), False)
    ledger.settle()
    stats = ledger.stats()
    assert stats.joules == pytest.approx(plant.total, rel=0.001)
    assert stats.charged + stats.idle_joules == pytest.approx(stats.joules, rel=0.03)
    assert float(ledger._slots.joules.sum()) == pytest.approx(stats.charged)


def test_an_idle_device_charges_no_request(work: CostShares) -> None:
    plant = Plant()
    ledger = ledger_on(plant, work)
    plant.passes(30, False)
    ledger.settle()
    assert ledger.stats().idle_joules == pytest.approx(plant.total) == 2700
    assert ledger.stats().charged == 0


def test_a_pause_between_two_readings_is_charged_at_the_last_idle_power(work: CostShares) -> None:
    plant = Plant()
    ledger = ledger_on(plant, work)
    plant.passes(5, False)
    ledger.settle()
    for _ in range(200):  # a request of 50 ms in every 100
        ledger.working(plant.now, True)
        plant.passes(0.05, True)
        ledger.charge(batch([0], [1], [10]), 0.05)
        ledger.working(plant.now, False)
        plant.passes(0.05, False)
    ledger.settle()
    assert ledger.stats().idle_joules == pytest.approx(90 * 15, rel=0.02)
    assert ledger.drawn_at_work == pytest.approx(690 * 10, rel=0.02)


def test_energy_drawn_by_others_while_an_engine_sleeps_is_not_its_own(work: CostShares) -> None:
    plant = Plant()
    ledgers = [ledger_on(plant, work), ledger_on(plant, work)]
    ledgers[1].suspend()
    for turn in range(6):
        here, away = ledgers[turn % 2], ledgers[1 - turn % 2]
        here.working(plant.now, True)
        for _ in range(100):
            plant.passes(0.05, True)
            here.charge(batch([0], [1], [10]), 0.05)
            away.settle()
        here.working(plant.now, False)
        plant.passes(1, False)
        here.suspend()
        away.resume()
    stats = [ledger.stats() for ledger in ledgers]
    assert sum(s.joules for s in stats) == pytest.approx(plant.total)
    assert [s.joules for s in stats] == [pytest.approx(plant.total / 2)] * 2
    for s in stats:
        assert s.charged + s.idle_joules == pytest.approx(s.joules, rel=0.05)


def test_work_is_divided_by_tokens_and_context(work: CostShares) -> None:
    shares = work.shares(batch([0, 1, 2, 3], [1, 1, 1, 40], [10, 10, 100, 40]))
    assert shares.sum() == pytest.approx(1)
    assert shares[0] == shares[1] < shares[2] < shares[3]


def test_tokens_before_a_window_cost_nothing(tiny_model: Callable[[str], Path]) -> None:
    windowed = CostShares(read_spec(tiny_model("mistral")), 1000, 256, cuda=False)
    shares = windowed.shares(batch([0, 1], [1, 1], [24, 60]))
    assert shares[0] == pytest.approx(shares[1])


class Prompt:
    """A meter whose last reading is always new, independent of its thread's share of the processor."""

    source, why = "test", ""

    def __init__(self) -> None:
        self.total = 0.0

    @property
    def latest(self) -> Reading:
        self.total += 1.0
        return Reading(time.monotonic(), self.total)

    def close(self) -> None:
        pass


@pytest.fixture
def metered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.engine.engine.energy_counter", lambda *_: None)
    monkeypatch.setattr("weft.engine.engine.EnergyMeter", lambda _: Prompt())


@pytest.mark.usefixtures("metered")
def test_an_engine_charges_its_requests_through_preemption_and_reports_each(tiny_model: Callable[[str], Path]) -> None:
    harness = Harness(tiny_model("llama2"), num_pages=7, page_size=16, max_model_len=64)
    harness.expect_short_outputs()
    reported: dict[int, list[float]] = {}
    for handle in range(4):
        harness.add(range(3 + handle, 23 + handle), **GREEDY, max_tokens=40, stop_token_ids=(198,), min_tokens=40)
        harness.engine.scheduler._requests[handle].metered = handle != 3
    while harness.engine.has_work:
        outputs = harness.step()
        for handle, joules in outputs.joules.items() if outputs is not None else ():
            reported.setdefault(handle, []).append(joules)
    assert harness.engine.scheduler.preemptions > 0
    assert set(reported) == {0, 1, 2}
    assert all(values == sorted(values) and values[-1] > 0 for values in reported.values()), "it never falls"
    stats = harness.engine.stats().energy
    assert stats is not None
    assert sum(values[-1] for values in reported.values()) < stats.charged
    assert harness.engine.describe().energy_source == "test"
    harness.engine.close()


@pytest.mark.usefixtures("metered")
def test_an_idle_engine_reports_its_energy_once_a_second(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = Harness(tiny_model("llama2")).engine
    clock = [1000.0]
    monkeypatch.setattr("weft.engine.engine.time.monotonic", lambda: clock[0])
    reported = []
    for _ in range(20):
        reported.append(engine.idle() is not None)
        clock[0] += 0.25
    assert reported.count(True) == 5
    engine.close()


@pytest.mark.usefixtures("metered")
@pytest.mark.parametrize("share", [Share(sharers=2), Share(models=3, awake=2)])
def test_engines_that_may_share_a_device_do_not_count(tiny_model: Callable[[str], Path], share: Share) -> None:
    engine = Harness(tiny_model("llama2"), share=share).engine
    assert engine.stats().energy is None
    assert engine.describe().energy_missing.startswith("several engines work on this device")
    engine.close()


def test_an_engine_without_a_counter_logs_the_reason_and_charges_nothing(
    tiny_model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError("no counter in this test")

    monkeypatch.setattr("weft.engine.engine.energy_counter", none)
    engine: Engine = Harness(tiny_model("llama2")).engine
    engine.add(
        AddRequest(
            handle=1, prompt_token_ids=np.arange(3, 9, dtype=np.int32).tobytes(), params=SamplingParams(), metered=True
        )
    )
    outputs = None
    while outputs is None:
        outputs = engine.step()
    assert outputs.joules == {}
    assert outputs.stats.energy is None
    assert (engine.describe().energy_source, engine.describe().energy_missing) == ("", "no counter in this test")
    assert engine.idle() is None
    engine.close()
