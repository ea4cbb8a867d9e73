"""Work lists of paged attention, planned on the host: which program reads which tokens. Plain arrays, no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ITEM_FIELDS = 8
"""Fields of a decode item, int32: q row, table row, first, end, first partial slot, splits, split, first visible."""
BLOCK_TOKENS = 64  # Tokens that decode attention processes at once.
TILE_ROWS = 128  # (token, query head of the group) pairs in a tile.
TILE_FIELDS = 4
"""Fields of a prefill item, int32: q row of the first query, queries, tokens before the first query, page-table row."""

SPLIT_FIELDS = 8
"""Fields of a split, int32: those of the item, first key, end key, first partial slot, splits + 65536 * split."""
SPLIT_KEYS = 128  # Prefill items are split at multiples of this.
FIRST_DECODERS = 40  # Programs that keep the memory busy with decodes.
MANY_WAVES = 16
"""From this many waves of tiles on, both lists run in sequence, with `FIRST_DECODERS` programs beginning with decodes.

This was faster than both at once by 1 to 14 % for chunks of 12K and 16K (23 and 31 waves) with 220 and 250 decodes,
regardless of the prediction. Nothing was measured between 4 waves (chunks of 2,048) and these."""
DECODE_KEYS = 110
"""Keys of a KV head that decodes read while a program processes one key for all 128 rows of a tile, for any head size.

Measured on an H200: 4.25 TB/s at the same time as 4.9 TFLOP/s."""
MIN_KEYS = 17500
"""With fewer keys (230 microseconds, heads of 128), one list after the other was as fast as any mixture."""
TWO_LISTS_US = (0.0117, 0.0152, 3.7, 20.9)
ONE_LIST_US = (0.0112, 0.00304, 9.6, 6.1)
TOGETHER_US = (0.00436, 0.00766, 0.00816, 0.00653, 0.0247, 1.9, 17.9)
"""Costs in microseconds of three variants, fitted to 1,393 batches of the paper's sweep on an H200, 2026-11-26.

