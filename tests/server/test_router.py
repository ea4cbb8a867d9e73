"""Which engine gets a request, as a function of the engines' known state."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.server.replicas.router import POLICY, Candidate, choose

TOKENS = st.integers(0, 5000)
CANDIDATES = st.lists(st.tuples(TOKENS, TOKENS, TOKENS), min_size=1, max_size=8).map(
    lambda rows: [Candidate(i, *row) for i, row in enumerate(rows)]
)
SIZES = st.lists(st.integers(1, 2000), min_size=1, max_size=300)


def mean(values: list[float]) -> float:
    return sum(values) / len(values)


@given(CANDIDATES, st.integers(1, 5000), st.integers(0, 500))
def test_one_engine_is_chosen_and_always_the_same(candidates: list[Candidate], prompt: int, size: int) -> None:
    chosen = choose(candidates, prompt, size, POLICY)
    assert chosen in [c.engine for c in candidates]
    assert chosen == choose(candidates[::-1], prompt, size, POLICY)


@given(CANDIDATES, st.integers(1, 5000), st.integers(0, 500))
def test_an_overloaded_engine_gets_no_requests(candidates: list[Candidate], prompt: int, size: int) -> None:
    chosen = candidates[choose(candidates, prompt, size, POLICY)]
    assert chosen.load <= POLICY.load_bound * mean([c.load for c in candidates]) + POLICY.load_slack * size


@given(CANDIDATES, st.integers(1, 5000), st.integers(0, 500))
def test_no_engine_that_is_better_in_everything_is_skipped(candidates: list[Candidate], prompt: int, size: int) -> None:
    chosen = candidates[choose(candidates, prompt, size, POLICY)]
    for other in candidates:
        better = other.load < chosen.load and other.work < chosen.work
        assert not (better and other.cached > chosen.cached)


@pytest.mark.parametrize(
    ("candidates", "expected"),
    [
        ([Candidate(0, 0, 50, 0), Candidate(1, 0, 40, 9)], 1),  # the least to do
        ([Candidate(0, 0, 40, 9), Candidate(1, 0, 40, 8)], 1),  # the least given
        ([Candidate(0, 0, 40, 8), Candidate(1, 0, 40, 8)], 0),  # the first
        ([Candidate(0, 0, 0, 0), Candidate(1, 900, 300, 300)], 1),  # the pages
        ([Candidate(0, 900, 300, 0), Candidate(1, 950, 900, 0)], 0),  # as good as the best
        ([Candidate(0, 0, 0, 0), Candidate(1, 900, 3000, 0)], 0),  # the pages, but too much to do
        ([Candidate(0, 0, 0, 0), Candidate(1, 900, 0, 9000)], 0),  # the pages, but given too much
        # An overloaded engine gets nothing, even if all others were given too much.
        ([Candidate(0, 0, 9000, 0), Candidate(1, 0, 0, 9000)], 1),
    ],
)
def test_cases(candidates: list[Candidate], expected: int) -> None:
    assert choose(candidates, 1000, 100.0, POLICY) == expected


@given(SIZES, st.integers(2, 5))
def test_a_prefix_shared_by_all_does_not_fill_one_engine(sizes: list[int], engines: int) -> None:
    """Every request finds its pages at engine 0, and ends before the next one arrives."""
    work, largest = [0.0] * engines, max(sizes)
    for i, size in enumerate(sizes):
        mean_size = sum(work) / i if i else 0.0
        candidates = [Candidate(e, size if e == 0 else 0, 0, work[e]) for e in range(engines)]
        work[choose(candidates, size, mean_size, POLICY)] += size
    bound = POLICY.work_bound * mean(work) + POLICY.work_slack * mean([float(s) for s in sizes])
    # Means move: an earlier decision within the bound is judged with the largest request added.
    assert max(work) <= bound + (POLICY.work_slack + 1) * largest


@given(SIZES, st.integers(2, 5))
def test_without_prefixes_loads_differ_by_at_most_a_request(sizes: list[int], engines: int) -> None:
    load = [0.0] * engines
    for size in sizes:
        load[choose([Candidate(e, 0, load[e], 0) for e in range(engines)], size, 0.0, POLICY)] += size
    assert max(load) - min(load) <= max(sizes)


def test_a_key_leads_to_the_same_engine_if_load_and_pages_leave_a_choice() -> None:
    keys = [f"session {i}" for i in range(64)]

    def of(candidates: list[Candidate], key: str | None) -> int:
        return choose(candidates, 1000, 100, POLICY, key)

    idle = [Candidate(i) for i in range(4)]
    homes = {key: of(idle, key) for key in keys}
    assert set(homes.values()) == {0, 1, 2, 3}
    assert of(idle, None) == 0
    for key, home in homes.items():
        busy = [Candidate(i, load=50.0 * (i == home), work=90.0 * (i == home)) for i in range(4)]
        assert of(busy[::-1], key) == home  # a little load changes nothing
        assert of([Candidate(i, load=5000.0 * (i == home)) for i in range(4)], key) != home
        other = (home + 1) % 4
        assert of([Candidate(i, 900 * (i == other)) for i in range(4)], key) == other  # pages count for more
        left = [c for c in idle if c.engine != other]
        assert of(left, key) == home  # an engine that leaves takes only its own keys with it
