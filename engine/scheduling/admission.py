"""Predicts the peak of KV memory, so that a request is admitted only if no other must be preempted for it.

NanoFlow §4.2.1: completion times are estimated from the tokens decoded so far and the mean output length.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable

PRIOR_OUTPUT_TOKENS = 128.0
PRIOR_WEIGHT = 4.0


class OutputLengths:
    """Running mean of finished output lengths, with a weak prior."""

    def __init__(self, mean: float = PRIOR_OUTPUT_TOKENS, weight: float = PRIOR_WEIGHT) -> None:
        """The prior is `mean`, weighted like `weight` requests."""
        self._sum = mean * weight
        self._count = weight

    def add(self, tokens: int) -> None:
        # Decay old lengths, so that the mean follows a changing workload.
        keep = 0.999
        self._sum = self._sum * keep + tokens
        self._count = self._count * keep + 1.0

    @property
    def mean(self) -> float:
        return self._sum / self._count

    def expected(self, request: Request) -> float:
        """Return the expected output tokens of a request that has not started."""
        return min(self.mean, request.max_total_tokens - request.prompt_len)

    def remaining(self, decoded: npt.NDArray[np.int32], left: npt.NDArray[np.int32]) -> npt.NDArray[np.float64]:
        """Return the expected remaining output tokens, given those `decoded` and at most `left` more. A request past
        the mean is expected to continue for a quarter of it."""
        return np.minimum(np.maximum(self.mean - decoded, self.mean / 4), left)


def peak_tokens(current: npt.NDArray[np.float64], remaining: npt.NDArray[np.float64]) -> float:
    """Return the largest sum of KV tokens at any future time. Every request grows by one token per iteration and leaves
    after `remaining` of them. The peak is just before a request leaves: sorted by remaining, at the k-th departure
    requests k and later are present, each grown by r_k."""
    if not len(current):
        return 0.0
    order = np.argsort(remaining)
    r, c = remaining[order], current[order]
    present = np.cumsum(c[::-1])[::-1]
    return float(np.max(present + r * np.arange(len(r), 0, -1)))


def fits(
    s: SlotTable, request: Request, lengths: OutputLengths, *, page_size: int, held: int, new_pages: int, capacity: int
) -> bool:
    """Return whether the predicted memory peak with this request stays within `capacity` pages. Running requests hold
    `held` pages, and this one would add `new_pages`."""
    running = s.running()
    length = len(request.token_ids)
    now = np.append(np.maximum(s.scheduled[running], s.target[running]), length)
    decoded = np.append(now[:-1] - s.prompt_len[running], length - request.prompt_len)
    left = np.append(s.max_total_tokens[running], request.max_total_tokens) - now
    exact = np.append(s.exact_output[running], not request.stop_ids)
    remaining = np.where(exact, left, lengths.remaining(decoded, left))
    of_states = 2 * s.states.pages if s.states is not None else 0
    pages = -(-now // page_size) + of_states
    pages[:-1] -= s.given_back[running]
    # Shared pages are counted once per request that holds them: subtract the excess.
    shared = max(0, int(pages.sum()) - (held + new_pages))
    peak = peak_tokens(pages.astype(np.float64), remaining / page_size)
    if s.window is not None:
        # No request grows beyond its window, except for prompt pages that it already holds.
        most = np.maximum(s.window // page_size + 2 + of_states, pages)
        peak = min(peak, float(np.minimum(pages + remaining / page_size, most).sum()))
    peak -= shared
    return peak <= capacity or not len(running)
