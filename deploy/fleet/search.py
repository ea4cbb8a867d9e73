"""Explores given fleets at every rate, or finds the fewest engines that meet the objectives."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from weft.deploy.fleet.engine import EngineOptions
from weft.deploy.fleet.settings import Settings
from weft.deploy.fleet.simulation import Result, simulate
from weft.loadgen.errors import LoadError

OnBegin = Callable[[int, EngineOptions, float | None, float], Callable[[float], None]]
"""Takes engines, configuration, rate and seconds of arrivals; returns a callback for the simulation's progress."""


class Point(NamedTuple):
    """A simulated fleet. `rate`: None if the arrivals determine it."""

    engines: int
    configuration: EngineOptions
    rate: float | None
    result: Result

    @property
    def met(self) -> bool:
        return self.result.attainment.met


def explore(settings: Settings, on_begin: OnBegin) -> Iterator[Point]:
    """Yield points in the order of simulation. Raises `LoadError`."""
    for rate in settings.rates:
        workload = settings.workload(rate)
        duration = float(workload.times[-1]) if workload.times is not None else settings.arrival.duration or 0.0
        for configuration in settings.configurations:

            def run(engines: int, configuration: EngineOptions = configuration, rate: float | None = rate) -> Point:
                result = simulate(
                    settings.fleet(engines, configuration), workload, settings.objectives,  # noqa: B023
                    warmup=settings.warmup, max_failures=settings.max_failures,
                    on_progress=on_begin(engines, configuration, rate, duration),  # noqa: B023
                )  # fmt: skip
                if not result.judged.records:
                    raise LoadError(f"--warmup {settings.warmup:g}s: no request arrives after it; shorten --warmup")
                return Point(engines, configuration, rate, result)

            yield from map(run, settings.engines) if settings.engines else fewest(run, settings.max_engines)


def fewest(run: Callable[[int], Point], most: int) -> Iterator[Point]:
    """Find the fewest engines that meet the objectives by doubling and bisection, assuming more are no worse."""
    low, high, engines = 0, 0, 1
    while not high and engines <= most:
        point = run(engines)
        yield point
        low, high = (low, engines) if point.met else (engines, 0)
        engines = 2 * engines if engines == most else min(2 * engines, most)
    while high - low > 1:
        point = run((low + high) // 2)
        yield point
        low, high = (low, point.engines) if point.met else (point.engines, high)


def best(points: Sequence[Point]) -> dict[float | None, Point | None]:
    """Return by rate the point that meets the objectives with the fewest engines, then joules, then latency."""
    found: dict[float | None, Point | None] = {}
    for point in points:
        before = found.setdefault(point.rate, None)
        if point.met and (before is None or _cost(point) < _cost(before)):
            found[point.rate] = point
    return found


def _cost(point: Point) -> tuple[float, float, float]:
    return point.engines, point.result.joules or 0.0, point.result.distributions["e2e"].mean
