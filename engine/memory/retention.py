"""`RetainedPages`: pages that clients asked to keep for a time. They are evicted after all others."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Sequence

from weft.engine.memory.prefix_index import PrefixEntry


class RetainedPages:
    """The retained pages of one prefix index. Single-threaded, like the pool that owns it.

    A chain is retained from its first page on, so no retained page has a parent that is not. At most `limit` pages are
    retained; beyond that the least recently retained ones are released, last pages of a chain first. Retained pages
    can still be evicted, so that running requests never wait for them."""

    def __init__(self, limit: int, on_release: Callable[[PrefixEntry], None]) -> None:
        """`on_release` is called with each entry that is no longer retained."""
        self.limit = limit
        self.displaced = 0  # pages released early in favor of others
        self._on_release = on_release
        self._entries: OrderedDict[PrefixEntry, None] = OrderedDict()
        """Least recently retained first; every page comes before its parent."""
        self._ends: list[tuple[float, int, PrefixEntry]] = []
        """(end in monotonic seconds, serial, last page) of retentions, including those renewed or displaced since."""
        self._serial = 0

    def __len__(self) -> int:
        return len(self._entries)

    def retain(self, chain: Sequence[PrefixEntry], until: Sequence[float]) -> int:
        """Retain a chain, first page first, each page until its own time (monotonic seconds, non-increasing). Returns
        how many of its pages are retained, which `limit` bounds."""
        chain = chain[: self.limit]
        for entry, end in zip(reversed(chain), reversed(until[: len(chain)]), strict=True):
            entry.retained_until = max(entry.retained_until, end)
            self._entries[entry] = None
            self._entries.move_to_end(entry)
        while len(self._entries) > self.limit:
            self.displaced += 1
            self._release(next(iter(self._entries)))
        for i, end in enumerate(until[: len(chain)]):
            if i + 1 == len(chain) or until[i + 1] != end:
                self._serial += 1
                heapq.heappush(self._ends, (end, self._serial, chain[i]))
        return len(chain)

    def expire(self, now: float) -> None:
        while self._ends and self._ends[0][0] <= now:
            entry: PrefixEntry | None = heapq.heappop(self._ends)[2]
            while entry is not None:
                if entry.retained_until <= now and entry in self._entries:
                    self._release(entry)
                entry = entry.parent

    def _release(self, entry: PrefixEntry) -> None:
        self.drop(entry)
        self._on_release(entry)

    def drop(self, entry: PrefixEntry) -> None:
        """Forget an entry that has left the index."""
        entry.retained_until = 0.0
        self._entries.pop(entry, None)

    def clear(self) -> None:
        """Forget all entries: the index was cleared."""
        for entry in self._entries:
            entry.retained_until = 0.0
        self._entries.clear()
        self._ends.clear()

    def check(self) -> None:
        """Raise `AssertionError` unless at most `limit` pages are retained, in complete chains."""
        assert len(self._entries) <= self.limit, "too many pages are retained"
        seen: set[PrefixEntry] = set()
        for entry in self._entries:
            assert entry.retained_until, "an entry that is not retained is counted"
            assert entry.parent is None or entry.parent.retained_until, "a retained page has a parent that is not"
            assert entry.parent not in seen, "a page is released after its parent"
            seen.add(entry)
