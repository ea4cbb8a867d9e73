"""`DeviceInputs`: sends an iteration's inputs to the GPU as one slab of int32 words, from a ring of pinned copies."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.model.vision.family import Vision
from weft.engine.plans.pipeline import Pipeline
from weft.engine.runner.cuda.adapter_slots import AdapterSlots, adapter_widths
from weft.engine.runner.iteration.attention_lists import AttentionGrid, AttentionLists
from weft.engine.runner.iteration.attention_path import AttentionPath
from weft.engine.runner.iteration.batch import Batch, SamplingInputs, Verified, sampler_names
from weft.engine.runner.iteration.input_layout import COUNTS, DECODE, KEPT, KEPT_PREFILL, LIVE, PREFILL, Layout
from weft.engine.runner.iteration.nano import Assignment, assign
from weft.engine.runner.options.resolve import ResolvedConfig
from weft.kernels.attention.break_evens import BreakEvens
from weft.kernels.attention.fp8_unpack import unpacking_is_faster
from weft.kernels.attention.triton_backend import DecodeWork, cuts_prefill
from weft.kernels.attention.work_lists import ITEM_FIELDS, TILE_FIELDS
from weft.kernels.matmul.adapter_depth import Steps, Work
from weft.kernels.matmul.adapter_work import ADAPTER_FIELDS, sort_rows, tile_steps, used_slots

RING = 4
"""Pinned copies: more than iterations in flight, so that none is rewritten before its transfer has ended."""
INVARIANT_SPLIT_TOKENS = 1024  # Tokens per split of a request's decode attention with batch invariance.
UNPACKED_TOKENS = 16384, 131072
"""Minimum and maximum tokens of FP8 pages that prefill attention reads unpacked to 16 bits at once."""
PARTIAL_ROWS = 512  # Splits of prefill tiles times KV heads: two waves of programs plus rounding.


class DeviceInputs:
    """The slab on the device, its columns by name, and the ring that fills it. All addresses are fixed."""

    def __init__(self, layout: Layout, device: torch.device, num_slots: int, max_pages: int) -> None:
        self.layout = layout
        columns = layout.columns()
        words = sum(-(-size // 4) * 4 for size, _ in columns.values())  # 16-byte aligned columns
        self.slab = torch.zeros(words, dtype=torch.int32, device=device)
        runs = device.type != "meta"  # the meta device stands for a GPU
        self._ring = [torch.zeros(words, dtype=torch.int32, pin_memory=runs) for _ in range(RING if runs else 0)]
        self._host: list[dict[str, np.ndarray]] = [self._split(r.numpy(), columns, np.float32) for r in self._ring]
        self.column: dict[str, Tensor] = self._split(self.slab, columns, torch.float32)
        self.count = {name: self.column["counts"][i : i + 1] for i, name in enumerate(COUNTS)}
        self.count["kept"] = self.column["kept"][KEPT : KEPT + 1]
        self.page_table = torch.zeros(num_slots, max_pages, dtype=torch.int32, device=device)
        self._sent_pages = np.zeros((num_slots, max_pages), np.int32)
        self._turn = 0
        self.attention: AttentionPath | None = None  # Path of the last batch, for weft's own kernels.
        self.break_evens: BreakEvens | None = None  # Measured times for `--pod auto`.

    @staticmethod
    def _split(slab: Any, columns: dict[str, tuple[int, bool]], float32: Any) -> dict[str, Any]:
        """Split an array or tensor into its columns."""
        out, at = {}, 0
        for name, (size, is_float) in columns.items():
            column = slab[at : at + size]
            out[name] = column.view(float32) if is_float else column
            at += -(-size // 4) * 4
        return out

    def clear(self) -> None:
        """Set the inputs to no tokens, on the current stream. The next `send` overwrites everything."""
        self.slab.zero_()

    def decode_work(self, nano: int) -> dict[int | None, DecodeWork]:
        """Return the decode work of a nano-batch, by window."""
        lists = self.column["decode_items"].view(self.layout.decode_lists, -1, ITEM_FIELDS)
        first = nano * len(self.layout.windows)
        return {
            window: DecodeWork(lists[at], self.column["counts"][DECODE + at : DECODE + at + 1])
            for at, window in enumerate(self.layout.windows, first)
        }

    def prefill_work(self, nano: int) -> tuple[Tensor, Tensor]:
        """Return a nano-batch's prefill items `[max, 4]`, or `[max, 8]` with splits, and their number `[1]`."""
        items = self.column["prefill_items"].view(self.layout.nano_batches, -1, self.layout.prefill_fields)[nano]
        return items, self.column["counts"][PREFILL + nano : PREFILL + nano + 1]

    def unpacked_work(self, nano: int, *, kept: bool = False) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return a nano-batch's unpacked pages `[max]`, their number, its items `[max, 4]` that read them, and their
        number; see `Unpacked`. kept: as in `kept_prefill_work`."""
        nano_batches, counts = self.layout.nano_batches, self.column["unpacked"]
        pages = self.column["unpacked_pages"].view(nano_batches, -1)[nano]
        items = self.column["kept_unpacked_items" if kept else "unpacked_items"]
        number = 3 * nano + (2 if kept else 1)
        return (
            pages, counts[3 * nano : 3 * nano + 1], items.view(nano_batches, -1, TILE_FIELDS)[nano],
            counts[number : number + 1],
        )  # fmt: skip

    def kept_prefill_work(self, nano: int) -> tuple[Tensor, Tensor]:
        """`prefill_work` of the last layer, if it drops rows: only tiles with a kept row."""
        items = self.column["kept_items"].view(self.layout.nano_batches, -1, self.layout.prefill_fields)[nano]
        return items, self.column["kept"][KEPT_PREFILL + nano : KEPT_PREFILL + nano + 1]

    def decoders(self, nano: int) -> Tensor:
        """Return `[1]` number of programs that begin with decodes, if a nano-batch's attention is one launch."""
        return self.column["decoders"][nano : nano + 1]

    def fuses(self, pipeline: Pipeline) -> bool:
        """Return whether decodes and chunks are one launch: they must follow each other in the only lane."""
        if self.layout.pod == "off" or not self.layout.prefill_slots:
            return False
        if len(pipeline.lanes) > 1 or len(pipeline.nano_batches) > 1:
            return False
        return {Role.DECODE_ATTENTION, Role.PREFILL_ATTENTION} <= {op.role for _, op in pipeline.operations}

    def sampler_arguments(self, rows: int) -> dict[str, Tensor]:
        """Return the samplers' arguments except the logits, by name, `[rows]` each."""
        return {name: self.column[name][:rows] for name in sampler_names()}

    def live(self, pipeline: Pipeline, begin: int) -> Tensor:
        """Return `[1]` number of the iteration's tokens from row `begin` on, or zero."""
        at = LIVE + pipeline.begins.index(begin)
        return self.column["counts"][at : at + 1]

    def adapter_work(self, *, kept: bool = False) -> Work:
        """Return which rows have which LoRA adapter. kept: of the rows that are kept in the last layer."""
        rows, items, counts = (
            self.column[f"{'kept_' * kept}adapter_{name}"] for name in ("rows", "items", "counts")
        )  # fmt: skip
        return Work(rows, items.view(-1, ADAPTER_FIELDS), counts)

    def adapter_steps(self, *, kept: bool = False) -> dict[int, dict[int, Steps]]:
        """Return `adapter_depth.More.steps` by the columns of an adapter. kept: of kept rows."""
        found: dict[int, dict[int, Steps]] = {width: {} for width in self.layout.adapter_widths}
        for (width, rows), (tiles, blocks) in self.layout.adapter_steps().items():
            column = self.column[f"{'kept_' * kept}adapter_steps_{width}_{rows}"]
            found[width][rows] = Steps(column[tiles : tiles * (1 + blocks)].view(tiles, blocks), column[:tiles])
        return found

    def send(
        self, batch: Batch, pipeline: Pipeline, grid: AttentionGrid, adapters: AdapterSlots | None = None
    ) -> Assignment:
        """Write the batch to the next ring slot and start its transfer on the current stream.

        adapters: given if the batch has any; the pipeline is then serial. Padding tokens up to the token bucket use the
        dummy page. Returns the rows of the tokens."""
        verified = batch.verified
        if verified is not None:
            batch = batch.by_query()
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
        if adapters is not None:
            self._write_adapters(host, batch, adapters, pipeline.tokens, assigned)
        self._write_sampling(host, batch.sampling, assigned)
        if self.layout.verifies:
            self._write_verified(host, len(batch.sampling.slots), verified)
        counts[: len(COUNTS)] = (t, len(batch.sampling.slots), self._page_updates(batch, host))
        self.slab.copy_(self._ring[self._turn], non_blocking=True)
        return assigned

    @staticmethod
    def _write_tokens(host: dict[str, np.ndarray], batch: Batch, bucket: int, assigned: Assignment) -> None:
        t, d = batch.num_tokens, batch.num_decodes
        order = slice(None) if assigned.order is None else assigned.order
        token_slots = np.full(t, -1, np.int32)
        token_slots[:d] = np.where(batch.token_ids[:d] == -1, batch.slots[:d], -1)
        columns = (
            ("token_ids", batch.token_ids, 0),
            ("token_slots", token_slots, -1),
            ("positions", batch.positions, 0),
            ("slot_mapping", batch.slot_mapping, 0),
        )
        for name, values, filler in columns:
            host[name][:t] = values[order]
            host[name][t:bucket] = filler
        if "image_rows" in host:
            host["image_rows"][:t] = -1 if batch.images is None else batch.images.rows[order]
            host["image_rows"][t:bucket] = -1
        if "rope_positions" in host:
            three = host["rope_positions"].reshape(3, -1)
            given = None if batch.images is None else batch.images.positions
            three[:, :t] = batch.positions[order] if given is None else given[:, order]
            three[:, t:bucket] = 0
        if "until" in host:
            host["until"][:t] = (batch.positions if batch.until is None else batch.until)[order]
            host["until"][t:bucket] = 0

    def _write_attention(
        self, host: dict[str, np.ndarray], batch: Batch, pipeline: Pipeline, grid: AttentionGrid, assigned: Assignment
    ) -> AttentionPath:
        fused = self.fuses(pipeline) and batch.adapters is None
        lists = AttentionLists(self.layout, grid, batch, host, fused=fused, break_evens=self.break_evens)
        if assigned.read is not None:
            lists.keep_rows(assigned.read if assigned.places is None else assigned.places[assigned.read])
        for k, (nano, sms) in enumerate(zip(assigned.nano_batches, pipeline.decode_sms, strict=True)):
            lists.add(k, nano, sms)
        return AttentionPath.of(
            batch.num_decodes, batch.num_chunks, lanes=len(pipeline.lanes), fused=fused, as_tiles=lists.as_tiles,
            together=lists.together,
            in_turn=int(host["decoders"][0]) >= pipeline.decode_sms[0], split_decodes=lists.splits_decodes,
            cut_chunks=lists.cuts_chunks,
        )  # fmt: skip

    def _write_adapters(
        self, host: dict[str, np.ndarray], batch: Batch, adapters: AdapterSlots, bucket: int, assigned: Assignment
    ) -> None:
        assert batch.adapters is not None
        slots = np.repeat(adapters.slots_of(batch.adapters), batch.query_len)
        kept = slots[:0] if assigned.read is None else slots[assigned.read]
        for prefix, own in (("", slots), ("kept_", kept)):
            rows, items, totals = sort_rows(own, adapters.ranks, bucket)
            host[f"{prefix}adapter_rows"][: len(rows)] = rows
            host[f"{prefix}adapter_items"][: items.size] = items.ravel()
            host[f"{prefix}adapter_counts"][:] = totals
            used = used_slots(own, len(adapters.ranks))
            for (width, tile), (tiles, _) in self.layout.adapter_steps().items():
                blocks, counts = tile_steps(used, tile, width)
                column = host[f"{prefix}adapter_steps_{width}_{tile}"]
                column[: len(counts)], column[len(counts) : tiles] = counts, 0
                column[tiles : tiles + blocks.size] = blocks.ravel()

    @staticmethod
    def _write_sampling(host: dict[str, np.ndarray], s: SamplingInputs, assigned: Assignment) -> None:
        n = len(s.slots)
        host["slots"][:n] = s.slots
        for name, values in s.sampler_arguments().items():
            host[name][:n] = values
        host["logit_tokens"][:n] = s.logit_tokens if assigned.places is None else assigned.places[s.logit_tokens]
        host["logit_tokens"][n:] = 0
        host["temperature"][n:] = 0.0  # padding rows are greedy, which is the least work

    @staticmethod
    def _write_verified(host: dict[str, np.ndarray], samples: int, verified: Verified | None) -> None:
        host["first"][:samples] = np.arange(samples) if verified is None else verified.first
        host["expected"][:samples] = -1 if verified is None else verified.expected

    def _page_updates(self, batch: Batch, host: dict[str, np.ndarray]) -> int:
        """Write page-table entries that the device does not have yet. Returns their number."""
        width = batch.page_table.shape[1]
        rows, columns = np.nonzero(self._sent_pages[batch.slots, :width] != batch.page_table)
        if not len(rows):
            return 0
        slots, pages = batch.slots[rows], batch.page_table[rows, columns]
        self._sent_pages[slots, columns] = pages
        at = (slots.astype(np.int64) * self._sent_pages.shape[1] + columns).astype(np.int32)
        if len(at) > self.layout.max_updates:
            # Many long prompts at once are rare: copy their entries before the graph.
            index = torch.from_numpy(at.astype(np.int64)).pin_memory().to(self.slab.device, non_blocking=True)
            value = torch.from_numpy(pages).pin_memory().to(self.slab.device, non_blocking=True)
            self.page_table.view(-1).index_copy_(0, index, value)
            return 0
        host["update_at"][: len(at)] = at
        host["update_page"][: len(at)] = pages
        return len(at)


