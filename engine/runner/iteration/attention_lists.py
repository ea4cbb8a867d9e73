"""`AttentionLists`: the work lists of attention of one iteration, as they are written into its slab."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.input_layout import DECODE, LEFT, LEFT_PREFILL, PREFILL, Layout
from weft.engine.runner.iteration.nano import NanoBatch
from weft.kernels.attention.break_evens import BreakEvens, Even
from weft.kernels.attention.work_lists import (
    ITEM_FIELDS,
    PART_FIELDS,
    PART_KEYS,
    TILE_FIELDS,
    TILE_ROWS,
    decode_items,
    one_launch,
    prefill_items,
    prefill_parts,
    with_decodes,
)

NO_TILES = np.zeros((0, TILE_FIELDS), np.int32)
"""items of prefill attention of an iteration without chunks"""
NO_PARTS = np.zeros((0, PART_FIELDS), np.int32)
Items = npt.NDArray[np.int32]


class AttentionGrid(NamedTuple):
    """What the lists of a runner's iterations have in common."""

    num_kv_heads: int
    group: int
    """query heads of each"""
    per_sm: int
    """decode programs on each SM"""
    part_tokens: int = 0
    page_size: int = 64
    """see `decode_items`"""

    @property
    def undivided(self) -> int:
        """Tokens of a prompt that nano-batches must not divide, with a fixed cut of decodes (batch invariance): a tile
        of prefill attention, in which the order of sums follows its last token."""
        return TILE_ROWS // self.group if self.part_tokens else 1


