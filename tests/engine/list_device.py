"""A device made of plain lists, and a scheduler that drives it. Only the page table decides what is sampled.

The device stores, for every KV position, a hash of the token that was fed there and of all the positions before it, as
real KV depends on its context. A sampled token is a hash of all that the request's page table makes visible, so any
lost or overwritten page changes an answer, and so does the right page after the wrong beginning.

A recurrent state is a hash folded over the tokens, kept in pages of the same pool. A token that is counted twice, left
out or another request's changes every later answer.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import xxhash

from weft.engine.memory.pages import DUMMY_PAGE, PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.tiers import Tiers
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.scheduling.admission import OutputLengths
from weft.engine.scheduling.drafter import Drafter
from weft.engine.scheduling.fairness import Fairness
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.states import StatePolicy
from weft.engine.scheduling.verification import Verification
from weft.engine.wire.messages import Retention
from weft.engine.wire.sampling import SamplingParams

VOCAB = 23
REJECTED = -13  # the KV of a rejected draft


def kv_of(before: np.ndarray, token: int, window: int | None = None) -> int:
    """The KV of a token after the positions `before [p]`. It sees `window` of them, its own included."""
    seen = before if window is None else before[max(0, len(before) + 1 - window) :]
    return xxhash.xxh32_intdigest(seen.tobytes() + bytes([token])) >> 1


def sampled(visible: np.ndarray, window: int | None = None, state: int = 0) -> int:
    return (xxhash.xxh32_intdigest(visible[-window if window else 0 :].tobytes()) + state) % VOCAB


def fold(state: int, token: int) -> int:
    """The recurrent state after one more token; before the first it is 0."""
    return xxhash.xxh32_intdigest(state.to_bytes(4, "little") + bytes([token])) >> 1


def next_token(tokens: Sequence[int], window: int | None = None, recurrent: bool = False) -> int:
    """The token that the device samples after these when no page is lost."""
    visible, state = np.zeros(len(tokens), np.int32), 0
    for position, token in enumerate(tokens):
        visible[position] = kv_of(visible[:position], token, window)
        state = fold(state, token)
    return sampled(visible, window, state if recurrent else 0)


def continuation(prompt: Sequence[int], count: int, recurrent: bool = False) -> list[int]:
    """The `count` tokens that the device samples after the prompt when no page is lost."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, recurrent=recurrent))
    return tokens[len(prompt) :]


class ListDevice:
    """Executes batches in order, as late as the test requires."""

    def __init__(self, num_pages: int, page_size: int, num_slots: int, window: int | None = None) -> None:
        self.window = window
        self.kv = np.full((num_pages, page_size), -7, np.int32)
        self.last_token = np.full(num_slots, -7, np.int32)

    def execute(self, batch: Batch) -> StepResult:
        ids = batch.token_ids.copy()
        unknown = np.flatnonzero(ids < 0)
        ids[unknown] = self.last_token[np.repeat(batch.slots, batch.query_len)[unknown]]
        assert (ids >= 0).all(), "a placeholder reached the embedding"
        assert DUMMY_PAGE not in batch.slot_mapping // self.kv.shape[1]
        assert len(np.unique(batch.slot_mapping)) == len(ids), "two tokens of one batch share a KV position"
        ends = np.cumsum(batch.query_len)
        tokens, wanted = np.zeros(len(ids), np.int32), set(batch.sampling.logit_tokens.tolist())
        for row, end in enumerate(ends.tolist()):
            visible = self.kv[batch.page_table[row]].reshape(-1)[: batch.kv_len[row]]
            first = end - int(batch.query_len[row])
            for at in range(first, end):
                visible[batch.positions[at]] = kv_of(visible[: batch.positions[at]], int(ids[at]), self.window)
                self.kv.reshape(-1)[batch.slot_mapping[at]] = visible[batch.positions[at]]
                if at in wanted and batch.states is None:
                    tokens[at] = sampled(visible[: batch.positions[at] + 1], self.window)
            if batch.states is not None:
                tokens[end - 1] = sampled(visible, self.window, self._advance(batch, row, ids[first:end]))
        result = tokens[batch.sampling.logit_tokens]
        newest = np.ones(len(result), np.bool_)
        if (verified := batch.verified) is not None:
            void = verified.ends(result, np.zeros(len(result), np.bool_))
            reached = verified.reached(void)
            newest = reached & void
            # Spoil the KV of rejected drafts: nothing may read it.
            self.kv.reshape(-1)[batch.slot_mapping[batch.sampling.logit_tokens[~reached]]] = REJECTED
        self.last_token[batch.sampling.slots[newest]] = result[newest]
        return StepResult(batch, result, None, (), 0.0)

    def _advance(self, batch: Batch, row: int, ids: np.ndarray) -> int:
        """Fold a row's tokens into its state, save the checkpoints on the way, and return the state at the end."""
        if batch.states is None:
            return 0
        read, fresh, write, rows, counts, pages = batch.states
        assert fresh[row] == (batch.kv_len[row] == len(ids)), "a state starts in the middle"
        state = 0 if fresh[row] else self._state(read[row])
        mine = {int(counts[c]): pages[c] for c in np.flatnonzero(rows == row)}
        for count, token in enumerate(ids.tolist(), 1):
            state = fold(state, token)
            if (checkpoint := mine.pop(count, None)) is not None:
                assert (batch.kv_len[row] - len(ids) + count) % self.kv.shape[1] == 0, "a checkpoint inside a page"
                self._keep(checkpoint, state)
        assert not mine, "a checkpoint behind the row's tokens"
        self._keep(write[row], state)
        return state

    def _state(self, pages: np.ndarray) -> int:
        assert DUMMY_PAGE not in pages
        state = int(self.kv[pages[0], 0])
        for piece, page in enumerate(pages.tolist()):
            assert (self.kv[page] == self._piece(state, piece)).all(), "pages of several states, or of none"
        return state

    def _keep(self, pages: np.ndarray, state: int) -> None:
        assert DUMMY_PAGE not in pages
        for piece, page in enumerate(pages.tolist()):
            self.kv[page] = self._piece(state, piece)

    @staticmethod
    def _piece(state: int, piece: int) -> int:
        return state if not piece else fold(state, piece)


