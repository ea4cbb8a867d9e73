"""Work lists of attention: every query attends to exactly its tokens, whatever the cut."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from weft.kernels.work_lists import TILE_ROWS, decode_items, prefill_items, tokens_of_whole_tiles

lengths = st.lists(st.integers(1, 5000), max_size=60)


@given(lengths, st.sampled_from([1, 8]), st.sampled_from([4, 528]), st.sampled_from([0, 512, 1024]))
def test_decode_items_cover_every_request_once_longest_first(
    requests: list[int], kv_heads: int, programs: int, part_tokens: int
) -> None:
    items = decode_items(
        np.array(requests), num_kv_heads=kv_heads, num_programs=programs, max_slots=512, part_tokens=part_tokens
    )
    covered: dict[int, list[tuple[int, int]]] = {}
    slots: set[int] = set()
    for row, page_row, begin, end, slot, parts, part, _ in items.tolist():
        assert row == page_row
        covered.setdefault(row, []).append((begin, end))
        if parts > 1:
            assert slot + part not in slots
            assert slot + part < 512
            slots.add(slot + part)
    for row, length in enumerate(requests):
        at = 0
        for begin, end in sorted(covered[row]):
            assert begin == at
            at = end
        assert at == length
    sizes = items[:, 3] - items[:, 2]
    assert (np.diff(sizes) <= 0).all()


@given(lengths.filter(len), st.integers(1, 4000))
def test_with_fixed_parts_a_requests_cut_does_not_depend_on_its_neighbours(others: list[int], own: int) -> None:
    def cut(requests: list[int]) -> set[tuple[int, int]]:
        items = decode_items(np.array(requests), num_kv_heads=8, num_programs=528, max_slots=4096, part_tokens=1024)
        return {(begin, end) for row, _, begin, end, *_ in items.tolist() if row == len(requests) - 1}

    assert cut([*others, own]) == cut([own])


chunks = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=6)


@given(chunks, st.sampled_from([1, 2, 4, 8]))
def test_prefill_tiles_cover_every_query_once_and_begin_at_absolute_places(
    parts: list[tuple[int, int]], group: int
) -> None:
    queries, context = (np.array([p[i] for p in parts], int) for i in (0, 1))
    first = np.cumsum(queries) - queries
    per_tile = TILE_ROWS // group
    seen: dict[tuple[int, int], int] = {}
    for row, count, start, page_row in prefill_items(
        first, queries, context, np.arange(len(parts)), group=group
    ).tolist():
        assert count >= 1
        assert start // per_tile == (start + count - 1) // per_tile
        for j in range(count):
            assert (page_row, start + j) not in seen
            seen[page_row, start + j] = row + j
    assert seen == {(i, context[i] + j): first[i] + j for i in range(len(parts)) for j in range(queries[i])}


@given(st.integers(1, 16), st.integers(1, 900), st.integers(0, 6))
def test_prompts_cut_at_whole_tiles_have_the_tiles_of_uncut_ones(group: int, length: int, cuts: int) -> None:
    def tiles(begin: int, end: int) -> set[tuple[int, ...]]:
        items = prefill_items(np.array([begin]), np.array([end - begin]), np.array([begin]), np.array([0]), group=group)
        return set(map(tuple, items.tolist()))

    step = tokens_of_whole_tiles(group)
    assert 64 < step <= TILE_ROWS
    cut = min(cuts * step, length)
    parts = tiles(cut, length) | (tiles(0, cut) if cut else set()) if cut < length else tiles(0, cut)
    assert parts == tiles(0, length)
