"""Work lists of chunks with recurrent states, and the places of their units in pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.engine.memory.state_layout import StateLayout
from weft.engine.model.parts import StateSpec, StateTensor
from weft.tools.kernels.states.state_pages import BLOCK, chunk_lists, unit_places

CHUNK = st.tuples(st.integers(1, 300), st.integers(0, 200), st.lists(st.integers(1, 300), max_size=3, unique=True))


@settings(max_examples=60, deadline=None)
@given(chunks=st.lists(CHUNK, max_size=5), decodes=st.integers(0, 3))
def test_blocks_cover_every_token_once_and_begin_at_multiples(
    chunks: list[tuple[int, int, list[int]]], decodes: int
) -> None:
    queries, context = (np.array([c[i] for c in chunks], np.int64) for i in range(2))
    first = decodes + np.cumsum(queries) - queries
    rows = decodes + np.arange(len(chunks))
    ends = [(int(row), end) for row, c in zip(rows, chunks, strict=True) for end in c[2] if end <= c[0]]
    end_rows, end_tokens = np.array(ends, np.int64).reshape(-1, 2).T
    listed, blocks, checkpoints = chunk_lists(first, queries, context, rows, end_rows, end_tokens)
    assert (np.diff(listed[:, 1]) <= 0).all(), "longest first"
    covered = np.concatenate([np.arange(b[0], b[0] + b[1]) for b in blocks] or [np.zeros(0, np.int64)])
    assert sorted(covered) == list(range(decodes, decodes + int(queries.sum())))
    for index, (begin, count, chunk, offset) in enumerate(blocks):
        _, tokens, before, _, first_block, of, *_ = listed[chunk]
        assert first_block <= index < first_block + of
        assert begin == listed[chunk, 0] + offset
        assert (before + offset) % BLOCK == 0 or offset == 0
        assert (before + offset + count) % BLOCK == 0 or offset + count == tokens
        assert (before + offset) // BLOCK == (before + offset + count - 1) // BLOCK
    seen = []
    for i, (_, _, _, row, *_, begin, end) in enumerate(listed):
        for tokens, inside, index, block in checkpoints[begin:end]:
            assert (row, tokens) == (end_rows[index], end_tokens[index])
            assert blocks[block, 2] == i
            assert blocks[block, 3] + inside == tokens
            assert 1 <= inside <= blocks[block, 1]
            seen.append(index)
        assert list(checkpoints[begin:end, 0]) == sorted(checkpoints[begin:end, 0])
    assert sorted(seen) == list(range(len(ends)))


def test_a_checkpoint_of_a_decode_is_refused() -> None:
    one = np.array([1])
    with pytest.raises(ValueError, match=r"rows \[0\] have checkpoints but no chunk"):
        chunk_lists(one, one, one, one, np.array([0]), one)


@pytest.mark.parametrize("page_bytes", [64, 96, 400, 1000, 1 << 16])
def test_units_have_the_places_that_the_layout_gives_them(page_bytes: int) -> None:
    spec = StateSpec((StateTensor("conv", (5, 3), "bfloat16"), StateTensor("recurrent", (3, 4, 4), "float32")))
    layout = StateLayout.of([spec] * 3, page_bytes)
    taken = set()
    for runs in layout.runs:
        for of, units, size, item in ((runs[0], 1, 30, 2), (runs[1], 3, 64, 4)):
            for page, element in unit_places(of, units, size, item):
                span = {(page, element * item + i) for i in range(size)}
                assert not span & taken
                assert element * item + size <= page_bytes
                taken |= span


def test_pages_smaller_than_a_unit_are_refused() -> None:
    layout = StateLayout.of([StateSpec((StateTensor("recurrent", (3, 4, 4), "float32"),))], 48)
    with pytest.raises(ValueError, match="does not fit a page; use a larger --block-size"):
        unit_places(layout.runs[0][0], 3, 64, 4)
