"""How many drafts are verified: learned chances, measured times, the best number, and the guard."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.scheduling.draft_chances import Chances, Own
from weft.engine.scheduling.draft_depth import FRESH_SECONDS, WINDOW_ITERATIONS, Guard, RowTimes, best_depth


def test_chances_approach_what_is_measured() -> None:
    chances, rng = Chances(), np.random.default_rng(0)
    for _ in range(3000):
        right = int(rng.random() < 0.8)
        chances.learn(4, [1.0], right, 1, Own())
    assert chances.survival(4, [1.0], Own())[0] == pytest.approx(0.8, abs=0.04)
    # Other classes keep their first chance.
    assert chances.survival(1, [1.0], Own())[0] == pytest.approx(0.05)


def test_survival_falls_along_a_draft() -> None:
    survival = Chances().survival(8, [1.0, 0.9, 0.6, 0.2], Own())
    assert survival == sorted(survival, reverse=True)
    assert all(0 < chance < 1 for chance in survival)


def test_a_request_whose_drafts_fail_is_drafted_less() -> None:
    chances, bad, fresh = Chances(), Own(), Own()
    for _ in range(20):
        chances.learn(8, [1.0], 0, 1, bad)
        chances.learn(8, [1.0, 1.0], 2, 2, Own())
    assert bad.factor < 0.5
    assert chances.survival(8, [1.0], bad)[0] < 0.6 * chances.survival(8, [1.0], fresh)[0]


def test_only_tokens_that_met_the_text_count() -> None:
    chances, before = Chances(), Chances().survival(8, [1.0] * 6, Own())
    chances.learn(8, [1.0] * 6, 0, 0, Own())
    assert chances.survival(8, [1.0] * 6, Own()) == before
    chances.learn(8, [1.0] * 6, 1, 2, Own())
    first, second = chances.survival(8, [1.0] * 2, Own())
    assert first > before[0]  # right
    assert second / first < before[1] / before[0]  # wrong; the other four are not judged


def test_a_slow_first_iteration_of_a_size_does_not_count() -> None:
    times = RowTimes()
    for seconds in (0.016, 0.009, 0.01):
        times.add(4, seconds, 0.0)
    assert times.at(np.array([4])) == pytest.approx([0.009])


def test_times_are_known_once_measured_and_while_fresh() -> None:
    times = RowTimes()
    assert not times.knows(8, 0.0)
    assert np.isnan(times.at(np.array([8]))).all()
    for i in range(4):
        times.add(8, 0.02, float(i))
    assert times.knows(8, 4.0)
    assert times.knows(9, 4.0)
    assert not times.knows(16, 4.0)
    assert not times.knows(8, 4.0 + FRESH_SECONDS)
    assert times.at(np.array([1, 8, 99])).tolist() == [0.02] * 3


def test_times_between_measured_ones_are_interpolated_and_never_fall() -> None:
    times = RowTimes()
    for rows, seconds in ((1, 0.010), (4, 0.016), (8, 0.012)):
        times.add(rows, seconds, 0.0)
    assert times.at(np.array([1, 2, 4, 6, 8])).tolist() == pytest.approx([0.010, 0.012, 0.016, 0.016, 0.016])


def test_one_slow_iteration_moves_a_time_little() -> None:
    times = RowTimes()
    for i in range(20):
        times.add(4, 0.01, float(i))
    times.add(4, 5.0, 20.0)
    assert times.at(np.array([4]))[0] < 0.011
    times.add(4, -1.0, 20.0)
    times.add(4, math.nan, 20.0)
    assert times.at(np.array([4]))[0] < 0.011


def test_missing_times_come_from_the_other_table() -> None:
    plain, verifying = RowTimes(), RowTimes()
    plain.add(1, 0.01, 0.0)
    verifying.add(4, 0.05, 0.0)  # once is not enough
    assert verifying.at(np.array([1, 4]), plain).tolist() == pytest.approx([0.01, 0.01])
    verifying.add(4, 0.03, 0.0)
    assert verifying.at(np.array([1, 4]), plain).tolist() == pytest.approx([0.01, 0.03])


CHANCES = st.lists(st.floats(0.01, 0.98), max_size=4).map(
    lambda raw: list(itertools.accumulate(raw, lambda a, b: a * b))
)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(CHANCES, min_size=1, max_size=4),
    st.integers(0, 8),
    st.lists(st.floats(0.0, 0.02), min_size=17, max_size=17),
)
def test_the_best_depth_is_that_of_trying_all(survivals: list[list[float]], most: int, steps: list[float]) -> None:
    rows, seconds = len(survivals), 0.01 + np.cumsum([0.0, *steps[1:]])
    choice = best_depth(rows, survivals, most, seconds)
    rates = []
    for depths in itertools.product(*(range(len(one) + 1) for one in survivals)):
        if sum(depths) <= most:
            foreseen = sum(sum(one[:depth]) for one, depth in zip(survivals, depths, strict=True))
            rates.append((rows + foreseen) / seconds[sum(depths)])
    assert choice.rate == pytest.approx(max(rates))


def test_no_depth_is_best_if_each_row_costs_as_much_as_a_token() -> None:
    assert best_depth(2, [[0.9, 0.8], [0.9]], 9, 0.01 * np.arange(2, 6)).extra == 0
    assert best_depth(2, [[0.9, 0.8], [0.9]], 9, np.full(4, 0.01)).extra == 3


def test_the_guard_pauses_longer_each_time_and_forgets_once_drafts_pay() -> None:
    guard, now, pauses = Guard(), 0.0, []
    for paid in (False, False, False, True, False):
        for i in itertools.count():
            now += 0.05
            if not guard.add(0.05, 12 if paid else 9, 10.0, now):
                pauses.append(guard.until - now)
                break
            if i >= 2 * WINDOW_ITERATIONS:
                break
    assert pauses == pytest.approx([1.0, 2.0, 4.0, 1.0])
    assert guard.pauses == 4
