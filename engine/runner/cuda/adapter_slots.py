"""`AdapterSlots`: LoRA adapters in a GPU's memory, at addresses that captured graphs read."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.errors import OutOfMemory
from weft.engine.model.adapter import Adapter
from weft.engine.model.spec import ModelSpec
from weft.engine.runner.options.footprint import GIB
from weft.kernels.matmul.adapter_work import slot_rank
from weft.kernels.matmul.adapters import Slots

STEP = 16  # Matrices begin at multiples of this.


class _Place(NamedTuple):
    """Where a slot keeps the matrices of a projection."""

    widths: tuple[int, ...]  # Output rows of each part.
    begins: tuple[int, ...]  # `LowRank.begin` of each part.
    depth: int
    a: int
    b: int
    shift: int  # -1: no norm with a bias precedes the projection.


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


class AdapterSlots(MutableMapping[int, Adapter]):
    """Adapters by number. All slots are one tensor `[S, E]`, so that an adapter is one copy.

    The owner deletes an adapter only when no iteration in flight uses it."""

    def __init__(self, spec: ModelSpec, count: int, max_rank: int, dtype: torch.dtype, device: torch.device) -> None:
        """Raises `OutOfMemory`."""
        self.rank = slot_rank(max_rank)
        self._places: list[dict[str, _Place]] = []
        at = 0
        for layer in range(spec.num_layers):
            places = {}
            for op in spec.layer_operations(layer):
                if op.name not in ("qkv", "o", "gate_up", "up", "down"):
                    continue
                widths, begins, reads = _parts(spec, op.name)
                b = at + len(widths) * self.rank * op.inner
                end = b + sum(widths) * self.rank
                shift = end if reads and spec.norm.bias and spec.placement.before else -1
                places[op.name] = _Place(widths, begins, op.inner, at, b, shift)
                at = end + (len(widths) * self.rank if shift >= 0 else 0)
                at = -(-at // STEP) * STEP
            self._places.append(places)
        self._size, self._dtype = at, dtype
        try:
            self._slots = torch.zeros(count, at, dtype=dtype, device=device)
        except torch.OutOfMemoryError:
            size = count * at * dtype.itemsize / GIB
            raise OutOfMemory(f"{count} adapters need {size:.1f} GiB: lower --max-loras or --max-lora-rank") from None
        self.layers = [{name: self._slots_of(place) for name, place in own.items()} for own in self._places]
        """The matrices of each layer's projections, by operation."""
        self.shapes = {(place.depth, len(place.widths)) for own in self._places for place in own.values()}
        self.max_width = max((sum(place.widths) for own in self._places for place in own.values()), default=0)
        self.ranks = np.zeros(count, np.int32)
        self._held: dict[int, tuple[int, Adapter]] = {}  # Slot and adapter by number.
        self._free = list(range(count))
        runs = device.type != "meta"
        self._copies = torch.cuda.Stream(device) if runs else None
        self._copied: dict[int, torch.cuda.Event] = {}  # Events of copies that no iteration has waited for, by slot.

    def _slots_of(self, place: _Place) -> Slots:
        a_size, b_size = len(place.widths) * self.rank * place.depth, sum(place.widths) * self.rank
        shift = self._slots[:, place.shift : place.shift + len(place.widths) * self.rank] if place.shift >= 0 else None
        return Slots(
            self._slots[:, place.a : place.a + a_size], self._slots[:, place.b : place.b + b_size], place.widths,
            self.rank, shift,
        )  # fmt: skip

    @property
    def count(self) -> int:
        return len(self.ranks)

    def stage(self, adapter: Adapter) -> StagedAdapter:
        """Return the adapter in a slot's layout. Any thread may call it. Raises `OutOfMemory`."""
        try:
            packed = torch.zeros(self._size, dtype=self._dtype, pin_memory=self._slots.is_cuda)
        except RuntimeError:
            size = self._size * self._dtype.itemsize / GIB
            raise OutOfMemory(f"no {size:.1f} GiB of pinned host memory to copy an adapter from") from None
        for places, matrices in zip(self._places, adapter.layers, strict=True):
            for name, parts in matrices.items():
                place = places[name]
                a = packed[place.a : place.b].view(len(place.widths), self.rank, place.depth)
                for each in parts:
                    part, rank = place.begins.index(each.begin), len(each.a)
                    a[part, :rank] = each.a
                    first = place.b + sum(place.widths[:part]) * self.rank
                    packed[first : first + len(each.b) * self.rank].view(-1, self.rank)[:, :rank] = each.b
                    if each.shift is not None:
                        packed[place.shift :][part * self.rank : part * self.rank + rank] = each.shift
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
            self._slots[slot].copy_(adapter.packed, non_blocking=True)
            event = self._copied[slot] = torch.cuda.Event()
            event.record(self._copies)
        self.ranks[slot] = adapter.rank
        self._held[number] = slot, Adapter((), adapter.rank)

    def __getitem__(self, number: int) -> Adapter:
        return self._held[number][1]

    def __delitem__(self, number: int) -> None:
        slot, _ = self._held.pop(number)
        self._free.append(slot)

    def __iter__(self) -> Iterator[int]:
        return iter(self._held)

    def __len__(self) -> int:
        return len(self._held)
