"""Loads of pages to the GPU: `PageLoad` is one page, `Loading` a request's wait for pages, and `LoadSpeeds` decides
how much of a prefix is worth loading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry

SMOOTHING = 0.2  # weight of the newest measurement
PRIOR_HOST_BYTES_PER_SECOND = 10e9
PRIOR_SSD_BYTES_PER_SECOND = 1e9


@dataclass(eq=False, slots=True)
class PageLoad:
    """A load into GPU page `page`, which it holds until its last copy has ended."""

    entry: PrefixEntry
    page: int
    tier: str  # source tier: 'host' or 'ssd'
    begun: float  # start in monotonic seconds
    waiters: list[Loading] = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Loading:
    """A request's wait for loads, including those that other requests started."""

    slot: int  # slot of the request; -1 once it has left the slot
    entries: list[PrefixEntry]
    remaining: int = 0
    failed: bool = False

    def wait_for(self, load: PageLoad) -> None:
        load.waiters.append(self)
        self.remaining += 1


class LoadSpeeds:
    """Measured speeds of the tiers and of prefill."""

    def __init__(self, page_bytes: int, page_size: int) -> None:
        self._page_bytes, self.page_size = page_bytes, page_size
        self.bytes_per_second = {"host": PRIOR_HOST_BYTES_PER_SECOND, "ssd": PRIOR_SSD_BYTES_PER_SECOND}
        self._measured: set[str] = set()
        self._prefill_tokens_per_second = 0.0

    def moved(self, tier: str, pages: int, seconds: float) -> None:
        """Record how long a batch of page loads from a tier took."""
        if seconds > 0:
            rate, weight = pages * self._page_bytes / seconds, SMOOTHING if tier in self._measured else 1.0
            self.bytes_per_second[tier] += weight * (rate - self.bytes_per_second[tier])
            self._measured.add(tier)

    def computed(self, tokens: int, seconds: float, full: bool) -> None:
        """Record an iteration. One that is not `full` only shows that prefill is at least this fast."""
        if seconds <= 0:
            return
        rate, known = tokens / seconds, self._prefill_tokens_per_second
        if not known or (not full and rate > known):
            self._prefill_tokens_per_second = rate
        elif full:
            self._prefill_tokens_per_second += SMOOTHING * (rate - known)

    def worthwhile(
        self, entries: Sequence[PrefixEntry], busy_pages: dict[str, int], busy_tokens: int,
        states: Mapping[int, Sequence[PrefixEntry]] | None = None,
    ) -> int:  # fmt: skip
        """Return how many entries of a chain to load so that loading them and computing the rest ends soonest.
        `busy_pages` are the pages per tier already loading and `busy_tokens` the prompt tokens already queued; both
        come first. A load that ends before the processor is free costs nothing. All are used before a prefill was
        measured. `states` are the entries of the recurrent state after each number of entries that has one. Only such
        numbers are returned, and only the state of that number is loaded."""
        rate = self._prefill_tokens_per_second
        counts = np.arange(len(entries) + 1) if states is None else np.array([0, *sorted(states)])
        below = [() if states is None else states.get(int(count), ()) for count in counts]
        deepest = int(counts[-1])
        if not rate or all(e.page != NOWHERE for e in (*entries[:deepest], *below[-1])):
            return deepest
        # A page from the SSD crosses both links. They overlap, so the slower one counts.
        loading = np.full(len(counts), busy_tokens / rate)
        for tier, places in (("host", ("page",)), ("ssd", ("page", "host"))):
            away = [_nowhere(entries, places), *(_nowhere(state, places) for state in below)]
            pages = np.concatenate(([0], np.cumsum(away[0])))[counts] + [sum(state) for state in away[1:]]
            seconds = (busy_pages[tier] + pages) * self._page_bytes / self.bytes_per_second[tier]
            loading = np.maximum(loading, np.where(pages > 0, seconds, 0.0))
        gain = counts * self.page_size / rate - loading
        # Among equals, take the longest: loads leave the processor to other requests.
        return int(counts[np.flatnonzero(gain >= gain.max() - 1e-9)[-1]])


def _nowhere(entries: Sequence[PrefixEntry], places: Sequence[str]) -> list[bool]:
    """Return for each entry whether all of these attributes say that it has no copy there."""
    return [all(getattr(entry, place) == NOWHERE for place in places) for entry in entries]
