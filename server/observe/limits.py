"""Rates per API key: token buckets on the shared state, so that they hold over all API processes."""

from __future__ import annotations

import math
import time

import numpy as np
import numpy.typing as npt

from weft.server.errors import ApiError
from weft.server.observe.counters import Counter
from weft.server.observe.shared_state import SharedState

LONGEST_WAIT = 120  # Maximum seconds of `Retry-After`.

TIME, REQUESTS, TOKENS = 0, 1, 2
"""Columns of `SharedState.buckets`: time of the last refill, and the *used* amount of each allowance."""


class RateLimits:
    """A bucket holds a minute's allowance and refills steadily.

    A request costs one of `requests` on arrival. Prompt tokens are charged before they are computed, output tokens when
    the request ends. A key without tokens waits for the refill. Without keys, all clients share one bucket."""

    def __init__(self, shared_state: SharedState, rejected: Counter, requests: int | None, tokens: int | None) -> None:
        """`rejected`: counts rejections by code."""
        self._shared_state = shared_state
        self._rejected = rejected
        self._requests = requests
        self._tokens = tokens

    def enter(self, key: int) -> ApiError | None:
        """Charge `key` for a request, or return the error."""
        if self._requests is None and self._tokens is None:
            return None
        with self._shared_state.lock():
            bucket = self._refill(key)
            wait = 0.0
            if self._requests is not None and bucket[REQUESTS] + 1 > self._requests:
                wait, what = (bucket[REQUESTS] + 1 - self._requests) * 60 / self._requests, "requests"
            if self._tokens is not None and bucket[TOKENS] >= self._tokens:
                wait, what = max(wait, (bucket[TOKENS] - self._tokens + 1) * 60 / self._tokens), "tokens"
            if not wait:
                bucket[REQUESTS] += 1
                return None
        self._rejected.labels("rate_limit_exceeded").inc()
        limit = self._requests if what == "requests" else self._tokens
        message, after = f"This key may use {limit} {what} a minute.", min(LONGEST_WAIT, max(1, math.ceil(wait)))
        return ApiError(429, message, code="rate_limit_exceeded", retry_after=after)

    def charge(self, key: int, tokens: int) -> None:
        """Charge `key` for tokens of a request."""
        if self._tokens is not None and tokens:
            with self._shared_state.lock():
                self._refill(key)[TOKENS] += tokens

    def _refill(self, key: int) -> npt.NDArray[np.float64]:
        bucket: npt.NDArray[np.float64] = self._shared_state.buckets[key]
        now = time.monotonic()  # the same clock in all processes
        minutes = (now - bucket[TIME]) / 60
        bucket[TIME] = now
        bucket[REQUESTS] = max(0.0, bucket[REQUESTS] - minutes * (self._requests or 0))
        bucket[TOKENS] = max(0.0, bucket[TOKENS] - minutes * (self._tokens or 0))
        return bucket
