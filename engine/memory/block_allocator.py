"""`BlockAllocator`: assigns the numbered places of one tier below the GPU (host slots, SSD extents) to entries."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from weft.engine.memory.prefix_index import PrefixEntry


class BlockAllocator:
    """A place is free, cached (it holds an entry's page and is evictable) or held (a transfer reads or writes it).
    `spared(entry)` returns whether the tier may lose its copy; `lose(entry)` takes the place from the entry. Victims
    are the least recently used, retained pages last. The heaps of candidates are corrected when they are read."""

    def __init__(
        self, capacity: int, spared: Callable[[PrefixEntry], bool], lose: Callable[[PrefixEntry], None]
    ) -> None:
        self.capacity = capacity
        self.evictions = 0
        self._spared, self._lose = spared, lose
        self._free = dict.fromkeys(range(capacity - 1, -1, -1))
        """A stack that also supports removal of any place. Low numbers are handed out first."""
        self._entries: dict[int, PrefixEntry] = {}
        self._pins: dict[int, int] = {}
        self._candidates = _Candidates()
        self._retained = _Candidates()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_held(self) -> int:
        return len(self._pins)

    @property
    def num_cached(self) -> int:
        """Places that belong to an entry, including held ones."""
        return len(self._entries)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def entries(self) -> Iterable[tuple[int, PrefixEntry]]:
        return self._entries.items()

    def take(self) -> int | None:
        """Return a place to write to, held once. Evicts if none is free; None if none can be evicted now."""
        if not self._free:
            self._evict()
        if not self._free:
            return None
        place, _ = self._free.popitem()
        self._pins[place] = 1
        return place

    def settle(self, place: int, entry: PrefixEntry) -> None:
        """Assign a held place, now written, to the entry."""
        self._entries[place] = entry

    def claim(self, place: int, entry: PrefixEntry) -> None:
        """Assign a free place that already holds the entry's page, as found on disk at start."""
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
        """Take the place from its entry. It becomes free once no transfer holds it."""
        self._entries.pop(place, None)
        if place not in self._pins:
            self._free[place] = None

    def reconsider(self, entry: PrefixEntry, place: int) -> None:
        """Check again whether the entry can be evicted: it lost a child."""
        if self._entries.get(place) is entry and place not in self._pins:
            self._reconsider(place)

    def _reconsider(self, place: int) -> None:
        entry = self._entries[place]
        (self._retained if entry.retained_until else self._candidates).push(entry.used, place)

    def _evict(self) -> None:
        for candidates in (self._candidates, self._retained):
            while candidates.heap:
                used, place = candidates.pop()
                entry = self._entries.get(place)
                # Stale: held now, or a parent. It is queued again when it is unpinned or its last child leaves.
                if entry is None or place in self._pins or not self._spared(entry):
                    continue
                if entry.used != used or (entry.retained_until and candidates is self._candidates):
                    self._reconsider(place)
                    continue
                self.evictions += 1
                self._lose(entry)
                return

    def evict_all(self) -> None:
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
    """Heap of places that may be evicted, least recently used first."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int]] = []  # (last use, place)
        self._queued: set[int] = set()

    def push(self, used: int, place: int) -> None:
        if place not in self._queued:
            self._queued.add(place)
            heapq.heappush(self.heap, (used, place))

    def pop(self) -> tuple[int, int]:
        used, place = heapq.heappop(self.heap)
        self._queued.discard(place)
        return used, place
