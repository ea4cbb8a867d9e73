"""`KeptSlots`: keeps a slot that another tenant yielded for the next request of its tenant, which may follow at once.

Otherwise the slot goes back as soon as the request ends, and the tenant's next request waits until another one is
yielded. Each yield costs computed tokens, and attention over contexts of more lengths. A slot kept in vain is idle, so
none is kept for a tenant whose last pause was longer.
"""

from __future__ import annotations

from weft.engine.scheduling.request import Request
from weft.engine.scheduling.waiting import WaitingQueue

KEPT = 8  # iterations that a slot is kept for
MAX_PAUSED = 1024  # tenants whose last end is remembered


class KeptSlots:
    """A tenant is in `_given` from the yield until its slot was kept in vain."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._given: set[int] = set()
        self._kept: dict[int, tuple[int, int]] = {}
        """By tenant: the last step that its slot is kept for, and the precedence of the request that ended."""
        self._paused: dict[int, int] = {}
        """By tenant whose slot was kept in vain, or was not kept for this reason: the step at which its request ended,
        longest ago first."""

    def give(self, tenant: int, since: int) -> None:
        """Record that a slot was yielded to this tenant, which has waited since this step."""
        if since - self._paused.get(tenant, since) <= KEPT:
            self._given.add(tenant)
            self._paused.pop(tenant, None)

    def ended(self, request: Request) -> None:
        """Record that a request has ended and left its slot."""
        tenant, step = request.tenant, self._queue.step
        if self._queue.has_slot(tenant):
            return
        if tenant in self._given:
            self._kept[tenant] = step + KEPT, request.precedence
        elif tenant in self._paused:
            self._pauses(tenant, step)

    def _pauses(self, tenant: int, step: int) -> None:
        self._paused.pop(tenant, None)
        self._paused[tenant] = step
        if len(self._paused) > MAX_PAUSED:
            del self._paused[next(iter(self._paused))]

    def update(self) -> tuple[int, list[Request]]:
        """Return how many slots are kept in this step, and the requests that they were kept for, which are next. Other
        tenants that wait without a slot, and better precedences, come first."""
        if not self._kept:
            return 0, []
        queue, returned = self._queue, []
        others = any(tenant not in self._kept for tenant in queue.tenants_without_slot())
        for tenant, (until, precedence) in list(self._kept.items()):
            if (request := queue.first_of(tenant, precedence)) is not None:
                returned.append(request)
            elif queue.step > until:
                self._given.discard(tenant)
                self._pauses(tenant, until - KEPT)
            elif not queue.has_slot(tenant):
                continue
            del self._kept[tenant]
        head = queue.head()
        if others or head is None:
            return 0, []
        return sum(precedence <= head.precedence for _, precedence in self._kept.values()), returned
