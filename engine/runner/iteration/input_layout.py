"""`Layout`: the sizes of an iteration's inputs on a GPU, and the columns of the slab that they make."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from weft.engine.config import Pod
from weft.engine.plans.plan import MAX_NANO_BATCHES
from weft.engine.wire.sampling import COLUMNS
from weft.kernels.attention.work_lists import ITEM_FIELDS, PART_FIELDS, TILE_FIELDS, TILE_ROWS

COUNTS = ("tokens", "sampled", "updates")
# then prefill items of each nano-batch, live tokens behind each beginning of a range, and decode items of each
# nano-batch and window
PREFILL, LIVE, DECODE = (len(COUNTS) + i * MAX_NANO_BATCHES for i in range(3))
# Of the last layer, where rows leave: how many are left, then prefill items of each nano-batch. Not at the beginning of
# their column: kernels compiled for counts that are no multiple of 16 bytes away from anything serve these as well.
LEFT, LEFT_PREFILL = 1, 2


class Layout(NamedTuple):
    """Sizes that every captured graph agrees on."""

    max_tokens: int
    max_sampled: int
    max_decode_items: int
    """of one nano-batch and window"""
    max_prefill_items: int
    """of one nano-batch"""
    max_updates: int
    nano_batches: int
    max_part_slots: int
    """partial sums of split decode requests, of one nano-batch"""
    windows: tuple[int | None, ...] = (None,)
    """of attention, each once"""
    unpacked: tuple[int, int] = (0, 0)
    """pages in FP8 that prefill attention of a nano-batch reads in 16 bits, at most (0: it reads them as they are), and
    their tokens"""
    prefill_slots: int = 0
    """partial sums of prefill tiles that are cut along their keys, of one nano-batch; 0: tiles stay whole"""
    pod: Pod = "off"
    """whether attention of decodes and chunks is one launch, where tiles are cut"""

    @classmethod
    def of(
        cls, max_tokens: int, max_seqs: int, group: int, nano_batches: int = 1, max_part_slots: int = 1024,
        windows: Iterable[int | None] = (None,), unpacked: tuple[int, int] = (0, 0), prefill_slots: int = 0,
        pod: Pod = "off",
    ) -> Layout:  # fmt: skip
        tiles = -(-max_tokens // (TILE_ROWS // group)) + 2 * max_seqs + 2  # a chunk may begin and end inside one
        items = 2 * max_seqs + max_part_slots
        return cls(
            max_tokens, max_seqs, items, tiles + prefill_slots, max(4096, 2 * max_seqs), nano_batches, max_part_slots,
            tuple(dict.fromkeys(windows)), unpacked, prefill_slots, pod,
        )  # fmt: skip

    @property
    def prefill_fields(self) -> int:
        return PART_FIELDS if self.prefill_slots else TILE_FIELDS

    @property
    def decode_lists(self) -> int:
        return self.nano_batches * len(self.windows)

    def columns(self) -> dict[str, tuple[int, bool]]:
        """Words of each column, and whether they are float32."""
        t, s = self.max_tokens, self.max_sampled
        prefill_items = self.nano_batches * self.max_prefill_items * self.prefill_fields
        unpacked = {
            "unpacked": (3 * MAX_NANO_BATCHES, False),
            "unpacked_pages": (self.nano_batches * self.unpacked[0], False),
            "unpacked_items": (prefill_items, False),
            "left_unpacked_items": (prefill_items, False),
        }
        return {
            "counts": (DECODE + MAX_NANO_BATCHES * len(self.windows), False),
            "token_ids": (t, False),
            "token_slots": (t, False),
            "positions": (t, False),
            "slot_mapping": (t, False),
            "decode_items": (self.decode_lists * self.max_decode_items * ITEM_FIELDS, False),
            "prefill_items": (prefill_items, False),
            "decoders": (self.nano_batches, False),
            **(unpacked if self.unpacked[0] else {}),
            "left": (LEFT_PREFILL + MAX_NANO_BATCHES, False),
            "left_tokens": (t, False),
            "left_items": (prefill_items, False),
            "update_at": (self.max_updates, False),
            "update_page": (self.max_updates, False),
            "logit_tokens": (s, False),
            "slots": (s, False),
            **{c.name: (s, c.dtype is np.float32) for c in COLUMNS if c.sampler},
            "uniform": (s, True),
        }
