"""`WaitingQueue`: requests without a slot, ordered by precedence, then fairly by tenant, then by priority and arrival.

Every operation is logarithmic in the number of waiting requests. Requests that have left are dropped from a heap when
they reach its top, or when they are most of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal

from weft.engine.scheduling.fair_queue import FairQueue
from weft.engine.scheduling.request import Request

Blocked = Literal["slots", "pages", "tokens"]
OVERTAKING = 4  # precedences, and priorities of the head's tenant, that are searched for a request that fits


class _RequestHeap:
    """Waiting requests ordered by a number, smallest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        """(number, ticket, request). A request that has left has another ticket."""
        self.size = 0

    def push(self, number: int, request: Request) -> None:
        heapq.heappush(self._heap, (number, request.ticket, request))
        self.size += 1

    def first(self) -> Request:
        while self._heap[0][1] != self._heap[0][2].ticket:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def left(self) -> None:
        """Record that one of the requests has left."""
        self.size -= 1
        if len(self._heap) > 2 * self.size + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)


class _Level:
    """A tenant's waiting requests of one priority."""

    def __init__(self) -> None:
        self.by_arrival, self.by_length = _RequestHeap(), _RequestHeap()


class _Tenant:
    """A tenant's waiting requests of one precedence."""

    def __init__(self) -> None:
        self.levels: dict[int, _Level] = {}  # by priority; none is empty
        self.priorities: list[int] = []
        self.shown: Request | None = None  # its request in `_Precedence.shortest`

    @property
    def best(self) -> _Level:
        return self.levels[self.priorities[0]]

    def push(self, request: Request) -> None:
        level = self.levels.get(request.priority)
        if level is None:
            level = self.levels[request.priority] = _Level()
            insort(self.priorities, request.priority)
        level.by_arrival.push(request.order, request)
        level.by_length.push(len(request.token_ids), request)

    def remove(self, request: Request) -> None:
        level = self.levels[request.priority]
        level.by_arrival.left()
        level.by_length.left()
        if not level.by_arrival.size:
            del self.levels[request.priority]
            del self.priorities[bisect_left(self.priorities, request.priority)]


class _Precedence:
    """The waiting requests of one precedence."""

    def __init__(self) -> None:
        self.fair = FairQueue()
        self.tenants: dict[int, _Tenant] = {}
        self.without_slot: dict[int, int] = {}
        """By tenant that waits and has no slot: the step since which that is so, in this order."""
        self._shortest: list[tuple[int, int, int, Request]] = []
        """(length, ticket, number, request). An entry is valid while its tenant shows the request with this ticket."""
        self._shows = 0

    def push(self, request: Request) -> None:
        tenant = self.tenants.get(request.tenant)
        if tenant is None:
            tenant = self.tenants[request.tenant] = _Tenant()
            self.fair.join(request.tenant, request.order)
        tenant.push(request)
        self._show(tenant)

    def _show(self, tenant: _Tenant) -> None:
        """Enter the shortest request of the tenant's best priority in the heap."""
        request = tenant.best.by_length.first()
        if request is tenant.shown:
            return
        tenant.shown = request
        self._shows += 1
        heapq.heappush(self._shortest, (len(request.token_ids), request.ticket, self._shows, request))
        if len(self._shortest) > 2 * len(self.tenants) + 64:
            self._shortest = [entry for entry in self._shortest if self._is_shown(entry[1], entry[3])]
            heapq.heapify(self._shortest)

    def _is_shown(self, ticket: int, request: Request) -> bool:
        tenant = self.tenants.get(request.tenant)
        return tenant is not None and tenant.shown is request and ticket == request.ticket

    def shortest(self) -> Request:
        """Return the shortest of the requests that have the best priority of their tenant."""
        while not self._is_shown(self._shortest[0][1], self._shortest[0][3]):
            heapq.heappop(self._shortest)
        return self._shortest[0][3]

    def head(self) -> Request:
        return self.first_of(self.fair.first())

    def first_of(self, tenant: int) -> Request:
        return self.tenants[tenant].best.by_arrival.first()

    def pay(self, request: Request, cost: float) -> None:
        """Charge the tenant of a request that is about to leave."""
        if request is self.first_of(request.tenant):
            self.fair.serve(request.tenant, cost)
        else:
            self.fair.charge(request.tenant, cost)

    def remove(self, request: Request) -> None:
        tenant = self.tenants[request.tenant]
        tenant.remove(request)
        if not tenant.levels:
            del self.tenants[request.tenant]
            self.without_slot.pop(request.tenant, None)
            self.fair.leave(request.tenant)
            return
        if tenant.shown is request:
            tenant.shown = None
        self._show(tenant)


