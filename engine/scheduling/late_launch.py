"""`LateLaunch`: how long an engine may wait with the next iteration, so that requests that come meanwhile are in it.

With one iteration always launched behind the one that runs, a request waits for the rest of that one and for all of
the next, which was scheduled before it came. An iteration whose length is known is followed by one that is scheduled
shortly before it ends instead: what that takes the host, and a margin. Decodes take what those before them took; of
iterations with prompts `IterationCost` learns what they will take. The device tells whether it had to wait: then the
margin doubles.
"""

from __future__ import annotations

import math
from collections import deque

from weft.engine.runner.batch import Batch, StepResult
from weft.engine.runner.work import Costs
from weft.engine.scheduling.iteration_cost import IterationCost, load_of

KNOWN = 8
"""iterations of decodes whose shortest is what the next one is taken for; with prompts as many must have been seen"""
STRAY = 2.0
"""standard deviations of the forecast by which an iteration with prompts is taken for shorter"""
MARGINS = (0.4e-3, 5e-3)
"""seconds, at least and at most"""
IDLE_SECONDS = 50e-6
"""of the device before an iteration that was launched late: more is a wait"""
CALMER = 0.99
"""by what a margin shrinks with each one that was in time"""


class LateLaunch:
    """Of one engine. Times are those of one monotonic clock, in seconds."""

    def __init__(self, costs: Costs) -> None:
        self._costs, self._cost = costs, IterationCost(costs)
        self._decodes: deque[float] = deque(maxlen=KNOWN)
        self._with_prompts = 0
        self._begun = 0.0
        self._host = 0.0
        self._behind_prompts = False
        """what `at` was last asked about"""
        self._late: dict[int, bool] = {}
        """steps that were waited for, and whether behind prompts"""
        self.margins = {False: 2 * MARGINS[0], True: 2 * MARGINS[0]}
        """behind decodes, behind prompts"""

    def launched(self, batch: Batch, seconds: float, *, late: bool) -> None:
        """It took the host so long to schedule and launch it. late: `at` was waited for."""
        self._host = max(seconds, 0.95 * self._host)
        if late:
            self._late[batch.step] = self._behind_prompts

    def ended(self, result: StepResult, now: float) -> None:
        """The iteration behind it, which was launched before, begins now."""
        self._begun = now
        behind = self._late.pop(result.batch.step, None)
        if behind is not None:
            waited = result.idle_seconds > IDLE_SECONDS
            (least, most), margin = MARGINS, self.margins[behind]
            self.margins[behind] = min(2 * margin, most) if waited else max(CALMER * margin, least)
        self._cost.observe(load_of(result.batch, self._costs), result.seconds)
        if _decodes_alone(result.batch):
            self._decodes.append(result.seconds)
        else:
            self._with_prompts += 1

    def at(self, running: Batch) -> float:
        """When the iteration behind `running`, which began when the last one ended, should be scheduled; 0: at once."""
        self._behind_prompts = not _decodes_alone(running)
        if self._behind_prompts:
            if self._with_prompts < KNOWN:
                return 0.0
            seconds = self._cost.seconds(load_of(running, self._costs)) * math.exp(-STRAY * self._cost.spread)
        elif len(self._decodes) < KNOWN:
            return 0.0
        else:
            seconds = min(self._decodes)
        return self._begun + seconds - self._host - self.margins[self._behind_prompts]


def _decodes_alone(batch: Batch) -> bool:
    return batch.num_decodes == len(batch.query_len)
