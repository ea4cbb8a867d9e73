"""`FairQueue`: whose request is next when several tenants wait: start-time fair queueing over tokens.

A tenant's account is the service, in tokens, that it has had. Its first request gets a tag, the account of that moment,
and the lowest tag is next. A tag never rises: what else the tenant gets meanwhile, out of turn, is paid by its requests
behind. A tenant that comes back from a pause begins where those who waited are, so nobody saves up turns. Tenants that
pause and are not ahead are forgotten.

The bound: between two turns of a tenant each other tenant has `MAX_AHEAD` tokens and two requests, at most.
"""

from __future__ import annotations

import heapq

MAX_AHEAD = 65_536
"""tokens of service out of turn that are held against a tenant, at most"""
MAX_PAUSED = 1024
"""tenants that do not wait and are remembered because they are ahead"""
KEPT_PAUSED = MAX_PAUSED // 2
"""those furthest ahead, when there are more"""


class FairQueue:
    def __init__(self) -> None:
        self._now = 0.0
        """the tag of whoever was served last in turn"""
        self._accounts: dict[int, float] = {}
        self._tags: dict[int, tuple[float, int]] = {}
        """of each tenant that waits: the tag of its first request, and the arrival number of the request with which it
        joined: the first of equal tags goes first"""
        self._heap: list[tuple[float, int, int]] = []
        """(tag, arrival, tenant); an entry holds while the tag is the tenant's"""

    def joins(self, tenant: int, order: int) -> None:
        """The tenant begins to wait."""
        self._tag(tenant, order)

    def leaves(self, tenant: int) -> None:
        """The tenant waits for nothing any more."""
        del self._tags[tenant]
        if len(self._accounts) > len(self._tags) + MAX_PAUSED:
            ahead = sorted((t for t in self._accounts if t not in self._tags), key=self._accounts.__getitem__)
            kept = [t for t in ahead if self._accounts[t] > self._now][-KEPT_PAUSED:]
            self._accounts = {t: self._accounts[t] for t in (*self._tags, *kept)}

    def first(self) -> int:
        """The tenant whose turn it is; there must be one that waits."""
        while not self._holds(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def serve(self, tenant: int, cost: float) -> None:
        """The first request of the tenant is taken, in its turn or out of it."""
        tag, order = self._tags[tenant]
        if tenant == self.first():
            self._now = max(self._now, tag)
            self._accounts[tenant] += cost
        else:
            self.charge(tenant, cost)
        self._tag(tenant, order)

    def charge(self, tenant: int, cost: float) -> None:
        """Service out of turn, or more (or less) of it than was charged. A tenant that is not known pays nothing."""
        account = self._accounts.get(tenant)
        if account is None or not cost:
            return
        self._accounts[tenant] = account = min(account + cost, max(account, self._now + MAX_AHEAD))
        if tenant in self._tags and account < self._tags[tenant][0]:
            self._tag(tenant, self._tags[tenant][1])

    def _tag(self, tenant: int, order: int) -> None:
        tag = self._accounts[tenant] = max(self._accounts.get(tenant, 0.0), self._now)
        self._tags[tenant] = tag, order
        heapq.heappush(self._heap, (tag, order, tenant))
        if len(self._heap) > 2 * len(self._tags) + 64:
            self._heap = [(*tag_order, t) for t, tag_order in self._tags.items()]
            heapq.heapify(self._heap)

    def _holds(self, entry: tuple[float, int, int]) -> bool:
        return self._tags.get(entry[2]) == entry[:2]
