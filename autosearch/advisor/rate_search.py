"""`RateSearch`: finds the rate to advise by runs of the engine, so that all runs meet it and 15 % more misses."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

from weft.autosearch.advisor.curve import RateRun
from weft.autosearch.time_budget import TimeBudget

MISS_FACTOR = 1.15  # Multiple of the advised rate that must miss.
RUNS = 3  # Runs that must meet the objectives at the advised rate.
STEP = 1.12  # Factor between rates until some runs meet and some miss.
CLOSE = 1.05  # The knee is known once rates that meet and miss are this close.
MOST_RUNS = 24  # Limit for a machine that is too noisy to converge.
ENOUGH = 1000
"""Requests per run. With fewer, the random rate varies by more than 3 %, and the knee is wider than 15 %."""
SAME = 0.02  # Relative difference below which rates are equal.


class MeasuredRate(NamedTuple):
    """The rate to advise, with runs at it and at `MISS_FACTOR` times it. Requests and seconds are per run."""

    rate: float
    kept: int
    runs: int
    more_kept: int
    more_runs: int
    requests: int
    seconds: float

    def __str__(self) -> str:
        more = "no run at a higher rate"
        if self.more_runs:
            more = f"{self.more_kept} of {self.more_runs} at {MISS_FACTOR - 1:.0%} more"
        few = f"; with only {self.requests} requests per run, the random rate varies by {self.requests**-0.5:.0%}"
        fewer = f" (out of time for {RUNS})" if self.runs < RUNS else ""
        at = f"{self.kept} of {self.runs} runs of {self.seconds:.3g} s met the objectives{fewer}"
        return f"{at}, {more}{few if self.requests < ENOUGH else ''}"


def knee(runs: Sequence[RateRun]) -> tuple[float, float]:
    """Return the adjacent rates that best separate runs that met from runs that missed; 0 or infinity if open."""
    rates = sorted({run.rate for run in runs})
    edges = list(zip([0.0, *rates], [*rates, math.inf], strict=True))

    def wrong(edge: tuple[float, float]) -> int:
        low, high = edge
        return sum(run.rate <= low and not run.kept for run in runs) + sum(
            run.rate >= high and run.kept for run in runs
        )

    least = min(map(wrong, edges))
    best = [edge for edge in edges if wrong(edge) == least]
    return best[0][0], best[-1][1]


def measured_rate(runs: Sequence[RateRun]) -> MeasuredRate | None:
    """Return the rate to advise: as far below the knee as 15 % more is above it, and below any miss at such a rate.

    The highest rate that met is not advised, because about half of all runs near the knee miss. Returns None until runs
    have both met and missed."""
    low, high = knee(runs)
    if not low or math.isinf(high):
        return None
    rate = math.sqrt(low * high) / math.sqrt(MISS_FACTOR)
    while any(not run.kept and run.rate <= rate * (1 + SAME) for run in runs):
        rate /= CLOSE
    at = [run for run in runs if abs(run.rate / rate - 1) <= SAME]
    more = [run for run in runs if abs(run.rate / (rate * MISS_FACTOR) - 1) <= SAME]
    seconds = max(run.seconds for run in runs)
    requests = max(1, round(rate * seconds))
    return MeasuredRate(rate, sum(r.kept for r in at), len(at), sum(r.kept for r in more), len(more), requests, seconds)


class RateSearch:
    """The search at one slot limit. Known runs are not repeated."""

    def __init__(
        self, serve: Callable[[int, float, int], RateRun], bound: int, start: float, budget: TimeBudget,
        runs: Sequence[RateRun] = (), keep: Callable[[RateRun], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """serve: runs Poisson arrivals at (slot limit, rate, seed). start: estimated knee. keep: gets each new run."""
        self._serve, self._bound, self._start, self._budget, self._keep = serve, bound, start, budget, keep
        self._longest = 0.0  # Seconds of the longest run.
        self.runs = list(runs)

    def run(self) -> list[RateRun]:
        budget = self._budget
        while len(self.runs) < MOST_RUNS and (rate := self._next()) is not None and not budget.stop_requested():
            begun = budget.spent
            if begun + self._longest > budget.seconds:
                break
            budget.report(f"{rate:.3g} requests per second, slot limit {self._bound}")
            run = self._serve(self._bound, rate, len(self.runs))
            if budget.stop_requested():
                break  # the run is incomplete
            self._longest = max(self._longest, budget.spent - begun)
            self.runs.append(run)
            self._keep(run)
        return self.runs

    def _next(self) -> float | None:
        low, high = knee(self.runs)
        if not self.runs:
            return self._start
        if not low:
            return high / STEP
        if math.isinf(high):
            return low * STEP
        if high / low > CLOSE:
            return math.sqrt(low * high)
        found = measured_rate(self.runs)
        assert found is not None
        if found.runs < RUNS:
            return found.rate
        return None if found.more_runs else found.rate * MISS_FACTOR
