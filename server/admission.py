"""Admission: how much may wait for the engine before new work is turned away."""

from __future__ import annotations

from weft.engine.client import EngineClient
from weft.server.errors import ApiError, unavailable

RETRY_AFTER = 1
"""seconds; queues drain fast once they drain"""


class Admission:
    """Bounds on waiting sequences and on prompt tokens that have not led to a first output token.

    An idle engine takes any request: bounds turn load away, they do not limit what one request may be.
    """

    def __init__(self, client: EngineClient, *, max_num_seqs: int, max_requests: int, max_tokens: int) -> None:
        self._client = client
        self._max_num_seqs = max_num_seqs
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self.prefill_tokens = 0
        """prompt tokens of admitted sequences that have no output yet; kept by the sequences' owners"""

    @property
    def full(self) -> bool:
        return self.refusal(1, 1) is not None

    def refusal(self, num_sequences: int, num_tokens: int) -> ApiError | None:
        """Why work of this size is not taken now, or None."""
        if self._client.num_open == 0:
            return None
        # Behind a queue everything waits; without one, what exceeds the engine's seats will.
        behind = self._client.stats.waiting + num_sequences if self._client.stats.waiting else 0
        if max(behind, self._client.num_open + num_sequences - self._max_num_seqs) > self._max_requests:
            return unavailable("Too many requests are waiting.", "queue_full", RETRY_AFTER)
        if self.prefill_tokens + num_tokens > self._max_tokens:
            return unavailable("Too many prompt tokens are waiting.", "queue_tokens_full", RETRY_AFTER)
        return None
