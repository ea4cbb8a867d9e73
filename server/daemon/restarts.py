"""`Restarts`: how soon a process may follow one that ended, and when to give up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 600.0
"""restarts longer ago are forgotten"""


class Restarts:
    """Of one process and its successors. Pauses double from restart to restart, as long as these are not forgotten."""

    def __init__(
        self, first: float, longest: float, limit: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`first`, `longest`: pauses in seconds. `limit`: of restarts within WINDOW_SECONDS, None for no end."""
        self._first, self._longest, self._limit, self._clock = first, longest, limit, clock
        self._recent: deque[float] = deque()

    @property
    def count(self) -> int:
        """of restarts that are not forgotten"""
        while self._recent and self._clock() - self._recent[0] > WINDOW_SECONDS:
            self._recent.popleft()
        return len(self._recent)

    def forget(self) -> None:
        """The process did well."""
        self._recent.clear()

    def next_pause(self) -> float | None:
        """Seconds to wait before the next restart, which counts from now on; None: there were enough of them."""
        count = self.count
        if self._limit is not None and count >= self._limit:
            return None
        self._recent.append(self._clock())
        return min(self._longest, self._first * 2.0 ** min(count, 30))
