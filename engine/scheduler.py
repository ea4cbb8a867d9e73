"""`Scheduler`: chooses what each iteration computes, one step ahead of what it knows, and commits what came back.

Decodes first, then prefill chunks that fill the token budget exactly. Lengths are optimistic: a request that sampled
an end token in the iteration still in flight is scheduled once more; the result of that step is dropped as stale.
"""

from __future__ import annotations

import heapq
import time
from typing import NamedTuple

import numpy as np

from weft.engine.admission import OutputLengths, peak_tokens
from weft.engine.batch import I32, Batch, CountReset, StepResult
from weft.engine.build import Chunk, build_batch
from weft.engine.events import Events, prompt_logprobs, token_logprobs
from weft.engine.messages import EngineStats, Finish, Started
from weft.engine.pages import PagePool, Pages
from weft.engine.prefix import PrefixEntry
from weft.engine.request import Request, State
from weft.engine.slots import Phase, SlotTable


class _Fence(NamedTuple):
    """Pages and a slot that a launched step may still touch."""

    step: int
    slot: int
    """-1: pages only"""
    pages: Pages


class Scheduler:
    """Owns the waiting queue, the slot table and the page pool. Not thread-safe: one caller."""

    def __init__(self, slots: SlotTable, pool: PagePool, *, max_num_batched_tokens: int, prefix_caching: bool) -> None:
        self.slots = slots
        self.pool = pool
        self.max_num_batched_tokens = max_num_batched_tokens
        self.prefix_caching = prefix_caching
        self.output_lengths = OutputLengths()
        self._waiting: list[tuple[tuple[int, int], Request]] = []
        self._num_waiting = 0
        self._waiting_tokens = 0
        self._requests: dict[int, Request] = {}
        self._fences: list[_Fence] = []
        self._completed_step = 0
        self._count_resets: list[CountReset] = []
        self._aborted: list[int] = []
        self.preemptions = 0
        self.prefix_queried_tokens = 0
        self.prefix_hit_tokens = 0
        self.prompt_tokens = 0
        self.generation_tokens = 0

    # -- what comes in

    def add(self, request: Request) -> None:
        self._requests[request.handle] = request
        self._enqueue(request)

    def abort(self, handle: int) -> None:
        """End a request. Idempotent; an unknown handle is ignored. Its pages are freed behind the fence."""
        request = self._requests.pop(handle, None)
        if request is None:
            return
        if request.state is State.RUNNING:
            self._retire(request.slot)
        else:
            self._num_waiting -= 1
            self._waiting_tokens -= len(request.tokens)
        request.state = State.FINISHED
        self._aborted.append(handle)
        # Ended requests leave the queue when they reach its head, or when they are the most of it.
        if len(self._waiting) > 2 * self._num_waiting + 64:
            self._waiting = [entry for entry in self._waiting if entry[1].state is State.WAITING]
            heapq.heapify(self._waiting)

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    @property
    def num_requests(self) -> int:
        """Requests that have not had their terminal event."""
        return len(self._requests)

    @property
    def num_running(self) -> int:
        return len(self._requests) - self._num_waiting

    def has_events(self) -> bool:
        return bool(self._aborted)

    # -- forming an iteration

    def schedule(self, step: int) -> Batch | None:
        """The batch of iteration `step`, or None when nothing can run now."""
        decodes = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        chunks = self._schedule_prefills(budget)
        if not len(decodes) and not chunks:
            return None
        resets, self._count_resets = self._count_resets, []
        return build_batch(self.slots, self.pool.page_size, step, decodes, chunks, resets)

    def _schedule_decodes(self) -> I32:
        """Slots that decode one token each, their pages grown; preempts when memory is short."""
        s, page_size = self.slots, self.pool.page_size
        # scheduled + 1 tokens exist once all launched steps are done: at the limit the request needs no more.
        ready = np.flatnonzero((s.phase == Phase.DECODE) & (s.scheduled + 1 < s.limit)).astype(np.int32)
        if len(ready) > self.max_num_batched_tokens:
            first = np.lexsort((s.order[ready], s.priority[ready]))[: self.max_num_batched_tokens]
            ready = ready[np.sort(first)]
        needs = s.scheduled[ready] >= s.num_pages[ready] * page_size
        while (short := int(needs.sum()) - self.pool.num_available) > 0:
            soon = sum(len(f.pages) for f in self._fences)
            if short <= soon:
                # Pages are about to come back: the youngest wait one iteration instead of preempting more.
                growing = np.flatnonzero(needs)
                youngest = np.lexsort((s.order[ready[growing]], s.priority[ready[growing]]))[-short:]
                keep = np.ones(len(ready), np.bool_)
                keep[growing[youngest]] = False
            else:
                victim = self._preempt_one()
                keep = ready != victim
            ready, needs = ready[keep], needs[keep]
        growing_slots = ready[needs]
        if len(growing_slots):
            s.page_table[growing_slots, s.num_pages[growing_slots]] = self.pool.allocate(len(growing_slots))
            s.num_pages[growing_slots] += 1
        return ready

    def _preempt_one(self) -> int:
        """Send the running request of the lowest priority, the youngest among those, back to the queue."""
        s = self.slots
        running = s.running()
        victim = int(running[np.lexsort((s.order[running], s.priority[running]))[-1]])
        request = s.request[victim]
        assert request is not None
        request.tokens = s.tokens[victim, : s.known[victim]].copy()
        request.keys, request.last_entry, request.publishable = [], None, True
        self._retire(victim)
        request.slot = -1
        self._enqueue(request)
        self.preemptions += 1
        return victim

    def _schedule_prefills(self, budget: int) -> list[Chunk]:
        """(slot, tokens) chunks: running prefills first, then new requests, until the budget is used up."""
        s = self.slots
        chunks: list[Chunk] = []
        going = np.flatnonzero((s.phase == Phase.PREFILL) & (s.scheduled < s.target))
        for slot in going[np.lexsort((s.order[going], s.priority[going]))].tolist():
            if budget == 0:
                break
            length = min(budget, int(s.target[slot] - s.scheduled[slot]))
            chunks.append((slot, length))
            budget -= length
        while budget > 0 and s.num_free and (request := self._head()) is not None:
            slot = self._admit(request)
            if slot is None:
                break
            length = min(budget, int(s.target[slot] - s.scheduled[slot]))
            chunks.append((slot, length))
            budget -= length
        return chunks

    def _enqueue(self, request: Request) -> None:
        request.state = State.WAITING
        heapq.heappush(self._waiting, (request.sort_key, request))
        self._num_waiting += 1
        self._waiting_tokens += len(request.tokens)

    def _head(self) -> Request | None:
        while self._waiting:
            request = self._waiting[0][1]
            if request.state is State.WAITING:
                return request
            heapq.heappop(self._waiting)
        return None

    def _admit(self, request: Request) -> int | None:
        """Reserve pages for the whole prompt, attach its cached prefix, give it a slot; None when it must wait."""
        pool, page_size = self.pool, self.pool.page_size
        length = len(request.tokens)
        entries = self._cached_prefix(request)
        needed = -(-length // page_size) - len(entries)
        idle_hits = sum(pool.ref[e.page] == 0 for e in entries)  # pinning makes them unavailable
        if needed + idle_hits > pool.num_available or not self._will_fit(request, needed + idle_hits):
            return None
        heapq.heappop(self._waiting)
        self._num_waiting -= 1
        self._waiting_tokens -= length
        cached = len(entries) * page_size
        slot = self.slots.occupy(request, pool.pin(entries), cached)
        self.slots.page_table[slot, len(entries) : len(entries) + needed] = pool.allocate(needed)
        self.slots.num_pages[slot] += needed
        request.state = State.RUNNING
        request.last_entry = entries[-1] if entries else None
        request.last_key = entries[-1].key if entries else pool.index.root(request.salt)
        if not request.scheduled_at:
            request.scheduled_at = time.monotonic()
            request.cached_tokens = cached
            self.prompt_tokens += request.prompt_len
            if self.prefix_caching:
                self.prefix_queried_tokens += request.prompt_len
                self.prefix_hit_tokens += cached
        if request.params.needs_counts:
            prompt, output = request.tokens[: request.prompt_len], request.tokens[request.prompt_len :]
            self._count_resets.append(CountReset(slot, prompt, output))
        return slot

    def _cached_prefix(self, request: Request) -> list[PrefixEntry]:
        if not self.prefix_caching or request.params.prompt_logprobs is not None:
            return []
        index, page_size = self.pool.index, self.pool.page_size
        # At least one token is left to compute: its logits are what the request came for.
        reusable = (len(request.tokens) - 1) // page_size
        if not request.keys:
            request.keys = index.keys(request.tokens[: reusable * page_size], page_size, request.salt)
        return index.match(request.tokens, request.keys, page_size, request.salt)

    def _will_fit(self, request: Request, new_pages: int) -> bool:
        """Would the predicted peak of memory, with this request running, stay within the pool?"""
        s, page_size = self.slots, self.pool.page_size
        running = s.running()
        length = len(request.tokens)
        now = np.append(np.maximum(s.scheduled[running], s.target[running]), length)
        decoded = np.append(now[:-1] - s.prompt_len[running], length - request.prompt_len)
        room = np.append(s.limit[running], request.limit) - now
        exact = np.append(s.exact_output[running], not request.stop_ids)
        remaining = np.where(exact, room, self.output_lengths.remaining(decoded, room))
        pages = -(-now // page_size)
        # Shared pages are counted once for every request that holds them: take the excess off again.
        shared = max(0, int(pages.sum()) - (self._held_by_running() + new_pages))
        return peak_tokens(pages.astype(np.float64), remaining / page_size) - shared <= self.pool.capacity or not len(
            running
        )

    def _held_by_running(self) -> int:
        return self.pool.num_held - sum(len(f.pages) for f in self._fences)

    # -- committing an iteration

    def commit(self, result: StepResult) -> Events:
        """Take in what iteration `result.batch.step` computed. Rows of requests that ended meanwhile are dropped."""
        s, batch = self.slots, result.batch
        self._completed_step = batch.step
        live = s.epoch[batch.slots] == batch.epochs
        slots = batch.slots[live]
        s.confirmed[slots] += batch.query_len[live]
        s.in_flight[slots] -= batch.query_len[live]

        sampled = live[batch.sampled_rows]
        token_slots, tokens = batch.slots[batch.sampled_rows][sampled], result.tokens[sampled]
        index = s.known[token_slots]
        s.tokens[token_slots, index] = tokens
        s.known[token_slots] = index + 1
        self.generation_tokens += len(tokens)
        stopped = (s.stop_ids[token_slots] == tokens[:, None]).any(1)
        full = index + 1 >= s.limit[token_slots]
        finish = np.where(stopped, np.uint8(Finish.STOP), np.where(full, np.uint8(Finish.LENGTH), np.uint8(0)))
        handles = s.handle[token_slots]

        scored_prompts = prompt_logprobs(s, result, live)
        logprobs = token_logprobs(s, result, sampled)
        started = [self._start(int(slot)) for slot in token_slots[index == s.prompt_len[token_slots]]]
        self._publish(slots)
        for slot in token_slots[finish != 0].tolist():
            self._finish(slot)
        # Scored prompts (max_tokens 0) end with their prefill, without a token.
        scored = slots[(s.limit[slots] == s.prompt_len[slots]) & (s.confirmed[slots] >= s.target[slots])]
        ends = s.handle[scored]
        for slot in scored.tolist():
            started.append(self._start(slot))
            self._finish(slot)
        events = Events(handles, tokens, finish, started, logprobs, scored_prompts)
        self._release_fences()
        return self._with_aborts(events.ended(ends.tolist(), Finish.LENGTH))

    def idle_events(self) -> Events:
        """Terminal events that wait for no iteration (aborts)."""
        return self._with_aborts(Events.none())

    def _with_aborts(self, events: Events) -> Events:
        aborted, self._aborted = self._aborted, []
        return events.ended(aborted, Finish.ABORT)

    def _start(self, slot: int) -> Started:
        request = self.slots.request[slot]
        assert request is not None
        now = time.monotonic()
        return Started(
            request.handle, request.cached_tokens, request.scheduled_at - request.arrival, now - request.scheduled_at
        )

    def _publish(self, slots: I32) -> None:
        """Enter pages that became full and confirmed into the prefix index."""
        if not self.prefix_caching:
            return
        s, pool, page_size = self.slots, self.pool, self.pool.page_size
        for slot in slots[s.confirmed[slots] // page_size > s.published[slots]].tolist():
            request = s.request[slot]
            assert request is not None
            for i in range(int(s.published[slot]), int(s.confirmed[slot]) // page_size):
                s.published[slot] = i + 1
                if not request.publishable:
                    continue
                tokens = s.tokens[slot, i * page_size : (i + 1) * page_size].tobytes()
                parent, page = request.last_entry, int(s.page_table[slot, i])
                key = pool.index.chain(request.last_key, tokens)
                entry = None
                if parent is None or pool.index.contains(parent):
                    entry = pool.index.publish(page, parent, key, tokens, request.salt)
                if entry is None:
                    request.publishable = False
                    continue
                if entry.page != page:
                    # Another request computed the same page first: hold that one, and let ours go behind the fence.
                    s.page_table[slot, i] = pool.pin([entry])[0]
                    self._release_behind(int(s.last_step[slot]), -1, np.array([page], np.int32))
                request.last_entry, request.last_key = entry, key

    def _finish(self, slot: int) -> None:
        request = self.slots.request[slot]
        assert request is not None
        self.output_lengths.add(int(self.slots.known[slot]) - request.prompt_len)
        request.state = State.FINISHED
        del self._requests[request.handle]
        self._retire(slot)

    def _retire(self, slot: int) -> None:
        step = int(self.slots.last_step[slot])
        self._count_resets = [r for r in self._count_resets if r.slot != slot]
        self._release_behind(step, slot, self.slots.retire(slot))

    # -- fences

    def _release_behind(self, step: int, slot: int, pages: Pages) -> None:
        """Free pages and slot once step `step`, the last launched one that can touch them, has completed."""
        if step <= self._completed_step:
            self.pool.release(pages)
            if slot >= 0:
                self.slots.vacate(slot)
        else:
            self._fences.append(_Fence(step, slot, pages))

    def _release_fences(self) -> None:
        passed = [f for f in self._fences if f.step <= self._completed_step]
        if passed:
            self._fences = [f for f in self._fences if f.step > self._completed_step]
            for fence in passed:
                self._release_behind(*fence)

    # -- what is true now

    @property
    def num_fenced(self) -> int:
        return len(self._fences)

    def stats(self) -> EngineStats:
        pool = self.pool
        return EngineStats(
            running=self.num_running,
            waiting=self._num_waiting,
            waiting_tokens=self._waiting_tokens,
            pages_held=pool.num_held,
            pages_cached=pool.num_cached,
            pages_total=pool.capacity,
            prefix_queried_tokens=self.prefix_queried_tokens,
            prefix_hit_tokens=self.prefix_hit_tokens,
            preemptions=self.preemptions,
            prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens,
        )

    def check(self) -> None:
        """Raise `AssertionError` unless slots, pages and counters agree (DESIGN invariants 3 and 4)."""
        s, pool = self.slots, self.pool
        pool.check()
        running = s.running()
        assert (s.scheduled[running] == s.confirmed[running] + s.in_flight[running]).all(), "counters disagree"
        assert (s.in_flight[running] >= 0).all(), "negative in-flight count"
        ref = np.zeros(pool.num_pages, np.int32)
        for slot in running.tolist():
            pages = s.page_table[slot, : s.num_pages[slot]]
            assert len(np.unique(pages)) == len(pages), "a request holds a page twice"
            assert len(pages) * pool.page_size >= s.scheduled[slot], "a scheduled token has no page"
            np.add.at(ref, pages, 1)
        for fence in self._fences:
            np.add.at(ref, fence.pages, 1)
        assert (ref == pool.ref).all(), "reference counts disagree with owners"
        ending = {f.slot for f in self._fences if f.slot >= 0}
        assert s.num_free + len(running) + len(ending) == s.num_slots, "a slot is lost"
        assert len(running) == self.num_running, "a running request is lost"
