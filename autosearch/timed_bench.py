"""`TimedBench`: a bench that raises `OutOfTime` once its time is over, and the `Record` of its measurements.

Code that measures does not check a clock. It catches `OutOfTime` and falls back to the record.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from weft.autosearch.bench_protocol import Bench, Load, Timing
from weft.autosearch.journal import Journal
from weft.autosearch.machine import Machine
from weft.autosearch.refine import OutOfTime, median, period_key
from weft.autosearch.time_budget import TimeBudget
from weft.engine.plans.plan import Period


class Record:
    """Measurements of pipelines. It can stand in for a bench and answers immediately.

    For an unmeasured load it scales the profile's prediction by the error of that prediction for the same pipeline at
    other loads. For a pipeline without measurements it uses the smallest error ratio of all pipelines, since a serial
    plan of fewer tokens must not look slower than it is."""

    def __init__(self, machine: Machine) -> None:
        self._machine, self.num_sms = machine, machine.num_sms
        self._timings: dict[tuple[bytes, Load], list[Timing]] = {}
        self._proportions: dict[bytes, list[float]] = {}

    def add(self, period: Period, load: Load, timing: Timing) -> None:
        key = period_key(period)
        self._timings.setdefault((key, load), []).append(timing)
        self._proportions.setdefault(key, []).append(timing.ms / self._machine.period(period, load).ms)

    def loads(self, period: Period) -> list[Load]:
        """Return the loads at which the period was measured."""
        key = period_key(period)
        return [load for known, load in self._timings if known == key]

    def measured(self, period: Period, load: Load) -> Timing | None:
        """Return the median of all measurements, or None if there are none."""
        found = self._timings.get((period_key(period), load))
        return None if found is None else median(found)

    def period(self, period: Period, load: Load) -> Timing:
        """Return the measured timing, or an estimate."""
        if (timing := self.measured(period, load)) is not None:
            return timing
        own = self._proportions.get(period_key(period))
        every = [statistics.median(p) for p in self._proportions.values()]
        proportion = statistics.median(own) if own else min(every, default=1.0)
        predicted = self._machine.period(period, load)
        return predicted._replace(ms=predicted.ms * proportion)


class TimedBench:
    """Raises `OutOfTime` instead of starting a measurement that would not finish in time."""

    def __init__(self, bench: Bench, machine: Machine, budget: TimeBudget) -> None:
        """budget: time for all measurements."""
        self._bench, self._budget = bench, budget
        self._ends = [budget.end]
        self.num_sms = bench.num_sms
        self.record = Record(machine)
        self.cost = 0.0  # Seconds per measurement with compiled kernels; 0 before the first one.
        self._kernels: set[tuple[object, ...]] = set()
        self._compiling = 0.0  # Seconds of the longest measurement that used new kernels.

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """End the available time at `end` within the block."""
        self._ends.append(min(end, self._ends[-1]))
        try:
            yield
        finally:
            self._ends.pop()

    @property
    def over(self) -> bool:
        """Whether no time is left to measure."""
        left = self._ends[-1] - self._budget.clock()
        return self._budget.stop_requested() or left <= 0 or left < self.cost

    def period(self, period: Period, load: Load) -> Timing:
        """See `Bench`. Raises `OutOfTime` and the errors of the bench."""
        now = self._budget.clock()
        kernels = {(op.operation, op.config, op.sms == self.num_sms) for op in period.operations}
        # Compiling takes many times as long as measuring. It may exceed the innermost limit but not the budget.
        unknown = not kernels <= self._kernels
        if self.over or (unknown and self._ends[0] - now < self._compiling):
            raise OutOfTime("no time is left to measure")
        timing = self._bench.period(period, load)
        took = self._bench.took if isinstance(self._bench, Journal) else self._budget.clock() - now
        if unknown:
            self._kernels |= kernels
            self._compiling = max(self._compiling, took)
        else:
            self.cost = min(self.cost or took, took)
        self.record.add(period, load, timing)
        return timing
