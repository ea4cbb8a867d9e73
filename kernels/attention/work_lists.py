"""Work lists of paged attention, planned on the host: which program reads which tokens. Plain arrays, no Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

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

PART_FIELDS = 8
"""of a part of a prefill item, int32: those of the item, first key, behind the last key, first partial slot of the
item, parts + 65536 * part"""
PART_KEYS = 128
"""parts of prefill items are cut at multiples of this"""
FIRST_DECODERS = 40
"""programs that keep the memory busy with decodes"""
MANY_WAVES = 16
"""of tiles, behind which both lists in turn, `FIRST_DECODERS` beginning with decodes, are the quicker way whatever is
predicted: of chunks of 12K and 16K (23 and 31 waves) beside 220 and 250 decodes, by 1 to 14 % of the time of both at
once. Between 4 waves (chunks of 2,048) and these nothing was measured."""
DECODE_KEYS = 110
"""keys of one KV head that decodes read while a program attends to one key for all 128 rows of a tile, whatever the
head's size: 4.25 TB/s beside 4.9 TFLOP/s, on an H200"""
LEAST_KEYS = 17500
"""below this (230 microseconds, heads of 128 numbers) one list behind the other was as quick as any mixture"""
TWO_LISTS_US = (0.0117, 0.0152, 3.7, 20.9)
ONE_LIST_US = (0.0112, 0.00304, 9.6, 6.1)
TOGETHER_US = (0.00436, 0.00766, 0.00816, 0.00653, 0.0247, 1.9, 17.9)
"""microseconds of three ways of one launch, fitted to 1,393 batches of the paper's sweep on an H200, 2026-11-26. All: a
key of tiles, of the program that has most; a key that decodes read, of one head and a program's even share; a part of a
tile more than one. Decodes and tiles as two lists (timed for 142 of the batches; 1 % off on the mean, 7 % at worst):
last a batch. Decodes as tiles of a query in one list (139; 1.6 %, 10 %): last a wave of tasks. Both lists on every SM
at the same time (all; 1.8 %, one in twenty by more than 5 %): behind a key read both once more, for the half that takes
longer; then a key of the chunks' own, which each wave of tiles fetches anew; last a batch"""
_TASK_KEYS = 160
"""what a prefill task costs beside its keys, and as a part once more, in keys"""


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


