"""`DraftSwitch`: whether iterations may have drafts, decided by measured times.

Without drafts the engine launches one iteration ahead. While drafts promise more tokens a second, iterations are
launched one at a time. `Guard` ends that when the tokens do not come.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from weft.engine.runner.iteration.batch import StepResult
from weft.engine.scheduling.draft_depth import Choice, Guard, RowTimes

GAIN = 1.05  # factor on the tokens a second that drafts must promise before they are used
UNUSED = 4  # consecutive iterations without a draft that pays, after which launching ahead is better


class DraftSwitch:
    """measured: if False, iterations always may have drafts."""

    def __init__(self, measured: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self.measured, self.on = measured, not measured
        self.plain = RowTimes()  # of iterations without drafts, launched ahead
        self.guard = Guard()
        self._clock = clock
        self._unused = 0
        self._proposed = self._judged = False  # the iteration in flight, and the one committed now, could have drafts
        self._last_end: float | None = None
        self._after: bool | None = None  # whether the last iteration could have drafts
        self._period: tuple[float, int] | None = None  # seconds and requests of the iteration that is committed now

    def proposed(self, drafts: int) -> None:
        """Note that the next iteration could have drafts, and how many it has."""
        self._proposed = True
        self._unused = 0 if drafts else self._unused + 1

    def ended(self, result: StepResult, now: float) -> float | None:
        """Take in an iteration that ended at `now` and is not committed yet. Returns its seconds if they are those of
        decodes that could have drafts."""
        batch, last, self._last_end = result.batch, self._last_end, now
        self._judged, self._proposed = self._proposed, False
        # The first iteration that is launched ahead still waited for the host.
        settled = self._judged or not self._after
        self._after = self._judged
        self._period = None
        if not settled or last is None or batch.num_chunks:
            return None
        self._period = now - last, batch.num_decodes
        if self._judged:
            return now - last
        self.plain.add(batch.num_tokens, now - last, now)
        return None

    def committed(self, busy: bool, accepted: int) -> tuple[float, int] | None:
        """Decide whether drafts stay on, after a commit. accepted: draft tokens of that iteration. Returns the seconds
        and requests of the iteration if drafts are off and may be considered."""
        if not busy:
            self._last_end = None
        if not self.measured or self._period is None:
            return None
        seconds, requests = self._period
        now = self._clock()
        if self._judged:
            self._judge(seconds, requests, accepted, now)
            return None
        if self.on or now < self.guard.until or not self.plain.knows(requests, now):
            return None
        return self._period

    def _judge(self, seconds: float, requests: int, accepted: int, now: float) -> None:
        """Compare an iteration that could have drafts with those without."""
        if not self.plain.knows(requests, now):
            self._set(False)  # to measure it
            return
        without = seconds * requests / float(self.plain.at(np.array([requests]))[0])
        pays = self.guard.add(seconds, requests + accepted, without, now)
        if not pays or self._unused >= UNUSED:
            self._set(False)

    def consider(self, choice: Choice, requests: int) -> None:
        """Turn drafts on if the choice promises more tokens a second."""
        if choice.extra and choice.rate > GAIN * requests / float(self.plain.at(np.array([requests]))[0]):
            self._set(True)

    def _set(self, on: bool) -> None:
        self.on, self._unused = on, 0
