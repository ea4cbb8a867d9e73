"""The predicted peak of memory equals that of a simulation, token by token."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.scheduling.admission import PRIOR_OUTPUT_TOKENS, PRIOR_WEIGHT, OutputLengths, fits, peak_tokens
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.sampling import SamplingParams


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 30)), max_size=12))
@settings(max_examples=300, deadline=None)
def test_peak_equals_a_simulation(requests: list[tuple[int, int]]) -> None:
    best = 0
    for t in range(31):
        best = max(best, sum(now + t for now, left in requests if left >= t))
    now = np.array([r[0] for r in requests], np.float64)
    left = np.array([r[1] for r in requests], np.float64)
    assert peak_tokens(now, left) == best


def test_the_mean_follows_finished_requests() -> None:
    lengths = OutputLengths()
    for _ in range(5000):
        lengths.add(40)
    assert abs(lengths.mean - 40) < 1
    remaining = lengths.remaining(np.array([0, 30, 400]), np.array([100, 100, 5]))
    assert np.allclose(remaining, [40, 10, 5], atol=1)


def test_remaining_output_is_the_rest_of_the_mean_then_a_quarter_of_it_and_never_more_than_fits() -> None:
    lengths = OutputLengths()
    lengths._sum, lengths._count = 400.0, 10.0
    decoded, room = np.array([0, 10, 30, 31, 90, 0]), np.array([99, 99, 99, 99, 99, 7])
    assert lengths.remaining(decoded, room).tolist() == [40, 30, 10, 10, 10, 7]


def test_the_mean_starts_with_a_prior_that_fades() -> None:
    lengths = OutputLengths()
    assert lengths.mean == PRIOR_OUTPUT_TOKENS
    lengths.add(28)
    assert lengths.mean == (PRIOR_OUTPUT_TOKENS * PRIOR_WEIGHT * 0.999 + 28) / (PRIOR_WEIGHT * 0.999 + 1)


class Sequence(NamedTuple):
    prompt: int
    output: int
    """tokens sampled so far"""
    max_tokens: int
    computed: int
    """positions of its prompt and output that have been scheduled"""
    stops: bool


SEQUENCES = st.builds(
    lambda prompt, output, more, missing, stops: Sequence(prompt, output, output + more, missing, stops),
    st.integers(1, 12), st.integers(0, 8), st.integers(1, 12), st.integers(0, 3), st.booleans(),
)  # fmt: skip


def request_of(sequence: Sequence, handle: int) -> Request:
    known = sequence.prompt + sequence.output
    return Request(
        handle, np.zeros(known, np.int32), sequence.prompt, SamplingParams(max_tokens=sequence.max_tokens),
        sequence.prompt + sequence.max_tokens, 0, handle, 0.0, salt="", stop_ids=(1,) if sequence.stops else (), seed=0,
    )  # fmt: skip


@given(
    running=st.lists(SEQUENCES, max_size=4),
    new=SEQUENCES,
    mean=st.integers(0, 16),
    shared=st.integers(-3, 6),
    spare=st.integers(-1, 1),
)
@settings(max_examples=400)
def test_a_request_fits_if_the_predicted_peak_does(
    running: list[Sequence], new: Sequence, mean: int, shared: int, spare: int
) -> None:
    page_size = 4
    s = SlotTable(5, 40, page_size)
    for handle, sequence in enumerate(running):
        slot = s.assign(request_of(sequence, handle), np.zeros(0, np.int32), 0)
        # Prefilling: less than its target. Decoding: one more with every launched step.
        s.scheduled[slot] = sequence.prompt + sequence.output + sequence.computed - 2
        s.scheduled[slot] = min(int(s.scheduled[slot]), int(s.max_total_tokens[slot]))
    lengths = OutputLengths()
    lengths._sum, lengths._count = float(mean), 1.0
    pages, left = [], []
    for sequence, ahead in [*((q, max(0, q.computed - 2)) for q in running), (new, 0)]:
        limit = sequence.prompt + sequence.max_tokens
        now = min(sequence.prompt + sequence.output + ahead, limit)
        decoded, room = now - sequence.prompt, limit - now
        pages.append(-(-now // page_size))
        left.append((min(max(mean - decoded, mean / 4), room) if sequence.stops else room) / page_size)
    own = -(-(new.prompt + new.output) // page_size)
    held = sum(pages) - own - shared  # fewer than they hold one by one: `shared` are counted twice; or more
    peak = max(sum(p + r for p, q in zip(pages, left, strict=True) if q >= r) for r in left)
    capacity = int(peak) - max(0, shared) + spare
    expected = not running or peak - max(0, shared) <= capacity
    got = fits(s, request_of(new, 9), lengths, page_size=page_size, held=held, new_pages=own, capacity=capacity)
    assert got == expected
