"""`ks_exponential`: whether gaps are those of a Poisson process."""

from __future__ import annotations

from math import exp, pi, sqrt

import numpy as np

from weft.loadgen.statistics import Values


def ks_exponential(gaps: Values, rate: float) -> tuple[float, float]:
    """Kolmogorov and Smirnov's distance of `gaps` from the exponential distribution of `rate`, and its p-value.

    The p-value is Kolmogorov's limit with Stephens' correction for a finite sample (1970).
    """
    n = len(gaps)
    cdf = -np.expm1(-rate * np.sort(gaps))
    steps = np.arange(n + 1) / n
    distance = float(max((steps[1:] - cdf).max(), (cdf - steps[:-1]).max()))
    return distance, _kolmogorov(distance * (sqrt(n) + 0.12 + 0.11 / sqrt(n)))


def _kolmogorov(x: float) -> float:
    """P(K > x) of Kolmogorov's distribution."""
    if x < 0.2:
        return 1.0
    if x < 1.0:  # the other series of the same function converges here
        return 1 - sqrt(2 * pi) / x * sum(exp(-((2 * k - 1) ** 2) * pi**2 / (8 * x * x)) for k in range(1, 20))
    return 2 * sum((-1) ** (k - 1) * exp(-2 * (k * x) ** 2) for k in range(1, 20))
