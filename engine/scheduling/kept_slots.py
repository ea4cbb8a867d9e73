"""`KeptSlots`: keeps a slot that another tenant yielded for the next request of its tenant, which may follow at once.

Otherwise the slot goes back as soon as the request ends, and the tenant's next request waits until another one is
yielded. Each yield costs computed tokens, and attention over contexts of more lengths.
"""

from __future__ import annotations

from weft.engine.scheduling.request import Request
from weft.engine.scheduling.waiting import WaitingQueue

KEPT = 8  # iterations that a slot is kept for


class KeptSlots:
    """A tenant is in `_given` from the yield until its slot was kept in vain."""

    def __init__(self, queue: WaitingQueue) -> None:
        self._queue = queue
        self._given: set[int] = set()
        self._kept: dict[int, tuple[int, int]] = {}
        """By tenant: the last step that its slot is kept for, and the precedence of the request that ended."""

    def give(self, tenant: int) -> None:
        """Record that a slot was yielded to this tenant."""
        self._given.add(tenant)

    def ended(self, request: Request) -> None:
        """Record that a request has ended and left its slot."""
        if request.tenant in self._given and not self._queue.has_slot(request.tenant):
            self._kept[request.tenant] = self._queue.step + KEPT, request.precedence

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
            elif not queue.has_slot(tenant):
                continue
            del self._kept[tenant]
        head = queue.head()
        if others or head is None:
            return 0, []
        return sum(precedence <= head.precedence for _, precedence in self._kept.values()), returned
