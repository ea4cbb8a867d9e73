"""Work lists of LoRA adapters, planned on the host: which rows of an iteration have which adapter. No Triton."""

from __future__ import annotations

import functools

import numpy as np
from numpy.typing import NDArray

I32 = NDArray[np.int32]

ADAPTER_FIELDS = 4
"""Fields of an item, int32: slot (-1: none), first sorted row, rows, rank."""
FEW_TOKENS = 256  # Largest token bucket with small tiles and more splits.


def slot_rank(rank: int) -> int:
    """Return the rank of slots for adapters up to this rank."""
    return 16 if rank <= 16 else -(-rank // 32) * 32


def tile_rows(tokens: int) -> int:
    """Return the rows of an item in iterations of a token bucket."""
    return 16 if tokens <= FEW_TOKENS else 64


def max_items(tokens: int, slots: int) -> int:
    """Return the most items of a token bucket. Each slot, and rows without an adapter, may end with a partial tile."""
    return min(tokens, -(-tokens // tile_rows(tokens)) + slots + 1)


STEP_COLUMNS = 64  # Columns of a step of `tile_steps`.
STRIPE = 64  # Rows of `used_slots`.


def column_blocks(slots: int, width: int) -> int:
    """Return the blocks of `STEP_COLUMNS` columns of this many slots with `width` columns each."""
    return -(-slots * width // STEP_COLUMNS)


@functools.cache
def _blocks_of(slots: int, width: int) -> NDArray[np.float32]:
    """Return `[slots, blocks]`: 1 where a slot has columns in a block."""
    blocks = np.zeros((slots, column_blocks(slots, width)), np.float32)
    for slot in range(slots):
        blocks[slot, slot * width // STEP_COLUMNS : ((slot + 1) * width - 1) // STEP_COLUMNS + 1] = 1
    return blocks


def used_slots(slot_of: I32, slots: int) -> NDArray[np.bool_]:
    """Return which slots each stripe of `STRIPE` rows has. slot_of `[n]`; -1: none."""
    used = np.zeros((-(-len(slot_of) // STRIPE), slots + 1), bool)
    used[np.arange(len(slot_of)) // STRIPE, slot_of] = True
    return used[:, :slots]


def tile_steps(used: NDArray[np.bool_], rows: int, width: int) -> tuple[I32, I32]:
    """Return which blocks of `STEP_COLUMNS` columns each tile of this many rows uses, and how many.

    used: of `used_slots`; slot s has columns `s * width ..`. Blocks of a tile come first in its row of `[tiles,
    blocks]`."""
    stripes, slots = used.shape
    each = rows // STRIPE
    tiles = -(-stripes // each)
    padded = np.zeros((tiles * each, slots), np.float32)
    padded[:stripes] = used
    blocks = padded.reshape(tiles, each, slots).max(1) @ _blocks_of(slots, width) > 0
    steps = np.argsort(~blocks, axis=1, kind="stable").astype(np.int32)
    return steps, blocks.sum(1).astype(np.int32)


def sort_rows(slot_of: I32, ranks: I32, tokens: int) -> tuple[I32, I32, tuple[int, int]]:
    """Return the `Work` of rows with these slots `[n]` (-1: none) as arrays: order `[n]`, items and counts.

    ranks `[S]`; tokens: of the bucket. Rows keep their order within a slot, and rows without one are last."""
    height, slots = tile_rows(tokens), len(ranks)
    key = np.where(slot_of < 0, slots, slot_of)
    order = np.argsort(key, kind="stable").astype(np.int32)
    rows = np.bincount(key, minlength=slots + 1)
    tiles = -(-rows // height)
    own = np.repeat(np.arange(slots + 1), tiles)
    within = (np.arange(len(own)) - np.repeat(np.cumsum(tiles) - tiles, tiles)) * height
    first = (np.cumsum(rows) - rows)[own] + within
    rank = np.append(ranks, 0)[own]
    items = np.stack((np.where(own < slots, own, -1), first, np.minimum(height, rows[own] - within), rank), 1)
    return order, items.astype(np.int32), (len(own) - int(tiles[slots]), len(own))
