"""`PrefixRouter`: `Affinity` as Ray Serve's request router. Ray copies this module by value: it has no state."""

from __future__ import annotations

from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from weft.deploy.ray.affinity import Affinity
from weft.deploy.ray.exchange import Question

PAGES = "pages"
"""in the routing statistics of a replica: the keys of blocks that it has seen lately"""
NOTHING = Question("", "", [])


def question_of(request: PendingRequest | None) -> Question:
    """What is asked; nothing, where it is not a client's request."""
    args = request.args if request is not None else ()
    return args[0] if args and isinstance(args[0], Question) else NOTHING


class PrefixRouter(RequestRouter):
    def initialize_state(self, **_: Any) -> None:
        self._affinity = Affinity()

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Ranks of one replica each."""
        by_name = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        self._affinity.replicas(by_name)
        for name, replica in by_name.items():
            if pages := replica.routing_stats.get(PAGES):
                self._affinity.hear(name, pages)
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # when all of them are full
        question = question_of(pending_request)
        return [[by_name[name]] for name in self._affinity.choose(question.keys, question.size, question.avoid)]

    def on_request_routed(self, pending_request: PendingRequest, replica_id: ReplicaID, _result: Any) -> None:
        question = question_of(pending_request)
        if question is not NOTHING:
            request = pending_request.metadata.internal_request_id
            self._affinity.sent(request, replica_id.unique_id, question.keys, question.size)

    def on_request_completed(self, _replica_id: ReplicaID, internal_request_id: str) -> None:
        self._affinity.ended(internal_request_id)
