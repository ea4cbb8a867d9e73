"""Reference implementation of LoRA: what low-rank matrices of several adapters add to the output of one projection."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


class LowRank(NamedTuple):
    """`scale * B A` for some output rows of a projection `[out, K]`, packed as its matrix is: the norm before it is
    folded into `a`, rows of `b` are in its order, and the scale is in `b`. R is the rank."""

    a: Tensor  # [R, K] float32.
    b: Tensor  # [n, R] float32.
    begin: int = 0  # Output row of b's first row.
    step: int = 1  # Output rows from one row of b to the next.
    shift: Tensor | None = None  # [R] float32: A times the bias of the norm before the projection.
    expert: int = 0  # The expert whose projection it is, if experts have one each.


class Delta:
    """What adapters add to a projection's output in one iteration.

    groups: the token rows `[n]` int64 of each adapter, and its matrices. row_by_row: multiply each row on its own, so
    that its bits do not depend on how many rows have the same adapter."""

    def __init__(
        self, groups: Sequence[tuple[Tensor, Sequence[LowRank]]], out: int, *, row_by_row: bool = False
    ) -> None:
        self._groups, self._out = groups, out
        self._multiply = _row_by_row if row_by_row else F.linear

    def values(self, x: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Return (rows `[n]`, addends `[n, out]` float32) of each adapter, for the projection's input x `[T, K]`, which
        is normed without the norm's weight."""
        found = []
        for rows, matrices in self._groups:
            read = x[rows].float()
            added = read.new_zeros(len(read), self._out)
            for a, b, begin, step, shift, _ in matrices:
                t = self._multiply(read, a)
                if shift is not None:
                    t = t + shift
                added[:, begin : begin + step * len(b) : step] += self._multiply(t, b)
            found.append((rows, added))
        return found


class ExpertDelta:
    """What adapters add to the outputs of experts in one iteration. Parameters are those of `Delta`.

    tokens: number of tokens in the iteration."""

    def __init__(
        self, groups: Sequence[tuple[Tensor, Sequence[LowRank]]], out: int, tokens: int, *, row_by_row: bool = False
    ) -> None:
        self._out, self._row_by_row = out, row_by_row
        self._member = torch.zeros(len(groups), tokens, dtype=torch.bool)
        self._by_expert: list[dict[int, list[LowRank]]] = []
        for member, (rows, matrices) in zip(self._member, groups, strict=True):
            member[rows] = True
            own: dict[int, list[LowRank]] = {}
            for each in matrices:
                own.setdefault(each.expert, []).append(each)
            self._by_expert.append(own)

    def add(self, y: Tensor, x: Tensor, expert: int, tokens: Tensor) -> Tensor:
        """Add to an expert's output y `[n, out]` for its input x `[n, K]` of `tokens [n]`, in place, and return it."""
        groups = [
            (member[tokens].nonzero()[:, 0], found)
            for member, by_expert in zip(self._member, self._by_expert, strict=True)
            if (found := by_expert.get(expert))
        ]
        groups = [(rows, found) for rows, found in groups if len(rows)]
        return add_values(y, Delta(groups, self._out, row_by_row=self._row_by_row).values(x)) if groups else y


def _row_by_row(x: Tensor, matrix: Tensor) -> Tensor:
    return torch.stack([matrix @ row for row in x])


def add_values(y: Tensor, values: Sequence[tuple[Tensor, Tensor]], columns: slice = slice(None)) -> Tensor:
    """Add the `columns` of `Delta.values` to y `[T, …]` in place, rounded once, and return it. Other rows keep their
    bits."""
    for rows, added in values:
        y[rows] = (y[rows].float() + added[:, columns]).to(y.dtype)
    return y
