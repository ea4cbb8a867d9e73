"""`Promises`: pages that clients asked to keep for a time (`cache_control`), which are evicted after all others."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

from weft.engine.memory.prefix_index import PrefixEntry


class Promises:
    """Of one prefix index. Single-threaded, like the pool that owns it.

    A chain is promised from its first page on, so no promised page has a parent that is not. There are `limit` promised
    pages at most; beyond that the least recently promised ones lose theirs, the last pages of a chain first. Pages that
    are promised can still be evicted: what must run never waits for them.
    """

    def __init__(self, limit: int, lapsed: Callable[[PrefixEntry], None]) -> None:
        """`lapsed`: told of an entry that is like any other again."""
        self.limit = limit
        self.displaced = 0
        """promises that ended early, for others"""
        self._lapsed = lapsed
        self._entries: OrderedDict[PrefixEntry, None] = OrderedDict()
        """least recently promised first, and every page before the one it follows"""
        self._ends: list[tuple[float, int, PrefixEntry]] = []
        """(monotonic seconds, serial, last page) of promises, those that were renewed or displaced since among them"""
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def make(self, chain: Sequence[PrefixEntry], until: Sequence[float]) -> int:
        """Promise a chain, first page first, each until its own time (monotonic seconds, none later than the one
        before). Returns how many of its pages are promised now: as many as there may be."""
        chain = chain[: self.limit]
        for entry, end in zip(reversed(chain), reversed(until[: len(chain)]), strict=True):
            entry.promised = max(entry.promised, end)
            self._entries[entry] = None
            self._entries.move_to_end(entry)
        while len(self._entries) > self.limit:
            self.displaced += 1
            self._lapse(next(iter(self._entries)))
        for i, end in enumerate(until[: len(chain)]):
            if i + 1 == len(chain) or until[i + 1] != end:
                self._serial += 1
                heapq.heappush(self._ends, (end, self._serial, chain[i]))
        return len(chain)

    def expire(self, now: float) -> None:
        """End the promises whose time is over."""
        while self._ends and self._ends[0][0] <= now:
            entry: PrefixEntry | None = heapq.heappop(self._ends)[2]
            while entry is not None:
                if entry.promised <= now and entry in self._entries:
                    self._lapse(entry)
                entry = entry.parent

    def _lapse(self, entry: PrefixEntry) -> None:
        self.gone(entry)
        self._lapsed(entry)

    def gone(self, entry: PrefixEntry) -> None:
        """The entry has left the index."""
        entry.promised = 0.0
        self._entries.pop(entry, None)

    def clear(self) -> None:
        """All entries have left the index."""
        for entry in self._entries:
            entry.promised = 0.0
        self._entries.clear()
        self._ends.clear()

    def check(self) -> None:
        """Raise `AssertionError` unless the promises are within their bound and of whole chains."""
        assert len(self._entries) <= self.limit, "more pages are promised than may be"
        seen: set[PrefixEntry] = set()
        for entry in self._entries:
            assert entry.promised, "an entry without a promise is counted"
            assert entry.parent is None or entry.parent.promised, "a promised page follows one that is not"
            assert entry.parent not in seen, "a page loses its promise after the one it follows"
            seen.add(entry)
