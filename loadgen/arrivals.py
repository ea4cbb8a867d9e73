"""Generates arrival times in seconds after the start of a run, as sorted float64 arrays."""

from __future__ import annotations

import math
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from weft.loadgen.errors import LoadError

Process = Literal["poisson", "gamma", "constant", "ramp", "closed"]
Times = NDArray[np.float64]

MAX_ARRIVALS = 10_000_000  # Requests of a run; their times and lengths are arrays.


def renewal(
    process: Process, rate: float, rng: np.random.Generator, *,
    duration: float | None, count: int | None, burstiness: float,
) -> Times:  # fmt: skip
    """Return arrivals with independent gaps of mean `1 / rate` seconds, up to `duration` or `count`.

    `poisson`: exponential gaps. `gamma`: gaps Gamma(shape `burstiness`, scale 1 / (rate * burstiness)), whose
    coefficient of variation is 1 / sqrt(burstiness): below 1 is burstier than Poisson. `constant`: equal gaps. Raises
    `LoadError` if there are too many."""
    if min(math.inf if count is None else count, math.inf if duration is None else duration * rate) > MAX_ARRIVALS:
        raise LoadError(f"--rate and --duration give {rate * (duration or 0):.3g} requests; the most is {MAX_ARRIVALS}")
    if process == "constant":
        # Due at 0, 1/rate, 2/rate, …: multiply instead of summing, so that errors do not accumulate.
        limits = [count] if count else []
        if duration:
            limits.append(int(np.ceil(duration * rate - 1e-9)))
        return np.arange(min(limits)) / rate

    def gaps(n: int) -> Times:
        return (
            rng.exponential(1 / rate, n) if process == "poisson" else rng.gamma(burstiness, 1 / (rate * burstiness), n)
        )

    if count is not None:
        times = np.cumsum(gaps(count))
    else:
        assert duration is not None
        times = np.empty(0)
        last = 0.0
        while last < duration:
            more = last + np.cumsum(gaps(int((duration - last) * rate * 1.1) + 32))
            times, last = np.concatenate((times, more)), float(more[-1])
    return times if duration is None else times[times < duration]


def ramp(start_rate: float, end_rate: float, duration: float, rng: np.random.Generator) -> Times:
    """Return Poisson arrivals whose rate changes linearly from `start_rate` to `end_rate` per second over `duration`.

    Unit-rate arrivals are mapped through the inverse of the expected count, start t + (end - start) t² / (2 duration).
    """
    total = (start_rate + end_rate) / 2 * duration
    unit = renewal("poisson", 1.0, rng, duration=total, count=None, burstiness=1.0)
    slope = (end_rate - start_rate) / duration
    if abs(slope) * duration < 1e-9 * (start_rate + end_rate):
        return unit / start_rate
    return (np.sqrt(np.maximum(start_rate**2 + 2 * slope * unit, 0.0)) - start_rate) / slope


def replay(
    times: Times, *, speed: float = 1.0, rate: float | None = None,
    duration: float | None = None, count: int | None = None,
) -> Times:  # fmt: skip
    """Return the start of a trace, `speed` times as fast, or stretched to a mean of `rate` requests per second.

    With a rate and a duration, only the first `rate * duration` requests are stretched. Raises `LoadError` if the trace
    takes no time and `rate` is given."""
    if rate is not None and duration is not None:
        count = min(count or len(times), max(2, round(rate * duration)))
    times = (times - times[0])[:count]
    if rate is not None:
        span = float(times[-1])
        if span <= 0:
            raise LoadError("--rate cannot stretch a trace whose requests all arrive at once; omit --rate")
        speed = rate * span / (len(times) - 1)
    times = times / speed
    return times if duration is None else times[times < duration]
