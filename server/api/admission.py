"""`Admission`: rejects new work when too much is queued for a model's engines, over all API processes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

from weft.server.errors import ApiError, unavailable
from weft.server.observe.counters import Counter
from weft.server.observe.shared_state import ENTERED, OPEN, PREFILL, SharedState
from weft.server.replicas.replicas import Replicas

RETRY_AFTER = 1  # seconds; queues drain fast once they drain


class Admission:
    """Limits the number of queued sequences and of prompt tokens without a first output token. Idle engines accept any
    request: the limits shed load, they do not restrict a single request."""

    def __init__(
        self, replicas: Replicas, shared_state: SharedState, row: int, rejected: Counter, *, max_requests: int,
        max_tokens: int, model: int = 0,
    ) -> None:  # fmt: skip
        """`row`: this process's row of `shared_state`. `rejected`: counts refusals by code. `model`: its number."""
        self._replicas, self._rejected, self._shared_state = replicas, rejected, shared_state
        self._load = shared_state.load[row, model]
        self._loads = shared_state.load[:, model]
        self._max_requests = max_requests
        self._max_tokens = max_tokens
        self._open_by_key: defaultdict[int, int] = defaultdict(int)  # open requests of this process
        self._load[:ENTERED] = 0
        replicas.on_open = self._set_open

    def _set_open(self, count: int) -> None:
        self._load[OPEN] = count

    @property
    def prefill_tokens(self) -> int:
        """Prompt tokens of this process's sequences without output; `Generation` updates it."""
        return int(self._load[PREFILL])

    @prefill_tokens.setter
    def prefill_tokens(self, count: int) -> None:
        self._load[PREFILL] = count

    @contextmanager
    def admit(self, num_sequences: int, num_tokens: int, key: int | None = None) -> Iterator[None]:
        """A context for submitting work, which locks out other processes. Raises `ApiError` 503 if refused. An API
        `key` without an open request in this process may have one although others have filled the queue."""
        with self._shared_state.lock():
            first = key is not None and not self._open_by_key[key] and self._max_requests
            if not first and (refusal := self.refusal(num_sequences, num_tokens)) is not None:
                self._rejected.labels(str(refusal.code)).inc()
                raise refusal
            yield
            if key is not None:
                self._open_by_key[key] += 1

    def left(self, key: int | None) -> None:
        """Record that an admitted request has ended."""
        if key is not None:
            self._open_by_key[key] -= 1

    def refusal(self, num_sequences: int, num_tokens: int) -> ApiError | None:
        """Why work of this size is refused now, or None."""
        num_open, prefill_tokens = self._loads[:, [OPEN, PREFILL]].sum(axis=0).tolist()
        if num_open == 0:
            return None
        # Everything waits behind a queue; without one, only what exceeds the engines' slots does.
        waiting = self._replicas.waiting
        queued = waiting + num_sequences if waiting else 0
        if max(queued, num_open + num_sequences - self._replicas.max_num_seqs) > self._max_requests:
            return unavailable("Too many requests are waiting.", "queue_full", RETRY_AFTER)
        if prefill_tokens + num_tokens > self._max_tokens:
            return unavailable("Too many prompt tokens are waiting.", "queue_tokens_full", RETRY_AFTER)
        return None
