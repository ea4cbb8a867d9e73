"""`AttentionLists`: writes the attention work lists of one iteration into its input slab."""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.input_layout import DECODE, KEPT, KEPT_PREFILL, PREFILL, Layout
from weft.engine.runner.iteration.nano import NanoBatch
from weft.kernels.attention.break_evens import BreakEven, BreakEvens
from weft.kernels.attention.work_lists import (
    ITEM_FIELDS,
    SPLIT_FIELDS,
    SPLIT_KEYS,
    TILE_FIELDS,
    TILE_ROWS,
    decode_items,
    one_launch,
    prefill_items,
    prefill_splits,
    with_decodes,
)

NO_TILES = np.zeros((0, TILE_FIELDS), np.int32)  # Prefill items of an iteration without chunks.
NO_SPLITS = np.zeros((0, SPLIT_FIELDS), np.int32)
Items = npt.NDArray[np.int32]


class AttentionGrid(NamedTuple):
    """Parameters that all work lists of a runner share."""

    num_kv_heads: int
    group: int  # Query heads per KV head.
    per_sm: int  # Decode programs per SM.
    split_tokens: int = 0
    page_size: int = 64  # Like `split_tokens`, an argument of `decode_items`.

    @property
    def undivided(self) -> int:
        """Prompt tokens that nano-batches must keep together. With batch invariance this is one prefill tile, because
        the tile's last token determines the order of its sums."""
        return TILE_ROWS // self.group if self.split_tokens else 1


