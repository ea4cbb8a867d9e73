"""`WaitingQueue`: requests without a slot: by priority, then tenants in turn, then first come, first served.

Every operation costs the logarithm of what waits: requests that left are dropped from a heap when they reach its top,
or when they are most of it.
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
PASSING_RANKS = 4
"""priorities, best first, among which one is looked for that fits where the head does not"""


class _Line:
    """Waiting requests by a number, least first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, Request]] = []
        """(number, ticket, request); one that left has another ticket now"""
        self.size = 0

    def push(self, number: int, request: Request) -> None:
        heapq.heappush(self._heap, (number, request.ticket, request))
        self.size += 1

    def first(self) -> Request:
        while self._heap[0][1] != self._heap[0][2].ticket:
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def left(self) -> None:
        """One of them has another ticket, or none, from now on."""
        self.size -= 1
        if len(self._heap) > 2 * self.size + 64:
            self._heap = [entry for entry in self._heap if entry[1] == entry[2].ticket]
            heapq.heapify(self._heap)


class _Rank:
    """The waiting requests of one priority."""

    def __init__(self) -> None:
        self.turns = FairQueue()
        self.shortest = _Line()
        self._tenants: dict[int, _Line] = {}

    def push(self, request: Request) -> None:
        line = self._tenants.get(request.tenant)
        if line is None:
            line = self._tenants[request.tenant] = _Line()
            self.turns.joins(request.tenant, request.order)
        line.push(request.order, request)
        self.shortest.push(len(request.token_ids), request)

    def head(self) -> Request:
        return self._tenants[self.turns.first()].first()

    def pay(self, request: Request, cost: float) -> None:
        """The tenant of a request that is about to leave is charged."""
        if request is self._tenants[request.tenant].first():
            self.turns.serve(request.tenant, cost)
        else:
            self.turns.charge(request.tenant, cost)

    def remove(self, request: Request) -> None:
        self.shortest.left()
        line = self._tenants[request.tenant]
        line.left()
        if not line.size:
            del self._tenants[request.tenant]
            self.turns.leaves(request.tenant)


class WaitingQueue:
    """Siblings are held beside the queue until the prompt that they share is computed."""

    def __init__(self) -> None:
        self._ranks: dict[int, _Rank] = {}
        """by priority; none is empty"""
        self._priorities: list[int] = []
        self._tickets = 0
        self.num_requests = 0
        """held ones included"""
        self.num_held = 0
        self.num_tokens = 0
        """to compute for them, if nothing is cached; without held ones"""
        self.blocked: Blocked = "tokens"
        """what the head lacked when it was last looked at: a slot, pages, or room in the iteration"""

    def __len__(self) -> int:
        return self.num_requests - self.num_held

    def push(self, request: Request) -> None:
        self._enter(request)
        self.num_requests += 1

    def _enter(self, request: Request) -> None:
        self._tickets += 1
        self.num_tokens += len(request.token_ids)
        request.ticket = self._tickets
        rank = self._ranks.get(request.priority)
        if rank is None:
            rank = self._ranks[request.priority] = _Rank()
            insort(self._priorities, request.priority)
        rank.push(request)

    def hold(self, request: Request, leader: Request) -> None:
        """Queue the request once the leader's prompt is computed."""
        leader.siblings.append(request)
        request.held = True
        self.num_held += 1
        self.num_requests += 1

    def head(self) -> Request | None:
        """Whose turn it is; None: nobody waits."""
        return self._ranks[self._priorities[0]].head() if self._priorities else None

    def shortest(self) -> Request | None:
        """The shortest of the best priority; None: nobody waits."""
        return self._ranks[self._priorities[0]].shortest.first() if self._priorities else None

    def num_of_priority(self, request: Request) -> int:
        """How many of the waiting request's priority wait, itself included."""
        return self._ranks[request.priority].shortest.size

    def shortest_by_priority(self) -> Iterator[Request]:
        """The shortest of each of the best few priorities."""
        for priority in islice(self._priorities, PASSING_RANKS):
            yield self._ranks[priority].shortest.first()

    def take(self, request: Request, cost: float) -> None:
        """A request leaves to be computed; `cost`, in tokens, is what its tenant is charged."""
        self._ranks[request.priority].pay(request, cost)
        self._remove(request)

    def settle(self, request: Request, cost: float) -> None:
        """A request that was taken has cost its tenant so much more (or less) than it was charged."""
        rank = self._ranks.get(request.priority)
        if rank is not None:
            rank.turns.charge(request.tenant, cost)

    def end(self, request: Request) -> None:
        """A waiting request has ended."""
        if request.held:
            self._leave(request)
        else:
            self._remove(request)

    def _remove(self, request: Request) -> None:
        request.ticket = 0
        self.num_tokens -= len(request.token_ids)
        rank = self._ranks[request.priority]
        rank.remove(request)
        if not rank.shortest.size:
            del self._ranks[request.priority]
            del self._priorities[bisect_left(self._priorities, request.priority)]
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_held -= request.held
        request.held = False

    def release_siblings(self, request: Request) -> None:
        """Queue those held for this prompt: all once it is computed, else one that the others are held for."""
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
        """Requests by what they wait for. Few overtake the head, so all behind it wait for what it lacks."""
        counts = dict.fromkeys(("slots", "pages", "tokens"), 0)
        counts[self.blocked] = self.num_requests - self.num_held
        return {**counts, "sibling": self.num_held}
