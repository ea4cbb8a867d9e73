"""`IdleClock`: finds the time of the prefix index's clock before which pages count as idle."""

from __future__ import annotations

from collections import deque

MARKS = 32
"""Marks of the clock over the idle time, which set the resolution."""


class IdleClock:
    """Samples the index's clock. With `seconds` 0 nothing is ever idle."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._marks: deque[tuple[float, int]] = deque()
        """(monotonic seconds, clock), oldest first."""

    def idle(self, now: float, clock: int) -> int:
        """Return the index's clock at or before which a last use counts as idle; -1 if nothing is idle."""
        if not self._seconds:
            return -1
        if not self._marks or now - self._marks[-1][0] >= self._seconds / MARKS:
            self._marks.append((now, clock))
        while len(self._marks) > 1 and now - self._marks[1][0] >= self._seconds:
            self._marks.popleft()
        then, used = self._marks[0]
        return used if now - then >= self._seconds else -1
