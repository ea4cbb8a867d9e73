"""`BlockAllocator`: the allocator of a tier below the GPU. It assigns host slots or SSD extents to index entries."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from weft.engine.memory.prefix_index import PrefixEntry


class BlockAllocator:
    """A block (slot or extent) is free, cached (holds an entry's page) or held (a transfer reads or writes it).
    `evictable(entry)` returns whether the tier may lose its copy; `lose(entry)` removes the entry's location. Victims
    are the least recently used, retained pages last. The heaps of candidates are corrected when they are read."""

    def __init__(
        self, capacity: int, evictable: Callable[[PrefixEntry], bool], lose: Callable[[PrefixEntry], None]
    ) -> None:
        self.capacity = capacity
        self.evictions = 0
        self._evictable, self._lose = evictable, lose
        self._free = dict.fromkeys(range(capacity - 1, -1, -1))
        """A stack that also supports removal of any block. Low numbers are allocated first."""
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
        """Blocks that belong to an entry, including held ones."""
        return len(self._entries)

    @property
    def num_used(self) -> int:
        return self.capacity - len(self._free)

    def entries(self) -> Iterable[tuple[int, PrefixEntry]]:
        return self._entries.items()

    def take(self) -> int | None:
        """Return a block to write to, held once. Evicts if none is free; None if none can be evicted now."""
        if not self._free:
            self._evict()
        if not self._free:
            return None
        block, _ = self._free.popitem()
        self._pins[block] = 1
        return block

    def settle(self, block: int, entry: PrefixEntry) -> None:
        """Assign a held block, now written, to the entry."""
        self._entries[block] = entry

    def claim(self, block: int, entry: PrefixEntry) -> None:
        """Assign a free block that already holds the entry's page, as found on disk at start."""
        del self._free[block]
        self.settle(block, entry)
        self._reconsider(block)

    def pin(self, block: int) -> None:
        self._pins[block] = self._pins.get(block, 0) + 1

    def unpin(self, block: int) -> None:
        self._pins[block] -= 1
        if not self._pins[block]:
            del self._pins[block]
            if block in self._entries:
                self._reconsider(block)
            else:
                self._free[block] = None

    def forget(self, block: int) -> None:
        """Detach the block from its entry. It becomes free once no transfer holds it."""
        self._entries.pop(block, None)
        if block not in self._pins:
            self._free[block] = None

    def reconsider(self, entry: PrefixEntry, block: int) -> None:
        """Check again whether the entry can be evicted: it lost a child."""
        if self._entries.get(block) is entry and block not in self._pins:
            self._reconsider(block)

    def _reconsider(self, block: int) -> None:
        entry = self._entries[block]
        (self._retained if entry.retained_until else self._candidates).push(entry.used, block)

    def _evict(self) -> None:
        for candidates in (self._candidates, self._retained):
            while candidates.heap:
                used, block = candidates.pop()
                entry = self._entries.get(block)
                # Stale: held now, or a parent. It is queued again when it is unpinned or its last child leaves.
                if entry is None or block in self._pins or not self._evictable(entry):
                    continue
                if entry.used != used or (entry.retained_until and candidates is self._candidates):
                    self._reconsider(block)
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
        """Raise `AssertionError` unless `free + cached + held == all` and no block is two of them."""
        free, held = set(self._free), set(self._pins)
        cached = set(self._entries) - held
        assert not free & held, "a held block is free"
        assert not free & cached, "a cached block is free"
        assert len(free) + len(cached) + len(held) == self.capacity, "a block is lost"


class _Candidates:
    """Heap of blocks that may be evicted, least recently used first."""

    def __init__(self) -> None:
        self.heap: list[tuple[int, int]] = []  # (last use, block)
        self._queued: set[int] = set()

    def push(self, used: int, block: int) -> None:
        if block not in self._queued:
            self._queued.add(block)
            heapq.heappush(self.heap, (used, block))

    def pop(self) -> tuple[int, int]:
        used, block = heapq.heappop(self.heap)
        self._queued.discard(block)
        return used, block
