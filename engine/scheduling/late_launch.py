"""`LateLaunch`: how long an engine may wait with the next iteration, so that requests that come meanwhile are in it.

With one iteration always launched behind the one that runs, a request waits for the rest of that one and for all of
the next, which was scheduled before it came. Behind decodes, whose length is known from those before, the next one is
scheduled shortly before they end instead: what it takes the host, and a margin. The device tells whether it had to
wait: then the margin doubles.
"""

from __future__ import annotations

from collections import deque

from weft.engine.runner.batch import Batch, StepResult

KNOWN = 8
"""iterations of decodes whose shortest is what the next one is taken for"""
MARGINS = (0.4e-3, 5e-3)
"""seconds, at least and at most"""
IDLE_SECONDS = 50e-6
"""of the device before an iteration that was launched late: more is a wait"""
CALMER = 0.99
"""by what a margin shrinks with each one that was in time"""


class LateLaunch:
    """Of one engine. Times are those of one monotonic clock, in seconds."""

    def __init__(self) -> None:
        self._decodes: deque[float] = deque(maxlen=KNOWN)
        self._begun = 0.0
        self._host = 0.0
        self._late: set[int] = set()
        self.margin = 2 * MARGINS[0]

    def launched(self, batch: Batch, seconds: float, *, late: bool) -> None:
        """It took the host so long to schedule and launch it. late: `at` was waited for."""
        self._host = max(seconds, 0.95 * self._host)
        if late:
            self._late.add(batch.step)

    def ended(self, result: StepResult, now: float) -> None:
        """The iteration behind it, which was launched before, begins now."""
        self._begun = now
        if result.batch.step in self._late:
            self._late.discard(result.batch.step)
            waited = result.idle_seconds > IDLE_SECONDS
            least, most = MARGINS
            self.margin = min(2 * self.margin, most) if waited else max(CALMER * self.margin, least)
        if _decodes_alone(result.batch):
            self._decodes.append(result.seconds)

    def at(self, running: Batch) -> float:
        """When the iteration behind `running`, which began when the last one ended, should be scheduled; 0: at once."""
        if len(self._decodes) < KNOWN or not _decodes_alone(running):
            return 0.0
        return self._begun + min(self._decodes) - self._host - self.margin


def _decodes_alone(batch: Batch) -> bool:
    return batch.num_decodes == len(batch.query_len)