def _prefill_slots(spec: ModelSpec, config: ResolvedConfig, vision: Vision | None) -> int:
    """Return the maximum of splits of prefill tiles along their keys; 0: tiles are not split."""
    if config.batch_invariant or config.attention != "triton" or not spec.native:
        return 0
    if vision is not None and vision.bidirectional:
        return 0
    shape = config.attention_shape(spec)
    return PARTIAL_ROWS // shape.num_kv_heads if cuts_prefill(shape) else 0


def device_inputs(
    spec: ModelSpec, config: ResolvedConfig, nano_batches: int, vision: Vision | None = None
) -> DeviceInputs:
    """Return the inputs of a runner. nano_batches: maximum over its pipelines. vision: of a model that takes
    images."""
    slots, pages = config.max_num_seqs, -(-config.max_model_len // config.kv.page_size)
    rows = config.max_sampled
    parts = rows * -(-config.max_model_len // INVARIANT_SPLIT_TOKENS) if config.batch_invariant else 1024
    windows = config.attention_shape(spec).windows
    unpacked = 0, 0
    # Batch invariance needs one kernel for a chunk, whether or not its pages could be unpacked.
    if spec.native and not config.batch_invariant and unpacking_is_faster(config.attention_shape(spec)):
        tokens = max(UNPACKED_TOKENS[0], min(config.max_model_len, UNPACKED_TOKENS[1])) + config.max_num_batched_tokens
        unpacked = -(-tokens // config.kv.page_size), config.kv.page_size
    layout = Layout.of(
        config.max_num_batched_tokens, rows, spec.heads_per_kv, nano_batches, parts, windows, unpacked,
        _prefill_slots(spec, config, vision), config.pod, config.drafting is not None, images=vision is not None,
        adapters=config.adapter_slots,
        adapter_widths=adapter_widths(spec, config.adapter_rank) if config.adapter_slots else (),
        rope=vision is not None and any(rope.sections for rope in spec.ropes),
        until=vision is not None and vision.bidirectional > 0,
    )  # fmt: skip
    return DeviceInputs(layout, config.device, slots, pages)
