"""`SlotTable`: the running requests as rows of numpy arrays.

Scheduling, input building and committing are vector operations over rows. Python code handles single requests only
when they start, finish or are preempted (docs/design.md, "The life of an iteration"). Counters are KV positions:

    scheduled == confirmed + in_flight

`scheduled` counts positions whose step is launched or done, `in_flight` those launched and not committed, `confirmed`
those committed. Rejected drafts are subtracted from `scheduled` when they are committed. `known` counts token ids on
the host: after a committed sample it is confirmed + 1. It is more than that while decodes compute an answer again
(`SlotTable.replays`); they do not sample.
"""

from __future__ import annotations

from enum import IntEnum

import numpy as np

from weft.engine.scheduling.request import Request
from weft.engine.scheduling.state_table import StateTable
from weft.engine.wire.sampling import COLUMNS, Pooling, SamplingParams


class Phase(IntEnum):
    """The phase of a row and of its request (see `Request`): LOADING -> PREFILL -> DECODE -> ENDING -> FREE."""

    FREE = 0
    PREFILL = 1
    DECODE = 2
    ENDING = 3  # Ended or preempted. The row is reused once the last step that uses it is done.
    LOADING = 4  # Admitted. The cached prefix is still being loaded to the GPU.


class SlotTable:
    """`num_slots` rows, allocated once; only the width of `stop_ids` grows later. `window` is the maximum of positions
    that a query sees, including its own, if every layer has a window. `state_pages` are the pages of a request's
    recurrent states. `replays`: an answer is never read as a prompt, whose sums have another order: decodes
    compute it again after a preemption, and no other request uses its pages."""

    def __init__(
        self, num_slots: int, max_model_len: int, page_size: int, window: int | None = None, state_pages: int = 0,
        *, replays: bool = False,
    ) -> None:  # fmt: skip
        n = self.num_slots = num_slots
        self.page_size, self.window, self.replays = page_size, window, replays
        self.states = StateTable(n, state_pages) if state_pages else None
        self.limit = num_slots
        """Slot limit: rows that may be in use at once. Lowering it takes no rows away; freed rows stay free."""
        self.kept = 0  # free rows that are kept for tenants whose next request may come soon
        max_pages = -(-max_model_len // page_size)
        self.request: list[Request | None] = [None] * n
        self.phase = np.zeros(n, np.uint8)  # `Phase` of each row, the only record of a request's progress
        self.handle = np.zeros(n, np.int64)
        self.epoch = np.zeros(n, np.int32)
        """Incremented when the row's request ends or is preempted: results of an older epoch are stale."""
        self.precedence = np.zeros(n, np.int64)
        self.tenant = np.zeros(n, np.int64)
        self.priority = np.zeros(n, np.int64)
        self.order = np.zeros(n, np.int64)
        self.prompt_len = np.zeros(n, np.int32)
        self.target = np.zeros(n, np.int32)  # tokens to prefill before the next sample
        self.max_total_tokens = np.zeros(n, np.int32)
        self.known = np.zeros(n, np.int32)
        self.scheduled = np.zeros(n, np.int32)
        self.in_flight = np.zeros(n, np.int32)
        self.confirmed = np.zeros(n, np.int32)
        self.drafts = np.zeros(n, np.int32)
        """Drafts in flight. How many are accepted is unknown, so the row is not launched until they are committed."""
        self.published = np.zeros(n, np.int32)  # pages of the row that are in the prefix index
        self.last_step = np.zeros(n, np.int64)
        self.since = np.zeros(n, np.int64)  # the step in which the request got the row
        # Zero pages are mapped on first write, so unused rows take no memory.
        self.token_ids = np.zeros((n, max_model_len), np.int32)
        self.page_table = np.zeros((n, max_pages), np.int32)
        self.num_pages = np.zeros(n, np.int32)  # entries in the row of the page table
        self.given_back = np.zeros(n, np.int32)
        """How many of them, from the first, are outside the window and were freed."""
        none = SamplingParams()
        self.columns = {column.name: np.full(n, column.of(none), column.dtype) for column in COLUMNS}
        """Sampling fields of each request, by name (`COLUMNS`)."""
        self.biased = np.zeros(n, np.bool_)
        self.masked = np.zeros(n, np.bool_)  # only some tokens are allowed
        self.constrained = np.zeros(n, np.bool_)
        """The allowed tokens depend on the newest token: it has a grammar, bad words or bounded thinking."""
        self.seed = np.zeros(n, np.uint64)
        self.max_drafts = np.zeros(n, np.int32)  # maximum draft tokens of an iteration
        self.adapter = np.zeros(n, np.int32)  # number of its LoRA adapter; 0 for none
        self.rope_delta = np.zeros(n, np.int32)  # see `Request.rope_delta`
        self.joules = np.zeros(n)  # joules charged so far
        self.metered = np.zeros(n, np.bool_)  # report the joules charged
        self.prompt_logprobs = np.full(n, -1, np.int32)
        self.pooling: list[Pooling | None] = [None] * n
        self.exact_output = np.zeros(n, np.bool_)
        """It cannot stop before `max_total_tokens` (ignore_eos and no stop token), so its length is known."""
        self.stop_ids = np.full((n, 4), -1, np.int32)
        self.min_total = np.zeros(n, np.int32)  # index below which no stop token is sampled
        self._free = list(range(n - 1, -1, -1))

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_open(self) -> int:
        """Number of rows that requests may get now."""
        return max(0, self.limit - self.kept - (self.num_slots - len(self._free)))

    def of(self, slot: int) -> Request:
        request = self.request[slot]
        assert request is not None
        return request

    def running(self) -> np.ndarray:
        """Return slots with a request: in LOADING, PREFILL or DECODE."""
        return np.flatnonzero((self.phase != Phase.FREE) & (self.phase != Phase.ENDING))

    def prefilling(self) -> np.ndarray:
        """Return slots with prompt tokens to schedule."""
        return np.flatnonzero((self.phase == Phase.PREFILL) & (self.scheduled < self.target))

    def decoding(self) -> np.ndarray:
        """Return slots that need another token. Once all launched steps are done there are scheduled + 1 tokens, which
        are enough at the limit."""
        return np.flatnonzero((self.phase == Phase.DECODE) & (self.scheduled + 1 < self.max_total_tokens))

    def in_order(self, slots: np.ndarray) -> np.ndarray:
        """Return these slots by precedence, then by arrival, except that each tenant's priorities order its own places:
        they move no other tenant's request."""
        precedence, tenant, priority, order = (
            column.take(slots) for column in (self.precedence, self.tenant, self.priority, self.order)
        )
        if len(slots) < 2 or not ((precedence != precedence[0]) | (priority != priority[0])).any():
            return slots[np.argsort(order)]
        own = np.lexsort((order, priority, tenant, precedence))
        places = order[np.lexsort((order, tenant, precedence))]
        return slots[own[np.lexsort((places, precedence[own]))]]

    def assign(self, request: Request, cached_pages: np.ndarray, cached_tokens: int) -> int:
        """Give the request a row and return it. Its first `cached_tokens` positions are already confirmed."""
        slot = self._free.pop()
        params, known = request.params, len(request.token_ids)
        request.slot = slot
        self.request[slot] = request
        self.phase[slot] = Phase.PREFILL
        self.handle[slot] = request.handle
        self.precedence[slot], self.tenant[slot] = request.precedence, request.tenant
        self.priority[slot], self.order[slot] = request.priority, request.order
        self.prompt_len[slot] = request.prompt_len
        self.known[slot] = known
        self.target[slot] = request.prompt_len if self.replays else known
        self.max_total_tokens[slot] = request.max_total_tokens
        self.scheduled[slot] = self.confirmed[slot] = cached_tokens
        self.in_flight[slot] = self.drafts[slot] = 0
        self.token_ids[slot, :known] = request.token_ids
        self.num_pages[slot] = self.published[slot] = len(cached_pages)
        self.given_back[slot] = 0
        self.page_table[slot, : len(cached_pages)] = cached_pages
        for column in COLUMNS:
            self.columns[column.name][slot] = column.of(params)
        self.biased[slot] = bool(params.logit_bias)
        self.constrained[slot], self.masked[slot] = request.constrained, request.masked
        self.seed[slot], self.adapter[slot] = request.seed, request.adapter
        self.rope_delta[slot] = request.rope_delta
        self.max_drafts[slot] = request.max_drafts
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

    def held(self, slot: int) -> np.ndarray:
        """Return a copy of the row's pages: K and V in token order, then recurrent states."""
        pages = self.page_table[slot, self.given_back[slot] : self.num_pages[slot]].copy()
        if self.states is None:
            return pages
        return np.concatenate((pages, self.states.held(slot), *(state for _, state in self.of(slot).checkpoints)))

    def retire(self, slot: int) -> np.ndarray:
        """End the row's request: results in flight become stale. Returns its pages, to be freed after a fence."""
        pages = self.held(slot)
        self.page_table[slot, : self.num_pages[slot]] = 0
        self.phase[slot] = Phase.ENDING
        self.epoch[slot] += 1
        self.num_pages[slot] = 0
        if (request := self.request[slot]) is not None:
            request.joules = float(self.joules[slot])
            request.checkpoints = []
        self.request[slot] = None
        return pages

    def _outside_window(self, slots: np.ndarray) -> np.ndarray:
        """Return how many first pages of each row no unconfirmed query sees."""
        assert self.window is not None
        return np.maximum(self.confirmed[slots] + 1 - self.window, 0) // self.page_size

    def outgrown(self, slots: np.ndarray) -> list[int]:
        """Return the rows that hold pages outside their window."""
        if self.window is None:
            return []
        found: list[int] = slots[self._outside_window(slots) > self.given_back[slots]].tolist()
        return found

    def give_back(self, slot: int) -> np.ndarray:
        """Remove the pages outside the window from the row, and return them, to be freed after a fence."""
        first, last = int(self.given_back[slot]), int(self._outside_window(np.array(slot)))
        pages = self.page_table[slot, first:last].copy()
        self.page_table[slot, first:last] = 0
        self.given_back[slot] = last
        return pages

    def release(self, slot: int) -> None:
        """Free the row: its fence has passed."""
        self.phase[slot] = Phase.FREE
        self.in_flight[slot] = 0
        self._free.append(slot)
