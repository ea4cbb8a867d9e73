"""Assigning an iteration to nano-batches: nothing lost, nothing twice, attention balanced."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.runner.iteration.batch import Batch, SamplingInputs
from weft.engine.runner.iteration.nano import assign, whole_counts


def _batch(kv: list[int], chunks: list[tuple[int, int]]) -> Batch:
    """Decodes that see `kv` tokens, and (context, length) chunks."""
    query_len = np.array([1] * len(kv) + [n for _, n in chunks], np.int32)
    kv_len = np.array(kv + [c + n for c, n in chunks], np.int32)
    rows, tokens = len(query_len), int(query_len.sum())
    none = np.zeros(0, np.int32)
    sampling = SamplingInputs.none()
    ids = np.arange(tokens, dtype=np.int32)
    slots = np.arange(rows, dtype=np.int32)
    return Batch(
        1, len(kv), slots, slots, query_len, kv_len, ids, ids, ids.astype(np.int64), slots[:, None], none, sampling,
        (), (),
    )  # fmt: skip


batches = st.builds(
    _batch,
    st.lists(st.integers(1, 5000), max_size=40),
    st.lists(st.tuples(st.integers(0, 300), st.integers(1, 60)), max_size=5),
).filter(lambda b: b.num_tokens > 0)


@given(batches, st.lists(st.integers(1, 80), min_size=1, max_size=4))
def test_every_token_has_one_place_and_every_query_is_attended_once(batch: Batch, cuts: list[int]) -> None:
    edges = [0, *np.cumsum(cuts).tolist()]
    edges[-1] = max(edges[-1], batch.num_tokens)
    ranges = list(itertools.pairwise(edges))
    if any(a >= b for a, b in ranges):
        return
    order, places, nano_batches, _ = assign(batch, ranges)
    t = batch.num_tokens
    order = np.arange(t) if order is None else order
    places = np.arange(t) if places is None else places
    assert sorted(order) == list(range(t))
    assert (order[places] == np.arange(t)).all()
    attended: dict[int, tuple[int, int]] = {}  # token of the batch -> (row, tokens it sees)
    for (begin, end), nano in zip(ranges, nano_batches, strict=True):
        for j, row in enumerate(nano.decodes):
            place = nano.first_decode + j
            assert begin <= place < end
            attended[int(order[place])] = (int(row), int(batch.kv_len[row]))
        pieces = zip(nano.chunk_start, nano.chunk_len, nano.chunk_context, nano.chunk_rows, strict=True)
        for start, length, context, row in pieces:
            for j in range(length):
                assert begin <= start + j < end
                token = int(order[start + j])
                assert token not in attended
                attended[token] = (int(row), int(context) + j + 1)
    starts = np.cumsum(batch.query_len) - batch.query_len
    expected = {
        int(starts[r]) + j: (r, int(batch.kv_len[r] - batch.query_len[r]) + j + 1)
        for r in range(batch.num_requests)
        for j in range(int(batch.query_len[r]))
    }
    assert attended == expected


def test_nano_batches_read_about_as_much_kv() -> None:
    rng = np.random.default_rng(0)
    kv = rng.lognormal(6, 1, 600).astype(int) + 1
    _, _, nano_batches, _ = assign(_batch(kv.tolist(), [(0, 1400)]), [(0, 1024), (1024, 2048)])
    work = [int(kv[n.decodes].sum()) for n in nano_batches]
    assert abs(work[0] - work[1]) < 0.03 * sum(work)


def test_decodes_that_do_not_fit_a_short_last_range_go_to_the_others() -> None:
    _, _, nano_batches, _ = assign(_batch([10] * 1030, []), [(0, 640), (640, 1280)])
    assert [len(n.decodes) for n in nano_batches] == [640, 390]


@given(batches, st.lists(st.integers(1, 80), min_size=2, max_size=4), st.sampled_from([4, 16, 64]))
def test_no_tile_of_a_prompt_is_divided_if_decodes_suffice(batch: Batch, cuts: list[int], tile: int) -> None:
    edges = [0, *np.cumsum(cuts).tolist()]
    edges[-1] = max(edges[-1], batch.num_tokens)
    ranges = list(itertools.pairwise(edges))
    counts = whole_counts(batch, ranges, tile)
    if any(a >= b for a, b in ranges) or counts is None:
        return
    assert sum(counts) == batch.num_decodes
    _, _, nano_batches, _ = assign(batch, ranges, tile)
    assert [len(nano.decodes) for nano in nano_batches] == counts
    begun: set[int] = set()
    for nano in nano_batches:
        for row, context in zip(nano.chunk_rows, nano.chunk_context, strict=True):
            assert row not in begun or context % tile == 0
            begun.add(int(row))


def test_a_cut_moves_back_by_decodes_of_the_next_nano_batch_or_on_by_its_own() -> None:
    ranges = [(0, 64), (64, 128)]
    many, few = [50] * 20, [50] * 2
    assert whole_counts(_batch(many, [(0, 100)]), ranges, 16) == [16, 4]  # 54 tokens before the cut, 48 with 6 more
    assert whole_counts(_batch(few, [(0, 126)]), ranges, 16) == [0, 2]  # 63, 64 with one fewer
    assert whole_counts(_batch([], [(0, 120)]), ranges, 64) == [0, 0]
    assert whole_counts(_batch(few, [(0, 100)]), ranges, 32) == [0, 2]


def test_too_few_decodes_cannot_move_a_cut() -> None:
    assert whole_counts(_batch([50] * 2, [(0, 20), (0, 100)]), [(0, 64), (64, 128)], 32) is None
    assert whole_counts(_batch([50] * 2, [(0, 63), (0, 63)]), [(0, 64), (64, 128)], 32) == [1, 1]
