"""`BlockAllocator`: the numbered places of one tier below the GPU (host slots, SSD extents), and whose they are."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from weft.engine.memory.prefix_index import PrefixEntry


class BlockAllocator:
    """A place is free, cached (an entry's, evictable) or held (a transfer reads or writes it).

    `spared(entry)` says whether the tier may lose its copy; `lose(entry)` takes the place away from the entry. Victims
    come least recently used first, those that were promised to be kept after all others, from heaps of candidates that
    are corrected when they are read.
    """

    def __init__(
        self, capacity: int, spared: Callable[[PrefixEntry], bool], lose: Callable[[PrefixEntry], None]
    ) -> None:
        self.capacity = capacity
        self.evictions = 0
        self._spared = spared
        self._lose = lose
        self._free = dict.fromkeys(range(capacity - 1, -1, -1))
        """a stack that any place can be taken out of; low numbers are handed out first"""
        self._entries: dict[int, PrefixEntry] = {}
        self._pins: dict[int, int] = {}
        self._candidates = _Candidates()
        self._promised = _Candidates()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._pins)

    @property
    def num_cached(self) -> int:
        """Places that are an entry's, held ones among them."""
        return len(self._entries)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def entries(self) -> Iterable[tuple[int, PrefixEntry]]:
        return self._entries.items()

    def take(self) -> int | None:
        """A place to write to, held once; evicts when none is free. None when none can be spared now."""
        if not self._free:
            self._evict()
        if not self._free:
            return None
        place, _ = self._free.popitem()
        self._pins[place] = 1
        return place

    def settle(self, place: int, entry: PrefixEntry) -> None:
        """What was written to the held place is the entry's page."""
        self._entries[place] = entry

    def claim(self, place: int, entry: PrefixEntry) -> None:
        """A free place that holds the entry's page already: found on the disk at start."""
        del self._free[place]
        self.settle(place, entry)
        self._reconsider(place)

    def pin(self, place: int) -> None:
        self._pins[place] = self._pins.get(place, 0) + 1

    def unpin(self, place: int) -> None:
        self._pins[place] -= 1
        if not self._pins[place]:
            del self._pins[place]
            if place in self._entries:
                self._reconsider(place)
            else:
                self._free[place] = None

    def forget(self, place: int) -> None:
        """The place is no entry's any more; it is free once no transfer holds it."""
        self._entries.pop(place, None)
        if place not in self._pins:
            self._free[place] = None

    def reconsider(self, entry: PrefixEntry, place: int) -> None:
        """The entry lost a child: perhaps it can be spared now."""
        if self._entries.get(place) is entry and place not in self._pins:
            self._reconsider(place)

    def _reconsider(self, place: int) -> None:
        entry = self._entries[place]
        (self._promised if entry.promised else self._candidates).push(entry.used, place)

    def _evict(self) -> None:
        for candidates in (self._candidates, self._promised):
            while candidates.heap:
                used, place = candidates.pop()
                entry = self._entries.get(place)
                # Stale: held now, or a parent. It comes back when it is let go, or when its last child leaves.
                if entry is None or place in self._pins or not self._spared(entry):
                    continue
                if entry.used != used or (entry.promised and candidates is self._candidates):
                    self._reconsider(place)
                    continue
                self.evictions += 1
                self._lose(entry)
                return

    def evict_all(self) -> None:
        """Lose every place that the tier can do without."""
        left = -1
        while left != self.num_cached:
            left = self.num_cached
            self._evict()

    def check(self) -> None:
        """Raise `AssertionError` unless `free + cached + held == all` and no place is two of them."""
        free, held = set(self._free), set(self._pins)
        cached = set(self._entries) - held
        assert not free & held, "a held place is free"
        assert not free & cached, "a cached place is free"
        assert len(free) + len(cached) + len(held) == self.capacity, "a place is lost"


class _Candidates:
    """Places that may be evicted, least recently used first."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int]] = []
        """(last use, place)"""
        self._queued: set[int] = set()

    def push(self, used: int, place: int) -> None:
        if place not in self._queued:
            self._queued.add(place)
            heapq.heappush(self.heap, (used, place))

    def pop(self) -> tuple[int, int]:
        used, place = heapq.heappop(self.heap)
        self._queued.discard(place)
        return used, place
