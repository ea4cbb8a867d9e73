"""`RowPool`: which rows of the runner's pool of embeddings hold which image.

Iterations run in order, so a row may be given to another image as soon as no request holds it: the iteration that
encodes the other image runs after all that read the row.
"""

from __future__ import annotations

from collections import OrderedDict

import numpy as np

from weft.engine.scheduling.request import Rows


class RowPool:
    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._free = np.arange(capacity, dtype=np.int32)[::-1].copy()
        self._num_free = capacity
        self._by_name: OrderedDict[tuple[str, bytes], Rows] = OrderedDict()
        """Images with embeddings, least recently released first."""

    @property
    def num_used(self) -> int:
        return self.capacity - self._num_free

    def hold(self, name: tuple[str, bytes]) -> Rows | None:
        """Return the rows of an image and add a reference, or None if the pool does not have it."""
        found = self._by_name.get(name)
        if found is not None:
            found.references += 1
        return found

    def allocate(self, name: tuple[str, bytes], count: int) -> Rows | None:
        """Return rows for an image that is about to be encoded, with one reference. Evicts images that no request
        holds, least recently used first. Returns None if those that are held leave too few rows."""
        loose = sum(len(rows.rows) for rows in self._by_name.values() if not rows.references)
        if count > self._num_free + loose:
            return None
        for rows in [rows for rows in self._by_name.values() if not rows.references]:
            if self._num_free >= count:
                break
            self.drop(rows)
        self._num_free -= count
        made = Rows(name, self._free[self._num_free : self._num_free + count].copy(), 1)
        self._by_name[name] = made
        return made

    def release(self, rows: Rows) -> None:
        """Drop a reference."""
        rows.references -= 1
        if self._by_name.get(rows.name) is rows:
            self._by_name.move_to_end(rows.name)
        elif not rows.references:
            self._put_back(rows)

    def drop(self, rows: Rows) -> None:
        """Forget an image: no other request finds it. Its rows are free once no request holds them."""
        if self._by_name.get(rows.name) is not rows:
            return
        del self._by_name[rows.name]
        if not rows.references:
            self._put_back(rows)

    def forget(self) -> None:
        """Forget all images: the embeddings are gone."""
        for rows in list(self._by_name.values()):
            self.drop(rows)

    def rows(self) -> list[Rows]:
        return list(self._by_name.values())

    def _put_back(self, rows: Rows) -> None:
        count = len(rows.rows)
        self._free[self._num_free : self._num_free + count] = rows.rows
        self._num_free += count

    def check(self) -> None:
        """Raise `AssertionError` if a row has two owners. Forgotten images that requests still hold are not seen."""
        used = [rows.rows for rows in self._by_name.values()]
        every = np.concatenate((self._free[: self._num_free], *used))
        assert len(np.unique(every)) == len(every), "a row of embeddings has two owners"
        assert all(rows.references >= 0 for rows in self._by_name.values()), "an image is released too often"
