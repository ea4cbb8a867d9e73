"""Work lists of attention: every query attends to exactly its tokens, for any split."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from weft.kernels.attention import work_lists
from weft.kernels.attention.work_lists import (
    TILE_ROWS,
    decode_items,
    first_decoders,
    one_launch,
    prefill_items,
    prefill_splits,
    tokens_of_whole_tiles,
    with_decodes,
)

lengths = st.lists(st.integers(1, 5000), max_size=60)


@given(lengths, st.sampled_from([1, 8]), st.sampled_from([4, 528]), st.sampled_from([0, 512, 1024]))
def test_decode_items_cover_every_request_once_longest_first(
    requests: list[int], kv_heads: int, programs: int, split_tokens: int
) -> None:
    items = decode_items(
        np.array(requests), num_kv_heads=kv_heads, num_programs=programs, max_slots=512, split_tokens=split_tokens
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
def test_with_fixed_splits_a_requests_cut_does_not_depend_on_its_neighbours(others: list[int], own: int) -> None:
    def cut(requests: list[int]) -> set[tuple[int, int]]:
        items = decode_items(np.array(requests), num_kv_heads=8, num_programs=528, max_slots=4096, split_tokens=1024)
        return {(begin, end) for row, _, begin, end, *_ in items.tolist() if row == len(requests) - 1}

    assert cut([*others, own]) == cut([own])


chunks = st.lists(st.tuples(st.integers(1, 300), st.integers(0, 300)), max_size=6)


@given(chunks, st.sampled_from([1, 2, 4, 8]))
def test_prefill_tiles_cover_every_query_once_and_begin_at_absolute_positions(
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


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 40000)), max_size=6),
    st.sampled_from([1, 4, 8]),
    st.sampled_from([None, 0, 256, 1000]),
)
def test_splits_of_prefill_tiles_cover_every_key_once(
    chunks: list[tuple[int, int]], kv_heads: int, split_keys: int | None
) -> None:
    queries, context = (np.array([c[i] for c in chunks], int) for i in (0, 1))
    first = np.cumsum(queries) - queries
    tiles = prefill_items(first, queries, context, np.arange(len(chunks)), group=4)
    room = 64 if split_keys is None else 10**6
    cut = prefill_splits(tiles, num_kv_heads=kv_heads, num_programs=132, max_slots=room, split_keys=split_keys)
    keys: dict[tuple[int, ...], list[tuple[int, int]]] = {}
    slots: list[int] = []
    for *tile, begin, end, slot, word in cut.tolist():
        parts, part = word & 65535, word >> 16
        assert part < parts
        assert begin % 128 == 0
        if parts > 1:
            slots.append(slot + part)
        keys.setdefault(tuple(tile), []).append((begin, end))
    assert len(slots) == len(set(slots))
    if split_keys is None:
        assert max(slots, default=0) < 64
    if split_keys == 0:
        assert not slots
    assert set(keys) == set(map(tuple, tiles.tolist()))
    for (_, count, start, _), ranges in keys.items():
        at = 0
        for begin, end in sorted(ranges):
            assert begin == at
            assert end > begin
            at = end
        assert at == start + count
    assert (np.diff(cut[:, 5] - cut[:, 4]) <= 0).all()


def test_more_splits_than_fit_are_refused() -> None:
    tiles = prefill_items(np.array([0]), np.array([1]), np.array([40000]), np.array([0]), group=4)
    with pytest.raises(ValueError, match="157 splits of tiles do not fit 64 slots"):
        prefill_splits(tiles, num_kv_heads=8, num_programs=132, max_slots=64, split_keys=256)


def test_only_tiles_that_leave_sms_idle_are_cut() -> None:
    def parts(queries: int, context: int) -> int:
        tiles = prefill_items(np.array([0]), np.array([queries]), np.array([context]), np.array([0]), group=4)
        return int((prefill_splits(tiles, num_kv_heads=8, num_programs=132, max_slots=64)[:, 7] & 65535).max())

    assert parts(128, 16384) == 4
    assert parts(256, 8192) == 2
    assert parts(128, 200) == 1
    assert parts(2048, 16384) == 1


def test_programs_start_with_decodes_if_that_ends_sooner() -> None:
    def decoders(chunk: int, context: int, decodes: int) -> int:
        items = decode_items(np.full(decodes, context), num_kv_heads=8, num_programs=528, max_slots=1024)
        tiles = prefill_items(np.array([0]), np.array([chunk]), np.array([context]), np.array([0]), group=4)
        parts = prefill_splits(tiles, num_kv_heads=8, num_programs=132, max_slots=64)
        return first_decoders(items, parts if chunk else parts[:0], num_kv_heads=8, num_programs=132)

    assert decoders(1024, 16384, 32) == 40
    assert decoders(512, 16384, 8) == 132  # one wave of tiles on all SMs, two on fewer
    assert decoders(256, 4096, 8) == 132  # too little of both
    assert decoders(0, 16384, 8) == 132
    assert decoders(512, 16384, 0) == 0


def planned(
    chunk: int, context: int, decodes: int, *, kv_heads: int = 8, group: int = 4, length: int | None = None
) -> tuple[str, bool]:
    """The rule's choice on an H200 for decodes of `length` tokens (as many as the context), and whether it made both
    lists."""
    lengths = np.full(decodes, context if length is None else length)
    items = decode_items(lengths, num_kv_heads=kv_heads, num_programs=528, max_slots=1024)
    tiles = prefill_items(np.array([decodes]), np.array([chunk]), np.array([context]), np.array([decodes]), group=group)
    made = []

    def both() -> NDArray[np.int32]:
        made.append(True)
        return with_decodes(tiles, 0, lengths, np.arange(decodes), group=group)

    found = one_launch(items, tiles, both, num_kv_heads=kv_heads, num_programs=132, max_slots=512 // kv_heads)
    assert not found.together or (len(found.decodes) and found.programs == 132)
    return "together" if found.together else "two lists" if len(found.decodes) else "tiles", bool(made)


def test_the_rule_runs_both_in_one_launch_unless_one_half_is_small() -> None:
    """The quickest on an H200, with 8 heads and groups of 4."""
    assert planned(1024, 8192, 96)[0] == "together"
    assert planned(512, 16384, 32)[0] == "together"
    assert planned(256, 16384, 8)[0] == "together"
    assert planned(128, 4096, 12)[0] == "tiles"
    assert planned(1024, 12288, 8)[0] == "two lists"  # nothing to read next to that many tiles
    assert planned(512, 8192, 4)[0] == "two lists"
    assert planned(1024, 12288, 0)[0] == "tiles"  # none of either


def test_chunks_of_many_waves_use_two_lists_and_some_programs_start_with_decodes() -> None:
    """Table 1 of the paper on POD-Attention, its C1 and C2, as measured on an H200."""
    for chunk, decodes in ((12288, 220), (16384, 250)):
        for shape in ({"kv_heads": 8, "group": 4}, {"kv_heads": 4, "group": 8}):
            assert planned(chunk, 0, decodes, length=12288, **shape) == ("two lists", False)
    assert planned(2048, 12288, 80)[0] == "together"
    items = decode_items(np.full(220, 12288), num_kv_heads=8, num_programs=528, max_slots=1024)
    tiles = prefill_items(np.array([0]), np.array([12288]), np.array([0]), np.array([0]), group=4)
    parts = prefill_splits(tiles, num_kv_heads=8, num_programs=132, max_slots=64)
    assert first_decoders(items, parts, num_kv_heads=8, num_programs=132) == 40


def test_tiles_of_fewer_heads_leave_more_of_the_memory_bandwidth_to_decodes() -> None:
    """The quickest on an H200, with 4 heads and groups of 8: the chunk's own keys are half as many."""
    yi: dict[str, Any] = {"kv_heads": 4, "group": 8}
    assert planned(256, 7168, 4, **yi)[0] == "together"  # as each of the chunk's tiles would be in three parts
    assert planned(256, 4096, 4, **yi)[0] == "together"
    assert planned(512, 4096, 8, **yi)[0] == "together"
    assert planned(2048, 4096, 48, **yi)[0] == "together"
    assert planned(128, 7168, 8, **yi)[0] == "tiles"  # one wave, two parts
    assert planned(128, 5120, 16, **yi)[0] == "together"  # a wave of tiles would be three quarters full


