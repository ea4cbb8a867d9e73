"""Recurrent states of requests in pages of a poisoned pool, and an iteration of decodes and chunks that uses them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.engine.memory.state_layout import StateLayout
from weft.engine.model.parts import StateSpec
from weft.engine.model.parts import StateTensor as StateShape
from weft.kernels.reference.states import StateWork, plan_states
from weft.tools.kernels.states.state_pages import (
    ChunkWork,
    StateTables,
    StateTensor,
    chunk_lists,
    chunk_work,
    unit_places,
)

LAYER = 1  # The layer under test; layer 0's state lies in the same pages.


class Row(NamedTuple):
    """A request of an iteration."""

    tokens: int
    context: int
    checkpoints: tuple[int, ...] = ()  # Its tokens before each checkpoint.
    in_place: bool = True  # Whether the new state replaces the old one.


class Scene:
    """Requests `rows`, decodes first, and their states in pages; every other byte of the pool is NaN."""

    def __init__(
        self, shapes: dict[str, tuple[int, ...]], rows: Sequence[Row], decodes: int, device: str, *,
        conv_dtype: str = "float32", dtype: str = "float32", page_bytes: int = 6144, padding: int = 0,
    ) -> None:  # fmt: skip
        tensors = [StateShape(name, s, conv_dtype if name == "conv" else dtype) for name, s in shapes.items()]
        self.layout = StateLayout.of([StateSpec(tuple(tensors))] * 2, page_bytes)
        self.rows, self.decodes, self.device = rows, decodes, device
        self.requests, self.padding = len(rows), padding
        n, ends = self.layout.pages, sum(len(row.checkpoints) for row in rows)
        pages = 1 + torch.randperm((2 * len(rows) + ends) * n).view(-1, n)
        self.pool = torch.full((len(pages) * n + 1, page_bytes), 0xFF, dtype=torch.uint8)
        self.read, self.write, self.kept = pages[: len(rows)], pages[len(rows) : 2 * len(rows)], pages[2 * len(rows) :]
        in_place = torch.tensor([row.in_place for row in rows])[:, None]
        self.write = torch.where(in_place, self.read, self.write)
        old = torch.tensor([row.context > 0 for row in rows])
        self.before: dict[str, Tensor] = {}
        for t in tensors:
            drawn = torch.randn(len(rows), *t.shape).to(getattr(torch, t.dtype)).float()
            self.before[t.name] = drawn * old.view(-1, *[1] * len(t.shape))
        given = {name: value[old] for name, value in self.before.items()}
        self.layout.write(self.pool, self.read[old], LAYER, given)
        self.given = self.pool.clone()
        self.pool = self.pool.to(device)

    def place(self, state: dict[str, Tensor]) -> None:
        """Write the state that the last row starts from."""
        pool = self.pool.cpu()
        self.layout.write(pool, self.read[-1:], LAYER, state)
        self.pool.copy_(pool)

    @property
    def lengths(self) -> np.ndarray:
        return np.array([row.tokens for row in self.rows])

    @property
    def context(self) -> np.ndarray:
        return np.array([row.context for row in self.rows])

    @property
    def tokens(self) -> int:
        return int(self.lengths.sum())

    @property
    def _ends(self) -> tuple[np.ndarray, np.ndarray]:
        pairs = [(i, end) for i, row in enumerate(self.rows) for end in row.checkpoints]
        rows, ends = np.array(pairs, np.int64).reshape(-1, 2).T
        return rows, ends

    def plan(self) -> StateWork:
        """The reference's work of all rows."""
        return plan_states(self.lengths, self.context, *self._ends)

    def tables(self) -> StateTables:
        def table(pages: Tensor) -> Tensor:
            padded = torch.cat((pages, pages.new_zeros(self.padding, pages.shape[1])))
            return padded.to(torch.int32).to(self.device)

        return StateTables(table(self.read), table(self.write))

    def tensor(self, name: str) -> StateTensor:
        names = [t.name for t in self.layout.states[LAYER].tensors]  # type: ignore[union-attr]
        shape = self.layout.states[LAYER].tensors[names.index(name)]  # type: ignore[union-attr]
        dtype = getattr(torch, shape.dtype)
        units = shape.shape[0] if len(shape.shape) > 2 else 1
        size = int(np.prod(shape.shape)) // units * dtype.itemsize
        places = unit_places(self.layout.runs[LAYER][names.index(name)], units, size, dtype.itemsize)
        return StateTensor(self.pool.view(dtype), torch.from_numpy(places).to(self.device))

    def work(self) -> ChunkWork:
        starts = np.cumsum(self.lengths) - self.lengths
        own = slice(self.decodes, None)
        lists = chunk_lists(
            starts[own], self.lengths[own], self.context[own], np.arange(self.requests)[own], *self._ends
        )
        return chunk_work(lists, self.kept.numpy(), self.device)

    def positions(self) -> Tensor:
        """Return the positions of the decodes and of padding."""
        return torch.tensor([*self.context[: self.decodes], *[0] * self.padding], dtype=torch.int32, device=self.device)

    def count(self) -> Tensor:
        return torch.tensor([self.decodes], dtype=torch.int32, device=self.device)

    def after(self, name: str) -> Tensor:
        """The states now at the rows' ends and in the checkpoints, `[R + E, ...]` float32."""
        pages = torch.cat((self.write, self.kept))
        return self.layout.read(self.pool.cpu(), pages, LAYER)[name].float()

    def assert_others_untouched(self) -> None:
        """No byte changed but those of this layer's new states."""
        pool = self.pool.cpu().clone()
        pages = torch.cat((self.write, self.kept))
        self.layout.write(pool, pages, LAYER, self.layout.read(self.given, pages, LAYER))
        assert torch.equal(pool, self.given)


def close(a: Tensor, b: Tensor, tolerance: float = 2e-5) -> None:
    a, b = a.float().cpu(), b.float()
    assert a.shape == b.shape
    assert not a.isnan().any()
    assert (a - b).abs().max() <= tolerance * b.abs().max().clamp(min=1e-3)
