"""An iteration's inputs on their way to the GPU: one slab of int32 words, a ring of pinned copies, one transfer."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from weft.engine.config import Pod
from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.pipeline import Pipeline
from weft.engine.plans.plan import MAX_NANO_BATCHES
from weft.engine.runner.attention_path import AttentionPath
from weft.engine.runner.batch import Batch, sampler_names
from weft.engine.runner.nano import Assignment, NanoBatch, assign
from weft.engine.runner.resolve import ResolvedConfig
from weft.engine.wire.sampling import COLUMNS
from weft.kernels.attention_triton import DecodeWork, cuts_prefill
from weft.kernels.break_evens import BreakEvens, Even
from weft.kernels.fp8_unpack import pays
from weft.kernels.work_lists import (
    FIRST_DECODERS,
    ITEM_FIELDS,
    PART_FIELDS,
    TILE_FIELDS,
    TILE_ROWS,
    decode_items,
    one_launch,
    prefill_items,
    prefill_parts,
    with_decodes,
)

RING = 4
"""pinned copies: more than iterations in flight, so that none is rewritten before its transfer is done"""
INVARIANT_PART_TOKENS = 1024
"""with batch invariance, a request's decode attention is always cut here"""
UNPACKED_TOKENS = 16384, 131072
"""of pages in FP8 that prefill attention may read in 16 bits at once: at least; at most, where contexts are longer"""
PARTIAL_ROWS = 512
"""parts of prefill tiles, times KV heads: two waves of programs and what rounding adds"""
NO_TILES = np.zeros((0, TILE_FIELDS), np.int32)
"""items of prefill attention of an iteration without chunks"""
NO_PARTS = np.zeros((0, PART_FIELDS), np.int32)
_COUNTS = ("tokens", "sampled", "updates")
# then prefill items of each nano-batch, live tokens behind each beginning of a range, and decode items of each
# nano-batch and window
_PREFILL, _LIVE, _DECODE = (len(_COUNTS) + i * MAX_NANO_BATCHES for i in range(3))
# Of the last layer, where rows leave: how many are left, then prefill items of each nano-batch. Not at the beginning of
# their column: kernels compiled for counts that are no multiple of 16 bytes away from anything serve these as well.
_LEFT, _LEFT_PREFILL = 1, 2


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
            "counts": (_DECODE + MAX_NANO_BATCHES * len(self.windows), False),
            "token_ids": (t, False),
            "token_slots": (t, False),
            "positions": (t, False),
            "slot_mapping": (t, False),
            "decode_items": (self.decode_lists * self.max_decode_items * ITEM_FIELDS, False),
            "prefill_items": (prefill_items, False),
            "decoders": (self.nano_batches, False),
            **(unpacked if self.unpacked[0] else {}),
            "left": (_LEFT_PREFILL + MAX_NANO_BATCHES, False),
            "left_tokens": (t, False),
            "left_items": (prefill_items, False),
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
        self.count["left"] = self.column["left"][_LEFT : _LEFT + 1]
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
            window: DecodeWork(lists[at], self.column["counts"][_DECODE + at : _DECODE + at + 1])
            for at, window in enumerate(self.layout.windows, first)
        }

    def prefill_work(self, nano: int) -> tuple[Tensor, Tensor]:
        """Prefill attention of a nano-batch: items `[max, 4]`, or `[max, 8]` of parts, and how many there are `[1]`."""
        items = self.column["prefill_items"].view(self.layout.nano_batches, -1, self.layout.prefill_fields)[nano]
        return items, self.column["counts"][_PREFILL + nano : _PREFILL + nano + 1]

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
        return items, self.column["left"][_LEFT_PREFILL + nano : _LEFT_PREFILL + nano + 1]

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
        counts, left, places = host["counts"], host["left"], None
        split = cut = as_tiles = False
        fused = self.fuses(pipeline)
        if pipeline.behind:
            assigned = assigned._replace(read=batch.rows_by_reader)
            assert assigned.read is not None
            places = assigned.read if assigned.places is None else assigned.places[assigned.read]
            left[_LEFT] = len(places)
            host["left_tokens"][: len(places)] = places
            places = np.sort(places)
        for k, (nano, sms) in enumerate(zip(assigned.nano_batches, pipeline.decode_sms, strict=True)):
            for at, window in enumerate(self.layout.windows, k * len(self.layout.windows)):
                decode = decode_items(
                    batch.kv_len[nano.decodes], num_kv_heads=num_kv_heads, num_programs=sms * per_sm,
                    max_slots=self.layout.max_part_slots, part_tokens=part_tokens, window=window, page_size=page_size,
                )  # fmt: skip
                split = split or bool((decode[:, 5] > 1).any())
                decode[:, 1] = batch.slots[nano.decodes[decode[:, 1]]]  # page tables are kept by slot
                decode[:, 0] += nano.first_decode
                self._write(host["decode_items"], decode, at, self.layout.decode_lists)
                counts[_DECODE + at] = len(decode)
            prefill, wide = self._prefill(host, k, nano, batch, group, page_size)
            if self.layout.prefill_slots:
                decode, prefill, as_tiles = self._one_launch(
                    host, k, nano, batch, decode, prefill, fused, num_kv_heads=num_kv_heads, group=group, sms=sms
                )
                counts[_DECODE + at] = len(decode)
                cut = cut or bool(((prefill[:, 7] & 65535) > 1).any())
            self._write(host["prefill_items"], prefill, k, self.layout.nano_batches)
            counts[_PREFILL + k] = len(prefill)
            if places is not None:
                kept = _tiles_of(prefill, places)
                self._write(host["left_items"], kept, k, self.layout.nano_batches)
                left[_LEFT_PREFILL + k] = len(kept)
            if places is not None and self.layout.unpacked[0]:
                kept = _tiles_of(wide, places)
                self._write(host["left_unpacked_items"], kept, k, self.layout.nano_batches)
                host["unpacked"][3 * k + 2] = len(kept)
        self.attention = AttentionPath.of(
            batch.num_decodes, batch.num_chunks, lanes=len(pipeline.lanes), fused=fused, as_tiles=as_tiles,
            in_turn=int(host["decoders"][0]) >= pipeline.decode_sms[0], split_decodes=split, cut_chunks=cut,
        )  # fmt: skip
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

    def _one_launch(
        self, host: dict[str, np.ndarray], k: int, nano: NanoBatch, batch: Batch, decode: npt.NDArray[np.int32],
        tiles: npt.NDArray[np.int32], fused: bool, *, num_kv_heads: int, group: int, sms: int,
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32], bool]:  # fmt: skip
        """Items of both lists of the k-th nano-batch where tiles may be cut, and whether decodes are tiles. Who begins
        with decodes, where both are one launch, is written."""
        options = {"num_kv_heads": num_kv_heads, "num_programs": sms, "max_slots": self.layout.prefill_slots}
        by_rule = fused and self.layout.pod == "auto"
        host["decoders"][k] = sms if by_rule else min(FIRST_DECODERS, sms)
        if not len(tiles):
            return decode, NO_PARTS, False
        if not by_rule:
            return decode, prefill_parts(tiles, **options), False
        even = self._measured(batch, nano)
        lengths, slots = batch.kv_len[nano.decodes], batch.slots[nano.decodes]
        both = partial(with_decodes, tiles, nano.first_decode, lengths, slots, group=group)
        found = one_launch(decode, tiles, both, way=None if even is None else even.way, **options)
        host["decoders"][k] = found.programs if even is None else min(even.programs, sms)
        return found.decodes, found.parts, len(found.decodes) < len(decode)

    def _measured(self, batch: Batch, nano: NanoBatch) -> Even | None:
        """What was measured to be the quickest way for decodes and chunks of this nano-batch, if anything was."""
        if self.break_evens is None or self.layout.pod != "auto":
            return None
        return self.break_evens.of_batch(nano.chunk_len, nano.chunk_context, batch.kv_len[nano.decodes])

    def _prefill(
        self, host: dict[str, np.ndarray], k: int, nano: NanoBatch, batch: Batch, group: int, page_size: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:  # fmt: skip
        """Items of prefill attention of the k-th nano-batch: of chunks whose pages are read as they are, and of those
        that are read in 16 bits. The latter, as far as there is room for their pages, are in the slab already."""
        if not len(nano.chunk_rows):  # most iterations: making lists of nothing took 40 % of what `send` does
            if self.layout.unpacked[0]:
                host["unpacked"][3 * k : 3 * k + 2] = 0
            return NO_TILES, NO_TILES
        slots = batch.slots[nano.chunk_rows]

        def items(these: npt.NDArray[np.bool_], page_rows: npt.NDArray[np.integer]) -> npt.NDArray[np.int32]:
            start, length, context = nano.chunk_start[these], nano.chunk_len[these], nano.chunk_context[these]
            return prefill_items(start, length, context, page_rows[these], group=group)

        room = self.layout.unpacked[0]
        if not room:
            none = np.zeros(len(slots), np.bool_)
            return items(~none, slots), items(none, slots)
        pages = -(-(nano.chunk_context + nano.chunk_len) // page_size)
        ends = np.cumsum(pages)
        fits = ends <= room
        wide = items(fits, ends - pages)
        self._write(host["unpacked_items"], wide, k, self.layout.nano_batches)
        of = [batch.page_table[row, :count] for row, count in zip(nano.chunk_rows[fits], pages[fits], strict=True)]
        self._write(host["unpacked_pages"], np.concatenate([slots[:0], *of]), k, self.layout.nano_batches)
        host["unpacked"][3 * k : 3 * k + 2] = int(pages[fits].sum()), len(wide)
        return items(~fits, slots), wide

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


def _tiles_of(items: npt.NDArray[np.int32], places: npt.NDArray[np.int64]) -> npt.NDArray[np.int32]:
    """Those items of prefill attention that have a token at one of the places `[N]`, which ascend."""
    first, behind = items[:, 0], items[:, 0] + items[:, 1]
    return items[np.searchsorted(places, behind) > np.searchsorted(places, first)]


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
