"""`PagePool`: ownership of KV pages, by reference counts, a free list, and the prefix index that keeps idle pages.

A page is free, held (referenced by at least one request, fence or copy), or cached (in the index, without references,
evictable). `free + cached + held == all` at any time. When the last reference is dropped, a page in the index becomes
cached and any other page becomes free. A cached page is evicted inside a later `allocate`. Page 0 is the dummy page: it
absorbs padding and is never allocated.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry, PrefixIndex
from weft.engine.memory.retention import RetainedPages

Pages = npt.NDArray[np.int32]
DUMMY_PAGE = 0
EVICTION_SCAN = 256  # idle pages to search for an evictable one


class PagePool:
    """Pages `1 … num_pages - 1`. Single-threaded: only the scheduler touches it. A copy to or from another tier holds a
    reference to its page, so that the page cannot be reused before the copy's event has passed."""

    def __init__(self, num_pages: int, page_size: int, index: PrefixIndex, retained_share: float = 0.5) -> None:
        """`retained_share` is the maximum share of pages that may be retained."""
        self.num_pages, self.page_size, self.index = num_pages, page_size, index
        self.evictions = 0
        self.idle_clock = -1
        """A time of the index's clock. Pages unused since then with a copy in a lower tier are evicted first."""
        self._entries: dict[int, PrefixEntry] = {}
        self._idle: OrderedDict[int, PrefixEntry] = OrderedDict()
        """Cached pages without references, least recently used first."""
        self._retained: OrderedDict[int, PrefixEntry] = OrderedDict()
        """Retained pages without references, which are evicted last."""
        self.retention = RetainedPages(int(retained_share * (num_pages - 1)), self._released)
        index.on_retained_dropped = self.retention.drop
        self.ref = np.zeros(num_pages, np.int32)
        self._free = np.arange(num_pages - 1, 0, -1, dtype=np.int32)  # a stack; low ids are allocated first
        self.num_free = num_pages - 1

    @property
    def capacity(self) -> int:
        return self.num_pages - 1

    @property
    def num_cached(self) -> int:
        return len(self._idle) + len(self._retained)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can return now: free ones, and cached ones without references."""
        return self.num_free + self.num_cached

    @property
    def num_held(self) -> int:
        return self.capacity - self.num_available

    def allocate(self, count: int) -> Pages:
        """Return `count` pages with reference count 1, evicting cached ones as needed. Check `num_available` first."""
        if count > self.num_available:
            raise RuntimeError(f"{count} pages requested, {self.num_available} available")
        while self.num_free < count:
            self._evict()
        self.num_free -= count
        pages = self._free[self.num_free : self.num_free + count].copy()
        self.ref[pages] = 1
        return pages

    def adopt(self, entry: PrefixEntry, page: int) -> None:
        """Assign a referenced page to an entry that has none."""
        self._entries[page] = entry
        self.index.set_page(entry, page)

    def pin(self, entries: list[PrefixEntry]) -> Pages:
        """Reference the pages of index entries. Call it right after finding them."""
        pages = np.array([e.page for e in entries], np.int32)
        for page in pages.tolist():
            self.hold(page)
        return pages

    def hold(self, page: int) -> None:
        """Add a reference to a cached or held page."""
        if self.ref[page] == 0:
            del self._idle_with(self._entries[page])[page]
        self.ref[page] += 1

    def release(self, pages: Pages, *, used: bool = True) -> None:
        """Drop one reference to each page; `pages` are in token order. Set `used` to False if no request used them:
        they go to the front of the queue and are evicted next."""
        self.index.clock += used
        # Last page first: a child goes idle before its parent and is evicted before it.
        for page in (pages[::-1] if used else pages).tolist():
            self.ref[page] -= 1
            if self.ref[page] == 0:
                entry = self._entries.get(page)
                if entry is None:
                    self._push(page)
                else:
                    idle = self._idle_with(entry)
                    idle[page] = entry
                    if used:
                        entry.used = self.index.clock
                    else:
                        idle.move_to_end(page, last=False)

    def _idle_with(self, entry: PrefixEntry) -> OrderedDict[int, PrefixEntry]:
        return self._retained if entry.retained_until else self._idle

    def retain(self, chain: Sequence[PrefixEntry], until: Sequence[float]) -> int:
        """Retain the pages of a chain as `RetainedPages.retain` does."""
        for entry in reversed(chain[: self.retention.limit]):
            if entry.page in self._idle:
                self._retained[entry.page] = self._idle.pop(entry.page)
        return self.retention.retain(chain, until)

    def _released(self, entry: PrefixEntry) -> None:
        if entry.page in self._retained:
            self._idle[entry.page] = self._retained.pop(entry.page)
        self.index.on_evictable(entry)

    def forget(self) -> None:
        """Free all cached pages: the index was cleared. Pages in use stay with their requests."""
        for page in (*self._idle, *self._retained):
            self._push(page)
        for entry in self._entries.values():
            entry.page = NOWHERE
        self._idle.clear()
        self._retained.clear()
        self.retention.clear()
        self._entries.clear()

    def evict_all(self) -> None:
        """Evict every page without references. Copies in lower tiers stay."""
        while self.num_cached:
            self._evict()

    def _evict(self) -> None:
        """Free the least recently used idle page that is evictable. Requests release their last page first, so the
        oldest is normally a leaf. Only after a failed load can no page be evictable: then the oldest is evicted, and
        its children are unusable until it is computed again."""
        # If all layers have windows, the oldest are first pages of requests that still run.
        idle = self._idle or self._retained
        oldest = islice(idle.items(), EVICTION_SCAN)
        page = None
        for candidate, entry in oldest:
            if entry.lower and (page is None or entry.used <= self.idle_clock):
                page = candidate
                break
            if page is None and entry.evictable_from_gpu():
                page = candidate
            if page is not None and entry.used > self.idle_clock:
                break
        if page is None:
            page = next(iter(idle))
        del idle[page]
        self.evictions += 1
        self.index.set_page(self._entries.pop(page), NOWHERE)
        self._push(page)

    def _push(self, page: int) -> None:
        self._free[self.num_free] = page
        self.num_free += 1

    def check(self) -> None:
        """Raise `AssertionError` unless each page is one of free, cached and held (docs/design.md invariant 4)."""
        free = self._free[: self.num_free]
        assert len(np.unique(free)) == self.num_free, "a page is free twice"
        assert DUMMY_PAGE not in free, "the dummy page is free"
        assert not self.ref[free].any(), "a free page is referenced"
        idle = np.array([*self._idle, *self._retained], np.int32)
        assert not any(e.retained_until for e in self._idle.values()), "a retained page is among the others"
        assert all(e.retained_until for e in self._retained.values()), "an unretained page is among the others"
        assert not self.ref[idle].any(), "an idle page is referenced"
        assert not np.intersect1d(free, idle).size, "a page is free and cached"
        held = np.flatnonzero(self.ref)
        assert len(held) == self.num_held, f"{self.num_held} pages held, {len(held)} referenced"
        assert (self.ref >= 0).all(), "a page was released too often"
        for page, entry in self._entries.items():
            assert entry.page == page, "an entry is stored under another page"
            assert self.index.contains(entry), "a page belongs to an entry that left the index"
        assert sum(e.page >= 0 for e in self.index.entries()) == len(self._entries), "an entry's page is lost"
        assert self._idle.keys() | self._retained.keys() <= self._entries.keys(), "an idle page is not indexed"
        self.retention.check()
        self.index.check()
