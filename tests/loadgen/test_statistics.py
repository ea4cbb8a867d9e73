"""Percentiles, intervals and the goodness-of-fit test against closed forms and brute force."""

from __future__ import annotations

from math import comb, inf, isnan, nan

import numpy as np
import pytest
from exponential import ks_exponential
from hypothesis import given
from hypothesis import strategies as st

from weft.loadgen.statistics import Distribution, percentile, percentile_interval, wilson


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=60), st.floats(0, 100))
def test_percentiles_are_those_of_numpy(values: list[float], q: float) -> None:
    array = np.array(values)
    assert percentile(array, q) == pytest.approx(float(np.percentile(array, q)), rel=1e-9, abs=1e-9)


def test_a_percentile_that_touches_a_failure_is_infinite() -> None:
    values = np.array([1.0] * 98 + [inf] * 2)
    assert percentile(values, 50) == 1.0
    assert percentile(values, 97.9) < inf
    assert percentile(values, 99) == inf
    assert percentile(np.array([1.0, inf]), 50) == inf
    assert isnan(percentile(np.empty(0), 50))


def _coverage_of_wilson(n: int, p: float) -> float:
    """Exact: the binomial probability of the counts whose interval holds `p`."""
    total = 0.0
    for k in range(n + 1):
        low, high = wilson(k, n)
        if low <= p <= high:
            total += comb(n, k) * p**k * (1 - p) ** (n - k)
    return total


@pytest.mark.parametrize("n", [20, 100, 400])
def test_wilson_covers_the_true_share_about_as_often_as_claimed(n: int) -> None:
    coverages = [_coverage_of_wilson(n, p) for p in np.linspace(0.03, 0.97, 95)]
    assert np.mean(coverages) == pytest.approx(0.95, abs=0.01)


def test_wilson_solves_its_own_equation() -> None:
    # The ends p are where (share - p)² = z² p (1 - p) / n.
    n, k, z = 50, 45, 1.959963984540054
    for p in wilson(k, n):
        assert (k / n - p) ** 2 == pytest.approx(z * z * p * (1 - p) / n, rel=1e-9)
    assert wilson(0, 0) == (0.0, 1.0)
    assert wilson(10, 10)[1] == pytest.approx(1.0)
    assert wilson(10, 10)[0] < 0.8


def test_the_interval_of_a_percentile_covers_it_at_least_in_nineteen_of_twenty_samples() -> None:
    rng = np.random.default_rng(0)
    true, hits, samples = -np.log(1 - 0.9), 0, 2000
    for _ in range(samples):
        low, high = percentile_interval(rng.exponential(size=300), 90)
        hits += low <= true <= high
    assert 0.95 - 4 * np.sqrt(0.05 * 0.95 / samples) <= hits / samples <= 0.985


def test_too_few_values_bound_no_high_percentile() -> None:
    low, high = percentile_interval(np.arange(50.0), 99)
    assert high == inf
    assert low > 0


def test_ks_distance_is_that_of_a_step_function_computed_by_hand() -> None:
    gaps = np.array([0.1, 0.5, 2.0])
    cdf = 1 - np.exp(-gaps)
    by_hand = max(max(abs((i + 1) / 3 - c), abs(i / 3 - c)) for i, c in enumerate(cdf))
    assert ks_exponential(gaps, 1.0)[0] == pytest.approx(by_hand)


def test_ks_p_values_are_uniform_when_the_hypothesis_holds() -> None:
    rng = np.random.default_rng(4)
    values = [ks_exponential(rng.exponential(0.5, 200), 2.0)[1] for _ in range(2000)]
    for level in (0.05, 0.25, 0.5, 0.9):
        assert np.mean(np.array(values) < level) == pytest.approx(
            level, abs=4 * np.sqrt(level * (1 - level) / 2000) + 0.01
        )


def test_a_distribution_of_no_values_and_of_one() -> None:
    assert isnan(Distribution.of(np.empty(0)).mean)
    one = Distribution.of(np.array([3.0]))
    assert (one.n, one.mean, one.sd, one.p50, one.p99, one.max) == (1, 3.0, 0.0, 3.0, 3.0, 3.0)
    assert one.mean != nan
    assert Distribution.of(np.array([1.0, 1.0, 4.0])).p99_over_mean == pytest.approx(3.94 / 2)
    assert isnan(Distribution.of(np.empty(0)).p99_over_mean)
    assert isnan(Distribution.of(np.zeros(3)).p99_over_mean)
