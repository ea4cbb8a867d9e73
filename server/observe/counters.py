"""Counters and histograms whose cells lie in shared memory: any process of the daemon can tell the sum of all.

A process adds to its own row without a lock; the row stays when the process dies, so that no total ever falls.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from operator import add
from typing import Generic, TypeVar

from weft.server.observe.exposition import head, labelled
from weft.server.observe.shared_state import CELLS, SharedState

OTHER = "other"
"""where values of a label are counted that are not among its own"""


class Store:
    """Hands out cells of one process's row. All processes must ask for the same cells in the same order."""

    def __init__(self, shared_state: SharedState, row: int) -> None:
        self._rows = [shared_state.row(i) for i in range(shared_state.rows)]
        self.cells = self._rows[row]
        self._used = 0
        self.families: list[Family[Cell] | Family[Buckets]] = []

    def take(self, count: int) -> int:
        """Where `count` new cells begin."""
        begin = self._used
        self._used += count
        if self._used > CELLS:
            raise ValueError(f"the metrics need more than {CELLS} cells")
        return begin

    def rows(self) -> list[bytes]:
        """The cells in use, as float64, of each process."""
        return [row[: self._used].tobytes() for row in self._rows]

    def text(self) -> bytes:
        """Of all metrics, in Prometheus's text format.

        Scrapes come so rarely that the caches hold nothing of the last one: what counts is how much code and memory
        is touched. So families that did not change are told by their bytes and not written again.
        """
        rows = self.rows()
        return b"".join([family.text(rows) for family in self.families])


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
            (self._told(values), self._template(dict(zip(labels, values, strict=True)))) for values in combinations
        ]
        """for the values of labels, in the order of their cells"""
        self._bytes = slice(8 * begin, 8 * (begin + len(combinations) * width))
        """the cells in a row"""
        self._shown: tuple[list[bytes], bytes] = ([], b"")
        """the cells, of each row, that `text` was last asked for, and its answer"""

    @abstractmethod
    def _child(self, at: int) -> Child: ...

    @abstractmethod
    def _told(self, values: tuple[str, ...]) -> bool:
        """Whether the lines of these labels are there before anything was counted."""

    @abstractmethod
    def _template(self, labels: dict[str, str]) -> str:
        """The lines of these labels, without figures."""

    @abstractmethod
    def _samples(self, totals: list[float]) -> list[str]:
        """The lines of what is told or was counted. `totals`: of the family's cells."""

    def text(self, rows: list[bytes]) -> bytes:
        """In Prometheus's text format. `rows`: of the store."""
        cells = [row[self._bytes] for row in rows]
        if cells != self._shown[0]:
            self._shown = (cells, (self._head + "".join(self._samples(self._totals(cells)))).encode())
        return self._shown[1]

    def _totals(self, cells: list[bytes]) -> list[float]:
        rows: Iterator[memoryview[float]] = (memoryview(row).cast("d") for row in cells)
        totals = list(next(rows))
        for row in rows:
            totals = list(map(add, totals, row))
        return totals

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

    def _samples(self, totals: list[float]) -> list[str]:
        lines = zip(totals, self._lines, strict=True)
        return [template % total for total, (told, template) in lines if total or told]


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
        return self._totals([row[self._bytes] for row in self._store.rows()])[:-1]

    def _child(self, at: int) -> Buckets:
        return Buckets(self._store.cells, at, self.bounds)

    def _told(self, values: tuple[str, ...]) -> bool:
        return not values

    def _template(self, labels: dict[str, str]) -> str:
        bounds = (*map(repr, self.bounds), "+Inf")
        buckets = [f"{self._name}_bucket{labelled({**labels, 'le': bound})} %d\n" for bound in bounds]
        ends = labelled(labels)
        return f"{''.join(buckets)}{self._name}_count{ends} %d\n{self._name}_sum{ends} %r\n"

    def _samples(self, totals: list[float]) -> list[str]:
        samples = []
        for i, (told, template) in enumerate(self._lines):
            *counts, total = totals[i * self._width : (i + 1) * self._width]
            *below, count = accumulate(counts)
            if told or count:
                samples.append(template % (*below, count, count, total))
        return samples
