"""Defines `PrefixRouter`, a Ray Serve request router. Ray copies this module by value, so it has no state."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from weft.deploy.ray.affinity import Affinity
from weft.deploy.ray.exchange import HttpRequest

PAGES = "pages"
"""Key in a replica's routing statistics: keys of recently seen blocks."""
NO_REQUEST = HttpRequest("", "", [])


def http_request_of(pending: PendingRequest | None) -> HttpRequest:
    """Return the HTTP request; `NO_REQUEST` if it is not a client's request."""
    args = pending.args if pending is not None else ()
    return args[0] if args and isinstance(args[0], HttpRequest) else NO_REQUEST


class PrefixRouter(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        self._affinity = Affinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Return ranks of one replica each."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._affinity.replicas(by_name)
        for name, replica in by_name.items():
            if pages := replica.routing_stats.get(PAGES):
                self._affinity.update(name, pages)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # if all of them are full
        http_request = http_request_of(pending_request)
        return [
            [by_name[name]] for name in self._affinity.choose(http_request.keys, http_request.size, http_request.avoid)
        ]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, _result: Any) -> None:
        http_request = http_request_of(pending_request)
        if http_request is not NO_REQUEST:
            request = pending_request.metadata.internal_request_id
            self._affinity.sent(request, replica_id.unique_id, http_request.keys, http_request.size)

    def on_request_completed(self, _replica_id: ReplicaID, internal_request_id: str) -> None:
        self._affinity.ended(internal_request_id)
