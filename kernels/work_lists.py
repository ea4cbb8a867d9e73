"""Work lists of paged attention, planned on the host: which program reads which tokens. Plain arrays, no Triton."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = 8
"""of a decode item, int32: q row, page-table row, first token, end token, first partial slot, parts, part, first token
that is seen"""
BLOCK_TOKENS = 64
"""that decode attention works on at once"""
TILE_ROWS = 128
"""(token, query head of the group) pairs in a tile"""
TILE_FIELDS = 4
"""of a prefill item, int32: q row of the first query, queries, tokens before the first query, page-table row"""


def decode_items(
    lengths: NDArray[np.integer],
    *,
    num_kv_heads: int,
    num_programs: int,
    max_slots: int,
    part_tokens: int = 0,
    min_part_tokens: int = 128,
    window: int | None = None,
    page_size: int = 64,
) -> NDArray[np.int32]:
    """Work items `[items, 8]` for requests whose context (own token included) is `lengths`, longest first.

    Request i uses q row i and page-table row i. A request is cut into parts only when there are too few of them to fill
    `num_programs`; `part_tokens` > 0 fixes the cut instead, so that it never depends on the neighbours. With a `window`
    a request sees its last tokens alone, and its items begin in the page of the first of them.
    """
    lengths = np.asarray(lengths, dtype=np.int64)
    seen = np.maximum(lengths - window, 0) if window is not None else np.zeros_like(lengths)
    step = min(page_size, BLOCK_TOKENS)
    base = seen // step * step  # what a kernel fetches at once lies in one page
    lengths = lengths - base
    count = len(lengths)
    if count == 0:
        return np.zeros((0, ITEM_FIELDS), np.int32)
    if part_tokens <= 0:
        total = int(lengths.sum()) * num_kv_heads
        part_tokens = max(min_part_tokens, -(-total // max(1, num_programs)))
        if count * num_kv_heads >= 2 * num_programs:  # enough requests: cut only what would outlast all others
            part_tokens = max(part_tokens, min(int(lengths.max()), 4 * part_tokens))
    part_tokens = -(-part_tokens // 128) * 128
    parts = np.maximum(1, -(-lengths // part_tokens))
    while int(parts[parts > 1].sum()) > max_slots:
        part_tokens *= 2
        parts = np.maximum(1, -(-lengths // part_tokens))
    row = np.repeat(np.arange(count), parts)
    first_item = np.cumsum(parts) - parts
    part = np.arange(len(row)) - first_item[row]
    split = np.where(parts > 1, parts, 0)
    slot = (np.cumsum(split) - split)[row]
    # equal parts, in whole blocks
    size = -(-lengths // (parts * 128)) * 128
    begin = base[row] + np.minimum(part * size[row], lengths[row])
    end = np.minimum(begin + size[row], base[row] + lengths[row])
    items = np.zeros((len(row), ITEM_FIELDS), np.int32)
    for column, value in enumerate((row, row, begin, end, slot, parts[row], part, seen[row])):
        items[:, column] = value
    return items[np.argsort(begin - end, kind="stable")]


def tokens_of_whole_tiles(group: int) -> int:
    """The most query tokens, `TILE_ROWS` or fewer, that fill whole tiles of prefill attention for groups of so many."""
    per_tile = TILE_ROWS // group
    return TILE_ROWS // per_tile * per_tile


def prefill_items(
    first_rows: NDArray[np.integer],
    queries: NDArray[np.integer],
    context: NDArray[np.integer],
    page_rows: NDArray[np.integer],
    *,
    group: int,
) -> NDArray[np.int32]:
    """Work items `[items, 4]` for chunks of `queries` tokens behind `context` tokens in pages, longest first.

    Tiles begin at multiples of their size in the request, wherever the chunk begins: so a token's tile, and with it the
    order of its sums, does not depend on how the prompt was cut (at such multiples).
    """
    per_tile = TILE_ROWS // group
    queries, context = np.asarray(queries, dtype=np.int64), np.asarray(context, dtype=np.int64)
    before = context % per_tile  # tokens of the first tile that an earlier chunk computed
    tiles = -(-(queries + before) // per_tile)
    chunk = np.repeat(np.arange(len(queries)), tiles)
    end = (np.arange(len(chunk)) - (np.cumsum(tiles) - tiles)[chunk] + 1) * per_tile - before[chunk]
    first = np.maximum(end - per_tile, 0)
    items = np.empty((len(chunk), TILE_FIELDS), np.int32)
    items[:, 0] = np.asarray(first_rows)[chunk] + first
    items[:, 1] = np.minimum(queries[chunk], end) - first
    items[:, 2] = context[chunk] + first
    items[:, 3] = np.asarray(page_rows)[chunk]
    return items[np.argsort(-(items[:, 1] + items[:, 2]), kind="stable")]
