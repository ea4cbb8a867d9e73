"""`IdleClock`: which uses of an index lie so many seconds back."""

from __future__ import annotations

from collections import deque

MARKS = 32
"""of the clock, over the time that makes a page idle: it is known to so fine a part"""


class IdleClock:
    """Follows the index's clock. `seconds` 0: nothing is ever idle."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._marks: deque[tuple[float, int]] = deque()
        """(monotonic seconds, clock), oldest first"""

    def idle(self, now: float, clock: int) -> int:
        """What was last used at this time of the index's clock, or before, is idle; -1: nothing is."""
        if not self._seconds:
            return -1
        if not self._marks or now - self._marks[-1][0] >= self._seconds / MARKS:
            self._marks.append((now, clock))
        while len(self._marks) > 1 and now - self._marks[1][0] >= self._seconds:
            self._marks.popleft()
        then, used = self._marks[0]
        return used if now - then >= self._seconds else -1
