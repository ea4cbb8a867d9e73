"""Statistics for reports, each with its definition."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, floor, inf, nan, sqrt

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]
Z95 = 1.959963984540054  # Two-sided 95 % point of the standard normal distribution.


def percentile(values: Values, q: float) -> float:
    """Return the `q`-th percentile (0-100), linear between order statistics (Hyndman and Fan's type 7); NaN if empty.

    Infinite values are allowed; a percentile between a finite and an infinite value is infinite."""
    n = len(values)
    if not n:
        return nan
    position = (n - 1) * q / 100
    low = int(position)
    high, weight = min(low + 1, n - 1), position - low
    part = np.partition(values, [low, high])
    a, b = float(part[low]), float(part[high])
    return a if weight == 0 or a == b else a + (b - a) * weight


def percentile_interval(values: Values, q: float) -> tuple[float, float]:
    """Return a distribution-free interval of the `q`-th percentile of independent values, from their order statistics.

    The number of values below the true percentile is binomial. Its normal approximation gives the two ranks, rounded
    outward, so that the coverage is at least nominal. If a rank lies outside the sample, that end is infinite: the
    sample is too small to bound the percentile."""
    n, p = len(values), q / 100
    if not n:
        return nan, nan
    half = Z95 * sqrt(n * p * (1 - p))
    low, high = floor(n * p - half), ceil(n * p + half)
    ordered = np.sort(values)
    return float(ordered[low - 1]) if low >= 1 else -inf, float(ordered[high - 1]) if 1 <= high <= n else inf


def wilson(good: int, total: int) -> tuple[float, float]:
    """Return Wilson's score interval of a proportion (E. B. Wilson 1927); (0, 1) if empty."""
    if not total:
        return 0.0, 1.0
    p, zz = good / total, Z95 * Z95
    centre = (p + zz / (2 * total)) / (1 + zz / total)
    half = Z95 / (1 + zz / total) * sqrt(p * (1 - p) / total + zz / (4 * total * total))
    return max(0.0, centre - half), min(1.0, centre + half)


@dataclass(frozen=True, slots=True)
class Distribution:
    """A summary of one measure over requests (or token gaps), in seconds. `p99_interval`: 95 % confidence."""

    n: int
    mean: float
    sd: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float
    p99_interval: tuple[float, float]
    p99_over_mean: float  # Without a unit; NaN if the mean is 0.

    @staticmethod
    def of(values: Values) -> Distribution:
        if not len(values):
            return Distribution(0, nan, nan, nan, nan, nan, nan, nan, (nan, nan), nan)
        p50, p90, p95, p99 = (percentile(values, q) for q in (50, 90, 95, 99))
        sd = float(values.std(ddof=1)) if len(values) > 1 else 0.0
        interval, mean = percentile_interval(values, 99), float(values.mean())
        ratio = p99 / mean if mean else nan
        return Distribution(len(values), mean, sd, p50, p90, p95, p99, float(values.max()), interval, ratio)
