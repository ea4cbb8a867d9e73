"""`PagePool`: who owns which KV page. Reference counts, the free list, and the prefix index that keeps idle pages.

A page is free (nobody's), held (referenced by at least one request, or behind a fence), or cached (in the index,
referenced by no request, evictable). `free + cached + held == all` at any time. Page 0 is the dummy page: it absorbs
padding and is never handed out.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from itertools import islice

import numpy as np
import numpy.typing as npt

from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry, PrefixIndex
from weft.engine.memory.promises import Promises

Pages = npt.NDArray[np.int32]
DUMMY_PAGE = 0
EVICTION_SCAN = 256
"""idle pages that are looked at for one that its chain can spare"""


class PagePool:
    """Pages `1 … num_pages - 1`. Single-threaded: only the scheduler touches it.

    A copy to or from another tier holds a reference of its own to its page, so that the page cannot be reused before
    the copy's event has passed.
    """

    def __init__(self, num_pages: int, page_size: int, index: PrefixIndex, promised_share: float = 0.5) -> None:
        """`promised_share`: of the pages, that may be promised to be kept."""
        self.num_pages = num_pages
        self.page_size = page_size
        self.index = index
        self.evictions = 0
        self.idle_clock = -1
        """pages used last at this time of the index's clock, or before, lie idle: those with a copy below go first"""
        self._entries: dict[int, PrefixEntry] = {}
        self._idle: OrderedDict[int, PrefixEntry] = OrderedDict()
        """cached pages that nobody references, least recently used first"""
        self._promised: OrderedDict[int, PrefixEntry] = OrderedDict()
        """those of them that are evicted last"""
        self.promises = Promises(int(promised_share * (num_pages - 1)), self._lapsed)
        index.on_broken = self.promises.gone
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
        return len(self._idle) + len(self._promised)

    @property
    def num_available(self) -> int:
        """Pages that `allocate` can give now: free ones and cached ones that nobody references."""
        return self._num_free + self.num_cached

    @property
    def num_held(self) -> int:
        return self.capacity - self.num_available

    def allocate(self, count: int) -> Pages:
        """Take `count` pages (reference count 1), evicting cached ones as needed; check `num_available` first."""
        if count > self.num_available:
            raise RuntimeError(f"{count} pages asked for, {self.num_available} available")
        while self._num_free < count:
            self._evict()
        self._num_free -= count
        pages = self._free[self._num_free : self._num_free + count].copy()
        self.ref[pages] = 1
        return pages

    def adopt(self, entry: PrefixEntry, page: int) -> None:
        """Make a referenced page the entry's; the entry had none."""
        self._entries[page] = entry
        self.index.set_page(entry, page)

    def pin(self, entries: list[PrefixEntry]) -> Pages:
        """Reference the pages of index entries, in one step with having found them."""
        pages = np.array([e.page for e in entries], np.int32)
        for page in pages.tolist():
            self.hold(page)
        return pages

    def hold(self, page: int) -> None:
        """One more reference to a page that is cached or held."""
        if self.ref[page] == 0:
            del self._idle_with(self._entries[page])[page]
        self.ref[page] += 1

    def release(self, pages: Pages, *, used: bool = True) -> None:
        """Drop one reference to each page; `pages` in the order of their tokens. `used`: it was for a request; else
        they lie as idle as before, and are the next to be evicted."""
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
        return self._promised if entry.promised else self._idle

    def promise(self, chain: Sequence[PrefixEntry], until: Sequence[float]) -> int:
        """As `Promises.make`."""
        for entry in reversed(chain[: self.promises.limit]):
            if entry.page in self._idle:
                self._promised[entry.page] = self._idle.pop(entry.page)
        return self.promises.make(chain, until)

    def _lapsed(self, entry: PrefixEntry) -> None:
        """The entry's promise is over."""
        if entry.page in self._promised:
            self._idle[entry.page] = self._promised.pop(entry.page)
        self.index.on_spared(entry)

    def forget(self) -> None:
        """No cached page is an entry's any more (the index was cleared). Pages in use stay with their requests."""
        for page in (*self._idle, *self._promised):
            self._push(page)
        for entry in self._entries.values():
            entry.page = NOWHERE
        self._idle.clear()
        self._promised.clear()
        self.promises.clear()
        self._entries.clear()

    def evict_all(self) -> None:
        """Drop every page that nobody references; what lower tiers hold stays there."""
        while self.num_cached:
            self._evict()

    def _evict(self) -> None:
        """Free the least recently used idle page that its chain can spare.

        Requests release their last page first, so the oldest is normally a leaf already. Only a failed load leaves
        a state in which none can be spared: then the oldest goes, and its children wait for it to be computed again.
        """
        # Of a model whose layers all have windows, the oldest are the beginnings of requests that still run.
        idle = self._idle or self._promised
        oldest = islice(idle.items(), EVICTION_SCAN)
        page = None
        for candidate, entry in oldest:
            if entry.lower and (page is None or entry.used <= self.idle_clock):
                page = candidate
                break
            if page is None and entry.spared_by_gpu():
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
        self._free[self._num_free] = page
        self._num_free += 1

    def check(self) -> None:
        """Raise `AssertionError` unless each page is exactly one of free, cached, held (docs/design.md invariant 4)."""
        free = self._free[: self._num_free]
        assert len(np.unique(free)) == self._num_free, "a page is free twice"
        assert DUMMY_PAGE not in free, "the dummy page is free"
        assert not self.ref[free].any(), "a free page is referenced"
        idle = np.array([*self._idle, *self._promised], np.int32)
        assert not any(e.promised for e in self._idle.values()), "a promised page is among the others"
        assert all(e.promised for e in self._promised.values()), "a page is kept without a promise"
        assert not self.ref[idle].any(), "an idle page is referenced"
        assert not np.intersect1d(free, idle).size, "a page is free and cached"
        held = np.flatnonzero(self.ref)
        assert len(held) == self.num_held, f"{self.num_held} pages held, {len(held)} referenced"
        assert (self.ref >= 0).all(), "a page was released too often"
        for page, entry in self._entries.items():
            assert entry.page == page, "an entry lies under another page"
            assert self.index.contains(entry), "a page belongs to an entry that is gone"
        assert sum(e.page >= 0 for e in self.index.entries()) == len(self._entries), "an entry's page is lost"
        assert self._idle.keys() | self._promised.keys() <= self._entries.keys(), "an idle page is not indexed"
        self.promises.check()
        self.index.check()
