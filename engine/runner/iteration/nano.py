"""Assigns an iteration's tokens and attention work to nano-batches (NanoFlow §4.1.2).

Nano-batches are token ranges, so an assignment is an order of the tokens: each range gets its share of decodes, then
prefill tokens. Decodes are dealt out by length, so that all nano-batches read about the same amount of KV.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.runner.iteration.batch import Batch

Rows = npt.NDArray[np.int64]


class NanoBatch(NamedTuple):
    """One token range of the iteration: D decodes, then the tokens of C chunks or pieces of chunks."""

    first_decode: int  # Place of the first decode among the iteration's tokens; the others follow.
    decodes: Rows  # `[D]` rows of the batch.
    chunk_start: Rows  # `[C]` place of the piece's first token.
    chunk_len: Rows
    chunk_context: Rows  # `[C]` tokens of the request before the piece.
    chunk_rows: Rows  # `[C]` rows of the batch.


class Assignment(NamedTuple):
    """An order of the iteration's tokens, and the attention work of each nano-batch."""

    order: Rows | None  # `[T]` token of the batch at each place; None: in the batch's order.
    places: Rows | None  # `[T]` place of each token of the batch.
    nano_batches: tuple[NanoBatch, ...]
    read: Rows | None = None
    """`[N]` tokens of the batch that are read after the last layer, in the order of its output rows; None: all, each at
    its place."""

    def output_rows(self, rows: npt.NDArray[np.integer]) -> npt.NDArray[np.integer]:
        """Return the rows of the last layer's output that hold tokens `[n]` of the batch."""
        if self.read is not None:
            order = np.argsort(self.read)
            return np.asarray(order[np.searchsorted(self.read, rows, sorter=order)])
        return rows if self.places is None else self.places[rows]


def decode_counts(num_decodes: int, capacity: Sequence[int]) -> list[int]:
    """Return the number of decodes per nano-batch: equal shares, and the surplus where `capacity` tokens allow it."""
    counts = [0] * len(capacity)
    remaining, not_full = num_decodes, [k for k, r in enumerate(capacity) if r]
    while remaining:
        share = max(1, -(-remaining // len(not_full)))
        for k in not_full:
            take = min(share, capacity[k] - counts[k], remaining)
            counts[k] += take
            remaining -= take
        not_full = [k for k in not_full if counts[k] < capacity[k]]
    return counts


def whole_counts(batch: Batch, ranges: Sequence[tuple[int, int]], tile: int) -> list[int] | None:
    """`decode_counts`, adjusted so that nano-batches cut prompts only at multiples of `tile` tokens: a few decodes more
    or less move the cut after them. Returns None if it finds no way; for two nano-batches none exists then."""
    capacity = _range_tokens(batch, ranges)
    counts = decode_counts(batch.num_decodes, capacity)
    length = batch.query_len[batch.num_decodes :].astype(np.int64)
    ends, context = np.cumsum(length), batch.kv_len[batch.num_decodes :].astype(np.int64) - length
    for k in range(len(ranges) - 1):
        cut = sum(capacity[: k + 1]) - sum(counts[: k + 1])
        chunk = int(np.searchsorted(ends, cut, side="right"))
        if chunk == len(ends):  # after all chunks
            break
        offset = cut - int(ends[chunk] - length[chunk])
        beyond = (int(context[chunk]) + offset) % tile
        if offset <= 0 or not beyond:
            continue
        back, on = min(beyond, offset), min(tile - beyond, int(ends[chunk]) - cut)
        later = sum(counts[k + 1 :])
        if back <= min(later, capacity[k] - counts[k]):
            moved = back
        elif on <= min(counts[k], sum(capacity[k + 1 :]) - later):
            moved = -on
        else:
            return None
        counts[k] += moved
        counts[k + 1 :] = decode_counts(later - moved, capacity[k + 1 :])
    return counts


def _range_tokens(batch: Batch, ranges: Sequence[tuple[int, int]]) -> list[int]:
    """Return the number of tokens per nano-batch."""
    return [max(0, min(end, batch.num_tokens) - begin) for begin, end in ranges]


def assign(batch: Batch, ranges: Sequence[tuple[int, int]], tile: int = 1) -> Assignment:
    """Assign the batch's T tokens to the token `ranges`, which cover at least `[0, T)` in order. tile: prompt tokens to
    keep together if `whole_counts` finds a way."""
    t, d = batch.num_tokens, batch.num_decodes
    starts = np.cumsum(batch.query_len, dtype=np.int64) - batch.query_len
    chunk_rows = np.arange(d, batch.num_requests)
    context = (batch.kv_len - batch.query_len).astype(np.int64)
    if len(ranges) == 1:
        whole = NanoBatch(0, np.arange(d), starts[d:], batch.query_len[d:].astype(np.int64), context[d:], chunk_rows)
        return Assignment(None, None, (whole,))
    capacity = _range_tokens(batch, ranges)
    counts = (whole_counts(batch, ranges, tile) if tile > 1 else None) or decode_counts(d, capacity)
    # The j-th of a nano-batch's n decodes belongs at (j + 1/2) / n of the sorted list.
    owner = np.repeat(np.arange(len(ranges)), counts)
    turn = np.concatenate([(np.arange(n) + 0.5) / n for n in counts if n] or [np.zeros(0)])
    owner = owner[np.argsort(turn, kind="stable")]
    by_length = np.argsort(-batch.kv_len[:d], kind="stable")
    order = np.empty(t, np.int64)
    nano_batches, at = [], d
    for k, (begin, _) in enumerate(ranges):
        # Keep the batch's order, so that neighbours stay neighbours.
        decodes = np.sort(by_length[owner == k])
        order[begin : begin + counts[k]] = decodes
        first, last = at, at + capacity[k] - counts[k]
        place = begin + counts[k]
        order[place : begin + capacity[k]] = np.arange(first, last)
        low, high = np.maximum(starts[d:], first), np.minimum(starts[d:] + batch.query_len[d:], last)
        own = low < high
        pieces = (low - first + place)[own], (high - low)[own], (context[d:] + low - starts[d:])[own]
        nano_batches.append(NanoBatch(begin, decodes, *pieces, chunk_rows[own]))
        at = last
    places = np.empty(t, np.int64)
    places[order] = np.arange(t)
    return Assignment(order, places, tuple(nano_batches))
