"""Counters and histograms in shared memory, so that any process of the daemon can report the totals.

A process adds to its own row without a lock. The row outlives the process, so that totals never decrease.
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

OTHER = "other"  # Label value for unknown values.


class Store:
    """Allocates cells in one process's row. All processes must allocate the same cells in the same order."""

    def __init__(self, shared_state: SharedState, row: int) -> None:
        self._rows = [shared_state.row(i) for i in range(shared_state.rows)]
        self.cells = self._rows[row]
        self._used = 0
        self.families: list[Family[Cell] | Family[Buckets]] = []

    def take(self, count: int) -> int:
        """Allocate `count` cells and return the index of the first."""
        begin = self._used
        self._used += count
        if self._used > CELLS:
            raise ValueError(f"the metrics need more than {CELLS} cells")
        return begin

    def rows(self) -> list[bytes]:
        """Return the used float64 cells of each process."""
        return [row[: self._used].tobytes() for row in self._rows]

    def text(self) -> bytes:
        """Return all metrics in Prometheus's text format. Scrapes are so rare that CPU caches are cold, so the cost is
        the amount of code and memory touched. Families with unchanged bytes are not formatted again."""
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
    """One histogram: counts per bucket, the last without an upper bound, and the sum of all values."""

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
    """A metric with labels. Label values are fixed sets; other values count as "other"."""

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
            (self._always_shown(values), self._template(dict(zip(labels, values, strict=True))))
            for values in combinations
        ]
        """(always shown, template) per combination of label values, in the order of their cells."""
        self._bytes = slice(8 * begin, 8 * (begin + len(combinations) * width))  # The family's bytes in a row.
        self._shown: tuple[list[bytes], bytes] = ([], b"")
        """Cells of each row at the last `text`, and its result."""

    @abstractmethod
    def _child(self, at: int) -> Child: ...

    @abstractmethod
    def _always_shown(self, values: tuple[str, ...]) -> bool:
        """Return whether these labels are shown even while their count is 0."""

    @abstractmethod
    def _template(self, labels: dict[str, str]) -> str:
        """Return the lines of these labels with placeholders for values."""

    @abstractmethod
    def _samples(self, totals: list[float]) -> list[str]:
        """Return the lines to show. `totals`: sums of the family's cells."""

    def text(self, rows: list[bytes]) -> bytes:
        """Return the family in Prometheus's text format. `rows`: the store's rows."""
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

    def _always_shown(self, values: tuple[str, ...]) -> bool:
        # `rate` needs a series to exist before it grows. With more labels, that would be many lines of zeros.
        return len(values) < 2 and OTHER not in values

    def _template(self, labels: dict[str, str]) -> str:
        return f"{self._name}{labelled(labels)} %r\n"

    def _samples(self, totals: list[float]) -> list[str]:
        lines = zip(totals, self._lines, strict=True)
        return [template % total for total, (shown, template) in lines if total or shown]


class Histogram(Family[Buckets]):
    """`bounds`: upper bounds of the buckets, ascending, without infinity."""

    def __init__(self, store: Store, name: str, help: str, bounds: Sequence[float], **labels: Sequence[str]) -> None:
        self.bounds = tuple(bounds)
        super().__init__(store, name, head(name, "histogram", help), len(bounds) + 2, labels)
        if not labels:
            self.observe = self.labels().observe
        store.families.append(self)

    def counts(self) -> list[float]:
        """Return the bucket counts of all processes, for a histogram without labels."""
        return self._totals([row[self._bytes] for row in self._store.rows()])[:-1]

    def _child(self, at: int) -> Buckets:
        return Buckets(self._store.cells, at, self.bounds)

    def _always_shown(self, values: tuple[str, ...]) -> bool:
        return not values

    def _template(self, labels: dict[str, str]) -> str:
        bounds = (*map(repr, self.bounds), "+Inf")
        buckets = [f"{self._name}_bucket{labelled({**labels, 'le': bound})} %d\n" for bound in bounds]
        ends = labelled(labels)
        return f"{''.join(buckets)}{self._name}_count{ends} %d\n{self._name}_sum{ends} %r\n"

    def _samples(self, totals: list[float]) -> list[str]:
        samples = []
        for i, (shown, template) in enumerate(self._lines):
            *counts, total = totals[i * self._width : (i + 1) * self._width]
            *below, count = accumulate(counts)
            if shown or count:
                samples.append(template % (*below, count, count, total))
        return samples
