"""The predicted peak of memory equals that of a simulation, token by token."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.scheduling.admission import OutputLengths, peak_tokens


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=12))
@settings(max_examples=300, deadline=None)
def test_peak_equals_a_simulation(requests: list[tuple[int, int]]) -> None:
    best = 0
    for t in range(31):
        best = max(best, sum(now + t for now, left in requests if left >= t))
    now = np.array([r[0] for r in requests], np.float64)
    left = np.array([r[1] for r in requests], np.float64)
    assert peak_tokens(now, left) == best


def test_the_mean_follows_what_finishes() -> None:
    lengths = OutputLengths()
    for _ in range(5000):
        lengths.add(40)
    assert abs(lengths.mean - 40) < 1
    remaining = lengths.remaining(np.array([0, 30, 400]), np.array([100, 100, 5]))
    assert np.allclose(remaining, [40, 10, 5], atol=1)
