"""`FairQueue`: chooses the next tenant when several wait, by start-time fair queueing over tokens.

A tenant's account counts the tokens of service it has received. Its first waiting request gets a tag, the account at
that moment, and the lowest tag is next. A tag never rises: service out of turn is charged to the tenant's later
requests. A tenant that returns from a pause starts level with those that waited, so that pauses earn nothing. Paused
tenants that are not ahead are dropped.

The bound: between two turns of a tenant, each other tenant receives at most `MAX_AHEAD` tokens and two requests, and
what it is promoted for.
"""

from __future__ import annotations

import heapq
from math import inf

MAX_AHEAD = 65_536  # maximum tokens of service out of turn that count against a tenant
MAX_PAUSED = 1024  # maximum paused tenants that are kept because they are ahead
KEPT_PAUSED = MAX_PAUSED // 2  # paused tenants to keep, furthest ahead first, when there are more


class FairQueue:
    """The accounts and tags of the tenants of one precedence."""

    def __init__(self) -> None:
        self._now = 0.0  # tag of the tenant that was last served in turn
        self._accounts: dict[int, float] = {}
        self._tags: dict[int, tuple[float, int]] = {}
        """By waiting tenant: the tag of its first request, and the arrival number with which it joined, which orders
        equal tags."""
        self._heap: list[tuple[float, int, int]] = []
        """(tag, arrival, tenant). An entry is valid while the tenant has this tag."""

    def leave(self, tenant: int) -> None:
        """Remove a tenant that has no waiting requests."""
        del self._tags[tenant]
        if len(self._accounts) > len(self._tags) + MAX_PAUSED:
            ahead = sorted((t for t in self._accounts if t not in self._tags), key=self._accounts.__getitem__)
            kept = [t for t in ahead if self._accounts[t] > self._now][-KEPT_PAUSED:]
            self._accounts = {t: self._accounts[t] for t in (*self._tags, *kept)}

    def first(self) -> int:
        """Return the tenant whose turn it is. At least one must wait."""
        while not self._is_valid(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][2]

    def serve(self, tenant: int, cost: float) -> None:
        """Charge a tenant whose first request is taken, in its turn or out of it."""
        tag, order = self._tags[tenant]
        if tenant == self.first():
            self._now = max(self._now, tag)
            self._accounts[tenant] += cost
        else:
            self.charge(tenant, cost)
        self.join(tenant, order)

    def promote(self, tenant: int) -> None:
        """Make a waiting tenant the next one, in front of its turn. It is charged as in its turn."""
        if self._tags[tenant][0] > -inf:
            self._tag(tenant, -inf, self._tags[tenant][1])

    def charge(self, tenant: int, cost: float) -> None:
        """Charge service out of turn, or a correction of an earlier charge. Unknown tenants are ignored."""
        account = self._accounts.get(tenant)
        if account is None or not cost:
            return
        self._accounts[tenant] = account = min(account + cost, max(account, self._now + MAX_AHEAD))
        if tenant in self._tags and account < self._tags[tenant][0]:
            self.join(tenant, self._tags[tenant][1])

    def join(self, tenant: int, order: int) -> None:
        """Add a tenant that starts to wait, or tag its next request."""
        tag = self._accounts[tenant] = max(self._accounts.get(tenant, 0.0), self._now)
        self._tag(tenant, tag, order)

    def _tag(self, tenant: int, tag: float, order: int) -> None:
        self._tags[tenant] = tag, order
        heapq.heappush(self._heap, (tag, order, tenant))
        if len(self._heap) > 2 * len(self._tags) + 64:
            self._heap = [(*tag_order, t) for t, tag_order in self._tags.items()]
            heapq.heapify(self._heap)

    def _is_valid(self, entry: tuple[float, int, int]) -> bool:
        return self._tags.get(entry[2]) == entry[:2]
