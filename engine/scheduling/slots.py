"""`SlotTable`: the running requests as rows of numpy arrays.

Scheduling, input building and committing are vector operations over rows; Python touches a request only when it
starts, finishes or is preempted (docs/design.md, "The life of an iteration"). A slot's counters are KV positions:

    scheduled == confirmed + in_flight

`scheduled` counts positions whose step is launched or done, `in_flight` those launched and not yet committed,
`confirmed` those committed. `known` counts token ids the host knows: after a committed sample it is confirmed + 1.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from weft.engine.scheduling.request import Request
from weft.engine.wire.sampling import COLUMNS, Pooling, SamplingParams


class Phase(IntEnum):
    """Of a row, and so of the request that holds it (see `Request`): LOADING -> PREFILL -> DECODE -> ENDING -> FREE."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    ENDING = 3
    """Ended or preempted; the row is reused once the last step that touched it is done."""
    LOADING = 4
    """Admitted; its cached prefix is still on its way to the GPU."""


class SlotTable:
    """`num_slots` rows. Created once; nothing grows later but the width of `stop_ids`.

    window: positions that a query sees at most, its own included, where every layer has such a bound.
    """

    def __init__(self, num_slots: int, max_model_len: int, page_size: int, window: int | None = None) -> None:
        n = self.num_slots = num_slots
        self.page_size, self.window = page_size, window
        self.limit = num_slots
        """rows that may be taken at once; when that gets less nobody loses a row, but those given back stay free"""
        max_pages = -(-max_model_len // page_size)
        self.request: list[Request | None] = [None] * n
        self.phase = np.zeros(n, np.uint8)
        """`Phase`: the one place that says how far a request with a slot is"""
        self.handle = np.zeros(n, np.int64)
        self.epoch = np.zeros(n, np.int32)
        """bumped when the row's request ends or is preempted: results of an older epoch are stale"""
        self.priority = np.zeros(n, np.int64)
        self.order = np.zeros(n, np.int64)
        self.prompt_len = np.zeros(n, np.int32)
        self.target = np.zeros(n, np.int32)
        """tokens to prefill before the next sample"""
        self.max_total_tokens = np.zeros(n, np.int32)
        self.known = np.zeros(n, np.int32)
        self.scheduled = np.zeros(n, np.int32)
        self.in_flight = np.zeros(n, np.int32)
        self.confirmed = np.zeros(n, np.int32)
        self.published = np.zeros(n, np.int32)
        """pages of the row entered in the prefix index (or found there)"""
        self.last_step = np.zeros(n, np.int64)
        # Only what is written takes memory: pages of zeros are mapped on first touch.
        self.token_ids = np.zeros((n, max_model_len), np.int32)
        self.page_table = np.zeros((n, max_pages), np.int32)
        self.num_pages = np.zeros(n, np.int32)
        """entries of the row of the page table"""
        self.given_back = np.zeros(n, np.int32)
        """how many of them, the first ones, lie behind the window and are nobody's any more"""
        none = SamplingParams()
        self.columns = {column.name: np.full(n, column.of(none), column.dtype) for column in COLUMNS}
        """what follows each request to the sampling, by name"""
        self.biased = np.zeros(n, np.bool_)
        self.masked = np.zeros(n, np.bool_)
        """may have some tokens only"""
        self.constrained = np.zeros(n, np.bool_)
        """which ones depends on its newest token: it has a grammar, words that must not occur, or bounded thinking"""
        self.seed = np.zeros(n, np.uint64)
        self.joules = np.zeros(n)
        """charged so far"""
        self.metered = np.zeros(n, np.bool_)
        """whoever sent it wants to know that"""
        self.prompt_logprobs = np.full(n, -1, np.int32)
        self.pooling: list[Pooling | None] = [None] * n
        self.exact_output = np.zeros(n, np.bool_)
        """cannot stop before `max_total_tokens` (ignore_eos and no stop token): its length needs no prediction"""
        self.stop_ids = np.full((n, 4), -1, np.int32)
        self.min_total = np.zeros(n, np.int32)
        """no stop token is sampled at an index below this"""
        self._free = list(range(n - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_open(self) -> int:
        """Rows that a request may be given now."""
        return max(0, self.limit - (self.num_slots - len(self._free)))

    def running(self) -> np.ndarray:
        """Slots that belong to a request: in LOADING, PREFILL or DECODE."""
        return np.flatnonzero((self.phase != Phase.FREE) & (self.phase != Phase.ENDING))

    def prefilling(self) -> np.ndarray:
        """Slots with prompt tokens still to be scheduled."""
        return np.flatnonzero((self.phase == Phase.PREFILL) & (self.scheduled < self.target))

    def decoding(self) -> np.ndarray:
        """Slots that want another token. scheduled + 1 tokens exist once all launched steps are done: at the limit the
        request needs no more."""
        return np.flatnonzero((self.phase == Phase.DECODE) & (self.scheduled + 1 < self.max_total_tokens))

    def assign(self, request: Request, cached_pages: np.ndarray, cached_tokens: int) -> int:
        """Give the request a row; its first `cached_tokens` positions are confirmed already."""
        slot = self._free.pop()
        params, known = request.params, len(request.token_ids)
        request.slot = slot
        self.request[slot] = request
        self.phase[slot] = Phase.PREFILL
        self.handle[slot] = request.handle
        self.priority[slot], self.order[slot] = request.sort_key
        self.prompt_len[slot] = request.prompt_len
        self.target[slot] = self.known[slot] = known
        self.max_total_tokens[slot] = request.max_total_tokens
        self.scheduled[slot] = self.confirmed[slot] = cached_tokens
        self.in_flight[slot] = 0
        self.token_ids[slot, :known] = request.token_ids
        self.num_pages[slot] = self.published[slot] = len(cached_pages)
        self.given_back[slot] = 0
        self.page_table[slot, : len(cached_pages)] = cached_pages
        for column in COLUMNS:
            self.columns[column.name][slot] = column.of(params)
        self.biased[slot] = bool(params.logit_bias)
        self.constrained[slot], self.masked[slot] = request.constrained, request.masked
        self.seed[slot] = request.seed
        self.joules[slot], self.metered[slot] = request.joules, request.metered
        self.prompt_logprobs[slot] = -1 if params.prompt_logprobs is None else params.prompt_logprobs
        self.pooling[slot], request.pooled = params.pooling, None
        self.exact_output[slot] = not request.stop_ids
        self.min_total[slot] = request.prompt_len + params.min_tokens
        stops = request.stop_ids
        if len(stops) > self.stop_ids.shape[1]:
            wider = np.full((self.num_slots, len(stops)), -1, np.int32)
            wider[:, : self.stop_ids.shape[1]] = self.stop_ids
            self.stop_ids = wider
        self.stop_ids[slot] = -1
        self.stop_ids[slot, : len(stops)] = stops
        return slot

    def retire(self, slot: int) -> np.ndarray:
        """End the row's request: results in flight become stale. Returns its pages, to be freed behind a fence."""
        pages = self.page_table[slot, self.given_back[slot] : self.num_pages[slot]].copy()
        self.page_table[slot, : self.num_pages[slot]] = 0
        self.phase[slot] = Phase.ENDING
        self.epoch[slot] += 1
        self.num_pages[slot] = 0
        if (request := self.request[slot]) is not None:
            request.joules = float(self.joules[slot])
        self.request[slot] = None
        return pages

    def _behind(self, slots: np.ndarray) -> np.ndarray:
        """How many pages of each row no query sees that is not confirmed yet."""
        assert self.window is not None
        return np.maximum(self.confirmed[slots] + 1 - self.window, 0) // self.page_size

    def outgrown(self, slots: np.ndarray) -> list[int]:
        """Those rows that hold pages behind their window."""
        if self.window is None:
            return []
        found: list[int] = slots[self._behind(slots) > self.given_back[slots]].tolist()
        return found

    def give_back(self, slot: int) -> np.ndarray:
        """Take the pages behind the window out of the row, to be freed behind a fence."""
        first, last = int(self.given_back[slot]), int(self._behind(np.array(slot)))
        pages = self.page_table[slot, first:last].copy()
        self.page_table[slot, first:last] = 0
        self.given_back[slot] = last
        return pages

    def release(self, slot: int) -> None:
        """The fence has passed: the row may be reused."""
        self.phase[slot] = Phase.FREE
        self.in_flight[slot] = 0
        self._free.append(slot)
