"""The request rate that `weft advise` reports as keeping the objectives."""

from __future__ import annotations

import io
from collections.abc import Sequence

import msgspec
import numpy as np
import pytest
from made_curves import SLO, curve, point
from rich.console import Console

from weft.autosearch.advisor import terminal
from weft.autosearch.advisor.advice import advise
from weft.autosearch.advisor.curve import RateRun, Times
from weft.autosearch.advisor.predicted_rate import predicted_rate
from weft.autosearch.advisor.rate_search import MISS_FACTOR, RateSearch, measured_rate
from weft.autosearch.time_budget import TimeBudget
from weft.engine.config import Objective


def test_the_predicted_rate_is_what_the_slots_can_serve() -> None:
    made, outputs = curve(), np.full(1, 338.0)
    bound = 64
    most = made.points[6].output_per_s / 338
    rate = predicted_rate(made, bound, SLO, outputs)
    assert 0.8 * most < rate <= 1.05 * most
    strict = predicted_rate(made, bound, [*SLO, Objective.parse("ttft:p99:150ms")], outputs)
    assert strict < rate
    assert predicted_rate(made, bound, [*SLO, Objective.parse("ttft:p99:1ms")], outputs) == 0


class Plant:
    """An engine that keeps its objectives in half of the runs at its knee, and in nearly all runs slightly below it."""

    def __init__(self, knee: float, width: float, seed: int) -> None:
        self.knee, self.width, self.rng, self.now = knee, width, np.random.default_rng(seed), 0.0

    def keeps(self, rate: float) -> bool:
        return bool(self.rng.normal(1, self.width) * self.knee > rate)

    def serve(self, bound: int, rate: float, seed: int) -> RateRun:
        self.now += 20.0
        return RateRun(
            bound=bound, rate=rate, seconds=20.0, seed=seed, objectives=(), kept=self.keeps(rate), requests=1,
            ttft=Times(), itl=Times(),
        )  # fmt: skip


def searched(plant: Plant, start: float, budget: float = 400.0, runs: Sequence[RateRun] = ()) -> list[RateRun]:
    return RateSearch(plant.serve, 8, start, TimeBudget(budget, clock=lambda: plant.now), runs).run()


def test_the_advised_rate_is_kept_three_times_and_fifteen_percent_more_is_not() -> None:
    good = 0
    for seed in range(100):
        plant = Plant(knee=50.0, width=0.02, seed=seed)
        found = measured_rate(searched(plant, start=50.0 * plant.rng.uniform(0.7, 1.4)))
        assert found is not None
        good += all(plant.keeps(found.rate) for _ in range(3)) and not plant.keeps(MISS_FACTOR * found.rate)
    assert good >= 97


def test_runs_at_measured_rates_are_reported() -> None:
    runs = searched(Plant(knee=50.0, width=0.0, seed=0), start=50.0)
    found = measured_rate(runs)
    assert found is not None
    reported = "3 of 3 runs of 20 s met the objectives, 0 of 1 at 15% more"
    assert str(found) == f"{reported}; with only {found.requests} requests per run, the random rate varies by 3%"
    assert str(found._replace(requests=1000)) == reported
    made = curve(rates=tuple(msgspec.structs.replace(r, bound=64, objectives=("itl:p99:50ms",)) for r in runs))
    advice = advise(made, SLO, 0.1, "throughput")
    assert advice.solution.best is not None
    assert advice.measured == (found if advice.solution.best.point.bound == 64 else None)
    known = Plant(knee=50.0, width=0.0, seed=0)
    assert searched(known, start=50.0, runs=runs) == runs
    assert known.now == 0.0


@pytest.mark.parametrize(
    ("width", "gone"), [(160, []), (110, ["SMs"]), (80, ["SMs", "DRAM", "ttft p50", "ran", "idle"])]
)
def test_a_narrow_terminal_drops_columns_and_names_them(width: int, gone: list[str]) -> None:
    points = [point(2**i, dram_share=0.4, sm_share=0.9) for i in range(11)]
    console = Console(width=width, file=io.StringIO())
    terminal.show(advise(curve(points), SLO, 0.1, "throughput"), console)
    text = console.file.getvalue()  # type: ignore[attr-defined]
    head = next(line for line in text.splitlines() if "slot limit" in line).split()
    assert "…" not in text
    assert not {word for name in gone for word in name.split()[:1]} & set(head)
    assert [name for name in gone if name in text.partition("Omitted ")[2]] == gone
    assert ("Omitted" in text) == bool(gone)


def test_no_rate_is_advised_when_all_runs_kept_or_all_missed() -> None:
    assert measured_rate([]) is None
    for knee in (1e9, 1e-9):
        runs = searched(Plant(knee=knee, width=0.0, seed=0), start=50.0, budget=100.0)
        assert len(runs) == 5
        assert measured_rate(runs) is None
        made = curve(rates=tuple(msgspec.structs.replace(r, bound=64, objectives=("itl:p99:50ms",)) for r in runs))
        advised = advise(made, SLO, 0.1, "throughput")
        assert advised.measured is None
        # A rate that missed is never advised, nor a rate above those tried.
        rates = [r.rate for r in runs]
        assert advised.rate < min(rates) if knee < 1 else advised.rate <= max(rates)


def test_a_miss_at_the_advised_rate_lowers_it() -> None:
    runs = searched(Plant(knee=50.0, width=0.0, seed=0), start=50.0)
    found = measured_rate(runs)
    assert found is not None
    unlucky = msgspec.structs.replace(runs[-1], rate=found.rate, kept=False)
    again = measured_rate([*runs, unlucky])
    assert again is not None
    assert 0.9 * found.rate < again.rate < 0.97 * found.rate
