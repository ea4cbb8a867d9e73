"""`Scheduler`: chooses what each iteration computes, one step ahead of the known results, and commits results.

Decodes come first, then prefill chunks fill the token budget. Lengths are optimistic: a request that samples an end
token in the iteration in flight is scheduled once more, and that result is dropped as stale.
"""

from __future__ import annotations

import time
from collections import Counter
from typing import Any

import numpy as np

from weft.engine.memory.pages import PagePool, Pages
from weft.engine.memory.tiers import Tiers
from weft.engine.runner.iteration.attention_path import AttentionPath, PathCounts
from weft.engine.runner.iteration.batch import I32, Batch, CountReset, StepResult, before_end
from weft.engine.scheduling import constraints, events
from weft.engine.scheduling.admission import OutputLengths, fits
from weft.engine.scheduling.build import build_batch
from weft.engine.scheduling.chunk_keeper import ChunkKeeper
from weft.engine.scheduling.fairness import MAX_OVERTAKEN, Fairness
from weft.engine.scheduling.fences import Fences
from weft.engine.scheduling.images import Images
from weft.engine.scheduling.kept_slots import KeptSlots
from weft.engine.scheduling.prefills import Prefills
from weft.engine.scheduling.prefix_reuse import Found, Prefixes, chain_of
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import Phase, SlotTable
from weft.engine.scheduling.states import StatePolicy, States
from weft.engine.scheduling.verification import Verification
from weft.engine.scheduling.waiting import WaitingQueue
from weft.engine.wire.messages import Finish, SchedulerStats, Started


