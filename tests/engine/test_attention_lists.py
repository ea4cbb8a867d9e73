"""Attention work lists made without a search for splits equal those of the search."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from weft.engine.runner.iteration.attention_lists import (
    AttentionGrid,
    _all_whole,
    _too_short,
    whole_decodes,
    whole_tiles,
)
from weft.kernels.attention.work_lists import decode_items, prefill_items, prefill_splits


@given(
    st.lists(st.integers(1, 3000), max_size=60) | st.lists(st.integers(900, 1100), min_size=40, max_size=80),
    st.sampled_from([1, 8]),
    st.sampled_from([4, 132, 528]),
    st.sampled_from([0, 1000, 1024]),
)
def test_requests_are_treated_as_whole_only_if_none_is_split(
    requests: list[int], kv_heads: int, programs: int, split_tokens: int
) -> None:
    lengths = np.array(requests, np.int32)
    if _all_whole(lengths, programs, AttentionGrid(kv_heads, 4, 4, split_tokens)):
        options = {"num_kv_heads": kv_heads, "num_programs": programs, "split_tokens": split_tokens}
        assert whole_decodes(lengths).tolist() == decode_items(lengths, max_slots=16, **options).tolist()


@pytest.mark.parametrize(("requests", "whole"), [([1000] * 256, True), ([1000] * 255 + [9000], False), ([], True)])
def test_many_requests_of_like_length_are_whole(requests: list[int], whole: bool) -> None:
    assert _all_whole(np.array(requests, np.int32), 528, AttentionGrid(8, 4, 4)) == whole


@given(
    st.lists(st.tuples(st.integers(1, 300), st.integers(0, 400)), min_size=1, max_size=12),
    st.sampled_from([1, 8]),
    st.sampled_from([4, 132]),
)
def test_tiles_of_few_keys_are_treated_as_whole_only_if_none_is_split(
    chunks: list[tuple[int, int]], kv_heads: int, programs: int
) -> None:
    queries, context = (np.array(column) for column in zip(*chunks, strict=True))
    first = np.cumsum(queries) - queries
    tiles = prefill_items(first, queries, context, np.arange(len(chunks)), group=4)
    if _too_short(tiles):
        parts = prefill_splits(tiles, num_kv_heads=kv_heads, num_programs=programs, max_slots=64)
        assert whole_tiles(tiles).tolist() == parts.tolist()
