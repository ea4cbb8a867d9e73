"""An iteration's inputs on their way to the GPU: one slab of int32 words, a ring of pinned copies, one transfer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.iteration.attention_lists import AttentionGrid, AttentionLists
from weft.engine.runner.iteration.attention_path import AttentionPath
from weft.engine.runner.iteration.batch import Batch, SamplingInputs, sampler_names
from weft.engine.runner.iteration.input_layout import COUNTS, DECODE, LEFT, LEFT_PREFILL, LIVE, PREFILL, Layout
from weft.engine.runner.iteration.nano import Assignment, assign
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.break_evens import BreakEvens
from weft.kernels.attention.fp8_unpack import pays
from weft.kernels.attention.triton_backend import DecodeWork, cuts_prefill
from weft.kernels.attention.work_lists import (
    ITEM_FIELDS,
    TILE_FIELDS,
)

RING = 4
"""pinned copies: more than iterations in flight, so that none is rewritten before its transfer is done"""
INVARIANT_PART_TOKENS = 1024
"""with batch invariance, a request's decode attention is always cut here"""
UNPACKED_TOKENS = 16384, 131072
"""of pages in FP8 that prefill attention may read in 16 bits at once: at least; at most, where contexts are longer"""
PARTIAL_ROWS = 512
"""parts of prefill tiles, times KV heads: two waves of programs and what rounding adds"""


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
        self.count = {name: self.column["counts"][i : i + 1] for i, name in enumerate(COUNTS)}
        self.count["left"] = self.column["left"][LEFT : LEFT + 1]
        self.page_table = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device)
        self._sent_pages = np.zeros((num_slots, max_pages), np.int32)
        self._turn = 0
        self.attention: AttentionPath | None = None
        """of the batch sent last, on our own kernels"""
        self.break_evens: BreakEvens | None = None
        """what measured batches say, with `--pod auto`"""

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
            window: DecodeWork(lists[at], self.column["counts"][DECODE + at : DECODE + at + 1])
            for at, window in enumerate(self.layout.windows, first)
        }

    def prefill_work(self, nano: int) -> tuple[Tensor, Tensor]:
        """Prefill attention of a nano-batch: items `[max, 4]`, or `[max, 8]` of parts, and how many there are `[1]`."""
        items = self.column["prefill_items"].view(self.layout.nano_batches, -1, self.layout.prefill_fields)[nano]
        return items, self.column["counts"][PREFILL + nano : PREFILL + nano + 1]

    def unpacked_work(self, nano: int, *, left: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Of chunks whose pages a nano-batch reads in 16 bits: pages `[max]` and how many, items `[max, 4]` and how
        many; see `Unpacked`. left: as `left_prefill_work`."""
        nano_batches, counts = self.layout.nano_batches, self.column["unpacked"]
        pages = self.column["unpacked_pages"].view(nano_batches, -1)[nano]
        items = self.column["left_unpacked_items" if left else "unpacked_items"]
        number = 3 * nano + (2 if left else 1)
        return (
            pages, counts[3 * nano : 3 * nano + 1], items.view(nano_batches, -1, TILE_FIELDS)[nano],
            counts[number : number + 1],
        )  # fmt: skip

    def left_prefill_work(self, nano: int) -> tuple[Tensor, Tensor]:
        """The same of the last layer, where rows leave that nobody reads: tiles with a row that somebody does."""
        items = self.column["left_items"].view(self.layout.nano_batches, -1, self.layout.prefill_fields)[nano]
        return items, self.column["left"][LEFT_PREFILL + nano : LEFT_PREFILL + nano + 1]

    def decoders(self, nano: int) -> Tensor:
        """`[1]`: programs of a nano-batch's attention that begin with decodes, where it is one launch."""
        return self.column["decoders"][nano : nano + 1]

    def fuses(self, pipeline: Pipeline) -> bool:
        """Whether decodes and chunks are one launch: they follow each other in one lane, on all of its SMs."""
        if self.layout.pod == "off" or not self.layout.prefill_slots:
            return False
        if len(pipeline.lanes) > 1 or len(pipeline.nano_batches) > 1:
            return False
        return {Role.DECODE_ATTENTION, Role.PREFILL_ATTENTION} <= {op.role for _, op in pipeline.operations}

    def sampler_arguments(self, rows: int) -> dict[str, Tensor]:
        """What the samplers take beside the logits, by name, `[rows]` each."""
        return {name: self.column[name][:rows] for name in sampler_names()}

    def live(self, pipeline: Pipeline, begin: int) -> Tensor:
        """`[1]`: the iteration's tokens from place `begin` on; zero when it ends before."""
        at = LIVE + pipeline.begins.index(begin)
        return self.column["counts"][at : at + 1]

    def send(self, batch: Batch, pipeline: Pipeline, grid: AttentionGrid) -> Assignment:
        """Write the batch into the next ring slot and start its transfer on the current stream.

        Padding tokens up to the token bucket point into the dummy page. Returns where the tokens stand.
        """
        self._turn = (self._turn + 1) % RING
        host, t = self._host[self._turn], batch.num_tokens
        counts = host["counts"]
        assigned = assign(batch, pipeline.nano_batches, grid.undivided)
        if pipeline.after_drop:
            assigned = assigned._replace(read=batch.rows_by_reader)
        self._write_tokens(host, batch, pipeline.tokens, assigned)
        self.attention = self._write_attention(host, batch, pipeline, grid, assigned)
        for j, begin in enumerate(pipeline.begins):
            counts[LIVE + j] = max(0, t - begin)
        self._write_sampling(host, batch.sampling, assigned)
        counts[: len(COUNTS)] = (t, len(batch.sampling.slots), self._page_updates(batch, host))
        self.slab.copy_(self._ring[self._turn], non_blocking=True)
        return assigned

    @staticmethod
    def _write_tokens(host: dict[str, np.ndarray], batch: Batch, bucket: int, assigned: Assignment) -> None:
        t, d = batch.num_tokens, batch.num_decodes
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

    def _write_attention(
        self, host: dict[str, np.ndarray], batch: Batch, pipeline: Pipeline, grid: AttentionGrid, assigned: Assignment
    ) -> AttentionPath:
        fused = self.fuses(pipeline)
        lists = AttentionLists(self.layout, grid, batch, host, fused=fused, break_evens=self.break_evens)
        if assigned.read is not None:
            lists.leave(assigned.read if assigned.places is None else assigned.places[assigned.read])
        for k, (nano, sms) in enumerate(zip(assigned.nano_batches, pipeline.decode_sms, strict=True)):
            lists.add(k, nano, sms)
        return AttentionPath.of(
            batch.num_decodes, batch.num_chunks, lanes=len(pipeline.lanes), fused=fused, as_tiles=lists.as_tiles,
            together=lists.together,
            in_turn=int(host["decoders"][0]) >= pipeline.decode_sms[0], split_decodes=lists.splits_decodes,
            cut_chunks=lists.cuts_chunks,
        )  # fmt: skip

    @staticmethod
    def _write_sampling(host: dict[str, np.ndarray], s: SamplingInputs, assigned: Assignment) -> None:
        n = len(s.slots)
        host["slots"][:n] = s.slots
        for name, values in s.sampler_arguments().items():
            host[name][:n] = values
        host["logit_tokens"][:n] = s.logit_tokens if assigned.places is None else assigned.places[s.logit_tokens]
        host["logit_tokens"][n:] = 0
        host["temperature"][n:] = 0.0  # rows of nobody take the best of whatever is there: the least work

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


def _prefill_slots(spec: ModelSpec, config: ResolvedConfig) -> int:
    """Into how many parts attention cuts the tiles of chunks along their keys, at most; 0: it does not."""
    if config.batch_invariant or config.attention != "triton" or not spec.native:
        return 0
    shape = config.attention_shape(spec)
    return PARTIAL_ROWS // shape.num_kv_heads if cuts_prefill(shape) else 0


def device_inputs(spec: ModelSpec, config: ResolvedConfig, nano_batches: int) -> DeviceInputs:
    """Of a runner with this configuration. nano_batches: of the pipeline that has most."""
    slots, pages = config.max_num_seqs, -(-config.max_model_len // config.kv.page_size)
    parts = slots * -(-config.max_model_len // INVARIANT_PART_TOKENS) if config.batch_invariant else 1024
    windows = config.attention_shape(spec).windows
    unpacked = 0, 0
    # With batch invariance one kernel computes a chunk, whether its pages find room beside the others' or not.
    if spec.native and not config.batch_invariant and pays(config.attention_shape(spec)):
        tokens = max(UNPACKED_TOKENS[0], min(config.max_model_len, UNPACKED_TOKENS[1])) + config.max_num_batched_tokens
        unpacked = -(-tokens // config.kv.page_size), config.kv.page_size
    layout = Layout.of(
        config.max_num_batched_tokens, slots, spec.heads_per_kv, nano_batches, parts, windows, unpacked,
        _prefill_slots(spec, config), config.pod,
    )  # fmt: skip
    return DeviceInputs(layout, config.device, slots, pages)
