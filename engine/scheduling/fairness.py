"""`Fairness`: decides which requests may run ahead of the first in line, and how often."""

from __future__ import annotations

import numpy as np

from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.waiting import Blocked

MAX_OVERTAKEN = 8  # requests that may overtake the first in line while it lacks pages or a slot
MAX_PREEMPTED = 3  # times that a request may lose its slot to a higher priority
SLOTS_AT_ONCE = 4  # slots that may be freed at once for a higher priority
PATIENCE = 32  # iterations that a tenant waits without a slot before one with several slots yields one
MOST = 8  # maximum factor on `PATIENCE` if that costs much


class Fairness:
    """The policy alone. The caller carries out its decisions and reports them back."""

    def __init__(self, prefill_share: float = 0.25, *, preempt: bool = True, patience: int = PATIENCE) -> None:
        """`prefill_share` is the share of prefill tokens, and of scarce slots, for the shortest prompts. With
        `preempt`, a higher priority takes the slot of a lower one. `patience`: see `PATIENCE`."""
        self._share, self._preempt, self.patience = prefill_share, preempt, patience
        self._credit = 0.0
        """At 1, the shortest prompt gets the next scarce slot. Each slot given adds the share."""
        self.overtaken = 0  # requests admitted ahead of the first in line
        self._next_yield = 0  # the first step that may have another yield
        self.preempted = 0  # slots given up for a higher priority
        self.yielded = 0  # slots given up for a tenant without one

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
        """Return the slot to free for the head: the youngest request of a lower precedence, else of a lower priority of
        its tenant; None if there is none."""
        if int(s.precedence.max()) <= head.precedence and int(s.priority.max()) <= head.priority:
            return None  # the fast path; stale values of free rows may skip it
        running = s.running()
        precedence = s.precedence[running]
        own = (precedence == head.precedence) & (s.tenant[running] == head.tenant)
        worse = running[(precedence > head.precedence) | own & (s.priority[running] > head.priority)]
        for slot in worse[np.lexsort((s.order[worse], s.priority[worse], s.precedence[worse]))][::-1].tolist():
            request = s.of(slot)
            if request.preempted < MAX_PREEMPTED:
                return int(slot)
        return None

    def donor(self, s: SlotTable, waiting: Request, waited: int, budget: int) -> np.ndarray:
        """Return the slots of the tenant that should yield one to `waiting`, whose tenant has waited without one for
        `waited` iterations of `budget` tokens; none if it must wait on. A prompt waits for as long as it takes.

        It is the tenant with the most slots, if these are several, or all that run and the other has waited long."""
        running = s.running()
        if waited < min(max(self.patience, len(waiting.token_ids) / budget), self.patience * MOST):
            return running[:0]
        of_others = running[(s.precedence[running] >= waiting.precedence) & (s.tenant[running] != waiting.tenant)]
        tenants, counts = np.unique(s.tenant[of_others], return_counts=True)
        own = of_others[s.tenant[of_others] == tenants[counts.argmax()]] if len(tenants) else of_others
        alone = len(running) == 1 and waited >= self.patience * MOST
        return own if len(own) > 1 or alone else own[:0]

    def yielding(self, s: SlotTable, own: np.ndarray, step: int) -> int | None:
        """Return which of a tenant's slots it yields now: the youngest request of its lowest priority. None if all must
        run on. A request that has yielded `n` times runs for `2**n` times as long first, so that it ends."""
        if step < self._next_yield:
            return None
        patience = self.patience if len(own) > 1 else self.patience * MOST
        for slot in own[np.lexsort((s.order[own], s.priority[own], s.precedence[own]))][::-1].tolist():
            if step - int(s.since[slot]) >= patience << min(s.of(slot).yielded, 32):
                return int(slot)
        return None

    def yields(self, s: SlotTable, slot: int, step: int) -> None:
        """Record that a request loses its slot to a tenant without one. The next may after twice as many iterations as
        tokens have to be computed again, which keeps the cost low even if prefixes are not cached."""
        self._next_yield = step + 2 * (int(s.known[slot]) - int(s.published[slot]) * s.page_size)
        s.of(slot).yielded += 1
        self.yielded += 1

    def last(self, s: SlotTable) -> int:
        """Return the slot to free when memory runs out: the youngest of the lowest precedence, of the tenant with the
        most slots there and of its lowest priority."""
        running = s.in_order(s.running())
        _, tenant, counts = np.unique(s.tenant[running], return_inverse=True, return_counts=True)
        return int(running[np.lexsort((counts[tenant], s.precedence[running]))[-1]])

    def preempts(self, head: Request, request: Request) -> None:
        """Record that `request` lost its slot to the head, which no other may overtake."""
        request.preempted += 1
        head.overtaken = MAX_OVERTAKEN
        self.preempted += 1
