"""`WaitingQueue`: requests without a slot, first come, first served within a priority."""

from __future__ import annotations

import heapq
from typing import Literal

from weft.engine.scheduling.request import Request

Blocked = Literal["slots", "pages", "tokens"]


class WaitingQueue:
    """Siblings are held beside the queue until the prompt that they share is computed."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Request]] = []
        """ended requests leave it when they reach its head, or when they are the most of it"""
        self.num_requests = 0
        """held ones included"""
        self.num_tokens = 0
        self.num_held = 0
        self.blocked: Blocked = "slots"
        """what the head lacked when it was last looked at: a slot, pages, or room in the iteration"""

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, request: Request) -> None:
        heapq.heappush(self._heap, (request.sort_key, request))
        self._count(request)

    def hold(self, request: Request, leader: Request) -> None:
        """Queue the request once the leader's prompt is computed."""
        leader.siblings.append(request)
        request.held = True
        self.num_held += 1
        self._count(request)

    def _count(self, request: Request) -> None:
        self.num_requests += 1
        self.num_tokens += len(request.token_ids)

    def head(self) -> Request | None:
        while self._heap:
            request = self._heap[0][1]
            if request.waiting:
                return request
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """The head leaves."""
        _, request = heapq.heappop(self._heap)
        self._leave(request)

    def _leave(self, request: Request) -> None:
        self.num_requests -= 1
        self.num_tokens -= len(request.token_ids)
        self.num_held -= request.held
        request.held = False

    def end(self, request: Request) -> None:
        """A waiting request has ended."""
        self._leave(request)
        if len(self._heap) > 2 * self.num_requests + 64:
            self._heap = [entry for entry in self._heap if entry[1].waiting]
            heapq.heapify(self._heap)

    def release_siblings(self, request: Request) -> None:
        """Queue those held for this prompt: all once it is computed, else one that the others are held for."""
        siblings = [s for s in request.siblings if s.waiting]
        request.siblings = []
        if siblings and not request.begun:
            siblings[0].siblings += siblings[1:]
            siblings = siblings[:1]
        for sibling in siblings:
            sibling.held = False
            heapq.heappush(self._heap, (sibling.sort_key, sibling))
        self.num_held -= len(siblings)

    def by_reason(self) -> dict[str, int]:
        """Requests by what they wait for. Nobody overtakes the head, so all behind it wait for what it lacks."""
        counts = dict.fromkeys(("slots", "pages", "tokens"), 0)
        counts[self.blocked] = self.num_requests - self.num_held
        return {**counts, "sibling": self.num_held}