Each begins with the cost per key of the busiest program's tiles, and per key that decodes read (one head, a program's
even share). Each has the cost of a further split of a tile as its last but one. TWO_LISTS_US ends with a constant (142
batches; mean error 1 %, maximum 7 %). ONE_LIST_US, decodes as one-query tiles, ends with the cost of a wave of tasks
(139; 1.6 %, 10 %). TOGETHER_US adds both costs per key again for the half that takes longer, then the cost per key
that chunks fetch again in each wave of tiles. It ends with a constant (all; 1.8 %, above 5 % for one in twenty)."""
_TASK_KEYS = 160  # Cost of a prefill task besides its keys, and again if it is a split, in keys.


def decode_items(
    lengths: NDArray[np.integer], *, num_kv_heads: int, num_programs: int, max_slots: int, split_tokens: int = 0,
    min_split_tokens: int = 128, window: int | None = None, page_size: int = 64,
) -> NDArray[np.int32]:  # fmt: skip
    """Return work items `[items, 8]` for requests whose context (own token included) is `lengths`, longest first.

    Request i uses q row i and page-table row i. Requests are split only if too few fill `num_programs`; a positive
    `split_tokens` fixes the split length instead, so that it never depends on the batch. With a `window` a request sees
    only its last tokens, and its items begin in the page of the first of them."""
    lengths = np.asarray(lengths, dtype=np.int64)
    seen = np.maximum(lengths - window, 0) if window is not None else np.zeros_like(lengths)
    step = min(page_size, BLOCK_TOKENS)
    base = seen // step * step  # a kernel's single fetch lies in one page
    lengths = lengths - base
    count = len(lengths)
    if count == 0:
        return np.zeros((0, ITEM_FIELDS), np.int32)
    if split_tokens <= 0:
        total = int(lengths.sum()) * num_kv_heads
        split_tokens = max(min_split_tokens, -(-total // max(1, num_programs)))
        if count * num_kv_heads >= 2 * num_programs:  # enough requests: split only those that would outlast all others
            split_tokens = max(split_tokens, min(int(lengths.max()), 4 * split_tokens))
    split_tokens = -(-split_tokens // 128) * 128
    parts = np.maximum(1, -(-lengths // split_tokens))
    while int(parts[parts > 1].sum()) > max_slots:
        split_tokens *= 2
        parts = np.maximum(1, -(-lengths // split_tokens))
    row = np.repeat(np.arange(count), parts)
    first_item = np.cumsum(parts) - parts
    part = np.arange(len(row)) - first_item[row]
    split = np.where(parts > 1, parts, 0)
    slot = (np.cumsum(split) - split)[row]
    # equal splits, in whole blocks
    size = -(-lengths // (parts * 128)) * 128
    begin = base[row] + np.minimum(part * size[row], lengths[row])
    end = np.minimum(begin + size[row], base[row] + lengths[row])
    items = np.zeros((len(row), ITEM_FIELDS), np.int32)
    for column, value in enumerate((row, row, begin, end, slot, parts[row], part, seen[row])):
        items[:, column] = value
    return items[np.argsort(begin - end, kind="stable")]


def tokens_of_whole_tiles(group: int) -> int:
    """Return the maximum query tokens, up to `TILE_ROWS`, that fill whole tiles of attention for this group size."""
    per_tile = TILE_ROWS // group
    return TILE_ROWS // per_tile * per_tile


def prefill_items(
    first_rows: NDArray[np.integer], queries: NDArray[np.integer], context: NDArray[np.integer],
    page_rows: NDArray[np.integer], *, group: int,
) -> NDArray[np.int32]:  # fmt: skip
    """Return work items `[items, 4]` for chunks of `queries` tokens after `context` tokens in pages, longest first.

    Tiles begin at multiples of their size in the request, regardless of where the chunk begins. So a token's tile, and
    the order of its sums, does not depend on how the prompt was cut (at such multiples)."""
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


def prefill_splits(
    items: NDArray[np.int32], *, num_kv_heads: int, num_programs: int, max_slots: int, split_keys: int | None = None
) -> NDArray[np.int32]:
    """Split prefill items `[items, 4]` along their keys into `[splits, 8]`, longest first, at most `max_slots` more.

    A short chunk over a long context has fewer tiles than the GPU has SMs. Tiles are split for the shortest run of one
    or two waves (POD-Attention, 4.2.4: no more than two); they stay whole if that gains little. split_keys: the fixed
    length of a split; 0: no splits. Raises `ValueError` if that needs more than `max_slots`."""
    count = len(items)
    keys = (items[:, 1] + items[:, 2]).astype(np.int64)
    parts = np.ones(count, np.int64)
    if split_keys is None and count:
        split_keys = _best_part(keys, num_kv_heads, num_programs, max_slots)
    if split_keys:
        parts = np.maximum(1, -(-keys // (-(-split_keys // SPLIT_KEYS) * SPLIT_KEYS)))  # no split is empty
    row = np.repeat(np.arange(count), parts)
    part = np.arange(len(row)) - (np.cumsum(parts) - parts)[row]
    split = np.where(parts > 1, parts, 0)
    if (slots := int(split.sum())) > max_slots:
        raise ValueError(f"{slots} splits of tiles do not fit {max_slots} slots")
    size = -(-keys // (parts * SPLIT_KEYS)) * SPLIT_KEYS
    out = np.empty((len(row), SPLIT_FIELDS), np.int32)
    out[:, :TILE_FIELDS] = items[row]
    out[:, 4] = np.minimum(part * size[row], keys[row])
    out[:, 5] = np.minimum(out[:, 4] + size[row], keys[row])
    out[:, 6] = (np.cumsum(split) - split)[row]
    out[:, 7] = parts[row] + (part << 16)
    return out[np.argsort(out[:, 4] - out[:, 5], kind="stable")]


def first_decoders(
    decodes: NDArray[np.int32], parts: NDArray[np.int32], *, num_kv_heads: int, num_programs: int
) -> int:
    """Return the programs of a hybrid batch that begin with decode items `[items, 8]`; others begin with `[splits, 8]`.

    Normally all of them, which runs the lists in sequence without a pause. If `FIRST_DECODERS` are predicted to end a
    tenth sooner and there is enough work, or tiles fill `MANY_WAVES`, that number instead. The prediction uses
    `DECODE_KEYS`, measured on an H200, where decodes next to tiles are as fast as decodes alone.
    """
    if not len(parts) or not len(decodes):
        return num_programs if len(decodes) else 0
    keys = (parts[:, 5] - parts[:, 4]).astype(np.int64)
    tasks, tile = len(parts) * num_kv_heads, float(keys.mean())
    reading = float((decodes[:, 3] - decodes[:, 2]).sum(dtype=np.int64)) * num_kv_heads / DECODE_KEYS
    in_turn = reading + -(-tasks // num_programs) * tile
    if num_programs <= 2 * FIRST_DECODERS or in_turn < MIN_KEYS:
        return num_programs
    if tasks >= MANY_WAVES * num_programs:
        return FIRST_DECODERS
    others = num_programs - FIRST_DECODERS
    done, at, wave, late = 0, 0.0, 0, 0
    while done < tasks:  # whole waves of the others; after the decodes, of all
        behind = reading + (late + 1) * tile
        if (wave + 1) * tile <= behind:
            wave, at, done = wave + 1, (wave + 1) * tile, done + others
        else:
            late, at, done = late + 1, behind, done + FIRST_DECODERS
    return FIRST_DECODERS if 1.1 * max(at, reading) < in_turn else num_programs


class OneLaunch(NamedTuple):
    """How one launch runs both lists of a hybrid batch."""

    decodes: NDArray[np.int32]
    parts: NDArray[np.int32]
    programs: int  # Programs that begin with decodes.
    together: bool = False  # Whether every program runs both lists at the same time.


def with_decodes(
    tiles: NDArray[np.int32], first_row: int, lengths: NDArray[np.integer], page_rows: NDArray[np.integer], *,
    group: int,
) -> NDArray[np.int32]:  # fmt: skip
    """Return prefill items `[items, 4]` and decodes of `lengths` tokens, from q row `first_row` on, as one-query tiles,
    longest first. Such a tile still multiplies `TILE_ROWS` rows, which costs time if compute is the bottleneck and none
    if memory is."""
    ones = np.ones(len(lengths), np.int64)
    rows = first_row + np.arange(len(lengths))
    both = np.concatenate((tiles, prefill_items(rows, ones, np.asarray(lengths) - 1, page_rows, group=group)))
    return both[np.argsort(-(both[:, 1] + both[:, 2]), kind="stable")]


def one_launch(
    decodes: NDArray[np.int32], tiles: NDArray[np.int32], both: Callable[[], NDArray[np.int32]], *, num_kv_heads: int,
    num_programs: int, max_slots: int, variant: str | None = None,
) -> OneLaunch:  # fmt: skip
    """Return how one launch runs decode items `[items, 8]` and prefill items `[items, 4]`; both: makes `with_decodes`.

    variant: see `break_evens.VARIANTS`. None selects the fastest prediction: two lists for very many tiles, or for many
    tiles with little to read; decodes as tiles if they fill full waves of programs; else both at the same time."""
    options = {"num_kv_heads": num_kv_heads, "num_programs": num_programs}
    parts = prefill_splits(tiles, max_slots=max_slots, split_keys=0 if variant == "whole" else None, **options)
    in_turn = OneLaunch(decodes, parts, first_decoders(decodes, parts, **options))
    if variant not in (None, "tiles", "together") or not len(decodes) or not len(tiles):
        return in_turn
    if variant is None and len(parts) * num_kv_heads >= MANY_WAVES * num_programs:
        return in_turn
    both_at_once = OneLaunch(decodes, parts, num_programs, together=True)
    if variant == "together":
        return both_at_once
    if variant == "tiles":
        return OneLaunch(decodes[:0], prefill_splits(both(), max_slots=max_slots, **options), 0)
    read = int((decodes[:, 3] - decodes[:, 2]).sum(dtype=np.int64)) * num_kv_heads / num_programs
    busiest, further = _busiest(parts, **options)
    best, limit = in_turn, _time_in_turn(busiest, read, further)
    time = _time_together(busiest, read, _own_keys(tiles, **options), further)
    if time < limit:
        best, limit = both_at_once, time
    if len(parts) * num_kv_heads > 4 * num_programs or _min_time_of_one_list(decodes, tiles, read, **options) >= limit:
        return best  # most batches are decided without making the list
    alike = prefill_splits(both(), max_slots=max_slots, **options)
    waves = -(-len(alike) * num_kv_heads // num_programs)
    busiest, further = _busiest(alike, **options)
    return OneLaunch(decodes[:0], alike, 0) if _time_of_one_list(busiest, read, further, waves) < limit else best


def _time_in_turn(busiest: float, read: float, further: int) -> float:
    """Microseconds of two lists: `TWO_LISTS_US`."""
    key, key_read, part, batch = TWO_LISTS_US
    return key * busiest + key_read * read + part * further + batch


def _time_of_one_list(busiest: float, read: float, further: int, waves: int) -> float:
    """Microseconds of decodes as tiles: `ONE_LIST_US`."""
    key, key_read, part, wave = ONE_LIST_US
    return key * busiest + key_read * read + part * further + wave * waves


def _min_time_of_one_list(
    decodes: NDArray[np.int32], tiles: NDArray[np.int32], read: float, num_kv_heads: int, num_programs: int
) -> float:
    """Lower bound of the time of one list, without making it: nothing in it is cut, or all programs have equal keys."""
    lengths = np.bincount(decodes[:, 0], weights=decodes[:, 3] - decodes[:, 2])
    keys = np.concatenate((tiles[:, 1] + tiles[:, 2], lengths[lengths > 0]))
    waves = -(-len(keys) * num_kv_heads // num_programs)
    even = float(keys.sum()) * num_kv_heads / num_programs + waves * _TASK_KEYS
    whole = _time(keys, num_kv_heads, num_programs, 0)
    return min(_time_of_one_list(whole, read, 0, waves), _time_of_one_list(even, read, 1, waves))


def _time_together(busiest: float, read: float, own: float, further: int) -> float:
    """Microseconds of both lists at the same time: `TOGETHER_US`."""
    key, key_read, more_key, more_read, key_own, part, batch = TOGETHER_US
    longer = max(more_key * busiest, more_read * read)
    return key * busiest + key_read * read + longer + key_own * own + part * further + batch


def _busiest(parts: NDArray[np.int32], num_kv_heads: int, num_programs: int) -> tuple[float, int]:
    """Return the keys of the busiest program of `[splits, 8]`, and the maximum splits of a tile beyond one."""
    keys = _time(parts[:, 5] - parts[:, 4], num_kv_heads, num_programs, 0)
    return keys, int((parts[:, 7] & 65535).max()) - 1


def _own_keys(tiles: NDArray[np.int32], num_kv_heads: int, num_programs: int) -> float:
    """Return a program's share of the keys of all heads that tiles `[tiles, 4]`, longest first, fetch from memory.

    A request's keys count once for each wave that its tiles fill, up to a quarter of the keys that they read. Nothing
    larger was measured."""
    rows, ends = tiles[:, 3], tiles[:, 1] + tiles[:, 2]
    count = np.bincount(rows)
    longest = np.zeros(len(count), np.int64)
    longest[rows[::-1]] = ends[::-1]  # with repeated indices the last value stays
    fetched = float((longest * -(-count * num_kv_heads // num_programs)).sum())
    return min(fetched, 0.25 * float(ends.sum(dtype=np.int64))) * num_kv_heads / num_programs


def _best_part(keys: NDArray[np.int64], heads: int, programs: int, max_slots: int) -> int:
    """Return the fastest split length in keys if task t belongs to program t % programs; 0: whole items."""
    longest, total = int(keys.max()), int(keys.sum()) * heads
    if longest < 4 * SPLIT_KEYS or len(keys) * heads >= 4 * programs:
        return 0
    best, best_time = 0, 0.95 * _time(keys, heads, programs, 0)
    tried = set()
    for waves in (1, 2):
        for slack in (1.0, 1.1, 1.25, 1.5):
            part = -(-int(slack * total) // (waves * programs * SPLIT_KEYS)) * SPLIT_KEYS
            part = max(part, 2 * SPLIT_KEYS)
            parts = -(-keys // part)
            if part in tried or part >= longest or int(parts[parts > 1].sum()) > max_slots or parts.max() > 256:
                continue
            tried.add(part)
            time = _time(np.repeat(-(-keys // parts), parts), heads, programs, _TASK_KEYS)
            if time < best_time:
                best, best_time = part, time
    return best


def _time(keys: NDArray[np.int64], heads: int, programs: int, part: int) -> float:
    """Return the keys of the busiest program."""
    first = np.sort(keys)[::-1][np.arange(0, len(keys) * heads, programs) // heads]
    return float(first.sum() + len(first) * (_TASK_KEYS + part))
