"""`Turns`: whose request is next when several tenants wait: start-time fair queueing over tokens.

A tenant's tag is the service, in tokens, that it has had; the lowest is next. A tenant that comes back from a pause
begins where those who waited are, so nobody saves up turns. Tenants that pause and are not ahead are forgotten.
"""

from __future__ import annotations

import heapq

MAX_PAUSED = 1024
"""tenants that do not wait and are remembered because they are ahead"""
KEPT_PAUSED = MAX_PAUSED // 2
"""those furthest ahead, when there are more"""


class Turns:
    def __init__(self) -> None:
        self._now = 0.0
        """the tag of whoever was served last"""
        self._tags: dict[int, float] = {}
        self._waiting: dict[int, int] = {}
        """arrival number of the request with which each tenant that waits joined: the first of equal tags goes first"""
        self._heap: list[tuple[float, int, int]] = []
        """(tag, arrival, tenant); an entry holds while they are the tenant's own"""

    def joins(self, tenant: int, order: int) -> None:
        """The tenant begins to wait."""
        self._waiting[tenant] = order
        self._tags[tenant] = max(self._tags.get(tenant, 0.0), self._now)
        self._push(tenant)

    def leaves(self, tenant: int) -> None:
        """The tenant waits for nothing any more."""
        del self._waiting[tenant]
        if len(self._tags) > len(self._waiting) + MAX_PAUSED:
            ahead = sorted((t for t in self._tags if t not in self._waiting), key=self._tags.__getitem__)
            kept = [t for t in ahead if self._tags[t] > self._now][-KEPT_PAUSED:]
            self._tags = {t: self._tags[t] for t in (*self._waiting, *kept)}

    def first(self) -> int:
        """The tenant whose turn it is; there must be one that waits."""
        while not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def serve(self, tenant: int, cost: float) -> None:
        """A waiting request of the tenant is taken, in its turn or out of it."""
        if tenant == self.first():
            self._now = max(self._now, self._tags[tenant])
        self.charge(tenant, cost)

    def charge(self, tenant: int, cost: float) -> None:
        if cost and tenant in self._tags:
            self._tags[tenant] += cost
            if tenant in self._waiting:
                self._push(tenant)

    def _push(self, tenant: int) -> None:
        heapq.heappush(self._heap, (self._tags[tenant], self._waiting[tenant], tenant))
        if len(self._heap) > 2 * len(self._waiting) + 64:
            self._heap = [(self._tags[t], order, t) for t, order in self._waiting.items()]
            heapq.heapify(self._heap)

    def _holds(self, entry: tuple[float, int, int]) -> bool:
        tag, order, tenant = entry
        return self._waiting.get(tenant) == order and self._tags[tenant] == tag
