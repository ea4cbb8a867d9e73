"""Finds the highest rate at which a server meets its objectives, by doubling and bisection."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt

from weft.loadgen.run import Run


@dataclass(frozen=True, slots=True)
class SweepOptions:
    """`precision`: end the search if the lowest missed rate is at most this fraction above the highest met rate."""

    start_rate: float = 1.0
    growth: float = 2.0
    precision: float = 0.05
    max_runs: int = 20


@dataclass
class Sweep:
    """`best`: highest tried rate that met every objective. `missed`: lowest rate above it that did not. None: none."""

    name: str
    points: list[tuple[float, Run]] = field(default_factory=list)
    """(offered rate, run), in the order of the runs."""
    best: float | None = None
    missed: float | None = None
    reason: str = ""  # Why the search ended.
    interrupted: bool = False

    @property
    def runs(self) -> list[Run]:
        return [run for _, run in self.points]

    @property
    def by_rate(self) -> list[tuple[float, Run]]:
        return sorted(self.points, key=lambda point: point[0])

    @property
    def shown(self) -> Run:
        """The representative run: at the highest met rate, or else the first."""
        return next((run for rate, run in self.points if rate == self.best), self.runs[0])


def search(name: str, options: SweepOptions, measure: Callable[[float], Run]) -> Sweep:
    """Search with `measure(rate)`. A miss while the generator was late is no evidence, so it ends the search."""
    sweep, rate = Sweep(name), options.start_rate
    while len(sweep.points) < options.max_runs:
        try:
            run = measure(rate)
        except KeyboardInterrupt:  # before this run had results
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
            sweep.best = rate
        else:
            sweep.missed = rate
        low, high = sweep.best, sweep.missed
        if high is None:
            rate *= options.growth
        elif low is None:
            rate /= options.growth
            if rate < options.start_rate / options.growth**8:
                sweep.reason = f"even {high:.3g} requests/s misses the objectives"
                break
        elif high <= low * (1 + options.precision):
            sweep.reason = f"found to {high / low - 1:.1%}"
            break
        else:
            rate = sqrt(low * high)
    else:
        sweep.reason = f"stopped after {options.max_runs} runs"
    return sweep
