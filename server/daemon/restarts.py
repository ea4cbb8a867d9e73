"""`Restarts`: pauses between restarts of a process, and when to give up."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

WINDOW_SECONDS = 600.0  # Older restarts are forgotten.


class Restarts:
    """Restarts of one process and its successors. Pauses double with each restart that is not forgotten."""

    def __init__(
        self, first: float, longest: float, limit: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """`first`, `longest`: pauses in seconds. `limit`: restarts within WINDOW_SECONDS; None for no limit."""
        self._first, self._longest, self._limit, self._clock = first, longest, limit, clock
        self._recent: deque[float] = deque()

    @property
    def count(self) -> int:
        """Restarts that are not forgotten."""
        while self._recent and self._clock() - self._recent[0] > WINDOW_SECONDS:
            self._recent.popleft()
        return len(self._recent)

    def forget(self) -> None:
        """Reset after a process has run well."""
        self._recent.clear()

    def next_pause(self) -> float | None:
        """Count a restart and return the seconds to wait before it; None if the limit is reached."""
        count = self.count
        if self._limit is not None and count >= self._limit:
            return None
        self._recent.append(self._clock())
        return min(self._longest, self._first * 2.0 ** min(count, 30))
