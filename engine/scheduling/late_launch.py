"""`LateLaunch`: delays the next launch so that requests that arrive meanwhile can join that iteration.

With one iteration launched ahead, a new request waits for the rest of the running iteration and for all of the next
one, which was scheduled before the request arrived. If the length of the running iteration is known, the next one is
scheduled shortly before it ends: by the host time of a launch, plus a margin. Decodes are expected to take as long as
the decodes before them; `IterationCost` forecasts iterations with prompts. The margin doubles when the device had to
wait.
"""

from __future__ import annotations

import math
import time
from collections import deque

from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.runner.iteration.cost_shares import Costs
from weft.engine.scheduling.iteration_cost import IterationCost, load_of
from weft.engine.scheduling.listeners import Listener

KNOWN = 8
"""Recent iterations of decodes whose minimum predicts the next one. As many with prompts must have been measured."""
STRAY = 2.0  # standard deviations to subtract from the forecast of an iteration with prompts
MARGINS = (0.4e-3, 5e-3)  # minimum and maximum margin, in seconds
IDLE_SECONDS = 50e-6  # idle seconds of the device before a delayed iteration above which the launch was too late
CALMER = 0.99  # factor on the margin after each delayed launch that was in time


class LateLaunch(Listener):
    """The launch times of one engine. All times are seconds of `time.monotonic()`."""

    def __init__(self, costs: Costs) -> None:
        self._costs, self._cost = costs, IterationCost(costs)
        self._decodes: deque[float] = deque(maxlen=KNOWN)
        self._with_prompts = 0
        self._begun = 0.0
        self._host = 0.0
        self._after_prompts = False  # the iteration that `at` last looked at has prompts
        self.delayed = False  # the next launch was delayed on purpose
        self._late: dict[int, bool] = {}  # delayed steps, and whether each follows an iteration with prompts
        self.margins = {False: 2 * MARGINS[0], True: 2 * MARGINS[0]}
        """Margin after an iteration of decodes alone (False) and after one with prompts (True)."""

    def launch_at(self, running: Batch | None) -> float:
        """See `Listener`. The caller must wait until then: the next launch counts as delayed."""
        at = 0.0 if running is None else self.at(running)
        self.delayed = at > time.monotonic()
        return at if self.delayed else 0.0

    def on_launch(self, batch: Batch, host_seconds: float) -> None:
        self._host = max(host_seconds, 0.95 * self._host)
        if self.delayed:
            self._late[batch.step] = self._after_prompts

    def on_result(self, result: StepResult, now: float) -> None:
        """Learn from an iteration that has ended. The next one was launched before and begins now."""
        self._begun = now
        after_prompts = self._late.pop(result.batch.step, None)
        if after_prompts is not None:
            waited = result.idle_seconds > IDLE_SECONDS
            (least, most), margin = MARGINS, self.margins[after_prompts]
            self.margins[after_prompts] = min(2 * margin, most) if waited else max(CALMER * margin, least)
        self._cost.observe(load_of(result.batch, self._costs), result.seconds)
        if _decodes_alone(result.batch):
            self._decodes.append(result.seconds)
        else:
            self._with_prompts += 1

    def at(self, running: Batch) -> float:
        """Return when to schedule the iteration after `running`, which began when the last one ended; 0 for at once."""
        self._after_prompts = not _decodes_alone(running)
        if self._after_prompts:
            if self._with_prompts < KNOWN:
                return 0.0
            seconds = self._cost.seconds(load_of(running, self._costs)) * math.exp(-STRAY * self._cost.spread)
        elif len(self._decodes) < KNOWN:
            return 0.0
        else:
            seconds = min(self._decodes)
        return self._begun + seconds - self._host - self.margins[self._after_prompts]


def _decodes_alone(batch: Batch) -> bool:
    return batch.num_decodes == len(batch.query_len)
