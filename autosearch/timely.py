"""`Timely`: a `Bench` that measures pipelines only while there is time, and what it has measured: its `Record`.

Who measures need not look at a clock: whatever a search is at, it gets `OutOfTime` there, and goes by the record.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from contextlib import contextmanager

from weft.autosearch.bench_protocol import Bench, Load, Timing
from weft.autosearch.budget import Budget
from weft.autosearch.journal import Journal
from weft.autosearch.machine import Machine
from weft.autosearch.refine import OutOfTime, period_key
from weft.engine.plans.plan import Period


class Record:
    """What was measured of pipelines; it answers as a bench does, in no time.

    Where nothing was measured, it says what the profile predicts, in the proportion in which the profile was wrong
    about the same pipeline at other loads. Of a pipeline that was never measured it believes the best: a serial plan
    of fewer tokens must not look worse than it is.
    """

    def __init__(self, machine: Machine) -> None:
        self._machine, self.num_sms = machine, machine.num_sms
        self._timings: dict[tuple[bytes, Load], list[Timing]] = {}
        self._proportions: dict[bytes, list[float]] = {}

    def add(self, period: Period, load: Load, timing: Timing) -> None:
        key = period_key(period)
        self._timings.setdefault((key, load), []).append(timing)
        self._proportions.setdefault(key, []).append(timing.ms / self._machine.period(period, load).ms)

    def loads(self, period: Period) -> list[Load]:
        """At which it was measured."""
        key = period_key(period)
        return [load for known, load in self._timings if known == key]

    def measured(self, period: Period, load: Load) -> Timing | None:
        """Medians of all measurements; None: there are none."""
        found = self._timings.get((period_key(period), load))
        return None if found is None else median(found)

    def period(self, period: Period, load: Load) -> Timing:
        """Measured, else as above."""
        if (timing := self.measured(period, load)) is not None:
            return timing
        own = self._proportions.get(period_key(period))
        every = [statistics.median(p) for p in self._proportions.values()]
        proportion = statistics.median(own) if own else min(every, default=1.0)
        predicted = self._machine.period(period, load)
        return predicted._replace(ms=predicted.ms * proportion)


class Timely:
    """See above. Raises `OutOfTime` instead of beginning what would not end in time."""

    def __init__(self, bench: Bench, machine: Machine, budget: Budget) -> None:
        """budget: of all measurements."""
        self._bench, self._budget = bench, budget
        self._ends = [budget.end]
        self.num_sms = bench.num_sms
        self.record = Record(machine)
        self.cost = 0.0
        """seconds of one measurement whose kernels are there; 0: none was made yet"""
        self._kernels: set[tuple[object, ...]] = set()
        self._compiling = 0.0
        """seconds of the longest measurement that had kernels which none before it had"""

    @contextmanager
    def until(self, end: float) -> Iterator[None]:
        """Inside there is time until `end` at most."""
        self._ends.append(min(end, self._ends[-1]))
        try:
            yield
        finally:
            self._ends.pop()

    @property
    def over(self) -> bool:
        """Nothing can be measured any more."""
        left = self._ends[-1] - self._budget.clock()
        return self._budget.ended() or left <= 0 or left < self.cost

    def period(self, period: Period, load: Load) -> Timing:
        """See `Bench`. Raises `OutOfTime`, and what the bench raises."""
        now = self._budget.clock()
        kernels = {(op.operation, op.config, op.sms == self.num_sms) for op in period.operations}
        # compiling takes many times as long as measuring, and may use the time of others but not more than there is
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


def median(timings: list[Timing]) -> Timing:
    return Timing(*(statistics.median(values) for values in zip(*timings, strict=True)))
