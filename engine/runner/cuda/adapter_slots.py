"""`AdapterSlots`: LoRA adapters in a GPU's memory, at addresses that captured graphs read."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.errors import ModelError, OutOfMemory
from weft.engine.model.adapter import Adapter
from weft.engine.model.spec import ModelSpec
from weft.engine.runner.options.footprint import GIB
from weft.kernels.matmul.adapter_depth import columns
from weft.kernels.matmul.adapter_work import slot_rank

STEP = 16  # Matrices begin at multiples of this.


class _Place(NamedTuple):
    """Where a slot keeps the matrices of a projection. A projection has P parts, such as q, k and v."""

    widths: tuple[int, ...]  # Output rows of each part.
    begins: tuple[int, ...]  # `LowRank.begin` of each part.
    step: int  # Between two output rows of a part.
    depth: int
    a: int  # `[P, R, K]` begin here in the slot's numbers, then `[P, R]` of `shift`.
    shift: int  # -1: no norm with a bias precedes the projection.
    b: int  # The `[n, R]` of each part begin here in a staged adapter.


class Matrices(NamedTuple):
    """A projection's matrices in all slots; see `adapter_depth`."""

    width: int  # P * R columns of each slot.
    a: Tensor  # `[S, P * R * K]`
    b: Tensor  # `[N, C]`: slot s has columns `s * width ..`, in which a part has R columns and others' rows are zero.
    shift: Tensor | None  # `[S, P * R]`: A times the bias of the norm before it.


@dataclass(frozen=True, slots=True)
class StagedAdapter(Adapter):
    """An adapter as a slot keeps it, in pinned host memory."""

    packed: Tensor = field(default_factory=lambda: torch.empty(0))


def _parts(spec: ModelSpec, name: str) -> tuple[tuple[int, ...], tuple[int, ...], bool]:
    """Return the widths and first output rows of a projection's parts, and whether it reads the stream."""
    inter, heads, kv = spec.intermediate_size, spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    return {
        "qkv": ((heads, kv, kv), (0, heads, heads + kv), True),
        "gate_up": ((inter, inter), (0, 1), True),
        "up": ((inter,), (0,), True),
        "o": ((spec.hidden_size,), (0,), False),
        "down": ((spec.hidden_size,), (0,), False),
    }[name]


_PROJECTIONS = ("qkv", "o", "gate_up", "up", "down")


def adapter_widths(spec: ModelSpec, rank: int) -> tuple[int, ...]:
    """Return the columns that a slot of this rank has in a model's projections, each once."""
    names = {op.name for layer in range(spec.num_layers) for op in spec.layer_operations(layer)}
    return tuple(sorted({len(_parts(spec, name)[0]) * slot_rank(rank) for name in names & {*_PROJECTIONS}}))