class AttentionLists:
    """Work lists of one batch. host: columns of the slab. fused: one launch computes decodes and chunks. break_evens:
    measured times that decide how that launch works, if available."""

    def __init__(
        self, layout: Layout, grid: AttentionGrid, batch: Batch, host: dict[str, np.ndarray], *, fused: bool,
        break_evens: BreakEvens | None,
    ) -> None:  # fmt: skip
        self._layout, self._grid, self._batch, self._host = layout, grid, batch, host
        self._fused, self._break_evens = fused, break_evens
        self._kept: npt.NDArray[np.int64] | None = None
        self.splits_decodes = self.cuts_chunks = self.as_tiles = self.together = False

    def keep_rows(self, places: npt.NDArray[np.int64]) -> None:
        """Keep only the rows at these places after the last layer, and also list the tiles that contain them."""
        self._host["kept"][KEPT] = len(places)
        self._host["kept_tokens"][: len(places)] = places
        self._kept = np.sort(places)

    def add(self, k: int, nano: NanoBatch, sms: int) -> None:
        """Write the lists of the k-th nano-batch. sms: SMs available to its attention."""
        decode, at = self._decodes(k, nano, sms)
        prefill, wide = self._prefill(k, nano)
        if self._layout.prefill_slots:
            decode, prefill = self._one_launch(k, nano, decode, prefill, sms)
            self._host["counts"][DECODE + at] = len(decode)
            self.cuts_chunks |= bool(((prefill[:, 7] & 65535) > 1).any())
        self._write("prefill_items", prefill, k)
        self._host["counts"][PREFILL + k] = len(prefill)
        if self._kept is not None:
            kept = _tiles_of(prefill, self._kept)
            self._write("kept_items", kept, k)
            self._host["kept"][KEPT_PREFILL + k] = len(kept)
        if self._kept is not None and self._layout.unpacked[0]:
            kept = _tiles_of(wide, self._kept)
            self._write("kept_unpacked_items", kept, k)
            self._host["unpacked"][3 * k + 2] = len(kept)

    def _decodes(self, k: int, nano: NanoBatch, sms: int) -> tuple[Items, int]:
        """Write the decode lists of all windows. Returns the items and the list number of the last window."""
        batch, grid, windows = self._batch, self._grid, self._layout.windows
        for at, window in enumerate(windows, k * len(windows)):
            lengths, programs = batch.kv_len[nano.decodes], sms * grid.per_sm
            if window is None and _all_whole(lengths, programs, grid):
                decode = whole_decodes(lengths)
            else:
                decode = decode_items(
                    lengths, num_kv_heads=grid.num_kv_heads, num_programs=programs,
                    max_slots=self._layout.max_part_slots, split_tokens=grid.split_tokens, window=window,
                    page_size=grid.page_size,
                )  # fmt: skip
                self.splits_decodes |= len(decode) > len(lengths)
            decode[:, 1] = batch.slots[nano.decodes[decode[:, 1]]]  # page tables are indexed by slot
            decode[:, 0] += nano.first_decode
            self._write("decode_items", decode, at, self._layout.decode_lists)
            self._host["counts"][DECODE + at] = len(decode)
        return decode, at

    def _one_launch(self, k: int, nano: NanoBatch, decode: Items, tiles: Items, sms: int) -> tuple[Items, Items]:
        """Return both lists of the k-th nano-batch, with its tiles split along their keys. Writes how many programs
        begin with decodes, and records `as_tiles` and `together`."""
        batch, pod = self._batch, self._layout.pod if self._fused else "off"
        options = {
            "num_kv_heads": self._grid.num_kv_heads, "num_programs": sms, "max_slots": self._layout.prefill_slots
        }  # fmt: skip
        self._host["decoders"][k] = sms
        if not len(tiles):
            return decode, NO_SPLITS
        if pod == "off":
            return decode, whole_tiles(tiles) if _too_short(tiles) else prefill_splits(tiles, **options)
        even = self._measured(nano)
        lengths, slots = batch.kv_len[nano.decodes], batch.slots[nano.decodes]
        both = partial(with_decodes, tiles, nano.first_decode, lengths, slots, group=self._grid.group)
        variant = "together" if pod == "on" else None if even is None else even.variant
        found = one_launch(decode, tiles, both, variant=variant, **options)
        self._host["decoders"][k] = found.programs if even is None else min(even.programs, sms)
        self.as_tiles, self.together = len(found.decodes) < len(decode), found.together
        return found.decodes, found.parts

    def _measured(self, nano: NanoBatch) -> BreakEven | None:
        """Return the fastest measured launch for this nano-batch's decodes and chunks, or None."""
        if self._break_evens is None or self._layout.pod != "auto":
            return None
        return self._break_evens.of_batch(nano.chunk_len, nano.chunk_context, self._batch.kv_len[nano.decodes])

    def _prefill(self, k: int, nano: NanoBatch) -> tuple[Items, Items]:
        """Return the prefill items of the k-th nano-batch: first of chunks that read FP8 pages directly, then of chunks
        that read unpacked 16-bit pages. Writes the latter, as many as the unpacked pages can hold."""
        host, batch, grid = self._host, self._batch, self._grid
        if not len(nano.chunk_rows):  # most iterations; building empty lists took 40 % of `send`
            if self._layout.unpacked[0]:
                host["unpacked"][3 * k : 3 * k + 2] = 0
            return NO_TILES, NO_TILES
        slots = batch.slots[nano.chunk_rows]

        def items(these: npt.NDArray[np.bool_], page_rows: npt.NDArray[np.integer]) -> Items:
            start, length, context = nano.chunk_start[these], nano.chunk_len[these], nano.chunk_context[these]
            return prefill_items(start, length, context, page_rows[these], group=grid.group)

        capacity = self._layout.unpacked[0]
        if not capacity:
            return items(np.ones(len(slots), np.bool_), slots), NO_TILES
        pages = -(-(nano.chunk_context + nano.chunk_len) // grid.page_size)
        ends = np.cumsum(pages)
        fits = ends <= capacity
        wide = items(fits, ends - pages)
        self._write("unpacked_items", wide, k)
        of = [batch.page_table[row, :count] for row, count in zip(nano.chunk_rows[fits], pages[fits], strict=True)]
        self._write("unpacked_pages", np.concatenate([slots[:0], *of]), k)
        host["unpacked"][3 * k : 3 * k + 2] = int(pages[fits].sum()), len(wide)
        return items(~fits, slots), wide

    def _write(self, column: str, items: np.ndarray, at: int, lists: int | None = None) -> None:
        """Write the `at`-th list of a column that holds `lists` lists of equal size [one per nano-batch]."""
        values = self._host[column]
        first = at * (values.size // (self._layout.nano_batches if lists is None else lists))
        values[first : first + items.size] = items.reshape(-1)


def _all_whole(lengths: npt.NDArray[np.int32], programs: int, grid: AttentionGrid) -> bool:
    """Return True only if `decode_items` would split no request: none exceeds a program's even share of all keys, or
    the fixed split length. May return False although nothing would be split."""
    if not len(lengths):
        return True
    if grid.split_tokens:
        return int(lengths.max()) <= grid.split_tokens
    return int(lengths.max()) * programs <= int(lengths.sum(dtype=np.int64)) * grid.num_kv_heads


def whole_decodes(lengths: npt.NDArray[np.int32]) -> Items:
    """`decode_items` without splits and windows. Covers most iterations of many requests in a quarter of the time."""
    order = np.argsort(-lengths, kind="stable")
    items = np.zeros((len(order), ITEM_FIELDS), np.int32)
    items[:, 0] = items[:, 1] = order
    items[:, 3] = lengths[order]
    items[:, 5] = 1
    return items


def _too_short(tiles: Items) -> bool:
    """Return whether these tiles, the longest first, have too few keys for `prefill_splits` to split any."""
    return int(tiles[0, 1] + tiles[0, 2]) < 4 * SPLIT_KEYS


def whole_tiles(tiles: Items) -> Items:
    """`prefill_splits` if no tile is split."""
    splits = np.zeros((len(tiles), SPLIT_FIELDS), np.int32)
    splits[:, :TILE_FIELDS] = tiles
    np.add(tiles[:, 1], tiles[:, 2], out=splits[:, 5])
    splits[:, 7] = 1
    return splits


def _tiles_of(items: Items, places: npt.NDArray[np.int64]) -> Items:
    """Return the prefill items that contain a token at one of the ascending places `[N]`."""
    first, end = items[:, 0], items[:, 0] + items[:, 1]
    return items[np.searchsorted(places, end) > np.searchsorted(places, first)]