@pytest.mark.parametrize(("kv_heads", "group"), [(32, 1), (8, 4), (8, 8), (4, 8), (1, 8), (2, 16)])
def test_twice_as_much_to_read_as_to_multiply_runs_in_one_launch(kv_heads: int, group: int) -> None:
    shape = {"kv_heads": kv_heads, "group": group}
    assert planned(2048, 8192, 32 * group, **shape) == ("together", False)
    assert planned(2048, 8192, 1, length=100, **shape)[0] != "together"


@given(
    st.lists(st.integers(1, 9000), min_size=1, max_size=40),
    st.lists(st.tuples(st.integers(1, 600), st.integers(0, 9000)), min_size=1, max_size=3),
    st.sampled_from([(32, 1), (8, 4), (4, 8), (1, 8)]),
)
def test_no_list_is_quicker_than_the_rule_expects_without_it(
    requests: list[int], chunks: list[tuple[int, int]], shape: tuple[int, int]
) -> None:
    kv_heads, group = shape
    options = {"num_kv_heads": kv_heads, "num_programs": 132}
    queries, context = (np.array([c[i] for c in chunks], int) for i in (0, 1))
    rows = len(requests) + np.arange(len(chunks))
    tiles = prefill_items(len(requests) + np.cumsum(queries) - queries, queries, context, rows, group=group)
    decodes = decode_items(np.array(requests), num_kv_heads=kv_heads, num_programs=528, max_slots=1024)
    both = with_decodes(tiles, 0, np.array(requests), np.arange(len(requests)), group=group)
    alike = prefill_splits(both, max_slots=512 // kv_heads, **options)
    least = work_lists._min_time_of_one_list(decodes, tiles, 0.0, **options)
    busiest, further = work_lists._busiest(alike, **options)
    waves = -(-len(alike) * kv_heads // 132)
    assert least <= work_lists._time_of_one_list(busiest, 0.0, further, waves) + 1e-6
