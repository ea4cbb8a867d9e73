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
from weft.engine.batch import I32, Batch, CountReset, PromptLogprobs, SamplingInputs, StepResult, uniform_draw
from weft.engine.messages import EngineStats, Finish, Started, TokenLogprobs
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


class Events(NamedTuple):
    """What one commit has to tell the world; columns as in `messages.Outputs`."""

    handles: np.ndarray
    tokens: np.ndarray
    finish: np.ndarray
    started: list[Started]
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, list[TokenLogprobs]]


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
        request.state = State.FINISHED  # a waiting one is skipped when it reaches the head of the queue
        self._aborted.append(handle)

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
        return self._build(step, decodes, chunks)

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

    def _schedule_prefills(self, budget: int) -> list[tuple[int, int]]:
        """(slot, tokens) chunks: running prefills first, then new requests, until the budget is used up."""
        s = self.slots
        chunks: list[tuple[int, int]] = []
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

    def _build(self, step: int, decodes: I32, chunks: list[tuple[int, int]]) -> Batch:
        s, page_size = self.slots, self.pool.page_size
        num_decodes = len(decodes)
        rows = np.concatenate((decodes, np.array([c[0] for c in chunks], np.int32)))
        query_len = np.ones(len(rows), np.int32)
        query_len[num_decodes:] = [c[1] for c in chunks]
        start = s.scheduled[rows]
        total = int(query_len.sum())
        token_ids = np.full(total, -1, np.int32)
        positions = np.empty(total, np.int32)
        positions[:num_decodes] = start[:num_decodes]
        token_rows = np.repeat(np.arange(len(rows), dtype=np.int32), query_len)
        at = num_decodes
        asked: list[PromptLogprobs] = []
        for row, (slot, length) in enumerate(chunks, start=num_decodes):
            first = int(start[row])
            token_ids[at : at + length] = s.tokens[slot, first : first + length]
            positions[at : at + length] = np.arange(first, first + length, dtype=np.int32)
            if s.prompt_logprobs[slot] >= 0 and (part := self._prompt_logprobs(row, slot, first, length, at)):
                asked.append(part)
            at += length
        pages = s.page_table[rows[token_rows], positions // page_size].astype(np.int64)
        end = start + query_len
        s.scheduled[rows] = end
        s.in_flight[rows] += query_len
        s.last_step[rows] = step
        # A chunk that completes the prefill samples the next token, unless no output was asked for.
        samples = (np.arange(len(rows)) < num_decodes) | ((end == s.target[rows]) & (s.target[rows] < s.limit[rows]))
        sampled_rows = np.flatnonzero(samples).astype(np.int32)
        s.phase[rows[(end >= s.target[rows])]] = Phase.DECODE
        resets, self._count_resets = tuple(self._count_resets), []
        return Batch(
            step=step,
            num_decodes=num_decodes,
            slots=rows,
            epochs=s.epoch[rows],
            query_len=query_len,
            kv_len=end,
            token_ids=token_ids,
            positions=positions,
            slot_mapping=pages * page_size + positions % page_size,
            page_table=s.page_table[rows, : int(s.num_pages[rows].max())],
            sampled_rows=sampled_rows,
            sampling=self._sampling(rows[sampled_rows], (np.cumsum(query_len) - 1)[sampled_rows], end[sampled_rows]),
            count_resets=resets,
            prompt_logprobs=tuple(asked),
        )

    def _prompt_logprobs(self, row: int, slot: int, first: int, length: int, at: int) -> PromptLogprobs | None:
        """Position p predicts prompt token p + 1; positions delivered before a preemption are not sent again."""
        s = self.slots
        request = s.request[slot]
        assert request is not None
        low = max(first, request.prompt_logprobs_sent)
        high = min(first + length, int(s.prompt_len[slot]) - 1)
        if low >= high:
            return None
        tokens = np.arange(at + low - first, at + high - first, dtype=np.int32)
        return PromptLogprobs(row, tokens, s.tokens[slot, low + 1 : high + 1].copy(), int(s.prompt_logprobs[slot]))

    def _sampling(self, slots: I32, logit_tokens: np.ndarray, index: I32) -> SamplingInputs:
        """`index [S]`: the index that each new token will have in its request."""
        s = self.slots
        bias_rows: list[np.ndarray] = []
        bias_ids: list[np.ndarray] = []
        bias_values: list[np.ndarray] = []
        for row in np.flatnonzero(s.biased[slots]).tolist():
            request = s.request[slots[row]]
            assert request is not None
            bias = request.params.logit_bias
            bias_rows.append(np.full(len(bias), row, np.int32))
            bias_ids.append(np.fromiter(bias.keys(), np.int32, len(bias)))
            bias_values.append(np.fromiter(bias.values(), np.float32, len(bias)))
        early = np.flatnonzero(index < s.min_total[slots])
        if len(early):
            stops = s.stop_ids[slots[early]]
            where = np.nonzero(stops >= 0)
            bias_rows.append(early[where[0]].astype(np.int32))
            bias_ids.append(stops[where])
            bias_values.append(np.full(len(where[0]), -np.inf, np.float32))
        none_i, none_f = np.zeros(0, np.int32), np.zeros(0, np.float32)
        return SamplingInputs(
            slots=slots,
            logit_tokens=logit_tokens.astype(np.int32),
            temperature=s.temperature[slots],
            top_k=s.top_k[slots],
            top_p=s.top_p[slots],
            min_p=s.min_p[slots],
            uniform=uniform_draw(s.seed[slots], index),
            presence=s.presence[slots],
            frequency=s.frequency[slots],
            repetition=s.repetition[slots],
            counted=s.counted[slots],
            logprobs=s.logprobs[slots],
            bias_rows=np.concatenate(bias_rows) if bias_rows else none_i,
            bias_ids=np.concatenate(bias_ids) if bias_ids else none_i,
            bias_values=np.concatenate(bias_values) if bias_values else none_f,
        )

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

        prompt_logprobs = self._commit_prompt_logprobs(result, live)
        logprobs = self._commit_logprobs(result, sampled) if result.logprobs is not None else {}
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
        events = Events(
            handles=np.concatenate((handles, ends)),
            tokens=np.concatenate((tokens, np.full(len(ends), -1, np.int32))),
            finish=np.concatenate((finish, np.full(len(ends), Finish.LENGTH, np.uint8))),
            started=started,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        self._release_fences()
        return self._with_aborts(events)

    def idle_events(self) -> Events:
        """Terminal events that wait for no iteration (aborts)."""
        none = Events(np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.uint8), [], {}, {})
        return self._with_aborts(none)

    def _with_aborts(self, events: Events) -> Events:
        if not self._aborted:
            return events
        aborted, self._aborted = self._aborted, []
        return events._replace(
            handles=np.concatenate((events.handles, np.array(aborted, np.int64))),
            tokens=np.concatenate((events.tokens, np.full(len(aborted), -1, np.int32))),
            finish=np.concatenate((events.finish, np.full(len(aborted), Finish.ABORT, np.uint8))),
        )

    def _start(self, slot: int) -> Started:
        request = self.slots.request[slot]
        assert request is not None
        request.started = True
        now = time.monotonic()
        return Started(
            request.handle, request.cached_tokens, request.scheduled_at - request.arrival, now - request.scheduled_at
        )

    def _commit_logprobs(self, result: StepResult, sampled: np.ndarray) -> dict[int, TokenLogprobs]:
        columns, sampling = result.logprobs, result.batch.sampling
        assert columns is not None
        out: dict[int, TokenLogprobs] = {}
        for i, row in enumerate(columns.rows.tolist()):
            if sampled[row]:
                width = 1 + int(sampling.logprobs[row])
                out[int(self.slots.handle[sampling.slots[row]])] = TokenLogprobs(
                    int(columns.ranks[i]), tuple(columns.ids[i, :width].tolist()), tuple(columns.values[i, :width].tolist())
                )
        return out

    def _commit_prompt_logprobs(self, result: StepResult, live: np.ndarray) -> dict[int, list[TokenLogprobs]]:
        out: dict[int, list[TokenLogprobs]] = {}
        for asked, columns in zip(result.batch.prompt_logprobs, result.prompt_logprobs, strict=True):
            if not live[asked.row]:
                continue
            request = self.slots.request[result.batch.slots[asked.row]]
            assert request is not None
            request.prompt_logprobs_sent += len(asked.targets)
            out[request.handle] = [
                TokenLogprobs(rank, tuple(ids), tuple(values))
                for rank, ids, values in zip(
                    columns.ranks.tolist(), columns.ids.tolist(), columns.values.tolist(), strict=True
                )
            ]
        return out

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