class Scheduler:
    """Owns the waiting queue, the slot table and the page pool. Not thread-safe."""

    def __init__(
        self, slots: SlotTable, pool: PagePool, *, max_num_batched_tokens: int, prefix_caching: bool,
        tiers: Tiers | None = None, chunk_step: int = 1, fairness: Fairness | None = None,
        state_policy: StatePolicy | None = None, images: Images | None = None,
        verification: Verification | None = None,
    ) -> None:  # fmt: skip
        self.slots, self.pool, self.tiers = slots, pool, tiers
        self.max_num_batched_tokens, self.prefix_caching = max_num_batched_tokens, prefix_caching
        self.output_lengths = OutputLengths()
        self.fairness = fairness or Fairness()
        self._waiting = WaitingQueue()
        self._kept_slots = KeptSlots(self._waiting)
        self.fences = Fences(slots, pool)
        self.states: States | None = None  # None: the model has no recurrent states
        if slots.states is not None:
            self.states = States(slots, pool, self.fences, tiers, state_policy or StatePolicy(), chunk_step)
        loose = self.states is not None and not self.states.policy.exact
        self.images = images
        self._prefills = Prefills(
            slots, self._waiting, self.fairness, self._admit, chunk_step, loose=loose, images=images
        )
        self._requests: dict[int, Request] = {}
        self.prefixes = Prefixes(slots, pool, self.fences, tiers, enabled=prefix_caching, states=self.states)
        self._count_resets: list[CountReset] = []
        self._aborted: list[int] = []
        self._refused: dict[int, tuple[str, Finish]] = {}
        """Why requests cannot continue, by handle, until their events are reported."""
        self.preemptions = self.nonfinite_logits = 0
        self.prompt_tokens = self.generation_tokens = self.decode_tokens = self.prefill_tokens = 0
        self.attention = PathCounts()
        self.slot_limit_changes: dict[str, int] = {}  # changes of the slot limit by reason, set by `SlotLimitKeeper`
        self.verification = verification  # None: decodes have no drafts
        self._committed_step = 0
        self.chunk_keeper: ChunkKeeper | None = None
        """Limits chunks for the time between tokens; None if there is no objective."""

    # -- requests

    def add(self, request: Request) -> None:
        self._requests[request.handle] = request
        leader = self._requests.get(request.leader)
        if leader is not None and not leader.begun and self.prefixes.reusable(request):
            self._waiting.hold(request, leader)
        else:
            self._waiting.push(request)

    def withdraw(self, adapter: int, running: bool) -> list[Request]:
        """Take back the requests of an adapter, in order of arrival; those with a slot only if `running`. They can be
        added again later."""
        for slot in self.slots.running().tolist() if running else ():
            if self.slots.of(slot).adapter == adapter:
                self._preempt(slot)
        found: list[Request] = []
        while queued := [r for r in self._requests.values() if r.adapter == adapter and r.waiting and not r.held]:
            for request in queued:
                self._waiting.end(request)
                self._waiting.release_siblings(request)
                del self._requests[request.handle]
            found += queued
        return sorted(found, key=lambda request: request.order)

    def prefetch(self, names: tuple[bytes, ...]) -> None:
        """Load the pages of a conversation with one of these names before its next turn arrives."""
        if self.prefix_caching:
            self.prefixes.fetch(self.prefixes.conversations.chain(names))

    def abort(self, handle: int) -> None:
        """End a request. Idempotent; unknown handles are ignored. Its pages are released through a fence."""
        request = self._requests.get(handle)
        if request is None:
            return
        self._end(request)
        if request.slot >= 0:
            self._retire(request.slot)
        else:
            self._waiting.end(request)
        self._waiting.release_siblings(request)
        self._aborted.append(handle)

    @property
    def num_waiting(self) -> int:
        return self._waiting.num_requests

    @property
    def num_requests(self) -> int:
        """Number of requests without a terminal event so far."""
        return len(self._requests)

    def count_by_adapter(self) -> Counter[int]:
        """Return the requests without a terminal event, and slots whose fence has not passed, by adapter number."""
        s = self.slots
        counts = Counter(request.adapter for request in self._requests.values())
        counts.update(s.adapter[s.phase == Phase.ENDING].tolist())
        return counts

    @property
    def num_running(self) -> int:
        return len(self._requests) - self.num_waiting

    @property
    def short_of_slots(self) -> bool:
        """Whether a slot is all that the first request in the queue lacks."""
        return self.num_waiting > 0 and self._waiting.blocked == "slots"

    @property
    def has_headroom(self) -> bool:
        """Whether the next iteration has a slot and tokens for a request that arrives now, after all others."""
        s, queue = self.slots, self._waiting
        if s.num_open <= len(queue) or (len(queue) and queue.blocked == "pages"):
            return False
        if self.chunk_keeper is not None and self.chunk_keeper.cuts:
            return False
        slots = s.prefilling()
        prompts = int((s.target[slots] - s.scheduled[slots]).sum()) + queue.num_tokens
        return len(s.decoding()) + prompts < self.max_num_batched_tokens

    def limit_running(self, limit: int) -> None:
        """Set the slot limit. No request is preempted for it: freed slots stay empty until fewer requests run. Raises
        `ValueError` if the limit is less than one or more than the number of slots."""
        if not 1 <= limit <= self.slots.num_slots:
            raise ValueError(f"the slot limit must be 1 to {self.slots.num_slots}, not {limit}")
        self.slots.limit = limit

    def has_events(self) -> bool:
        return bool(self._aborted or self._refused)

    # -- forming an iteration

    def schedule(self, step: int) -> Batch | None:
        """Return the batch of iteration `step`, or None if nothing can run now."""
        verification = self.verification
        if verification is not None and self._committed_step < step - 1 and verification.waits:
            return None
        self._waiting.step = step
        self._take_loaded()
        self.pool.retention.expire(time.monotonic())
        if self.images is not None:
            self.images.begin()
            for request, (why, how) in list(self.images.refused.items()):
                self._refuse(request, why, how)
        self._free_slots()
        decodes = self._schedule_decodes()
        budget, keeper = self.max_num_batched_tokens - len(decodes), self.chunk_keeper
        cut = None if keeper is None else keeper.cut(decodes, self._prefills.in_turn())
        chunks = self._prefills.schedule(budget, cut)
        self._fetch_for_head()
        if not len(decodes) and not chunks:
            return None
        resets, self._count_resets = self._count_resets, []
        drafts = None
        if verification is not None and len(decodes):
            drafts = verification.choose(decodes, len(chunks), budget - sum(length for _, length in chunks))
        batch = build_batch(self.slots, self.pool.page_size, step, decodes, chunks, resets, drafts)
        if self.states is not None:
            batch = batch._replace(states=self.states.rows(batch))
        if self.images is not None:
            batch = self.images.inputs(batch)
        if keeper is not None:
            keeper.formed(batch)
        return batch

    def _fetch_for_head(self) -> None:
        """Load the pages of the first request in line, unless it waits for memory."""
        head = self._waiting.head() if self.tiers is not None else None
        if head is not None and not head.fetched and self._waiting.blocked != "pages":
            head.fetched = True
            self.prefixes.fetch(self.prefixes.find(head).entries)

    def _schedule_decodes(self) -> I32:
        """Return the slots that decode one token each, with their pages grown. Preempts if memory is short."""
        s, page_size = self.slots, self.pool.page_size
        ready = s.decoding().astype(np.int32)
        ready = ready[constraints.may_decode(s, ready)]
        if self.verification is not None:
            ready = ready[s.drafts.take(ready) == 0]
        if len(ready) > self.max_num_batched_tokens:
            ready = ready[np.isin(ready, s.in_order(ready)[: self.max_num_batched_tokens])]
        needs = s.scheduled.take(ready) >= s.num_pages.take(ready) * page_size
        while (short := int(needs.sum()) - self.pool.num_available) > 0:
            if short <= self._num_coming():
                # Enough pages are about to be freed: the youngest wait one iteration, and no more are preempted.
                keep = ~np.isin(ready, s.in_order(ready[needs])[-short:])
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
        """Preempt the request that loses its memory first, and return its slot."""
        return self._preempt(self.fairness.last(self.slots))

    def _preempt(self, victim: int) -> int:
        """Return the request in this slot to the queue."""
        s = self.slots
        request = s.of(victim)
        request.token_ids = s.token_ids[victim, : s.known[victim]].copy()
        if self.states is not None:
            self.states.save_newest(victim)
        request.keys, request.last_entry, request.publishable = [], None, True
        self._retire(victim)
        self._waiting.push(request)
        self.preemptions += 1
        return victim

    def _free_slots(self) -> None:
        """Free slots for waiting requests that may have them: of a tenant without a slot, or of a higher priority."""
        self.slots.kept, returned = self._kept_slots.update()
        for request in returned:
            self._next_in_line(request)
        self._free_for_tenant_without_slot()
        if self.slots.num_open or (head := self._waiting.head()) is None:
            return
        wanted = self.fairness.slots_wanted(self._waiting.num_like(head))
        # More requests may run than the current limit allows. Then no slot is freed, as none could be used.
        while 0 <= self.slots.limit - self.slots.kept - self.num_running < wanted:
            victim = self.fairness.victim(self.slots, head)
            if victim is None:
                return
            request = self.slots.of(victim)
            self.fairness.preempts(head, request)
            self._preempt(victim)

    def _free_for_tenant_without_slot(self) -> None:
        """Let a tenant with several slots yield one, if another has waited long without a slot for lack of slots or
        pages. That one is next. No request is preempted while freed slots or pages are about to be available."""
        s, queue, fairness = self.slots, self._waiting, self.fairness
        if (s.num_open and queue.blocked != "pages") or (longest := queue.longest_without_slot()) is None:
            return
        request, since = longest
        own = fairness.donor(s, request, queue.step - since, self.max_num_batched_tokens)
        if not len(own):
            return
        self._next_in_line(request)
        coming = self._num_coming() > 0 if s.num_open else self.num_running < s.limit
        if not coming and (slot := fairness.yielding(s, own, queue.step)) is not None:
            fairness.yields(s, slot, queue.step)
            self._preempt(slot)
            self._kept_slots.give(request.tenant, since)

    def _next_in_line(self, request: Request) -> None:
        """Make the request the head of its precedence, which none may overtake."""
        self._waiting.promote(request)
        request.overtaken = MAX_OVERTAKEN

    def _num_coming(self) -> int:
        """Return the pages about to be freed: those that only fences and transfers hold."""
        held = self._other_references()
        return int(((held > 0) & (held == self.pool.ref)).sum())

    def _other_references(self) -> Pages:
        held = self.fences.references()
        if self.tiers is not None:
            np.add.at(held, self.tiers.transfer_pages(), 1)
        return held

    def _admit(self, request: Request) -> int | None:
        """Give a request pages for the whole prompt, its cached prefix and a slot. Returns None if it must wait. If
        part of the prefix is not on the GPU, it starts to load, and the slot is LOADING until then."""
        found = self._find_if_fits(request)
        if found is None:
            return None
        expected = 0.0 if request.charged else request.prompt_len + self.output_lengths.expected(request)
        request.charged += expected
        self._waiting.take(request, expected)
        slot = self.prefixes.attach(request, found)
        self.slots.since[slot] = self._waiting.step
        if request.params.needs_counts:
            prompt, output = request.token_ids[: request.prompt_len], request.token_ids[request.prompt_len :]
            self._count_resets.append(CountReset(slot, prompt, output))
        if request.loading is None:
            self._begin(request)
        return slot

    def _find_if_fits(self, request: Request) -> Found | None:
        """Return the cached prefix of a request if memory suffices for the rest, else None."""
        pool, found = self.pool, self.prefixes.find(request)
        # Pinning makes idle pages unavailable.
        taken = found.num_fresh + found.num_idle
        if taken > pool.num_available or not fits(
            self.slots, request, self.output_lengths, page_size=pool.page_size, capacity=pool.capacity,
            held=pool.num_held - self.fences.num_pages, new_pages=taken,
        ):  # fmt: skip
            return None
        return found

    def _begin(self, request: Request) -> None:
        """Count a request once, when its computation can start."""
        if request.scheduled_at:
            return
        request.scheduled_at = time.monotonic()
        request.cached_tokens = sum(request.hits)
        self.prompt_tokens += request.prompt_len
        if self.prefix_caching:
            self.prefixes.stats.add(request.prompt_len, request.hits)
            self.prefixes.stats.stateless += request.stateless

    def _take_loaded(self) -> None:
        """Process finished loads: their requests can be scheduled, or return to the queue with a shorter prefix."""
        for waiting in self.tiers.pump() if self.tiers is not None else ():
            request = self.slots.request[waiting.slot] if waiting.slot >= 0 else None
            if request is None:
                continue
            if waiting.failed:
                self._retire(waiting.slot)
                self._waiting.push(request)
            else:
                self.prefixes.loaded(request, waiting)
                self._begin(request)

    def reset_cache(self) -> None:
        """Drop every cached prefix in all tiers. Pages in use stay with their requests."""
        self.pool.index.clear()
        self.pool.forget()
        if self.images is not None:
            self.images.forget()
        if self.tiers is not None:
            self.tiers.forget()

    # -- committing an iteration

    def commit(self, result: StepResult) -> events.Events:
        """Commit the result of an iteration and return its events. Rows of requests that have ended are dropped."""
        s, batch = self.slots, result.batch
        self.attention.add(result.attention or AttentionPath.of(batch.num_decodes, batch.num_chunks))
        self.fences.completed(batch.step)
        self._committed_step = batch.step
        live = s.epoch.take(batch.slots) == batch.epochs
        slots = batch.slots[live]
        computed = batch.query_len
        sampled = live[batch.sampled_rows]
        nonfinite, not_finite = events.nonfinite_results(result)
        verified = batch.verified
        if verified is not None:
            sampled &= verified.reached(verified.ends(result.tokens, not_finite))
        token_rows = batch.sampled_rows[sampled]
        token_slots, tokens, bad = batch.slots.take(token_rows), result.tokens[sampled], not_finite[sampled]
        index = s.known.take(token_slots)
        if verified is not None:
            index += np.arange(len(index)) - np.searchsorted(token_rows, token_rows)
        s.token_ids[token_slots, index] = tokens
        tokens = np.where(bad, np.int32(-1), tokens)
        # Laid out by column: numpy is slow at reducing many short rows.
        stopped = np.equal(s.stop_ids.take(token_slots, 0).T, tokens, order="C").any(0)
        ended = index + 1 >= s.max_total_tokens.take(token_slots)
        finish = np.where(stopped, np.uint8(Finish.STOP), np.where(ended, np.uint8(Finish.LENGTH), np.uint8(0)))
        finish[bad] = Finish.NONFINITE
        errors = constraints.advance(s, token_slots, tokens, finish)
        if verified is not None and self.verification is not None:
            # A request's end makes the samples after it void.
            kept = before_end(finish != 0, np.searchsorted(token_rows, token_rows))
            sampled[sampled] = kept
            token_rows, token_slots, tokens, bad, index, finish = (
                column[kept] for column in (token_rows, token_slots, tokens, bad, index, finish)
            )
            computed = self.verification.committed(batch, token_rows, tokens == verified.expected[sampled])
        s.known[token_slots] = index + 1
        s.confirmed[slots] += computed[live]
        s.in_flight[slots] -= batch.query_len[live]
        nonfinite &= live
        nonfinite[token_rows[bad]] = True
        self.nonfinite_logits += int(nonfinite.sum())
        handles = s.handle.take(token_slots)
        self.generation_tokens += len(tokens) - int(bad.sum())
        self.decode_tokens += batch.decode_tokens
        self.prefill_tokens += batch.num_tokens - batch.decode_tokens

        scored_prompts = events.prompt_logprobs(s, result, live)
        events.add_pooled(s, result, live)
        logprobs = events.token_logprobs(s, result, sampled)
        nonfinite_slots = batch.slots[nonfinite]
        nonfinite_handles = self._drop_nonfinite(nonfinite_slots, token_slots[bad], scored_prompts, errors)
        if self.prefix_caching:
            self.prefixes.publish(slots)
        if self.images is not None:
            self.images.commit()
        started = [self._start(int(slot)) for slot in token_slots[index == s.prompt_len.take(token_slots)]]
        for slot in s.outgrown(slots):
            self.fences.release_after(int(s.last_step[slot]), -1, s.give_back(slot))
        for slot in token_slots[(finish != 0) & ~bad].tolist():
            self._finish(slot)
        for slot in nonfinite_slots.tolist():
            self._give_up(slot)
        scored = self._scored(slots, nonfinite_slots)
        ends, pooled = s.handle[scored], dict[int, bytes]()
        for slot in scored.tolist():
            started.append(self._start(slot))
            request = s.of(slot)
            if request.params.pooling is not None:
                pooled[request.handle] = events.embedding(request)
            self._finish(slot)
        reported = events.Events(handles, tokens, finish, started, logprobs, scored_prompts, errors, pooled)
        reported = reported.with_ends(nonfinite_handles, Finish.NONFINITE)
        self.fences.open()
        if self.tiers is not None:
            full = 2 * batch.num_tokens >= self.max_num_batched_tokens
            self.tiers.speeds.computed(batch.num_tokens, result.seconds, full)
        return self._with_aborts(reported.with_ends(ends.tolist(), Finish.LENGTH))

    def _scored(self, slots: I32, nonfinite: I32) -> I32:
        """Return slots with a scored or pooled prompt (max_tokens 0), which end with their prefill, without a token."""
        s = self.slots
        scored = slots[s.max_total_tokens.take(slots) == s.prompt_len.take(slots)]
        if len(scored):
            scored = scored[(s.confirmed[scored] >= s.target[scored]) & ~np.isin(scored, nonfinite)]
        return scored

    def _drop_nonfinite(
        self, slots: I32, reported: I32, scored_prompts: dict[int, Any], errors: dict[int, str]
    ) -> list[int]:
        """Drop this iteration's results of requests with logits that are not finite. `reported` are those with a row in
        the events. Returns the handles of the others, which need an event."""
        if not len(slots):
            return []
        s = self.slots
        for slot in slots.tolist():
            request = s.of(slot)
            request.publishable = False  # its pages may contain the values that caused this
            scored_prompts.pop(request.handle, None)
            errors[request.handle] = events.NOT_FINITE
        others: list[int] = s.handle[slots[~np.isin(slots, reported)]].tolist()
        return others

    def _give_up(self, slot: int) -> None:
        """End a running request whose terminal event is reported elsewhere."""
        request = self.slots.of(slot)
        self._end(request)
        self._retire(slot)
        self._waiting.release_siblings(request)

    def _refuse(self, request: Request, why: str, how: Finish = Finish.REFUSED) -> None:
        """End a running request that cannot continue."""
        self._refused[request.handle] = why, how
        self._give_up(request.slot)

    def idle_events(self) -> events.Events:
        """Return terminal events that need no iteration (aborts)."""
        return self._with_aborts(events.Events.none())

    def _with_aborts(self, reported: events.Events) -> events.Events:
        aborted, self._aborted = self._aborted, []
        refused, self._refused = self._refused, {}
        reported.errors.update({handle: why for handle, (why, _) in refused.items()})
        reported = reported.with_ends(aborted, Finish.ABORT)
        for finish in (Finish.REFUSED, Finish.NONFINITE):
            reported = reported.with_ends([handle for handle, (_, how) in refused.items() if how is finish], finish)
        return reported

    def _start(self, slot: int) -> Started:
        request = self.slots.of(slot)
        request.begun = True
        self._waiting.release_siblings(request)
        now = time.monotonic()
        if request.retention and self.prefix_caching:
            self.prefixes.retain(request, now)
        return Started(
            request.handle,
            request.cached_tokens,
            request.scheduled_at - request.arrival,
            now - request.scheduled_at,
            request.retained_tokens,
        )

    def _finish(self, slot: int) -> None:
        request = self.slots.of(slot)
        if request.params.max_tokens != 0:  # requests without output do not count
            self.output_lengths.add(int(self.slots.known[slot]) - request.prompt_len)
        self._end(request)
        self._retire(slot)

    def _end(self, request: Request) -> None:
        """Mark a request as ended. The caller frees its slot and pages."""
        request.ended = True
        del self._requests[request.handle]
        if request.slot >= 0:
            # Charge the tenant for the actual tokens, not for the expected ones.
            self._waiting.settle(request, int(self.slots.known[request.slot]) - request.charged)

    def _retire(self, slot: int) -> None:
        request = self.slots.of(slot)
        if self.states is not None:
            self.states.save_newest(slot)
        if self.images is not None:
            self.images.release(request)
        request.slot = -1
        self._waiting.freed(request.tenant)
        if request.ended:
            self._kept_slots.ended(request)
        if request.loading is not None:
            # Loads continue: the transfers hold references to their pages.
            request.loading.slot, request.loading = -1, None
        if request.names and request.last_entry is not None:
            self.prefixes.conversations.remember(request.names, chain_of(request.last_entry))
        step = int(self.slots.last_step[slot])
        self._count_resets = [r for r in self._count_resets if r.slot != slot]
        self.fences.release_after(step, slot, self.slots.retire(slot))

    # -- state

    def stats(self, compiling: int = 0, adapter: int = 0) -> SchedulerStats:
        """`compiling` and `adapter` count the requests that wait for their grammar and for their adapter."""
        pool, loading = self.pool, int((self.slots.phase == Phase.LOADING).sum())
        saved, state_bytes = self.states.stats() if self.states is not None else ({}, 0)
        return SchedulerStats(
            running=self.num_running, slot_limit=self.slots.limit, slot_limit_changes=self.slot_limit_changes,
            waiting=self.num_waiting,
            queue={**self._waiting.by_reason(), "load": loading, "grammar": compiling, "adapter": adapter,
                   "encoder": 0 if self.images is None else self.images.num_waiting},
            pages_held=pool.num_held, pages_cached=pool.num_cached, pages_total=pool.capacity,
            retained_pages=len(pool.retention), retentions_displaced=pool.retention.displaced,
            prefix_queried_tokens=self.prefixes.stats.queried, prefix_hit_tokens=sum(self.prefixes.stats.hits),
            prefix_stateless_tokens=self.prefixes.stats.stateless, state_checkpoints=saved, state_bytes=state_bytes,
            prefix_lengths=self.prefixes.stats.by_length, tiers=self.prefixes.stats.tiers(pool, self.tiers),
            preemptions=self.preemptions, displaced=self.fairness.preempted, yielded=self.fairness.yielded,
            attention=dict(self.attention.iterations),
            chunks_cut=dict(self.chunk_keeper.bounds) if self.chunk_keeper is not None else {},
            chunks_late=self.chunk_keeper.limit.late if self.chunk_keeper is not None else 0,
            overtaken=self.fairness.overtaken, prompt_tokens=self.prompt_tokens,
            generation_tokens=self.generation_tokens, decode_tokens=self.decode_tokens,
            prefill_tokens=self.prefill_tokens, nonfinite_logits=self.nonfinite_logits,
        )  # fmt: skip

    def check(self) -> None:
        """Raise `AssertionError` unless slots, pages and counters agree (docs/design.md invariants 4 and 5)."""
        s, pool = self.slots, self.pool
        pool.check()
        if self.tiers is not None:
            self.tiers.check()
        running = s.running()
        assert (s.scheduled[running] == s.confirmed[running] + s.in_flight[running]).all(), "counters disagree"
        assert (s.in_flight[running] >= 0).all(), "negative in-flight count"
        ref = self._other_references()
        for slot in running.tolist():
            pages = s.held(slot)
            if self.states is not None:
                self.states.check(slot)
            assert len(np.unique(pages)) == len(pages), "a request holds a page twice"
            assert s.num_pages[slot] * pool.page_size >= s.scheduled[slot], "a scheduled token has no page"
            np.add.at(ref, pages, 1)
        assert (ref == pool.ref).all(), "reference counts disagree with owners"
        if self.images is not None:
            self.images.check(self._requests.values())
        assert s.num_free + len(running) + self.fences.num_slots == s.num_slots, "a slot is lost"
        assert len(running) == self.num_running, "a running request is lost"
