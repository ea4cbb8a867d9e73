"""`Sweep`: chooses the slot limits to measure: doubling until the curve is flat, then refining where it matters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Protocol

from weft.autosearch.advisor.curve import Curve, Point
from weft.autosearch.advisor.optimal_batch import Aim, judge, solve
from weft.autosearch.time_budget import TimeBudget
from weft.engine.config import Objective

FLAT = 0.03  # Minimum gain of a doubling. Two smaller gains in a row end the ascent.
TOO_LATE = 4.0  # Multiple of an objective at which the ascent ends.
CLOSE = 1.12  # Ratio of slot limits below which no more are measured between them.
MOST_POINTS = 24


class Bench(Protocol):
    """Measures an engine at a slot limit, up to `capacity`."""

    capacity: int

    def measure(self, bound: int) -> Point: ...


class Sweep:
    """Completes one curve. Known points are not measured again."""

    def __init__(
        self, bench: Bench, curve: Curve, objectives: Sequence[Objective], epsilon: float, aim: Aim, budget: TimeBudget,
        keep: Callable[[Curve], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """keep: called with each new point."""
        self.bench, self.curve = bench, curve
        self._objectives, self._epsilon, self._aim = objectives, epsilon, aim
        self._budget, self._keep = budget, keep
        self._measured = 0
        self.stopped = ""  # Reason why the ascent ended.

    def run(self) -> Curve:
        self._ascend()
        while self._time_for_one() and len(self.curve.points) < MOST_POINTS:
            if (bound := self._closer()) is None:
                break
            self._point(bound)
        return self.curve

    def _ascend(self) -> None:
        bound, flat = 1, 0
        before: Point | None = None
        while True:
            if before is not None and not self._time_for_one() and self.curve.known(bound) is None:
                self.stopped = "out of time"
                return
            point = self._point(bound)
            if point is None:
                self.stopped = "ended early"
                return
            if before is not None:
                gain = point.output_per_s / before.output_per_s - 1
                flat = flat + 1 if gain < FLAT else 0
                if point.batch < 0.6 * bound and point.batch < 1.1 * before.batch:
                    self.stopped = f"only {point.batch:.0f} requests fit the KV pool"
                    return
            if flat == 2:
                self.stopped = "the curve is flat"
                return
            if any(point.of(o) > TOO_LATE * o.limit for o in self._objectives):
                self.stopped = f"the objectives are far exceeded at {bound}"
                return
            if bound >= self.bench.capacity:
                self.stopped = f"--max-num-seqs {self.bench.capacity}"
                return
            before, bound = point, min(2 * bound, self.bench.capacity)

    def _closer(self) -> int | None:
        """Return a slot limit in the widest gap around the best, the last that fits, or the first that does not."""
        verdicts = judge(self.curve, self._objectives, self._epsilon)
        bounds = [v.point.bound for v in verdicts]
        solution = solve(self.curve, self._objectives, self._epsilon, self._aim)
        if solution.best is None:
            return None
        at = {i for i in range(len(verdicts) - 1) if verdicts[i].fits and not verdicts[i + 1].fits}
        at.add(bounds.index(solution.best.point.bound))
        gaps = []
        for i in at:
            for low, high in ((i - 1, i), (i, i + 1)):
                if low >= 0 and high < len(bounds) and bounds[low] < bounds[high]:
                    middle = round(math.sqrt(bounds[low] * bounds[high]))
                    ratio = bounds[high] / bounds[low]
                    edge = verdicts[low].fits != verdicts[high].fits
                    if ratio > CLOSE and bounds[low] < middle < bounds[high]:
                        gaps.append((edge, ratio, middle))
        return max(gaps)[2] if gaps else None

    def _point(self, bound: int) -> Point | None:
        """Measure a slot limit, or return the known point. Returns None if the measurement was cut short."""
        if (known := self.curve.known(bound)) is not None:
            return known
        self._budget.report(f"slot limit {bound}")
        point = self.bench.measure(bound)
        if self._budget.stop_requested():
            return None
        self._measured += 1
        self.curve = self.curve.with_point(point)
        self._keep(self.curve)
        return point

    def _time_for_one(self) -> bool:
        """Whether another point of mean duration fits the budget."""
        budget, spent = self._budget, self._budget.spent
        return not budget.stop_requested() and spent + spent / max(1, self._measured) <= budget.seconds
