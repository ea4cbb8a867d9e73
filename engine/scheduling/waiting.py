"""`WaitingQueue`: requests without a slot, ordered by priority, then fairly by tenant, then by arrival.

Every operation is logarithmic in the number of waiting requests. Requests that have left are dropped from a heap when
they reach its top, or when they are most of it.
"""

from __future__ import annotations

import heapq
from bisect import bisect_left, insort
from collections.abc import Iterator
from itertools import islice
from typing import Literal

from weft.engine.scheduling.fair_queue import FairQueue
from weft.engine.scheduling.request import Request

Blocked = Literal["slots", "pages", "tokens"]
OVERTAKING_PRIORITIES = 4  # highest priorities that are searched for a request that fits while the head does not


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


class _Priority:
    """The waiting requests of one priority."""

    def __init__(self) -> None:
        self.fair = FairQueue()
        self.shortest = _RequestHeap()
        self._tenants: dict[int, _RequestHeap] = {}

    def push(self, request: Request) -> None:
        heap = self._tenants.get(request.tenant)
        if heap is None:
            heap = self._tenants[request.tenant] = _RequestHeap()
            self.fair.join(request.tenant, request.order)
        heap.push(request.order, request)
        self.shortest.push(len(request.token_ids), request)

    def head(self) -> Request:
        return self._tenants[self.fair.first()].first()

    def pay(self, request: Request, cost: float) -> None:
        """Charge the tenant of a request that is about to leave."""
        if request is self._tenants[request.tenant].first():
            self.fair.serve(request.tenant, cost)
        else:
            self.fair.charge(request.tenant, cost)

    def remove(self, request: Request) -> None:
        self.shortest.left()
        heap = self._tenants[request.tenant]
        heap.left()
        if not heap.size:
            del self._tenants[request.tenant]
            self.fair.leave(request.tenant)


class WaitingQueue:
    """The waiting requests. Siblings are held outside the queue until the prompt that they share is computed."""

    def __init__(self) -> None:
        self._queues: dict[int, _Priority] = {}  # by priority; none is empty
        self._priorities: list[int] = []
        self._tickets = 0
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
        queue = self._queues.get(request.priority)
        if queue is None:
            queue = self._queues[request.priority] = _Priority()
            insort(self._priorities, request.priority)
        queue.push(request)

    def hold(self, request: Request, leader: Request) -> None:
        """Hold the request until the leader's prompt is computed."""
        leader.siblings.append(request)
        request.held = True
        self.num_held += 1
        self.num_requests += 1

    def head(self) -> Request | None:
        """Return the first in line; None if no request waits."""
        return self._queues[self._priorities[0]].head() if self._priorities else None

    def shortest(self) -> Request | None:
        """Return the shortest request of the highest priority; None if no request waits."""
        return self._queues[self._priorities[0]].shortest.first() if self._priorities else None

    def num_of_priority(self, request: Request) -> int:
        """Return how many requests of this request's priority wait, including itself."""
        return self._queues[request.priority].shortest.size

    def shortest_by_priority(self) -> Iterator[Request]:
        """Yield the shortest request of each of the highest few priorities."""
        for priority in islice(self._priorities, OVERTAKING_PRIORITIES):
            yield self._queues[priority].shortest.first()

    def take(self, request: Request, cost: float) -> None:
        """Remove a request to be computed, and charge its tenant `cost` tokens."""
        self._queues[request.priority].pay(request, cost)
        self._remove(request)

    def settle(self, request: Request, cost: float) -> None:
        """Charge the tenant of a taken request the difference to its actual cost."""
        queue = self._queues.get(request.priority)
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
        queue = self._queues[request.priority]
        queue.remove(request)
        if not queue.shortest.size:
            del self._queues[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]
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
