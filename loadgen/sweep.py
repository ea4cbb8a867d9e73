"""Finds the highest rate that a server serves within its objectives: doubling, then bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt

from weft.loadgen.run import Run


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """`precision`: the search ends when the lowest rate that missed is this fraction above the highest that met."""

    start_rate: float = 1.0
    growth: float = 2.0
    precision: float = 0.05
    max_runs: int = 20


@dataclass
class Sweep:
    """`best`: highest rate tried that met every objective; `missed`: lowest above it that did not; None: no such."""

    name: str
    points: list[tuple[float, Run]] = field(default_factory=list)
    """(rate asked for, run), in the order they were made"""
    best: float | None = None
    missed: float | None = None
    reason: str = ""
    """why the search ended"""
    interrupted: bool = False

    @property
    def runs(self) -> list[Run]:
        return [run for _, run in self.points]

    @property
    def by_rate(self) -> list[tuple[float, Run]]:
        return sorted(self.points, key=lambda point: point[0])

    @property
    def shown(self) -> Run:
        """The run that stands for the server: the one at the highest rate that met, else the first."""
        return next((run for rate, run in self.points if rate == self.best), self.runs[0])


def search(name: str, options: SweepOptions, measure: Callable[[float], Run]) -> Sweep:
    """`measure(rate)` makes a run. One that missed while the generator was late itself is no evidence: it ends."""
    sweep = Sweep(name)
    low: float | None = None
    high: float | None = None
    rate = options.start_rate
    while len(sweep.points) < options.max_runs:
        try:
            run = measure(rate)
        except KeyboardInterrupt:  # before there was anything of this run
            if not sweep.points:
                raise
            sweep.interrupted = True
        else:
            sweep.points.append((rate, run))
            sweep.interrupted = run.interrupted
        if sweep.interrupted:
            sweep.reason = "the sweep was interrupted"
            break
        if not run.attainment.met and run.lateness_matters:
            sweep.reason = f"at {rate:.3g} requests/s the generator could not keep up; use --processes"
            break
        if run.attainment.met:
            low = rate
        else:
            high = rate
        if low is not None and high is not None and high <= low * (1 + options.precision):
            sweep.reason = f"found to {high / low - 1:.1%}"
            break
        if high is None:
            rate *= options.growth
        elif low is None:
            rate /= options.growth
            if rate < options.start_rate / options.growth**8:
                sweep.reason = f"even {high:.3g} requests/s miss the objectives"
                break
        else:
            rate = sqrt(low * high)
    else:
        sweep.reason = f"stopped after {options.max_runs} runs"
    sweep.best, sweep.missed = low, high
    return sweep
