"""Arrival processes against their distributions."""

from __future__ import annotations

import numpy as np
import pytest
from exponential import ks_exponential

from weft.loadgen.arrivals import ramp, renewal, replay
from weft.loadgen.errors import LoadError


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def gaps(times: np.ndarray) -> np.ndarray:
    return np.diff(times, prepend=0.0)


def test_poisson_gaps_fit_the_exponential_distribution() -> None:
    times = renewal("poisson", 40.0, rng(), duration=None, count=20_000, burstiness=1.0)
    assert ks_exponential(gaps(times), 40.0)[1] > 0.01
    # The test is sensitive: a rate that is 5 % off fails.
    assert ks_exponential(gaps(times), 42.0)[1] < 1e-4


def test_poisson_counts_have_the_variance_of_their_mean() -> None:
    times = renewal("poisson", 50.0, rng(1), duration=2000.0, count=None, burstiness=1.0)
    counts = np.histogram(times, np.arange(2001))[0]
    # Var(sample variance) of a Poisson count is about (2 mean² + mean) / n.
    tolerance = 4 * np.sqrt((2 * 50**2 + 50) / 2000)
    assert counts.mean() == pytest.approx(50, abs=4 * np.sqrt(50 / 2000))
    assert counts.var() == pytest.approx(50, abs=tolerance)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_the_requested_mean_and_burstiness(burstiness: float) -> None:
    n = 50_000
    sample = gaps(renewal("gamma", 10.0, rng(2), duration=None, count=n, burstiness=burstiness))
    assert sample.mean() == pytest.approx(0.1, abs=4 * 0.1 / np.sqrt(burstiness * n))
    cv = sample.std() / sample.mean()
    assert cv == pytest.approx(1 / np.sqrt(burstiness), rel=0.05)


def test_gamma_of_burstiness_one_is_poisson_and_of_another_is_not() -> None:
    plain = gaps(renewal("gamma", 5.0, rng(3), duration=None, count=5000, burstiness=1.0))
    bursty = gaps(renewal("gamma", 5.0, rng(3), duration=None, count=5000, burstiness=0.5))
    assert ks_exponential(plain, 5.0)[1] > 0.01
    assert ks_exponential(bursty, 5.0)[1] < 1e-6


def test_constant_arrivals_do_not_drift() -> None:
    times = renewal("constant", 3.0, rng(), duration=1000.0, count=None, burstiness=1.0)
    assert len(times) == 3000
    assert times[2999] == 2999 / 3.0
    assert len(renewal("constant", 3.0, rng(), duration=1000.0, count=7, burstiness=1.0)) == 7


def test_ramp_gives_the_expected_number_in_every_part() -> None:
    times = np.concatenate([ramp(10.0, 50.0, 100.0, rng(seed)) for seed in range(20)])
    counts = np.histogram(times, [0, 25, 50, 75, 100])[0]
    expected = 20 * np.array([(10 + 40 * (a + b) / 200) * 25 for a, b in ((0, 25), (25, 50), (50, 75), (75, 100))])
    assert np.all(np.abs(counts - expected) < 4 * np.sqrt(expected))


def test_ramp_goes_down_and_stays_level() -> None:
    down = ramp(20.0, 0.0, 50.0, rng())
    assert np.all(np.diff(down) >= 0)
    assert down[-1] <= 50
    assert len(down) == pytest.approx(500, abs=4 * np.sqrt(500))
    assert ks_exponential(gaps(ramp(20.0, 20.0, 200.0, rng())), 20.0)[1] > 0.01


def test_a_trace_is_replayed_at_its_own_speed_faster_or_at_a_rate() -> None:
    times = np.array([100.0, 101.0, 104.0, 110.0])
    assert replay(times).tolist() == [0, 1, 4, 10]
    assert replay(times, speed=2).tolist() == [0, 0.5, 2, 5]
    assert replay(times, rate=4.0)[-1] == pytest.approx(3 / 4)
    # Three a second for one second: the first three, whose two gaps of 1 and 3 s become 2/3 s.
    assert replay(times, rate=3.0, duration=1.0) == pytest.approx([0, 1 / 6, 2 / 3])
    assert replay(times, duration=5).tolist() == [0, 1, 4]
    assert replay(times, count=2).tolist() == [0, 1]
    with pytest.raises(LoadError, match="arrive at once"):
        replay(np.zeros(3), rate=1.0)


def test_the_same_seed_gives_the_same_times() -> None:
    a, b = (renewal("poisson", 2.0, rng(5), duration=50.0, count=None, burstiness=1.0) for _ in range(2))
    assert np.array_equal(a, b)
