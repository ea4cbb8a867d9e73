"""`StateLayout`: how a request's recurrent states lie in pages of the KV pool.

The states of all layers together take n pages, which need not be adjacent. A unit is one head of a tensor `[H, ...]`
with three or more dimensions, or a whole smaller tensor. Units are placed largest first, at multiples of 16 bytes. A
unit that fits a page lies in one page.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Self

import torch
from torch import Tensor

from weft.engine.model.parts import StateSpec, StateTensor

UNIT_ALIGNMENT = 16


class Run(NamedTuple):
    """Bytes of a tensor that are adjacent in one page."""

    column: int  # Index among the n pages.
    begin: int  # Byte in the page.
    size: int


@dataclass(frozen=True, slots=True)
class StateLayout:
    """The states of a model's layers in pages of `page_bytes`. Tables of pages are `[R, n]` int64, pools `[pages,
    page_bytes]` uint8 (`kv_layout.page_rows`), both on one device."""

    states: tuple[StateSpec | None, ...]
    page_bytes: int
    pages: int  # n: pages of one request's states; 0 if the model has none.
    runs: tuple[tuple[tuple[Run, ...], ...], ...]
    """The bytes of each tensor of each layer, in order."""

    @classmethod
    def of(cls, states: Sequence[StateSpec | None], page_bytes: int) -> Self:
        tensors = [(i, j, t) for i, state in enumerate(states) if state for j, t in enumerate(state.tensors)]
        runs: dict[tuple[int, int], list[Run]] = {}
        end = 0
        for i, j, tensor in sorted(tensors, key=lambda item: -_unit_bytes(item[2])):
            placed = runs.setdefault((i, j), [])
            for _ in range(_units(tensor)):
                size = _unit_bytes(tensor)
                column, first = divmod(end, page_bytes)
                first = -(-first // UNIT_ALIGNMENT) * UNIT_ALIGNMENT
                if first and first + size > page_bytes:
                    column, first = column + 1, 0
                begin = column * page_bytes + first
                end = begin + size
                _append(placed, begin, size, page_bytes)
        placed_runs = tuple(
            tuple(tuple(runs[i, j]) for j in range(len(state.tensors) if state else 0))
            for i, state in enumerate(states)
        )
        return cls(tuple(states), page_bytes, -(-end // page_bytes), placed_runs)

    @property
    def nbytes(self) -> int:
        """Bytes of the states of one request, without padding."""
        return sum(_units(t) * _unit_bytes(t) for state in self.states if state for t in state.tensors)

    @property
    def reserved(self) -> int:
        """Pages that a request may need besides K and V: two states of its own and one that it starts from."""
        return 3 * self.pages

    @property
    def block(self) -> int:
        """Tokens at whose multiples prompts may be cut without changing bits: for all layers. 1 without states."""
        return math.lcm(*(state.block for state in self.states if state))

    @property
    def id(self) -> str:
        """Part of a page's identity; empty without states."""
        layers = [
            "+".join(f"{t.name} {t.dtype} {'x'.join(map(str, t.shape))}" for t in state.tensors) if state else "-"
            for state in self.states
        ]
        return f"{self.pages} state pages of {self.page_bytes}|{','.join(layers)}" if self.pages else ""

    def gather(self, pool: Tensor, table: Tensor) -> list[dict[str, Tensor]]:
        """Return copies of the states in these pages: for each layer `[R, *shape]` by name, empty without a state."""
        return [self.read(pool, table, layer) for layer in range(len(self.states))]

    def scatter(self, pool: Tensor, table: Tensor, values: Sequence[Mapping[str, Tensor]]) -> None:
        """Write what `gather` returns to these pages. Padding keeps its content."""
        for layer, of_layer in enumerate(values):
            self.write(pool, table, layer, of_layer)

    def read(self, pool: Tensor, table: Tensor, layer: int) -> dict[str, Tensor]:
        """Return copies of one layer's state, `[R, *shape]` by name."""
        found: dict[str, Tensor] = {}
        for tensor, runs in self._of(layer):
            # index_select copies rows; plain indexing would copy byte by byte, a hundred times slower.
            parts = [pool[:, run.begin : run.begin + run.size].index_select(0, table[:, run.column]) for run in runs]
            data = parts[0] if len(parts) == 1 else torch.cat(parts, 1)
            found[tensor.name] = data.contiguous().view(_dtype(tensor)).view(len(table), *tensor.shape)
        return found

    def write(self, pool: Tensor, table: Tensor, layer: int, values: Mapping[str, Tensor]) -> None:
        """Write one layer's state, `[R, *shape]` by name, in the dtypes of the layout."""
        for tensor, runs in self._of(layer):
            data = values[tensor.name].to(_dtype(tensor)).contiguous().flatten(1).view(torch.uint8)
            at = 0
            for run in runs:
                part, target = data[:, at : at + run.size], pool[:, run.begin : run.begin + run.size]
                if not any(n % 8 for n in (at, run.begin, run.size, data.stride(0), pool.stride(0))):
                    part, target = part.view(torch.int64), target.view(torch.int64)  # faster than bytes
                target.index_copy_(0, table[:, run.column], part)
                at += run.size

    def _of(self, layer: int) -> Iterator[tuple[StateTensor, tuple[Run, ...]]]:
        state = self.states[layer]
        return zip(state.tensors if state else (), self.runs[layer], strict=True)


NO_STATES = StateLayout.of((), 1)


def _append(placed: list[Run], begin: int, size: int, page_bytes: int) -> None:
    """Add adjacent bytes of the concatenated pages to a tensor's runs."""
    while size:
        column, first = divmod(begin, page_bytes)
        part = min(size, page_bytes - first)
        if placed and placed[-1].column == column and placed[-1].begin + placed[-1].size == first:
            placed[-1] = placed[-1]._replace(size=placed[-1].size + part)
        else:
            placed.append(Run(column, first, part))
        begin, size = begin + part, size - part


def _dtype(tensor: StateTensor) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, tensor.dtype)
    return dtype


def _units(tensor: StateTensor) -> int:
    return tensor.shape[0] if len(tensor.shape) > 2 else 1


def _unit_bytes(tensor: StateTensor) -> int:
    return math.prod(tensor.shape) // _units(tensor) * _dtype(tensor).itemsize
