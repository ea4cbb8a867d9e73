"""`PagePool`: who owns which KV page. Reference counts, the free list, and the prefix index that keeps idle pages.

A page is free (nobody's), held (referenced by at least one request, or behind a fence), or cached (in the index,
referenced by no request, evictable). `free + cached + held == all` at any time. Page 0 is the dummy page: it absorbs
padding and is never handed out.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.engine.prefix import PrefixEntry, PrefixIndex

Pages = npt.NDArray[np.int32]
DUMMY_PAGE = 0


class PagePool:
    """Pages `1 … num_pages - 1`. Single-threaded: only the scheduler touches it."""

    def __init__(self, num_pages: int, page_size: int, index: PrefixIndex) -> None:
        self.num_pages = num_pages
        self.page_size = page_size
        self.index = index
        self.ref = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack; low ids are handed out first
        self._num_free = num_pages - 1

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def num_free(self) -> int:
        return self._num_free

    @property
    def num_cached(self) -> int:
        return self.index.num_idle

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give now: free ones and cached ones that nobody references."""
        return self._num_free + self.index.num_idle

    @property
    def num_held(self) -> int:
        return self.capacity - self._num_free - self.index.num_idle

    def allocate(self, count: int) -> Pages:
        """Take `count` pages (reference count 1), evicting cached ones as needed; check `num_available` first."""
        if count > self.num_available:
            raise RuntimeError(f"{count} pages asked for, {self.num_available} available")
        while self._num_free < count:
            self._push(self.index.evict())
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self.ref[pages] = 1
        return pages

    def pin(self, entries: list[PrefixEntry]) -> Pages:
        """Reference the pages of index entries, in one step with having found them."""
        for entry in entries:
            if self.ref[entry.page] == 0:
                self.index.mark_held(entry)
            self.ref[entry.page] += 1
        return np.array([e.page for e in entries], np.int32)

    def release(self, pages: Pages) -> None:
        """Drop one reference to each page; `pages` in the order of their tokens."""
        # Last page first: a child goes idle before its parent and is evicted before it.
        for page in pages[::-1].tolist():
            self.ref[page] -= 1
            if self.ref[page] == 0:
                entry = self.index.entry_of(page)
                if entry is None:
                    self._push(page)
                else:
                    self.index.mark_idle(entry)

    def reset_index(self) -> None:
        """Forget every cached prefix. Pages in use stay with their requests."""
        for page in self.index.clear():
            self._push(page)

    def _push(self, page: int) -> None:
        self._free[self._num_free] = page
        self._num_free += 1

    def check(self) -> None:
        """Raise `AssertionError` unless every page is exactly one of free, cached, held (DESIGN invariant 4)."""
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == self._num_free, "a page is free twice"
        assert DUMMY_PAGE not in free, "the dummy page is free"
        assert not self.ref[free].any(), "a free page is referenced"
        idle = np.array([e.page for e in self.index.idle_entries()], np.int32)
        assert not self.ref[idle].any(), "an idle page is referenced"
        assert not np.intersect1d(free, idle).size, "a page is free and cached"
        held = np.flatnonzero(self.ref)
        assert len(held) == self.num_held, f"{self.num_held} pages held, {len(held)} referenced"
        assert (self.ref >= 0).all(), "a page was released too often"
        self.index.check()
