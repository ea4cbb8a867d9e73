"""Work lists of attention executed in torch as the kernels do: items in any order, partial results left in slots and
folded. It reads only what an item names, so that over pages of NaN a correct result proves the list correct."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Scores(NamedTuple):
    """Changes of a layer to its scores, as the kernels take them."""

    scale: float | None = None
    window: int | None = None
    softcap: float = 0.0
    sinks: Tensor | None = None


PLAIN = Scores()


def _part(
    q: Tensor, kv: Tensor, layer: int, pages: Tensor, keys: range, first_seen: Tensor, last_seen: Tensor, how: Scores
) -> Tensor:  # fmt: skip
    """Attention of queries `[N, Hq, D]` over the keys: `[N, Hq, D + 2]` sums, maxima, sums of weights, in float64.
    first_seen, last_seen: `[N]`, of each query."""
    page, heads, d = kv.shape[3:]
    at = torch.arange(keys.start, keys.stop, dtype=torch.long)
    held = kv[pages[at // page].long(), layer, :, at % page].double()  # [K, 2, Hkv, D]
    group = q.shape[1] // heads
    k, v = (held[:, i].repeat_interleave(group, 1) for i in (0, 1))
    scores = torch.einsum("nhd,khd->nhk", q.double(), k) * (d**-0.5 if how.scale is None else how.scale)
    if how.softcap:
        scores = how.softcap * (scores / how.softcap).tanh()
    seen = (at >= first_seen[:, None]) & (at <= last_seen[:, None])
    scores = scores.masked_fill(~seen[:, None], float("-inf"))
    largest = scores.amax(-1).clamp(min=-1e30)
    weights = (scores - largest[..., None]).exp()
    sums = torch.einsum("nhk,khd->nhd", weights, v)
    return torch.cat((sums, largest[..., None], weights.sum(-1)[..., None]), -1)


def _add(a: Tensor, b: Tensor) -> Tensor:
    largest = torch.maximum(a[..., -2], b[..., -2])
    found = torch.zeros_like(a)
    for part in (a, b):
        found += part * (part[..., -2] - largest).exp()[..., None]
    found[..., -2] = largest
    return found


class Played:
    """An output and the slots of one list. slots: their number. No slot may be left over or written twice."""

    def __init__(self, out: Tensor, heads: int, slots: int, rng: np.random.Generator, how: Scores = PLAIN) -> None:
        self.out, self._heads, self._slots, self._rng, self._how = out, heads, slots, rng, how
        self._left: dict[int, Tensor] = {}
        self._arrived: dict[int, int] = {}

    def _leave(self, rows: slice, part: Tensor, slot: int, parts: int, number: int) -> None:
        if parts > 1:
            assert slot >= 0
            assert slot + parts <= self._slots
            assert slot + number not in self._left
            self._left[slot + number] = part
            self._arrived[slot] = self._arrived.get(slot, 0) + 1
            if self._arrived[slot] < parts:
                return
            part = self._left.pop(slot)
            for other in range(1, parts):
                part = _add(part, self._left.pop(slot + other))
            del self._arrived[slot]
        if self._how.sinks is not None:
            part[..., -1] += (self._how.sinks.double()[None] - part[..., -2]).exp()
        assert bool(self.out[rows].isnan().all()), "a row is written once"
        self.out[rows] = (part[..., :-2] / part[..., -1:]).flatten(1).to(self.out.dtype)

    def decodes(self, q: Tensor, kv: Tensor, layer: int, table: Tensor, items: np.ndarray) -> None:
        for row, page_row, begin, end, slot, parts, number, seen in self._rng.permutation(items).tolist():
            first, last = torch.tensor([seen]), torch.tensor([end - 1])
            part = _part(q[row : row + 1], kv, layer, table[page_row], range(begin, end), first, last, self._how)
            self._leave(slice(row, row + 1), part, slot, parts, number)
        assert not self._left

    def tiles(self, q: Tensor, kv: Tensor, layer: int, table: Tensor, items: np.ndarray) -> None:
        """Whole tiles `[items, 4]`, or parts `[items, 8]`."""
        for row, queries, start, page_row, *rest in self._rng.permutation(items).tolist():
            begin, end, slot, word = rest or (0, start + queries, 0, 1)
            last = start + torch.arange(queries)
            first = torch.clamp(last + 1 - self._how.window, min=0) if self._how.window else torch.zeros_like(last)
            rows = slice(row, row + queries)
            part = _part(q[rows], kv, layer, table[page_row], range(begin, end), first, last, self._how)
            self._leave(rows, part, slot, word & 65535, word >> 16)
        assert not self._left
