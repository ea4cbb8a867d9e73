"""`predicted_rate`: how many requests a second an engine serves within its objectives, played out on its curve."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heappop, heappush

import numpy as np

from weft.autosearch.advisor.curve import Curve
from weft.autosearch.advisor.rate_search import MORE
from weft.engine.config import Objective

RUN_SECONDS = 120.0
SEEDS = 9
PRECISION = 0.02
"""of the rate"""


class Queue:
    """Poisson arrivals at an engine that runs at most `bound` requests and is as quick as its curve says."""

    def __init__(self, curve: Curve, bound: int, objectives: Sequence[Objective]) -> None:
        points = [
            p
            for p in curve.by_batch()
            if p.bound <= bound and p.itl.mean and all(p.of(o) == p.of(o) for o in objectives)
        ]
        self._batch = np.array([p.batch for p in points])
        self._token = np.array([p.itl.mean or 0.0 for p in points])
        self._bound, self._objectives = min(bound, max(1, round(float(self._batch[-1])))), objectives
        self._stretch = float(curve.output)
        self._values = {o: np.array([p.of(o) for p in points]) for o in objectives}

    def keeps(self, rate: float, seed: int, outputs: np.ndarray) -> bool:
        """Every objective in one run of `RUN_SECONDS`; outputs `[k]`: tokens, drawn from at random.

        Time goes in steps of a token: all that run get one, in as long as so many take.
        """
        rng = np.random.default_rng(seed)
        arrivals = np.cumsum(rng.exponential(1 / rate, max(8, int(rate * RUN_SECONDS * 1.5))))
        arrivals = arrivals[arrivals < RUN_SECONDS]
        if not len(arrivals):
            return True
        lengths = rng.choice(outputs, len(arrivals))
        ends: list[float] = []
        """heap of what `told` will be when a request ends"""
        now = told = 0.0
        """time, and tokens that each running request has been told since the beginning"""
        arrived = 0
        waits: list[float] = []
        late: dict[Objective, list[float]] = {o: [0.0, 0.0] for o in self._objectives if o.measure == "itl"}
        steps, values = self._by_running()
        while arrived < len(arrivals):
            while arrived < len(arrivals) and len(ends) < self._bound and arrivals[arrived] <= now:
                waits.append(now - float(arrivals[arrived]))
                heappush(ends, told + float(lengths[arrived]))
                arrived += 1
            if not ends:
                if arrived < len(arrivals):
                    now = float(arrivals[arrived])
                continue
            running, tokens = len(ends), ends[0] - told
            # As many tokens as nothing changes for: the shortest answer, or the next arrival.
            if running < self._bound and arrived < len(arrivals):
                tokens = min(tokens, max(1.0, float(np.ceil((arrivals[arrived] - now) / steps[running]))))
            now += tokens * steps[running]
            told += tokens
            while ends and ends[0] <= told:
                heappop(ends)
            for objective, share in late.items():
                value = values[objective][running]
                share[0] += tokens * running
                share[1] += tokens * running * (value if objective.statistic is None else value > objective.limit)
        return self._kept(np.array(waits), late)

    def _by_running(self) -> tuple[list[float], dict[Objective, list[float]]]:
        """Seconds of a token, and each objective's value, by how many run."""
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
        # A queue that grows is nobody's objective, and no rate to advise.
        end = waits[-max(1, len(waits) // 10) :]
        return bool(end.mean() < self._stretch * float(self._token[-1]))


def predicted_rate(curve: Curve, bound: int, objectives: Sequence[Objective], outputs: np.ndarray) -> float:
    """Requests a second, at which runs keep the objectives and no queue grows, while they do not at 15 % more.

    That is as far below the rate at which half of the runs do as 15 % more is above it. The highest at which all of
    some runs do would be kept by half of the next ones. 0 where none does. On objectives of `itl` alone the bound
    itself keeps them at any rate: then it is the rate beyond which requests wait longer and longer.
    """
    point = max((p for p in curve.points if p.bound <= bound), key=lambda p: p.bound)
    highest = 1.1 * point.output_per_s / max(curve.output, 1.0)
    queue = Queue(curve, bound, objectives)

    def kept(rate: float) -> bool:
        return sum(queue.keeps(rate, seed, outputs) for seed in range(SEEDS)) > SEEDS / 2

    low, high = 0.0, highest
    while high - low > PRECISION * highest:
        middle = (low + high) / 2
        low, high = (middle, high) if kept(middle) else (low, middle)
    return low / math.sqrt(MORE)
