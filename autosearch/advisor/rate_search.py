"""`RateSearch`: the rate to advise, by runs of the engine at it: kept in all of them, and missed at 15 % more."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from weft.autosearch.advisor.curve import RateRun
from weft.autosearch.budget import Budget

MORE = 1.15
"""so much more must miss"""
RUNS = 3
"""that keep the objectives at the advised rate"""
STEP = 1.12
"""between rates, until some keep and some miss"""
CLOSE = 1.05
"""the knee is known when what keeps and what misses are this close"""
MOST_RUNS = 24
"""on a machine too noisy for an end"""
ENOUGH = 1000
"""requests in a run: with fewer, chance moves its rate by more than 3 %, and the knee is as wide as 15 %"""
SAME = 0.02
"""rates this close are the same"""


class RateBench(Protocol):
    def serve(self, bound: int, rate: float, seed: int) -> RateRun:
        """Poisson arrivals at a rate, for a while."""
        ...


class MeasuredRate(NamedTuple):
    """What runs say of a rate."""

    rate: float
    kept: int
    runs: int
    more_kept: int
    more_runs: int
    """at `MORE` times the rate"""
    requests: int
    """of a run"""
    seconds: float
    """that requests come in a run"""

    def __str__(self) -> str:
        more = "none was run at more"
        if self.more_runs:
            more = f"of {self.more_runs} at {MORE - 1:.0%} more {self.more_kept}"
        few = f"; with {self.requests} requests in a run, chance moves its rate by {self.requests**-0.5:.0%}"
        fewer = f" ({RUNS} were wanted: there was no time)" if self.runs < RUNS else ""
        at = f"{self.kept} of {self.runs} runs of {self.seconds:.3g} s at it kept the objectives{fewer}"
        return f"{at}, {more}{few if self.requests < ENOUGH else ''}"


def knee(runs: Sequence[RateRun]) -> tuple[float, float]:
    """The rates between which the fewest runs are on the wrong side: kept above, missed below. 0 and infinity where
    there are none."""
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


def measured(runs: Sequence[RateRun]) -> MeasuredRate | None:
    """The rate to advise: as far below the knee as 15 % more is above it, and below what missed at such a rate. A run
    at either is worth little near the knee, where half of them miss: that is why the highest rate that kept is none to
    advise. None while nothing kept, or nothing missed."""
    low, high = knee(runs)
    if not low or math.isinf(high):
        return None
    rate = math.sqrt(low * high) / math.sqrt(MORE)
    while any(not run.kept and run.rate <= rate * (1 + SAME) for run in runs):
        rate /= CLOSE
    at = [run for run in runs if abs(run.rate / rate - 1) <= SAME]
    more = [run for run in runs if abs(run.rate / (rate * MORE) - 1) <= SAME]
    seconds = max(run.seconds for run in runs)
    requests = max(1, round(rate * seconds))
    return MeasuredRate(rate, sum(r.kept for r in at), len(at), sum(r.kept for r in more), len(more), requests, seconds)


class RateSearch:
    """One bound. Runs that are known already are not done again."""

    def __init__(
        self, bench: RateBench, bound: int, start: float, budget: Budget, runs: Sequence[RateRun] = (),
        keep: Callable[[RateRun], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """start: requests a second, a guess at the knee. keep: called with each new run."""
        self._bench, self._bound, self._start, self._budget, self._keep = bench, bound, start, budget, keep
        self._took = 0.0
        """seconds, at most, by a run"""
        self.runs = list(runs)

    def run(self) -> list[RateRun]:
        budget = self._budget
        while len(self.runs) < MOST_RUNS and (rate := self._next()) is not None and not budget.ended():
            begun = budget.spent
            if begun + self._took > budget.seconds:
                break
            budget.tell(f"{rate:.3g} requests a second, {self._bound} at once")
            run = self._bench.serve(self._bound, rate, len(self.runs))
            if budget.ended():
                break  # it was cut short
            self._took = max(self._took, budget.spent - begun)
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
        found = measured(self.runs)
        assert found is not None
        if found.runs < RUNS:
            return found.rate
        return None if found.more_runs else found.rate * MORE
