"""An iteration's inputs on their way to the GPU: one slab of int32 words, a ring of pinned copies, one transfer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import MAX_NANO_BATCHES
from weft.engine.runner.batch import Batch, sampler_names
from weft.engine.runner.nano import Assignment, assign
from weft.engine.runner.resolve import ResolvedConfig
from weft.engine.wire.sampling import COLUMNS
from weft.kernels.attention_triton import DecodeWork
from weft.kernels.work_lists import ITEM_FIELDS, TILE_FIELDS, TILE_ROWS, decode_items, prefill_items

RING = 4
"""pinned copies: more than iterations in flight, so that none is rewritten before its transfer is done"""
INVARIANT_PART_TOKENS = 1024
"""with batch invariance, a request's decode attention is always cut here"""
_COUNTS = ("tokens", "sampled", "updates")
# then prefill items of each nano-batch, live tokens behind each beginning of a range, and decode items of each
# nano-batch and window
_PREFILL, _LIVE, _DECODE = (len(_COUNTS) + i * MAX_NANO_BATCHES for i in range(3))


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

    @classmethod
    def of(
        cls, max_tokens: int, max_seqs: int, group: int, nano_batches: int = 1, max_part_slots: int = 1024,
        windows: Iterable[int | None] = (None,),
    ) -> Layout:  # fmt: skip
        tiles = -(-max_tokens // (TILE_ROWS // group)) + 2 * max_seqs + 2  # a chunk may begin and end inside one
        items = 2 * max_seqs + max_part_slots
        return cls(
            max_tokens, max_seqs, items, tiles, max(4096, 2 * max_seqs), nano_batches, max_part_slots,
            tuple(dict.fromkeys(windows)),
        )  # fmt: skip

    @property
    def decode_lists(self) -> int:
        return self.nano_batches * len(self.windows)

    def columns(self) -> dict[str, tuple[int, bool]]:
        """Words of each column, and whether they are float32."""
        t, s = self.max_tokens, self.max_sampled
        return {
            "counts": (_DECODE + MAX_NANO_BATCHES * len(self.windows), False),
            "token_ids": (t, False),
            "token_slots": (t, False),
            "positions": (t, False),
            "slot_mapping": (t, False),
            "decode_items": (self.decode_lists * self.max_decode_items * ITEM_FIELDS, False),
            "prefill_items": (self.nano_batches * self.max_prefill_items * TILE_FIELDS, False),
            "update_at": (self.max_updates, False),
            "update_page": (self.max_updates, False),
            "logit_tokens": (s, False),
            "slots": (s, False),
            **{c.name: (s, c.dtype is np.float32) for c in COLUMNS if c.sampler},
            "uniform": (s, True),
        }


class DeviceInputs:
    """The slab on the device, its columns by name, and the ring that fills it. All addresses stay put."""

    def __init__(self, layout: Layout, device: torch.device, num_slots: int, max_pages: int) -> None:
        self.layout = layout
        columns = layout.columns()
        words = sum(-(-size // 4) * 4 for size, _ in columns.values())  # 16-byte aligned columns
        self.slab = torch.zeros(words, dtype=torch.int32, device=device)
        runs = device.type != "meta"  # which stands for a GPU
        self._ring = [torch.zeros(words, dtype=torch.int32, pin_memory=runs) for _ in range(RING if runs else 0)]
        self._host: list[dict[str, np.ndarray]] = [self._split_host(r.numpy(), columns) for r in self._ring]
        self.column = self._split_device(self.slab, columns)
        self.count = {name: self.column["counts"][i : i + 1] for i, name in enumerate(_COUNTS)}
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

    def clear(self) -> None:
        """An iteration of no tokens, behind what was launched on the current stream. The next `send` writes it all."""
        self.slab.zero_()

    def decode_work(self, nano: int) -> dict[int | None, DecodeWork]:
        """Decode attention of a nano-batch, by window."""
        lists = self.column["decode_items"].view(self.layout.decode_lists, -1, ITEM_FIELDS)
        first = nano * len(self.layout.windows)
        return {
            window: DecodeWork(lists[at], self.column["counts"][_DECODE + at : _DECODE + at + 1])
            for at, window in enumerate(self.layout.windows, first)
        }

    def prefill_work(self, nano: int) -> tuple[Tensor, Tensor]:
        """Prefill attention of a nano-batch: items `[max, 4]`, and how many there are `[1]`."""
        items = self.column["prefill_items"].view(self.layout.nano_batches, -1, TILE_FIELDS)[nano]
        return items, self.column["counts"][_PREFILL + nano : _PREFILL + nano + 1]

    def sampler_arguments(self, rows: int) -> dict[str, Tensor]:
        """What the samplers take beside the logits, by name, `[rows]` each."""
        return {name: self.column[name][:rows] for name in sampler_names()}

    def live(self, pipeline: Pipeline, begin: int) -> Tensor:
        """`[1]`: the iteration's tokens from place `begin` on; zero when it ends before."""
        at = _LIVE + pipeline.begins.index(begin)
        return self.column["counts"][at : at + 1]

    def send(
        self, batch: Batch, pipeline: Pipeline, *, num_kv_heads: int, group: int, per_sm: int, part_tokens: int = 0,
        page_size: int = 64,
    ) -> Assignment:  # fmt: skip
        """Write the batch into the next ring slot and start its transfer on the current stream.

        Padding tokens up to the token bucket point into the dummy page. per_sm: decode programs on each SM;
        part_tokens, page_size: see `decode_items`. Returns where the tokens stand.
        """
        self._turn = (self._turn + 1) % RING
        host, t, d, bucket = self._host[self._turn], batch.num_tokens, batch.num_decodes, pipeline.tokens
        assigned = assign(batch, pipeline.nano_batches)
        order = slice(None) if assigned.order is None else assigned.order
        token_slots = np.full(t, -1, np.int32)
        token_slots[:d] = batch.slots[:d]
        columns = (
            ("token_ids", batch.token_ids, 0),
            ("token_slots", token_slots, -1),
            ("positions", batch.positions, 0),
            ("slot_mapping", batch.slot_mapping, 0),
        )
        for name, values, filler in columns:
            host[name][:t] = values[order]
            host[name][t:bucket] = filler
        counts = host["counts"]
        for k, (nano, sms) in enumerate(zip(assigned.nano_batches, pipeline.decode_sms, strict=True)):
            for at, window in enumerate(self.layout.windows, k * len(self.layout.windows)):
                decode = decode_items(
                    batch.kv_len[nano.decodes], num_kv_heads=num_kv_heads, num_programs=sms * per_sm,
                    max_slots=self.layout.max_part_slots, part_tokens=part_tokens, window=window, page_size=page_size,
                )  # fmt: skip
                decode[:, 1] = batch.slots[nano.decodes[decode[:, 1]]]  # page tables are kept by slot
                decode[:, 0] += nano.first_decode
                self._write(host["decode_items"], decode, at, self.layout.decode_lists)
                counts[_DECODE + at] = len(decode)
            prefill = prefill_items(
                nano.chunk_start, nano.chunk_len, nano.chunk_context, batch.slots[nano.chunk_rows], group=group
            )
            self._write(host["prefill_items"], prefill, k, self.layout.nano_batches)
            counts[_PREFILL + k] = len(prefill)
        for j, begin in enumerate(pipeline.begins):
            counts[_LIVE + j] = max(0, t - begin)
        s = batch.sampling
        n = len(s.slots)
        host["slots"][:n] = s.slots
        for name, values in s.sampler_arguments().items():
            host[name][:n] = values
        host["logit_tokens"][:n] = s.logit_tokens if assigned.places is None else assigned.places[s.logit_tokens]
        host["logit_tokens"][n:] = 0
        host["temperature"][n:] = 0.0  # rows of nobody take the best of whatever is there: the least work
        counts[: len(_COUNTS)] = (t, n, self._page_updates(batch, host))
        self.slab.copy_(self._ring[self._turn], non_blocking=True)
        return assigned

    @staticmethod
    def _write(column: np.ndarray, items: np.ndarray, at: int, lists: int) -> None:
        """As the `at`-th of the equally long lists in `column`."""
        first = at * (column.size // lists)
        column[first : first + items.size] = items.reshape(-1)

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


def device_inputs(spec: ModelSpec, config: ResolvedConfig, nano_batches: int) -> DeviceInputs:
    """Of a runner with this configuration. nano_batches: of the pipeline that has most."""
    slots, pages = config.max_num_seqs, -(-config.max_model_len // config.kv.page_size)
    parts = slots * -(-config.max_model_len // INVARIANT_PART_TOKENS) if config.batch_invariant else 1024
    windows = config.attention_shape(spec).windows
    layout = Layout.of(config.max_num_batched_tokens, slots, spec.heads_per_kv, nano_batches, parts, windows)
    return DeviceInputs(layout, config.device, slots, pages)
