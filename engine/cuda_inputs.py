"""An iteration's inputs on their way to the GPU: one slab of int32 words, a ring of pinned copies, one transfer."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import Batch
from weft.kernels.decode_attention import ITEM_FIELDS, plan_decode
from weft.kernels.prefill_attention import TILE_FIELDS, TILE_ROWS, plan_prefill

RING = 4
"""pinned copies: more than iterations in flight, so that none is rewritten before its transfer is done"""
COUNTS = ("tokens", "sampled", "decode_items", "prefill_items", "updates")


class Layout(NamedTuple):
    """Sizes that every captured graph agrees on."""

    max_tokens: int
    max_sampled: int
    max_decode_items: int
    max_prefill_items: int
    max_updates: int

    @classmethod
    def of(cls, max_tokens: int, max_seqs: int, group: int) -> Layout:
        tiles = -(-max_tokens // (TILE_ROWS // group)) + max_seqs
        return cls(max_tokens, max_seqs, 2 * max_seqs + MAX_PART_SLOTS, tiles, max(4096, 2 * max_seqs))

    def columns(self) -> dict[str, tuple[int, bool]]:
        """Words of each column, and whether they are float32."""
        t, s = self.max_tokens, self.max_sampled
        return {
            "counts": (8, False),
            "token_ids": (t, False),
            "token_slots": (t, False),
            "positions": (t, False),
            "slot_mapping": (t, False),
            "decode_items": (self.max_decode_items * ITEM_FIELDS, False),
            "prefill_items": (self.max_prefill_items * TILE_FIELDS, False),
            "update_at": (self.max_updates, False),
            "update_page": (self.max_updates, False),
            "logit_tokens": (s, False),
            "slots": (s, False),
            "top_k": (s, False),
            "temperature": (s, True),
            "top_p": (s, True),
            "min_p": (s, True),
            "uniform": (s, True),
        }


MAX_PART_SLOTS = 1024
"""partial sums of split decode requests"""


class DeviceInputs:
    """The slab on the device, its columns by name, and the ring that fills it. All addresses stay put."""

    def __init__(self, layout: Layout, device: torch.device, num_slots: int, max_pages: int) -> None:
        self.layout = layout
        columns = layout.columns()
        words = sum(-(-size // 4) * 4 for size, _ in columns.values())  # 16-byte aligned columns
        self.slab = torch.zeros(words, dtype=torch.int32, device=device)
        self._ring = [torch.zeros(words, dtype=torch.int32, pin_memory=True) for _ in range(RING)]
        self._host: list[dict[str, np.ndarray]] = [self._split_host(r.numpy(), columns) for r in self._ring]
        self.column = self._split_device(self.slab, columns)
        self.count = {name: self.column["counts"][i : i + 1] for i, name in enumerate(COUNTS)}
        self.page_table = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device)
        self._sent_pages = np.zeros((num_slots, max_pages), np.int32)
        self._turn = 0

    @staticmethod
    def _split_host(slab: np.ndarray, columns: dict[str, tuple[int, bool]]) -> dict[str, np.ndarray]:
        out, at = {}, 0
        for name, (size, is_float) in columns.items():
            part = slab[at : at + size]
            out[name] = part.view(np.float32) if is_float else part
            at += -(-size // 4) * 4
        return out

    @staticmethod
    def _split_device(slab: Tensor, columns: dict[str, tuple[int, bool]]) -> dict[str, Tensor]:
        out, at = {}, 0
        for name, (size, is_float) in columns.items():
            part = slab[at : at + size]
            out[name] = part.view(torch.float32) if is_float else part
            at += -(-size // 4) * 4
        return out

    def send(self, batch: Batch, *, num_kv_heads: int, group: int, num_programs: int, bucket: int) -> None:
        """Write the batch into the next ring slot and start its transfer on the current stream.

        Padding tokens up to `bucket` point into the dummy page.
        """
        self._turn = (self._turn + 1) % RING
        host, t, d = self._host[self._turn], batch.num_tokens, batch.num_decodes
        host["token_ids"][:t] = batch.token_ids
        host["token_slots"][:d] = batch.slots[:d]
        host["token_slots"][d:bucket] = -1
        host["token_ids"][t:bucket] = 0
        host["positions"][:t] = batch.positions
        host["positions"][t:bucket] = 0
        host["slot_mapping"][:t] = batch.slot_mapping
        host["slot_mapping"][t:bucket] = 0
        decode = plan_decode(
            batch.kv_len[:d], num_kv_heads=num_kv_heads, num_programs=num_programs, max_slots=MAX_PART_SLOTS
        )
        decode[:, 1] = batch.slots[decode[:, 1]]  # page tables are kept by slot
        host["decode_items"][: decode.size] = decode.reshape(-1)
        starts = np.cumsum(batch.query_len) - batch.query_len
        prefill = plan_prefill(
            starts[d:], batch.query_len[d:], (batch.kv_len - batch.query_len)[d:], batch.slots[d:], group=group
        )
        host["prefill_items"][: prefill.size] = prefill.reshape(-1)
        s = batch.sampling
        n = len(s.slots)
        for name in ("logit_tokens", "slots", "top_k", "temperature", "top_p", "min_p", "uniform"):
            host[name][:n] = getattr(s, name)
        host["logit_tokens"][n:] = 0
        host["temperature"][n:] = 0.0
        updates = self._page_updates(batch, host)
        host["counts"][: len(COUNTS)] = (t, n, len(decode), len(prefill), updates)
        self.slab.copy_(self._ring[self._turn], non_blocking=True)

    def _page_updates(self, batch: Batch, host: dict[str, np.ndarray]) -> int:
        """Page-table entries that the device does not have yet; returns how many are in the slab."""
        width = batch.page_table.shape[1]
        rows, columns = np.nonzero(self._sent_pages[batch.slots, :width] != batch.page_table)
        if not len(rows):
            return 0
        slots, pages = batch.slots[rows], batch.page_table[rows, columns]
        self._sent_pages[slots, columns] = pages
        at = (slots.astype(np.int64) * self._sent_pages.shape[1] + columns).astype(np.int32)
        if len(at) > self.layout.max_updates:
            # A flood of long prompts at once: rare enough for an ordinary copy in front of the graph.
            index = torch.from_numpy(at.astype(np.int64)).pin_memory().to(self.slab.device, non_blocking=True)
            value = torch.from_numpy(pages).pin_memory().to(self.slab.device, non_blocking=True)
            self.page_table.view(-1).index_copy_(0, index, value)
            return 0
        host["update_at"][: len(at)] = at
        host["update_page"][: len(at)] = pages
        return len(at)