class AdapterSlots(MutableMapping[int, Adapter]):
    """Adapters by number. An adapter is one copy to the GPU, from which each part's B goes to its columns.

    The owner deletes an adapter only when no iteration in flight uses it."""

    def __init__(self, spec: ModelSpec, count: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `OutOfMemory`."""
        self.rank = slot_rank(max_rank)
        self._places: list[dict[str, _Place]] = []
        self._columns: list[dict[str, Tensor]] = []
        at, behind = 0, 0
        operations = [
            [op for op in spec.layer_operations(layer) if op.name in _PROJECTIONS] for layer in range(spec.num_layers)
        ]
        for own in operations:
            places = {}
            for op in own:
                widths, begins, reads = _parts(spec, op.name)
                shift = at + len(widths) * self.rank * op.inner
                if not (reads and spec.norm.bias and spec.placement.before):
                    at_end, shift = shift, -1
                else:
                    at_end = shift + len(widths) * self.rank
                places[op.name] = _Place(
                    widths, begins, 2 if op.name == "gate_up" else 1, op.inner, at, shift, behind
                )  # fmt: skip
                at = -(-at_end // STEP) * STEP
                behind += sum(widths) * self.rank
            self._places.append(places)
        self._size, self._behind, self._dtype = at, behind, dtype
        try:
            self._slots = torch.zeros(count, at, dtype=dtype, device=device)
            self._incoming = torch.zeros(behind, dtype=dtype, device=device)
            for places in self._places:
                shapes = {
                    name: (sum(place.widths), columns(count, len(place.widths) * self.rank))
                    for name, place in places.items()
                }
                self._columns.append(
                    {name: torch.zeros(*shape, dtype=dtype, device=device) for name, shape in shapes.items()}
                )
        except torch.OutOfMemoryError:
            wide = sum(
                sum(p.widths) * columns(count, len(p.widths) * self.rank) for own in self._places for p in own.values()
            )
            size = (count * at + behind + wide) * dtype.itemsize / GIB
            raise OutOfMemory(f"{count} adapters need {size:.1f} GiB: lower --max-loras or --max-lora-rank") from None
        self.layers = [
            {name: self._matrices_of(place, b[name]) for name, place in own.items()}
            for own, b in zip(self._places, self._columns, strict=True)
        ]
        """The matrices of each layer's projections, by operation."""
        self.shapes = {(place.depth, len(place.widths) * self.rank) for own in self._places for place in own.values()}
        """The depth and `Matrices.width` of the projections."""
        self.ranks = np.zeros(count, np.int32)
        self._held: dict[int, tuple[int, Adapter]] = {}  # Slot and adapter by number.
        self._free = list(range(count))
        runs = device.type != "meta"
        self._copies = torch.cuda.Stream(device) if runs else None
        self._copied: dict[int, torch.cuda.Event] = {}  # Events of copies that no iteration has waited for, by slot.

    def _matrices_of(self, place: _Place, b: Tensor) -> Matrices:
        width = len(place.widths) * self.rank
        shift = self._slots[:, place.shift : place.shift + width] if place.shift >= 0 else None
        return Matrices(width, self._slots[:, place.a : place.a + width * place.depth], b, shift)

    @property
    def count(self) -> int:
        return len(self.ranks)

    def stage(self, adapter: Adapter) -> StagedAdapter:
        """Return the adapter in a slot's layout. Any thread may call it. Raises `OutOfMemory`, and `ModelError` for
        numbers that the dtype cannot hold: rows without the adapter multiply them by zero."""
        try:
            packed = torch.zeros(self._size + self._behind, dtype=self._dtype, pin_memory=self._slots.is_cuda)
        except RuntimeError:
            size = (self._size + self._behind) * self._dtype.itemsize / GIB
            raise OutOfMemory(f"no {size:.1f} GiB of pinned host memory to copy an adapter from") from None
        for places, matrices in zip(self._places, adapter.layers, strict=True):
            for name, parts in matrices.items():
                place = places[name]
                count = len(place.widths) * self.rank * place.depth
                a = packed[place.a : place.a + count].view(len(place.widths), self.rank, place.depth)
                for each in parts:
                    part, rank = place.begins.index(each.begin), len(each.a)
                    a[part, :rank] = each.a
                    first = self._size + place.b + sum(place.widths[:part]) * self.rank
                    packed[first : first + len(each.b) * self.rank].view(-1, self.rank)[:, :rank] = each.b
                    if each.shift is not None:
                        packed[place.shift :][part * self.rank : part * self.rank + rank] = each.shift
        if not packed.isfinite().all():
            raise ModelError(f"an adapter has numbers that are too large for {str(self._dtype).removeprefix('torch.')}")
        return StagedAdapter((), adapter.rank, packed)

    def slots_of(self, numbers: np.ndarray) -> np.ndarray:
        """Return the slots of adapters `[n]` by number; -1 for 0."""
        known = {0: -1} | {number: slot for number, (slot, _) in self._held.items()}
        return np.array([known[number] for number in numbers.tolist()], np.int32)

    def wait_for_copies(self, stream: torch.cuda.Stream) -> None:
        """Make the stream wait for the adapters that are still being copied."""
        for event in self._copied.values():
            stream.wait_event(event)
        self._copied.clear()

    def __setitem__(self, number: int, adapter: Adapter) -> None:
        assert isinstance(adapter, StagedAdapter)
        assert number not in self._held
        slot = self._free.pop()
        with torch.cuda.stream(self._copies), torch.inference_mode():
            self._slots[slot].copy_(adapter.packed[: self._size], non_blocking=True)
            self._incoming.copy_(adapter.packed[self._size :], non_blocking=True)
            self._place_columns(slot)
            event = self._copied[slot] = torch.cuda.Event()
            event.record(self._copies)
        self.ranks[slot] = adapter.rank
        self._held[number] = slot, Adapter((), adapter.rank)

    def _place_columns(self, slot: int) -> None:
        """Copy the B of all parts from `_incoming` to a slot's columns."""
        rank = self.rank
        for places, matrices in zip(self._places, self._columns, strict=True):
            for name, place in places.items():
                at, b = place.b, matrices[name]
                for part, (begin, rows) in enumerate(zip(place.begins, place.widths, strict=True)):
                    column = (slot * len(place.widths) + part) * rank
                    target = b[begin : begin + (rows - 1) * place.step + 1 : place.step, column : column + rank]
                    target.copy_(self._incoming[at : at + rows * rank].view(rows, rank))
                    at += rows * rank

    def __getitem__(self, number: int) -> Adapter:
        return self._held[number][1]

    def __delitem__(self, number: int) -> None:
        slot, _ = self._held.pop(number)
        self._free.append(slot)

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
