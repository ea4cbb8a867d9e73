"""`predicted_rate`: simulates arrivals on a curve to find the rate that meets the objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from weft.autosearch.advisor.curve import Curve
from weft.autosearch.advisor.rate_search import MISS_FACTOR
from weft.engine.config import Objective

RUN_SECONDS = 120.0
SEEDS = 9
PRECISION = 0.02  # Relative precision of the rate.


class Queue:
    """Poisson arrivals at an engine with slot limit `bound` and the speed of its curve."""

    def __init__(self, curve: Curve, bound: int, objectives: Sequence[Objective]) -> None:
        points = [
            p for p in curve.by_batch()
            if p.bound <= bound and p.itl.mean and all(p.of(o) == p.of(o) for o in objectives)
        ]  # fmt: skip
        self._batch = np.array([p.batch for p in points])
        self._token = np.array([p.itl.mean or 0.0 for p in points])
        self._bound, self._objectives = min(bound, max(1, round(float(self._batch[-1])))), objectives
        self._stretch = float(curve.output)
        self._values = {o: np.array([p.of(o) for p in points]) for o in objectives}

    def keeps(self, rate: float, seed: int, outputs: np.ndarray) -> bool:
        """Whether a run of `RUN_SECONDS` meets every objective. outputs `[k]`: output tokens to draw from.

        Time advances in token steps: each running request gets a token, in the step time of that batch size."""
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(1 / rate, max(8, int(rate * RUN_SECONDS * 1.5))))
        arrivals = arrivals[arrivals < RUN_SECONDS]
        if not len(arrivals):
            return True
        lengths = rng.choice(outputs, len(arrivals))
        ends: list[float] = []  # heap: `steps_done` at which each running request ends
        now = steps_done = 0.0
        arrived = 0
        waits: list[float] = []
        late: dict[Objective, list[float]] = {o: [0.0, 0.0] for o in self._objectives if o.measure == "itl"}
        steps, values = self._by_running()
        while arrived < len(arrivals):
            while arrived < len(arrivals) and len(ends) < self._bound and arrivals[arrived] <= now:
                waits.append(now - float(arrivals[arrived]))
                heappush(ends, steps_done + float(lengths[arrived]))
                arrived += 1
            if not ends:
                if arrived < len(arrivals):
                    now = float(arrivals[arrived])
                continue
            running, tokens = len(ends), ends[0] - steps_done
            # steps until the next request ends or arrives
            if running < self._bound and arrived < len(arrivals):
                tokens = min(tokens, max(1.0, float(np.ceil((arrivals[arrived] - now) / steps[running]))))
            now += tokens * steps[running]
            steps_done += tokens
            while ends and ends[0] <= steps_done:
                heappop(ends)
            for objective, share in late.items():
                value = values[objective][running]
                share[0] += tokens * running
                share[1] += tokens * running * (value if objective.statistic is None else value > objective.limit)
        return self._kept(np.array(waits), late)

    def _by_running(self) -> tuple[list[float], dict[Objective, list[float]]]:
        """Seconds per token and each objective's value, by the number of running requests."""
        running = np.arange(self._bound + 1)
        steps = np.interp(running, self._batch, self._token).tolist()
        return steps, {o: np.interp(running, self._batch, v).tolist() for o, v in self._values.items()}

    def _kept(self, waits: np.ndarray, late: dict[Objective, list[float]]) -> bool:
        for objective, (tokens, weight) in late.items():
            allowed = objective.limit if objective.statistic is None else 1 - objective.statistic / 100
            if tokens and weight / tokens > allowed + 1e-9:
                return False
        for objective in self._objectives:
            if objective.measure == "ttft":
                first = float(np.interp(self._bound, self._batch, self._values[objective]))
                if objective.of(waits) + first > objective.limit:
                    return False
        # a rate at which the queue grows cannot be advised
        end = waits[-max(1, len(waits) // 10) :]
        return bool(end.mean() < self._stretch * float(self._token[-1]))


def predicted_rate(curve: Curve, bound: int, objectives: Sequence[Objective], outputs: np.ndarray) -> float:
    """Return the requests per second at which runs meet the objectives without a growing queue, while 15 % more miss.

    It is as far below the knee, the rate that half of the runs meet, as 15 % more is above it. The highest rate that
    several runs met would be missed by half of further runs. Returns 0 if no rate meets the objectives. With `itl`
    objectives alone the slot limit meets them at any rate; then only the growing queue counts."""
    point = max((p for p in curve.points if p.bound <= bound), key=lambda p: p.bound)
    highest = 1.1 * point.output_per_s / max(curve.output, 1.0)
    queue = Queue(curve, bound, objectives)

    def kept(rate: float) -> bool:
        return sum(queue.keeps(rate, seed, outputs) for seed in range(SEEDS)) > SEEDS / 2

    low, high = 0.0, highest
    while high - low > PRECISION * highest:
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low / math.sqrt(MISS_FACTOR)
