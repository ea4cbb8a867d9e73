"""Admission: how much may wait for a model's engines before new work is turned away, over all API processes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from weft.server.errors import ApiError, unavailable
from weft.server.observe.board import ENTERED, OPEN, PREFILL, Board
from weft.server.observe.counters import Counter
from weft.server.replicas.replicas import Replicas

RETRY_AFTER = 1
"""seconds; queues drain fast once they drain"""


class Admission:
    """Bounds on waiting sequences and on prompt tokens that have not led to a first output token.

    Idle engines take any request: bounds turn load away, they do not limit what one request may be.
    """

    def __init__(
        self,
        replicas: Replicas,
        board: Board,
        row: int,
        rejected: Counter,
        *,
        max_requests: int,
        max_tokens: int,
        model: int = 0,
    ) -> None:
        """`row`: of this process on the board. `rejected`: counts refusals by code. `model`: whose engines they are."""
        self._replicas = replicas
        self._rejected = rejected
        self._board = board
        self._load = board.load[row, model]
        """of this process"""
        self._loads = board.load[:, model]
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._load[:ENTERED] = 0
        replicas.on_open = self._set_open

    def _set_open(self, count: int) -> None:
        self._load[OPEN] = count

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of this process's sequences that have no output yet; kept by the sequences' owners."""
        return int(self._load[PREFILL])

    @prefill_tokens.setter
    def prefill_tokens(self, count: int) -> None:
        self._load[PREFILL] = count

    @contextmanager
    def admit(self, num_sequences: int, num_tokens: int) -> Iterator[None]:
        """Submit the work inside: no other process admits any meanwhile. Raises `ApiError` 503 when it is refused."""
        with self._board.lock():
            if (refusal := self.refusal(num_sequences, num_tokens)) is not None:
                self._rejected.labels(str(refusal.code)).inc()
                raise refusal
            yield

    def refusal(self, num_sequences: int, num_tokens: int) -> ApiError | None:
        """Why work of this size is not taken now, or None."""
        num_open, prefill_tokens = self._loads[:, [OPEN, PREFILL]].sum(axis=0).tolist()
        if num_open == 0:
            return None
        # Behind a queue everything waits; without one, what exceeds the engines' seats will.
        waiting = self._replicas.waiting
        behind = waiting + num_sequences if waiting else 0
        if max(behind, num_open + num_sequences - self._replicas.max_num_seqs) > self._max_requests:
            return unavailable("Too many requests are waiting.", "queue_full", RETRY_AFTER)
        if prefill_tokens + num_tokens > self._max_tokens:
            return unavailable("Too many prompt tokens are waiting.", "queue_tokens_full", RETRY_AFTER)
        return None