class AttentionLists:
    """Of a batch. host: the slab's columns. fused: decodes and chunks are one launch. break_evens: what measured
    batches say of that, if anything."""

    def __init__(
        self, layout: Layout, grid: AttentionGrid, batch: Batch, host: dict[str, np.ndarray], *, fused: bool,
        break_evens: BreakEvens | None,
    ) -> None:  # fmt: skip
        self._layout, self._grid, self._batch, self._host = layout, grid, batch, host
        self._fused, self._break_evens = fused, break_evens
        self._left: npt.NDArray[np.int64] | None = None
        self.splits_decodes = self.cuts_chunks = self.as_tiles = self.together = False

    def leave(self, places: npt.NDArray[np.int64]) -> None:
        """Only rows at these places are read behind the last layer: lists of tiles with one of them are made, too."""
        self._host["left"][LEFT] = len(places)
        self._host["left_tokens"][: len(places)] = places
        self._left = np.sort(places)

    def add(self, k: int, nano: NanoBatch, sms: int) -> None:
        """The lists of the k-th nano-batch, whose attention has so many SMs."""
        decode, at = self._decodes(k, nano, sms)
        prefill, wide = self._prefill(k, nano)
        if self._layout.prefill_slots:
            decode, prefill = self._one_launch(k, nano, decode, prefill, sms)
            self._host["counts"][DECODE + at] = len(decode)
            self.cuts_chunks |= bool(((prefill[:, 7] & 65535) > 1).any())
        self._write("prefill_items", prefill, k)
        self._host["counts"][PREFILL + k] = len(prefill)
        if self._left is not None:
            kept = _tiles_of(prefill, self._left)
            self._write("left_items", kept, k)
            self._host["left"][LEFT_PREFILL + k] = len(kept)
        if self._left is not None and self._layout.unpacked[0]:
            kept = _tiles_of(wide, self._left)
            self._write("left_unpacked_items", kept, k)
            self._host["unpacked"][3 * k + 2] = len(kept)

    def _decodes(self, k: int, nano: NanoBatch, sms: int) -> tuple[Items, int]:
        """Items of the last window, and which of all lists of decodes theirs is; those of all windows are written."""
        batch, grid, windows = self._batch, self._grid, self._layout.windows
        for at, window in enumerate(windows, k * len(windows)):
            lengths, programs = batch.kv_len[nano.decodes], sms * grid.per_sm
            if window is None and _all_whole(lengths, programs, grid):
                decode = whole_decodes(lengths)
            else:
                decode = decode_items(
                    lengths, num_kv_heads=grid.num_kv_heads, num_programs=programs,
                    max_slots=self._layout.max_part_slots, part_tokens=grid.part_tokens, window=window,
                    page_size=grid.page_size,
                )  # fmt: skip
                self.splits_decodes |= len(decode) > len(lengths)
            decode[:, 1] = batch.slots[nano.decodes[decode[:, 1]]]  # page tables are kept by slot
            decode[:, 0] += nano.first_decode
            self._write("decode_items", decode, at, self._layout.decode_lists)
            self._host["counts"][DECODE + at] = len(decode)
        return decode, at

    def _one_launch(self, k: int, nano: NanoBatch, decode: Items, tiles: Items, sms: int) -> tuple[Items, Items]:
        """Items of both lists of the k-th nano-batch where tiles may be cut. Who begins with decodes, where both are
        one launch, is written, and whether decodes are tiles or both lists are done at the same time is kept."""
        batch, pod = self._batch, self._layout.pod if self._fused else "off"
        options = {
            "num_kv_heads": self._grid.num_kv_heads, "num_programs": sms, "max_slots": self._layout.prefill_slots
        }  # fmt: skip
        self._host["decoders"][k] = sms
        if not len(tiles):
            return decode, NO_PARTS
        if pod == "off":
            return decode, whole_tiles(tiles) if _too_short(tiles) else prefill_parts(tiles, **options)
        even = self._measured(nano)
        lengths, slots = batch.kv_len[nano.decodes], batch.slots[nano.decodes]
        both = partial(with_decodes, tiles, nano.first_decode, lengths, slots, group=self._grid.group)
        way = "together" if pod == "on" else None if even is None else even.way
        found = one_launch(decode, tiles, both, way=way, **options)
        self._host["decoders"][k] = found.programs if even is None else min(even.programs, sms)
        self.as_tiles, self.together = len(found.decodes) < len(decode), found.together
        return found.decodes, found.parts

    def _measured(self, nano: NanoBatch) -> Even | None:
        """What was measured to be the quickest way for decodes and chunks of this nano-batch, if anything was."""
        if self._break_evens is None or self._layout.pod != "auto":
            return None
        return self._break_evens.of_batch(nano.chunk_len, nano.chunk_context, self._batch.kv_len[nano.decodes])

    def _prefill(self, k: int, nano: NanoBatch) -> tuple[Items, Items]:
        """Items of prefill attention of the k-th nano-batch: of chunks whose pages are read as they are, and of those
        that are read in 16 bits. The latter, as far as there is room for their pages, are in the slab already."""
        host, batch, grid = self._host, self._batch, self._grid
        if not len(nano.chunk_rows):  # most iterations: making lists of nothing took 40 % of what `send` does
            if self._layout.unpacked[0]:
                host["unpacked"][3 * k : 3 * k + 2] = 0
            return NO_TILES, NO_TILES
        slots = batch.slots[nano.chunk_rows]

        def items(these: npt.NDArray[np.bool_], page_rows: npt.NDArray[np.integer]) -> Items:
            start, length, context = nano.chunk_start[these], nano.chunk_len[these], nano.chunk_context[these]
            return prefill_items(start, length, context, page_rows[these], group=grid.group)

        room = self._layout.unpacked[0]
        if not room:
            return items(np.ones(len(slots), np.bool_), slots), NO_TILES
        pages = -(-(nano.chunk_context + nano.chunk_len) // grid.page_size)
        ends = np.cumsum(pages)
        fits = ends <= room
        wide = items(fits, ends - pages)
        self._write("unpacked_items", wide, k)
        of = [batch.page_table[row, :count] for row, count in zip(nano.chunk_rows[fits], pages[fits], strict=True)]
        self._write("unpacked_pages", np.concatenate([slots[:0], *of]), k)
        host["unpacked"][3 * k : 3 * k + 2] = int(pages[fits].sum()), len(wide)
        return items(~fits, slots), wide

    def _write(self, column: str, items: np.ndarray, at: int, lists: int | None = None) -> None:
        """As the `at`-th of the equally long lists of a column: one a nano-batch, where it is not said."""
        values = self._host[column]
        first = at * (values.size // (self._layout.nano_batches if lists is None else lists))
        values[first : first + items.size] = items.reshape(-1)


def _all_whole(lengths: npt.NDArray[np.int32], programs: int, grid: AttentionGrid) -> bool:
    """Whether `decode_items` cuts no request, told without making its list: where none is longer than a program's even
    share of all keys, or than the fixed cut. (Others may be whole, too.)"""
    if not len(lengths):
        return True
    if grid.part_tokens:
        return int(lengths.max()) <= grid.part_tokens
    return int(lengths.max()) * programs <= int(lengths.sum(dtype=np.int64)) * grid.num_kv_heads


def whole_decodes(lengths: npt.NDArray[np.int32]) -> Items:
    """`decode_items` where nothing is cut, and all is seen: what most iterations of many requests ask for, at a quarter
    of the time."""
    order = np.argsort(-lengths, kind="stable")
    items = np.zeros((len(order), ITEM_FIELDS), np.int32)
    items[:, 0] = items[:, 1] = order
    items[:, 3] = lengths[order]
    items[:, 5] = 1
    return items


def _too_short(tiles: Items) -> bool:
    """Whether `prefill_parts` cuts none of these tiles, the longest first, because all have few keys."""
    return int(tiles[0, 1] + tiles[0, 2]) < 4 * PART_KEYS


def whole_tiles(tiles: Items) -> Items:
    """`prefill_parts` where nothing is cut."""
    parts = np.zeros((len(tiles), PART_FIELDS), np.int32)
    parts[:, :TILE_FIELDS] = tiles
    np.add(tiles[:, 1], tiles[:, 2], out=parts[:, 5])
    parts[:, 7] = 1
    return parts


def _tiles_of(items: Items, places: npt.NDArray[np.int64]) -> Items:
    """Those items of prefill attention that have a token at one of the places `[N]`, which ascend."""
    first, behind = items[:, 0], items[:, 0] + items[:, 1]
    return items[np.searchsorted(places, behind) > np.searchsorted(places, first)]
