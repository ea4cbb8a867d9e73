"""`Fairness`: decides which requests may run ahead of the first in line, and how often."""

from __future__ import annotations

import numpy as np

from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.waiting import Blocked

MAX_OVERTAKEN = 8  # requests that may overtake the first in line while it lacks pages or a slot
MAX_PREEMPTED = 3  # times that a request may lose its slot to a higher priority
SLOTS_AT_ONCE = 4  # slots that may be freed at once for a higher priority


class Fairness:
    """The policy alone. The caller carries out its decisions and reports them back."""

    def __init__(self, prefill_share: float = 0.25, *, preempt: bool = True) -> None:
        """`prefill_share` is the share of prefill tokens, and of scarce slots, for the shortest prompts. With
        `preempt`, a higher priority takes the slot of a lower one."""
        self._share, self._preempt = prefill_share, preempt
        self._credit = 0.0
        """At 1, the shortest prompt gets the next scarce slot. Each slot given adds the share."""
        self.overtaken = 0  # requests admitted ahead of the first in line
        self.preempted = 0  # slots given up for a higher priority

    def share(self, budget: int, chunk_step: int) -> int:
        """Return the prefill tokens of `budget` for the shortest prompts. It leaves a chunk for the first in line."""
        return max(0, min(int(self._share * budget), budget - chunk_step))

    def may_overtake(self, head: Request, blocked: Blocked) -> bool:
        """Return whether another request may be admitted ahead of the head, given what the head lacks. A head that only
        waits for tokens loses nothing."""
        if blocked == "tokens":
            return True
        return head.overtaken < MAX_OVERTAKEN and (blocked == "pages" or self._credit >= 1)

    def overtakes(self, head: Request, blocked: Blocked) -> None:
        """Record that another request was admitted ahead of the head."""
        if blocked == "tokens":
            return
        head.overtaken += 1
        self.overtaken += 1
        if blocked == "slots":
            self._credit -= 1 - self._share

    def admitted(self) -> None:
        self._credit = min(1.0, self._credit + self._share)

    def slots_wanted(self, waiting: int) -> int:
        """Return how many slots to free, given the waiting requests of a higher priority."""
        return min(waiting, SLOTS_AT_ONCE) if self._preempt else 0

    def victim(self, s: SlotTable, head: Request) -> int | None:
        """Return the slot to free for the head: the youngest request of the lowest priority; None if there is none."""
        if int(s.priority.max()) <= head.priority:
            return None  # the fast path; stale values of free rows may skip it
        running = s.running()
        worse = running[s.priority[running] > head.priority]
        for slot in worse[np.lexsort((s.order[worse], s.priority[worse]))][::-1].tolist():
            request = s.of(slot)
            if request.preempted < MAX_PREEMPTED:
                return int(slot)
        return None

    def preempts(self, head: Request, request: Request) -> None:
        """Record that `request` lost its slot to the head, which no other may overtake."""
        request.preempted += 1
        head.overtaken = MAX_OVERTAKEN
        self.preempted += 1