class ListEngine:
    """A scheduler on a `ListDevice`, one iteration at a time. It expects no request to grow, so it admits all that fit
    now."""

    def __init__(
        self,
        capacity: int,
        *,
        slots: int = 4,
        page_size: int = 2,
        budget: int = 64,
        index: PrefixIndex | None = None,
        prefix_caching: bool = True,
        chunk_step: int = 1,
        fairness: Fairness | None = None,
        state_pages: int = 0,
        state_policy: StatePolicy | None = None,
        tiers: Callable[[PagePool, ListDevice], Tiers] | None = None,
        drafter: Callable[[SlotTable], Drafter] | None = None,
    ) -> None:
        self.recurrent = state_pages > 0
        self.pool = PagePool(capacity + 1, page_size, PrefixIndex("m") if index is None else index)
        self.max_len = (capacity - 3 * state_pages) * page_size
        self.device = ListDevice(capacity + 1, page_size, slots)
        table = SlotTable(slots, self.max_len, page_size, state_pages=state_pages)
        self.scheduler = Scheduler(
            table,
            self.pool,
            max_num_batched_tokens=budget,
            prefix_caching=prefix_caching,
            chunk_step=chunk_step,
            fairness=fairness,
            state_policy=state_policy,
            tiers=None if tiers is None else tiers(self.pool, self.device),
            verification=None if drafter is None else Verification(table, self.pool, drafter(table)),
        )
        self.scheduler.output_lengths = OutputLengths(mean=0.0, weight=1e30)
        self.launched: deque[Batch] = deque()
        self.requests: list[Request] = []
        self.output: dict[int, list[int]] = {}
        self.started: list[int] = []
        """handles in the order of their first tokens"""
        self._steps = 0

    def add(
        self,
        prompt: Sequence[int],
        max_tokens: int = 1,
        *,
        priority: int = 0,
        salt: str = "",
        stop: int | None = None,
        leader: int = -1,
        tenant: int = 0,
        retention: tuple[Retention, ...] = (),
        names: tuple[bytes, ...] = (),
        **params: Any,
    ) -> Request:
        handle = len(self.requests)
        request = Request(
            handle=handle,
            token_ids=np.array(prompt, np.int32),
            prompt_len=len(prompt),
            params=SamplingParams(max_tokens=max_tokens, **params),
            max_total_tokens=len(prompt) + max_tokens,
            priority=priority,
            order=handle,
            arrival=0.0,
            salt=salt,
            stop_ids=() if stop is None else (stop,),
            seed=0,
            leader=leader,
            tenant=tenant,
            retention=retention,
            names=names,
        )
        self.requests.append(request)
        self.output[handle] = []
        self.scheduler.add(request)
        return request

    def launch(self) -> list[int]:
        """Schedule an iteration. Returns its handles, decodes first; none if nothing can run."""
        batch = self.scheduler.schedule(self._steps + 1)
        self.scheduler.check()
        if batch is None:
            return []
        self._steps += 1
        self.launched.append(batch)
        return self.scheduler.slots.handle[batch.slots].tolist()

    def complete(self) -> None:
        """Compute and commit the oldest launched iteration."""
        events = self.scheduler.commit(self.device.execute(self.launched.popleft()))
        self.scheduler.check()
        for handle, token in zip(events.handles.tolist(), events.tokens.tolist(), strict=True):
            if token >= 0:
                self.output[handle].append(token)
        self.started += [started.handle for started in events.started]

    def step(self) -> list[int]:
        handles = self.launch()
        if self.launched:
            self.complete()
        return handles

    def run(self) -> None:
        """Run until no request is left. Every output must match its prompt, and nothing may be held."""
        for _ in range(1000):
            if not self.step() and not self.scheduler.num_requests:
                break
        assert not self.scheduler.num_requests, "the scheduler makes no progress"
        self.scheduler.idle_events()
        self.settle()
        assert self.pool.num_held == 0
        for request in self.requests:
            prompt = request.token_ids[: request.prompt_len].tolist()
            got = self.output[request.handle]
            explained = continuation(prompt, len(got), self.recurrent)
            assert got == explained, "a token that the prompt does not explain"

    def settle(self) -> None:
        """Let asynchronous work end."""
