"""What brings pages back to the GPU: `PageLoad`, one page on its way; `Loading`, a request that waits for some;
`LoadSpeeds`, which decides how much of a prefix is worth it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry

SMOOTHING = 0.2
"""weight of the newest measurement"""
PRIOR_HOST_BYTES_PER_SECOND = 10e9
PRIOR_SSD_BYTES_PER_SECOND = 1e9


class PageLoad:
    """A page on its way to GPU page `page`, which the load holds until its last copy has ended."""

    __slots__ = ("begun", "entry", "page", "tier", "waiters")

    def __init__(self, entry: PrefixEntry, page: int, tier: str, begun: float) -> None:
        self.entry = entry
        self.page = page
        self.tier = tier
        """where it comes from: 'host' or 'ssd'"""
        self.begun = begun
        """monotonic seconds"""
        self.waiters: list[Loading] = []


class Loading:
    """A request's wait for loads, its own and those that others started."""

    __slots__ = ("entries", "failed", "remaining", "slot")

    def __init__(self, slot: int, entries: list[PrefixEntry]) -> None:
        self.slot = slot
        """-1 once its request has left the slot"""
        self.entries = entries
        self.remaining = 0
        self.failed = False

    def wait_for(self, load: PageLoad) -> None:
        load.waiters.append(self)
        self.remaining += 1


class LoadSpeeds:
    """Measured speeds of the tiers and of prefill, and what they say about a prefix."""

    def __init__(self, page_bytes: int, page_size: int) -> None:
        self._page_bytes = page_bytes
        self._page_size = page_size
        self._bytes_per_second = {"host": PRIOR_HOST_BYTES_PER_SECOND, "ssd": PRIOR_SSD_BYTES_PER_SECOND}
        self._measured: set[str] = set()
        self._prefill_tokens_per_second = 0.0

    @property
    def bytes_per_second(self) -> dict[str, float]:
        return dict(self._bytes_per_second)

    def moved(self, tier: str, pages: int, seconds: float) -> None:
        """A batch of page loads from a tier took so long."""
        if seconds > 0:
            rate, weight = pages * self._page_bytes / seconds, SMOOTHING if tier in self._measured else 1.0
            self._bytes_per_second[tier] += weight * (rate - self._bytes_per_second[tier])
            self._measured.add(tier)

    def computed(self, tokens: int, seconds: float, full: bool) -> None:
        """An iteration of so many tokens. One that is not full shows only that prefill is at least this fast."""
        if seconds <= 0:
            return
        rate, known = tokens / seconds, self._prefill_tokens_per_second
        if not known or (not full and rate > known):
            self._prefill_tokens_per_second = rate
        elif full:
            self._prefill_tokens_per_second += SMOOTHING * (rate - known)

    def worthwhile(self, entries: Sequence[PrefixEntry], busy_pages: dict[str, int], busy_tokens: int) -> int:
        """How many entries of the chain to use, so that loading them and computing the rest ends soonest.

        `busy_pages`: pages of each tier already on their way, `busy_tokens`: prompt tokens already to be computed;
        both come first. A load that ends before the processor is free costs nothing. Without a measured prefill: all.
        """
        rate = self._prefill_tokens_per_second
        if not rate or all(e.page != NOWHERE for e in entries):
            return len(entries)
        away = np.array([e.page == NOWHERE for e in entries])
        from_ssd = away & np.array([e.host == NOWHERE for e in entries])
        # A page from the SSD crosses both links; the two run beside each other, so the slower one counts.
        loading = np.full(len(entries), busy_tokens / rate)
        for tier, pages in (("host", away), ("ssd", from_ssd)):
            ahead = busy_pages[tier] + np.cumsum(pages)
            seconds = ahead * self._page_bytes / self._bytes_per_second[tier]
            loading = np.maximum(loading, np.where(np.cumsum(pages) > 0, seconds, 0.0))
        saved = np.arange(1, len(entries) + 1) * self._page_size / rate
        gain = np.concatenate(([-busy_tokens / rate], saved - loading))
        # Among equals the longest: what is loaded leaves the processor to other requests.
        return int(np.flatnonzero(gain >= gain.max() - 1e-9)[-1])