def prefill_parts(
    items: NDArray[np.int32], *, num_kv_heads: int, num_programs: int, max_slots: int, part_keys: int | None = None
) -> NDArray[np.int32]:
    """Prefill items `[items, 4]` cut along their keys -> `[parts, 8]`, longest first, at most `max_slots` more.

    A short chunk over a long context has fewer tiles than the GPU has SMs. They are cut into as many parts as give the
    shortest run of one or two waves (POD-Attention, 4.2.4: no more than two); where that gains little, they stay whole.
    part_keys: cut there, whatever it gains; 0: not at all. Raises `ValueError` if that makes more than `max_slots`.
    """
    count = len(items)
    keys = (items[:, 1] + items[:, 2]).astype(np.int64)
    parts = np.ones(count, np.int64)
    if part_keys is None and count:
        part_keys = _best_part(keys, num_kv_heads, num_programs, max_slots)
    if part_keys:
        parts = np.maximum(1, -(-keys // (-(-part_keys // PART_KEYS) * PART_KEYS)))  # so that no part is empty
    row = np.repeat(np.arange(count), parts)
    part = np.arange(len(row)) - (np.cumsum(parts) - parts)[row]
    split = np.where(parts > 1, parts, 0)
    if (slots := int(split.sum())) > max_slots:
        raise ValueError(f"{slots} parts of tiles, and room for {max_slots}")
    size = -(-keys // (parts * PART_KEYS)) * PART_KEYS
    out = np.empty((len(row), PART_FIELDS), np.int32)
    out[:, :TILE_FIELDS] = items[row]
    out[:, 4] = np.minimum(part * size[row], keys[row])
    out[:, 5] = np.minimum(out[:, 4] + size[row], keys[row])
    out[:, 6] = (np.cumsum(split) - split)[row]
    out[:, 7] = parts[row] + (part << 16)
    return out[np.argsort(out[:, 4] - out[:, 5], kind="stable")]


def first_decoders(
    decodes: NDArray[np.int32], parts: NDArray[np.int32], *, num_kv_heads: int, num_programs: int
) -> int:
    """Programs of a hybrid batch that begin with decode items `[items, 8]`, the others with parts `[parts, 8]`.

    All of them, which is one list behind the other without a pause, unless some `FIRST_DECODERS` promise to end a tenth
    sooner and there is enough work for that to be seen, or tiles are as many as `MANY_WAVES`. What was measured on an
    H200: `DECODE_KEYS`, and that decodes beside tiles are as quick as alone.
    """
    if not len(parts) or not len(decodes):
        return num_programs if len(decodes) else 0
    keys = (parts[:, 5] - parts[:, 4]).astype(np.int64)
    tasks, tile = len(parts) * num_kv_heads, float(keys.mean())
    reading = float((decodes[:, 3] - decodes[:, 2]).sum(dtype=np.int64)) * num_kv_heads / DECODE_KEYS
    in_turn = reading + -(-tasks // num_programs) * tile
    if num_programs <= 2 * FIRST_DECODERS or in_turn < LEAST_KEYS:
        return num_programs
    if tasks >= MANY_WAVES * num_programs:
        return FIRST_DECODERS
    others = num_programs - FIRST_DECODERS
    done, at, wave, late = 0, 0.0, 0, 0
    while done < tasks:  # whole waves of the others, and behind the decodes of all
        behind = reading + (late + 1) * tile
        if (wave + 1) * tile <= behind:
            wave, at, done = wave + 1, (wave + 1) * tile, done + others
        else:
            late, at, done = late + 1, behind, done + FIRST_DECODERS
    return FIRST_DECODERS if 1.1 * max(at, reading) < in_turn else num_programs


class OneLaunch(NamedTuple):
    """Both lists of a hybrid batch's one launch."""

    decodes: NDArray[np.int32]
    parts: NDArray[np.int32]
    programs: int
    """that begin with decodes"""
    together: bool = False
    """every program does both lists at the same time"""


def with_decodes(
    tiles: NDArray[np.int32], first_row: int, lengths: NDArray[np.integer], page_rows: NDArray[np.integer], *,
    group: int,
) -> NDArray[np.int32]:  # fmt: skip
    """Prefill items `[items, 4]` and decodes of requests of `lengths` tokens, from q row `first_row` on, as tiles of
    one query each; longest first. Such a tile has `TILE_ROWS` rows to multiply all the same, which costs time where
    compute is what lacks, and none where memory is."""
    ones = np.ones(len(lengths), np.int64)
    rows = first_row + np.arange(len(lengths))
    both = np.concatenate((tiles, prefill_items(rows, ones, np.asarray(lengths) - 1, page_rows, group=group)))
    return both[np.argsort(-(both[:, 1] + both[:, 2]), kind="stable")]


def one_launch(
    decodes: NDArray[np.int32], tiles: NDArray[np.int32], both: Callable[[], NDArray[np.int32]], *, num_kv_heads: int,
    num_programs: int, max_slots: int, way: str | None = None,
) -> OneLaunch:  # fmt: skip
    """How one launch does decode items `[items, 8]` and prefill items `[items, 4]`; both: makes `with_decodes`.

    way: "together": both lists at the same time on every SM. "tiles": decodes are tiles, in one list with the chunks',
    which is cut evenly: everybody reads and multiplies at once. "whole": two lists, tiles whole; others: tiles cut. By
    rule (None) what promises to end soonest: two lists where there is little to read beside many tiles or tiles are
    very many, decodes as tiles where those fill whole waves of programs, else together.
    """
    options = {"num_kv_heads": num_kv_heads, "num_programs": num_programs}
    parts = prefill_parts(tiles, max_slots=max_slots, part_keys=0 if way == "whole" else None, **options)
    in_turn = OneLaunch(decodes, parts, first_decoders(decodes, parts, **options))
    if way not in (None, "tiles", "together") or not len(decodes) or not len(tiles):
        return in_turn
    if way is None and len(parts) * num_kv_heads >= MANY_WAVES * num_programs:
        return in_turn
    both_at_once = OneLaunch(decodes, parts, num_programs, together=True)
    if way == "together":
        return both_at_once
    if way == "tiles":
        return OneLaunch(decodes[:0], prefill_parts(both(), max_slots=max_slots, **options), 0)
    read = int((decodes[:, 3] - decodes[:, 2]).sum(dtype=np.int64)) * num_kv_heads / num_programs
    busiest, further = _busiest(parts, **options)
    best, limit = in_turn, _time_in_turn(busiest, read, further)
    time = _time_together(busiest, read, _own_keys(tiles, **options), further)
    if time < limit:
        best, limit = both_at_once, time
    if len(parts) * num_kv_heads > 4 * num_programs or _least_of_one_list(decodes, tiles, read, **options) >= limit:
        return best  # most batches are told apart without making the list
    alike = prefill_parts(both(), max_slots=max_slots, **options)
    waves = -(-len(alike) * num_kv_heads // num_programs)
    busiest, further = _busiest(alike, **options)
    return OneLaunch(decodes[:0], alike, 0) if _time_of_one_list(busiest, read, further, waves) < limit else best


def _time_in_turn(busiest: float, read: float, further: int) -> float:
    """Microseconds of two lists: `TWO_LISTS_US`."""
    key, key_read, part, batch = TWO_LISTS_US
    return key * busiest + key_read * read + part * further + batch


def _time_of_one_list(busiest: float, read: float, further: int, waves: int) -> float:
    """The same of decodes as tiles: `ONE_LIST_US`."""
    key, key_read, part, wave = ONE_LIST_US
    return key * busiest + key_read * read + part * further + wave * waves


def _least_of_one_list(
    decodes: NDArray[np.int32], tiles: NDArray[np.int32], read: float, num_kv_heads: int, num_programs: int
) -> float:
    """No more than the same, without the list: either nothing in it is cut, or all programs have as many keys."""
    lengths = np.bincount(decodes[:, 0], weights=decodes[:, 3] - decodes[:, 2])
    keys = np.concatenate((tiles[:, 1] + tiles[:, 2], lengths[lengths > 0]))
    waves = -(-len(keys) * num_kv_heads // num_programs)
    even = float(keys.sum()) * num_kv_heads / num_programs + waves * _TASK_KEYS
    whole = _time(keys, num_kv_heads, num_programs, 0)
    return min(_time_of_one_list(whole, read, 0, waves), _time_of_one_list(even, read, 1, waves))


def _time_together(busiest: float, read: float, own: float, further: int) -> float:
    """The same of both lists at the same time: `TOGETHER_US`."""
    key, key_read, more_key, more_read, key_own, part, batch = TOGETHER_US
    longer = max(more_key * busiest, more_read * read)
    return key * busiest + key_read * read + longer + key_own * own + part * further + batch


def _busiest(parts: NDArray[np.int32], num_kv_heads: int, num_programs: int) -> tuple[float, int]:
    """Keys of the program that has most of parts `[parts, 8]`, and parts more than one of the tile that has most."""
    keys = _time(parts[:, 5] - parts[:, 4], num_kv_heads, num_programs, 0)
    return keys, int((parts[:, 7] & 65535).max()) - 1


def _own_keys(tiles: NDArray[np.int32], num_kv_heads: int, num_programs: int) -> float:
    """Keys of all heads that tiles `[tiles, 4]`, longest first, fetch from memory, a program's share: a request's once
    for each wave that its tiles fill. A quarter of what they read at most, for more was not measured."""
    rows, ends = tiles[:, 3], tiles[:, 1] + tiles[:, 2]
    count = np.bincount(rows)
    longest = np.zeros(len(count), np.int64)
    longest[rows[::-1]] = ends[::-1]  # of the same place the last value stays
    fetched = float((longest * -(-count * num_kv_heads // num_programs)).sum())
    return min(fetched, 0.25 * float(ends.sum(dtype=np.int64))) * num_kv_heads / num_programs


def _best_part(keys: NDArray[np.int64], heads: int, programs: int, max_slots: int) -> int:
    """Keys of a part that end soonest, where task t is program t % programs'; 0: whole items do."""
    longest, total = int(keys.max()), int(keys.sum()) * heads
    if longest < 4 * PART_KEYS or len(keys) * heads >= 4 * programs:
        return 0
    best, best_time = 0, 0.95 * _time(keys, heads, programs, 0)
    tried = set()
    for waves in (1, 2):
        for slack in (1.0, 1.1, 1.25, 1.5):
            part = -(-int(slack * total) // (waves * programs * PART_KEYS)) * PART_KEYS
            part = max(part, 2 * PART_KEYS)
            parts = -(-keys // part)
            if part in tried or part >= longest or int(parts[parts > 1].sum()) > max_slots or parts.max() > 256:
                continue
            tried.add(part)
            time = _time(np.repeat(-(-keys // parts), parts), heads, programs, _TASK_KEYS)
            if time < best_time:
                best, best_time = part, time
    return best


def _time(keys: NDArray[np.int64], heads: int, programs: int, part: int) -> float:
    """Of the busiest program, in keys."""
    first = np.sort(keys)[::-1][np.arange(0, len(keys) * heads, programs) // heads]
    return float(first.sum() + len(first) * (_TASK_KEYS + part))
