"""`Layout`: the sizes of an iteration's inputs on a GPU, and the columns of the slab that holds them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from weft.engine.config import Pod
from weft.engine.plans.plan import MAX_NANO_BATCHES
from weft.engine.wire.sampling import COLUMNS
from weft.kernels.attention.work_lists import ITEM_FIELDS, SPLIT_FIELDS, TILE_FIELDS, TILE_ROWS
from weft.kernels.matmul.adapter_work import ADAPTER_FIELDS, FEW_TOKENS, column_blocks, max_items
from weft.kernels.matmul.mid_config import BLOCK_TOKENS, TALL

COUNTS = ("tokens", "sampled", "updates")
# Then follow prefill items per nano-batch, live tokens after the start of each range, and decode items per nano-batch
# and window.
PREFILL, LIVE, DECODE = (len(COUNTS) + i * MAX_NANO_BATCHES for i in range(3))
# In the last layer, which drops rows that are not read: rows kept, then prefill items per nano-batch. They do not start
# at their column's beginning, so kernels compiled for pointers without 16-byte alignment serve them as well.
KEPT, KEPT_PREFILL = 1, 2


class Layout(NamedTuple):
    """Sizes that are the same in every captured graph."""

    max_tokens: int
    max_sampled: int
    max_decode_items: int  # Per nano-batch and window.
    max_prefill_items: int  # Per nano-batch.
    max_updates: int
    nano_batches: int
    max_part_slots: int  # Partial sums of split decode requests, per nano-batch.
    windows: tuple[int | None, ...] = (None,)  # Attention windows, each once.
    unpacked: tuple[int, int] = (0, 0)
    """Maximum of FP8 pages per nano-batch that prefill attention unpacks to 16 bits (0: none), and tokens per page."""
    prefill_slots: int = 0
    """Partial sums of prefill tiles that are split along their keys, per nano-batch; 0: tiles are not split."""
    images: bool = False  # Whether tokens may get embeddings of images.
    rope: bool = False  # Whether they then have three rotary positions.
    until: bool = False  # Whether tokens may see keys after their own, of their image.
    pod: Pod = "off"  # Whether decodes and chunks share one attention launch, if tiles are split.
    verifies: bool = False  # Whether iterations may have drafts.
    adapters: int = 0  # LoRA adapters in memory at once; 0: none.
    adapter_widths: tuple[int, ...] = ()  # Columns of an adapter in `adapter_depth.More` of the projections.

    @classmethod
    def of(
        cls, max_tokens: int, max_seqs: int, group: int, nano_batches: int = 1, max_part_slots: int = 1024,
        windows: Iterable[int | None] = (None,), unpacked: tuple[int, int] = (0, 0), prefill_slots: int = 0,
        pod: Pod = "off", verifies: bool = False, *, images: bool = False, rope: bool = False,
        until: bool = False, adapters: int = 0, adapter_widths: tuple[int, ...] = (),
    ) -> Layout:  # fmt: skip
        tiles = -(-max_tokens // (TILE_ROWS // group)) + 2 * max_seqs + 2  # a chunk may begin and end inside one
        items = 2 * max_seqs + max_part_slots
        return cls(
            max_tokens, max_seqs, items, tiles + prefill_slots, max(4096, 2 * max_seqs), nano_batches, max_part_slots,
            tuple(dict.fromkeys(windows)), unpacked, prefill_slots, images, rope, until, pod, verifies, adapters,
            adapter_widths,
        )  # fmt: skip

    @property
    def prefill_fields(self) -> int:
        return SPLIT_FIELDS if self.prefill_slots else TILE_FIELDS

    @property
    def max_adapter_items(self) -> int:
        """Items of rows with one adapter, of rows without one included, in any token bucket."""
        few = min(self.max_tokens, FEW_TOKENS)
        return max(max_items(few, self.adapters), max_items(self.max_tokens, self.adapters))

    def adapter_steps(self) -> dict[tuple[int, int], tuple[int, int]]:
        """Return the shape of `adapter_depth.Steps.blocks`, by the columns of an adapter and the rows of a tile."""
        return {
            (width, rows): (-(-self.max_tokens // rows), column_blocks(self.adapters, width))
            for width in self.adapter_widths
            for rows in (BLOCK_TOKENS, TALL)
        }

    @property
    def decode_lists(self) -> int:
        return self.nano_batches * len(self.windows)

    def columns(self) -> dict[str, tuple[int, bool]]:
        """Return the number of words per column, and whether they are float32."""
        t, s = self.max_tokens, self.max_sampled
        prefill_items = self.nano_batches * self.max_prefill_items * self.prefill_fields
        unpacked = {
            "unpacked": (3 * MAX_NANO_BATCHES, False),
            "unpacked_pages": (self.nano_batches * self.unpacked[0], False),
            "unpacked_items": (prefill_items, False),
            "kept_unpacked_items": (prefill_items, False),
        }
        adapted = {
            f"{prefix}adapter_{name}": (size, False)
            for prefix in ("", "kept_")
            for name, size in (("rows", t), ("items", self.max_adapter_items * ADAPTER_FIELDS), ("counts", 2))
        }
        for prefix in ("", "kept_"):
            for (width, rows), (tiles, blocks) in self.adapter_steps().items():
                adapted[f"{prefix}adapter_steps_{width}_{rows}"] = tiles * (1 + blocks), False
        return {
            "counts": (DECODE + MAX_NANO_BATCHES * len(self.windows), False),
            "token_ids": (t, False),
            "token_slots": (t, False),
            "positions": (t, False),
            "slot_mapping": (t, False),
            **({"image_rows": (t, False)} if self.images else {}),
            **({"rope_positions": (3 * t, False)} if self.rope else {}),
            **({"until": (t, False)} if self.until else {}),
            "decode_items": (self.decode_lists * self.max_decode_items * ITEM_FIELDS, False),
            "prefill_items": (prefill_items, False),
            "decoders": (self.nano_batches, False),
            **(unpacked if self.unpacked[0] else {}),
            **(adapted if self.adapters else {}),
            "kept": (KEPT_PREFILL + MAX_NANO_BATCHES, False),
            "kept_tokens": (t, False),
            "kept_items": (prefill_items, False),
            "update_at": (self.max_updates, False),
            "update_page": (self.max_updates, False),
            "logit_tokens": (s, False),
            "slots": (s, False),
            **({"first": (s, False), "expected": (s, False)} if self.verifies else {}),
            **{c.name: (s, c.dtype is np.float32) for c in COLUMNS if c.sampler},
            "uniform": (s, True),
        }
