"""Predicts the peak of KV memory, so that a request is admitted only when nobody will have to be preempted for it.

NanoFlow §4.2.1: completion times are estimated from tokens decoded so far and the mean output length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable

PRIOR_OUTPUT_TOKENS = 128.0
PRIOR_WEIGHT = 4.0


class OutputLengths:
    """Running mean of finished output lengths, with a prior that a few requests outweigh."""

    def __init__(self, mean: float = PRIOR_OUTPUT_TOKENS, weight: float = PRIOR_WEIGHT) -> None:
        """The prior: this mean, as if of `weight` requests."""
        self._sum = mean * weight
        self._count = weight

    def add(self, tokens: int) -> None:
        # Old lengths fade, so that the mean follows a workload that changes.
        keep = 0.999
        self._sum = self._sum * keep + tokens
        self._count = self._count * keep + 1.0

    @property
    def mean(self) -> float:
        return self._sum / self._count

    def expected(self, request: Request) -> float:
        """Output tokens of a request that has not begun."""
        return min(self.mean, request.max_total_tokens - request.prompt_len)

    def remaining(self, decoded: npt.NDArray[np.int32], room: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Output tokens still to come, for requests with `decoded` so far and at most `room` more.

        A request past the mean is expected to go on for a quarter of it.
        """
        return np.minimum(np.maximum(self.mean - decoded, self.mean / 4), room)


def peak_tokens(current: npt.NDArray[np.float64], remaining: npt.NDArray[np.float64]) -> float:
    """The largest sum of KV tokens at any future time.

    Every request grows by one token an iteration and leaves after `remaining` of them. The peak falls on a moment
    just before a request leaves: sort by remaining; at the k-th departure those from k on are there, each grown by r_k.
    """
    if not len(current):
        return 0.0
    order = np.argsort(remaining)
    r, c = remaining[order], current[order]
    still_there = np.cumsum(c[::-1])[::-1]
    return float(np.max(still_there + r * np.arange(len(r), 0, -1)))


def fits(
    s: SlotTable, request: Request, lengths: OutputLengths, *, page_size: int, held: int, new_pages: int, capacity: int
) -> bool:
    """Would the predicted peak of memory, with this request running as well, stay within `capacity` pages?

    `held` pages belong to running requests; `new_pages` more would be held with this one.
    """
    running = s.running()
    length = len(request.token_ids)
    now = np.append(np.maximum(s.scheduled[running], s.target[running]), length)
    decoded = np.append(now[:-1] - s.prompt_len[running], length - request.prompt_len)
    room = np.append(s.max_total_tokens[running], request.max_total_tokens) - now
    exact = np.append(s.exact_output[running], not request.stop_ids)
    remaining = np.where(exact, room, lengths.remaining(decoded, room))
    pages = -(-now // page_size)
    pages[:-1] -= s.given_back[running]
    # Shared pages are counted once for every request that holds them: take the excess off again.
    shared = max(0, int(pages.sum()) - (held + new_pages))
    peak = peak_tokens(pages.astype(np.float64), remaining / page_size)
    if s.window is not None:
        # No request grows beyond its window, but for what it holds of its prompt already.
        most = np.maximum(s.window // page_size + 2, pages)
        peak = min(peak, float(np.minimum(pages + remaining / page_size, most).sum()))
    peak -= shared
    return peak <= capacity or not len(running)