class WaitingQueue:
    """The waiting requests. Siblings are held outside the queue until the prompt that they share is computed."""

    def __init__(self) -> None:
        self._queues: dict[int, _Precedence] = {}  # by precedence; none is empty
        self._precedences: list[int] = []
        self._slots: dict[int, int] = {}  # slots by tenant; none is 0
        self._tickets = 0
        self.step = 0  # the iteration that is being formed
        self.num_requests = 0  # waiting requests, including held ones
        self.num_held = 0
        self.num_tokens = 0  # tokens to compute for them if nothing is cached, without held ones
        self.blocked: Blocked = "tokens"
        """What the head lacked at the last schedule: a slot, pages, or tokens of the iteration."""

    def __len__(self) -> int:
        return self.num_requests - self.num_held

    def push(self, request: Request) -> None:
        self._enter(request)
        self.num_requests += 1

    def _enter(self, request: Request) -> None:
        self._tickets += 1
        self.num_tokens += len(request.token_ids)
        request.ticket = self._tickets
        queue = self._queues.get(request.precedence)
        if queue is None:
            queue = self._queues[request.precedence] = _Precedence()
            insort(self._precedences, request.precedence)
        queue.push(request)
        if request.tenant not in self._slots:
            queue.without_slot.setdefault(request.tenant, self.step)

    def hold(self, request: Request, leader: Request) -> None:
        """Hold the request until the leader's prompt is computed."""
        leader.siblings.append(request)
        request.held = True
        self.num_held += 1
        self.num_requests += 1

    def head(self) -> Request | None:
        """Return the first in line; None if no request waits."""
        return self._queues[self._precedences[0]].head() if self._precedences else None

    def shortest(self) -> Request | None:
        """Return the shortest request of the first precedence, among the best of each tenant; None if none waits."""
        return self._queues[self._precedences[0]].shortest() if self._precedences else None

    def num_like(self, request: Request) -> int:
        """Return how many requests of this one's precedence, tenant and priority wait, including itself."""
        return self._queues[request.precedence].tenants[request.tenant].levels[request.priority].by_arrival.size

    def overtaking(self, head: Request) -> Iterator[Request]:
        """Yield requests that may be admitted while the head does not fit: the shortest of each of the first few
        precedences and of the head's tenant's further priorities."""
        for precedence in islice(self._precedences, OVERTAKING):
            yield self._queues[precedence].shortest()
        own = self._queues[head.precedence].tenants[head.tenant]
        for priority in own.priorities[1:OVERTAKING]:
            yield own.levels[priority].by_length.first()

    def longest_without_slot(self) -> tuple[Request, int] | None:
        """Return the first request of the tenant of the first precedence that has waited longest without a slot, and
        the step since which it has none; None if there is no such tenant."""
        queue = self._queues[self._precedences[0]] if self._precedences else None
        if queue is None or not queue.without_slot:
            return None
        tenant, since = next(iter(queue.without_slot.items()))
        return queue.first_of(tenant), since

    def tenants_without_slot(self) -> Iterable[int]:
        """Return the tenants of the first precedence that wait and have no slot."""
        return self._queues[self._precedences[0]].without_slot if self._precedences else ()

    def has_slot(self, tenant: int) -> bool:
        return tenant in self._slots

    def first_of(self, tenant: int, precedence: int) -> Request | None:
        """Return the tenant's first request of this precedence; None if none waits."""
        queue = self._queues.get(precedence)
        return queue.first_of(tenant) if queue is not None and tenant in queue.tenants else None

    def promote(self, request: Request) -> None:
        """Make the request's tenant the next one, out of turn."""
        self._queues[request.precedence].fair.promote(request.tenant)

    def freed(self, tenant: int) -> None:
        """Record that a request of this tenant has left its slot."""
        self._slots[tenant] -= 1
        if not self._slots[tenant]:
            del self._slots[tenant]
            for queue in self._queues.values():
                if tenant in queue.tenants:
                    queue.without_slot[tenant] = self.step

    def take(self, request: Request, cost: float) -> None:
        """Remove a request that gets a slot, and charge its tenant `cost` tokens."""
        self._queues[request.precedence].pay(request, cost)
        self._remove(request)
        self._slots[request.tenant] = self._slots.get(request.tenant, 0) + 1
        for queue in self._queues.values():
            queue.without_slot.pop(request.tenant, None)

    def settle(self, request: Request, cost: float) -> None:
        """Charge the tenant of a taken request the difference to its actual cost."""
        queue = self._queues.get(request.precedence)
        if queue is not None:
            queue.fair.charge(request.tenant, cost)

    def end(self, request: Request) -> None:
        if request.held:
            self._leave(request)
        else:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        request.ticket = 0
        self.num_tokens -= len(request.token_ids)
        queue = self._queues[request.precedence]
        queue.remove(request)
        if not queue.tenants:
            del self._queues[request.precedence]
            del self._precedences[bisect_left(self._precedences, request.precedence)]
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_held -= request.held
        request.held = False

    def release_siblings(self, request: Request) -> None:
        """Queue the requests held for this prompt: all if it is computed, else one that the others then wait for."""
        siblings = [s for s in request.siblings if s.waiting]
        request.siblings = []
        if siblings and not request.begun:
            siblings[0].siblings += siblings[1:]
            siblings = siblings[:1]
        for sibling in siblings:
            sibling.held = False
            self._enter(sibling)
        self.num_held -= len(siblings)

    def by_reason(self) -> dict[str, int]:
        """Return waiting requests by reason. All count under the reason that blocks the head."""
        counts = dict.fromkeys(("slots", "pages", "tokens"), 0)
        counts[self.blocked] = self.num_requests - self.num_held
        return {**counts, "sibling": self.num_held}
