"""Counters and histograms whose cells lie in shared memory: any process of the daemon can tell the sum of all.

A process adds to its own row without a lock; the row stays when the process dies, so that no total ever falls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate, product
from typing import Generic, TypeVar

from weft.server.board import CELLS, Board
from weft.server.exposition import head, labelled

OTHER = "other"
"""where values of a label are counted that are not among its own"""


class Store:
    """Hands out cells of one process's row. All processes must ask for the same cells in the same order."""

    def __init__(self, board: Board, row: int) -> None:
        self._counts = board.counts
        self.cells: memoryview[float] = board.row(row)
        self._used = 0
        self.families: list[Family[Cell] | Family[Buckets]] = []

    def take(self, count: int) -> int:
        """Where `count` new cells begin."""
        begin = self._used
        self._used += count
        if self._used > CELLS:
            raise ValueError(f"the metrics need more than {CELLS} cells")
        return begin

    def totals(self, begin: int, count: int) -> list[float]:
        """Of all processes."""
        totals: list[float] = self._counts[:, begin : begin + count].sum(axis=0).tolist()
        return totals

    def text(self) -> str:
        """Of all metrics, in Prometheus's text format."""
        totals = self.totals(0, self._used)
        return "".join([family.text(totals) for family in self.families])


class Cell:
    """One count."""

    __slots__ = ("_at", "_cells")

    def __init__(self, cells: memoryview[float], at: int) -> None:
        self._cells = cells
        self._at = at

    def inc(self, amount: float = 1.0) -> None:
        self._cells[self._at] += amount


class Buckets:
    """One histogram: counts by bucket, the last one without an upper bound, and the sum of what was observed."""

    __slots__ = ("_at", "_bounds", "_cells", "_sum")

    def __init__(self, cells: memoryview[float], at: int, bounds: tuple[float, ...]) -> None:
        self._cells = cells
        self._at = at
        self._bounds = bounds
        self._sum = at + len(bounds) + 1

    def observe(self, value: float) -> None:
        cells = self._cells
        cells[self._at + bisect_left(self._bounds, value)] += 1.0
        cells[self._sum] += value


Child = TypeVar("Child")


class Family(ABC, Generic[Child]):
    """A metric by the values of its labels, which are fixed sets; what is in none counts as "other"."""

    def __init__(self, store: Store, name: str, head: str, width: int, labels: dict[str, Sequence[str]]) -> None:
        self._name = name
        self._head = head
        self._store = store
        self._width = width
        self._allowed = [(*values, OTHER) for values in labels.values()]
        combinations = list(product(*self._allowed))
        begin = store.take(len(combinations) * width)
        self._at = {values: begin + i * width for i, values in enumerate(combinations)}
        self._children = {values: self._child(at) for values, at in self._at.items()}
        self._lines = [
            (at, self._told(values), self._template(dict(zip(labels, values, strict=True))))
            for values, at in self._at.items()
        ]
        self._range = slice(begin, begin + len(combinations) * width)
        self._shown: tuple[list[float], str] = ([], "")
        """the totals that `text` was last asked for, and its answer"""

    @abstractmethod
    def _child(self, at: int) -> Child: ...

    @abstractmethod
    def _told(self, values: tuple[str, ...]) -> bool:
        """Whether the lines of these labels are there before anything was counted."""

    @abstractmethod
    def _template(self, labels: dict[str, str]) -> str:
        """The lines of these labels, to be formatted with `_figures`."""

    @abstractmethod
    def _figures(self, cells: list[float]) -> tuple[float, ...]: ...

    def text(self, totals: list[float]) -> str:
        """In Prometheus's text format. `totals`: of all cells of the store."""
        mine = totals[self._range]
        if mine != self._shown[0]:
            self._shown = (mine, self._written(totals))
        return self._shown[1]

    def _written(self, totals: list[float]) -> str:
        parts, width = [self._head], self._width
        for at, told, template in self._lines:
            cells = totals[at : at + width]
            if told or any(cells):
                parts.append(template % self._figures(cells))
        return "".join(parts)

    def labels(self, *values: str) -> Child:
        child = self._children.get(values)
        if child is None:
            known = (v if v in allowed else OTHER for v, allowed in zip(values, self._allowed, strict=True))
            child = self._children[tuple(known)]
        return child


class Counter(Family[Cell]):
    def __init__(self, store: Store, name: str, help: str, **labels: Sequence[str]) -> None:
        super().__init__(store, f"{name}_total", head(f"{name}_total", "counter", help), 1, labels)
        store.families.append(self)

    def _child(self, at: int) -> Cell:
        return Cell(self._store.cells, at)

    def inc(self, amount: float = 1.0) -> None:
        self.labels().inc(amount)

    def _told(self, values: tuple[str, ...]) -> bool:
        # A rate sees a series grow only once it has been there. With more labels that would be many lines of zeros.
        return len(values) < 2 and OTHER not in values

    def _template(self, labels: dict[str, str]) -> str:
        return f"{self._name}{labelled(labels)} %r\n"

    def _figures(self, cells: list[float]) -> tuple[float, ...]:
        return (cells[0],)


class Histogram(Family[Buckets]):
    """`bounds`: upper bounds of the buckets, ascending, without infinity."""

    def __init__(self, store: Store, name: str, help: str, bounds: Sequence[float], **labels: Sequence[str]) -> None:
        self.bounds = tuple(bounds)
        super().__init__(store, name, head(name, "histogram", help), len(bounds) + 2, labels)
        if not labels:
            self.observe = self.labels().observe
        store.families.append(self)

    def counts(self) -> list[float]:
        """Of all processes, by bucket, without labels."""
        return self._store.totals(self._at[()], self._width - 1)

    def _child(self, at: int) -> Buckets:
        return Buckets(self._store.cells, at, self.bounds)

    def _told(self, values: tuple[str, ...]) -> bool:
        return not values

    def _template(self, labels: dict[str, str]) -> str:
        bounds = (*map(repr, self.bounds), "+Inf")
        buckets = [f"{self._name}_bucket{labelled({**labels, 'le': bound})} %d\n" for bound in bounds]
        ends = labelled(labels)
        return f"{''.join(buckets)}{self._name}_count{ends} %d\n{self._name}_sum{ends} %r\n"

    def _figures(self, cells: list[float]) -> tuple[float, ...]:
        *counts, total = cells
        buckets = tuple(accumulate(counts))
        return (*buckets, buckets[-1], total)
