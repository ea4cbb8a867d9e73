"""`Prefixes`: lets requests reuse cached prefixes when they start, and publishes their pages as they run."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from weft.engine.memory.loads import Loading, PageLoad
from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import NOWHERE, Hits, PrefixEntry, PrefixIndex
from weft.engine.memory.tiers import Tiers
from weft.engine.runner.iteration.batch import I32
from weft.engine.scheduling.fences import Fences
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import Phase, SlotTable
from weft.engine.scheduling.states import States
from weft.engine.wire.messages import LENGTHS, LengthHits, TierStats
from weft.engine.wire.page_keys import KEY_BYTES

MAX_PAGES = 1 << 20  # maximum number of remembered page keys, over all conversations


class ConversationPages:
    """The last pages of conversations, by the names that their next turns may have. Keeps keys only, so that it
    does not affect evictions. Evicted pages are not found."""

    def __init__(self, index: PrefixIndex, max_pages: int = MAX_PAGES) -> None:
        self._index = index
        self._keys: OrderedDict[bytes, bytes] = OrderedDict()
        """Page keys of a chain by name, least recently remembered first."""
        self._max_pages = max_pages
        self._num_pages = 0

    def remember(self, names: Iterable[bytes], chain: Iterable[PrefixEntry]) -> None:
        """Store the chain, first page first, that a conversation with these names ended with."""
        keys = b"".join([entry.key for entry in chain])
        for name in names:
            self._drop(name)
            self._keys[name] = keys
            self._num_pages += len(keys) // KEY_BYTES
        while self._num_pages > self._max_pages:
            self._drop(next(iter(self._keys)))

    def _drop(self, name: bytes) -> None:
        self._num_pages -= len(self._keys.pop(name, b"")) // KEY_BYTES

    def chain(self, names: Iterable[bytes]) -> list[PrefixEntry]:
        """Return the pages still kept, first page first, of the first of these names that is known."""
        keys = next((self._keys[name] for name in names if name in self._keys), b"")
        chain: list[PrefixEntry] = []
        for at in range(0, len(keys), KEY_BYTES):
            entry = self._index.find(keys[at : at + KEY_BYTES])
            if entry is None or not entry.anywhere:
                break
            chain.append(entry)
        return chain


class PrefixStats:
    """How many prompt tokens were looked up, and in which tier they were found."""

    def __init__(self) -> None:
        self.queried = 0
        self.stateless = 0  # tokens whose K and V were found and not used: there was no recurrent state
        self.hits = Hits()
        self.by_length = {name: LengthHits() for name in (*LENGTHS, "more")}

    def add(self, prompt_tokens: int, hits: Hits) -> None:
        self.queried += prompt_tokens
        self.hits = Hits(*(a + b for a, b in zip(self.hits, hits, strict=True)))
        of = self.by_length[next((name for name, limit in LENGTHS.items() if prompt_tokens < limit), "more")]
        of.gpu, of.host, of.ssd = of.gpu + hits.gpu, of.host + hits.host, of.ssd + hits.ssd
        of.missed += prompt_tokens - sum(hits)

    def tiers(self, pool: PagePool, lower: Tiers | None) -> dict[str, TierStats]:
        gpu = TierStats(used=pool.num_held + pool.num_cached, capacity=pool.capacity, evictions=pool.evictions)
        tiers = {"gpu": gpu, **(lower.stats() if lower is not None else {})}
        missed = self.queried
        for name, stats in tiers.items():
            stats.hit_tokens = getattr(self.hits, name)
            missed -= stats.hit_tokens
            stats.missed_tokens = missed
        return tiers


class Found(NamedTuple):
    """The cached beginning of a request, in any tiers. Nothing is pinned yet, so use it at once or drop it."""

    entries: list[PrefixEntry]
    num_fresh: int  # pages to allocate for the prompt: those neither on the GPU nor being loaded for another request
    num_idle: int  # pages that are on the GPU without references
    state: list[PrefixEntry]  # pages of the recurrent state after the last entry
    matched: int  # pages whose K and V were found; the recurrent state after them may be missing


class Prefixes:
    def __init__(
        self, slots: SlotTable, pool: PagePool, fences: Fences, tiers: Tiers | None, *, enabled: bool,
        states: States | None = None,
    ) -> None:  # fmt: skip
        self._slots, self._pool, self._fences, self._tiers = slots, pool, fences, tiers
        self._enabled, self._states = enabled, states
        self._own_pages = 0 if states is None else 2 * states.pages
        self.stats = PrefixStats()
        self.conversations = ConversationPages(pool.index)

    def reusable(self, request: Request) -> bool:
        """Return whether the request may use pages of other requests."""
        computes_all = request.params.prompt_logprobs is not None or request.params.pooling == "mean"
        may = self._enabled and not computes_all
        return may and len(request.token_ids) > self._pool.page_size

    def find(self, request: Request) -> Found:
        """Return the cached beginning of the request, as far as it is on the GPU or worth loading."""
        pages = -(-len(request.token_ids) // self._pool.page_size) + self._own_pages
        if not self.reusable(request):
            return Found([], pages, 0, [], 0)
        index, page_size, ref = self._pool.index, self._pool.page_size, self._pool.ref
        # At least one token must be computed, because the request needs its logits.
        most = request.prompt_len if self._slots.replays else len(request.token_ids)
        reusable = (most - 1) // page_size
        if not request.keys:
            prompt = request.token_ids[: reusable * page_size]
            request.keys = index.keys(prompt, page_size, request.salt, request.image_parts)
        matched = index.match(request.token_ids, request.keys, page_size, request.salt, request.image_parts)
        entries, state = self._worthwhile(matched)
        cached = entries + state
        away = sum(e.page == NOWHERE and self._coming(e) is None for e in cached)
        idle = sum(e.page != NOWHERE and ref[e.page] == 0 for e in cached)
        return Found(entries, pages - len(entries) + away, idle, state, len(matched))

    def _worthwhile(self, entries: list[PrefixEntry]) -> tuple[list[PrefixEntry], list[PrefixEntry]]:
        """Return the beginning of a chain that is on the GPU or worth loading, and the recurrent state after it."""
        states = None if self._states is None else self._states.below(entries)
        away = any(e.page == NOWHERE for of in (entries, *(states or {}).values()) for e in of)
        if self._tiers is not None and away:
            busy = self._tiers.busy_pages(), self._busy_tokens()
            count = self._tiers.speeds.worthwhile(entries, *busy, *([] if states is None else [states]))
        else:
            count = len(entries) if states is None else max(states, default=0)
        return entries[:count], [] if states is None else states.get(count, [])

    def _coming(self, entry: PrefixEntry) -> PageLoad | None:
        return self._tiers.coming(entry) if self._tiers is not None else None

    def _busy_tokens(self) -> int:
        """Return the prompt tokens that admitted requests still have to compute."""
        s = self._slots
        ahead = (s.phase == Phase.PREFILL) | (s.phase == Phase.LOADING)
        return int((s.target[ahead] - s.scheduled[ahead]).sum())

    def attach(self, request: Request, found: Found) -> int:
        """Give the request a slot with its prefix and fresh pages, and start to load pages from lower tiers."""
        pool, entries, count = self._pool, found.entries + found.state, len(found.entries)
        pool.pin([e for e in entries if e.page != NOWHERE])
        loads = [self._coming(e) if e.page == NOWHERE else None for e in entries]
        for load in loads:
            if load is not None:
                pool.hold(load.page)
        fresh = pool.allocate(found.num_fresh)
        to_load = [e for e, load in zip(entries, loads, strict=True) if e.page == NOWHERE and load is None]
        targets, others = fresh[: len(to_load)].tolist(), fresh[len(to_load) :]
        prefix, unused = np.zeros(len(entries), np.int32), iter(targets)
        for i, (entry, load) in enumerate(zip(entries, loads, strict=True)):
            prefix[i] = entry.page if entry.page != NOWHERE else load.page if load is not None else next(unused)
        own, others = others[: self._own_pages], others[self._own_pages :]
        slot = self._slots.assign(request, prefix[:count], count * pool.page_size)
        self._slots.page_table[slot, count : count + len(others)] = others
        self._slots.num_pages[slot] += len(others)
        if self._slots.states is not None:
            self._slots.states.assign(slot, own, prefix[count:])
        if self._states is not None and self._enabled:
            self._states.plan(request, found.matched)
        pool.index.use(entries)
        request.last_entry = entries[count - 1] if count else None
        request.last_key = entries[count - 1].key if count else pool.index.root(request.salt)
        request.hits = Hits.of(found.entries, pool.page_size)
        request.stateless = (found.matched - count) * pool.page_size if self._states is not None else 0
        if any(e.page == NOWHERE for e in entries):
            assert self._tiers is not None
            waiting = Loading(slot, entries)
            for load in loads:
                if load is not None:
                    waiting.wait_for(load)
            self._tiers.load(to_load, targets, waiting)
            request.loading = waiting
            self._slots.phase[slot] = Phase.LOADING
        return slot

    def fetch(self, entries: list[PrefixEntry]) -> None:
        """Load a chain to the GPU before its request runs, with at most half of the available pages. No request waits
        for it. Once loaded, its pages are cached as the most recently used."""
        pool, tiers = self._pool, self._tiers
        if tiers is None:
            return
        found, state = self._worthwhile(entries)
        entries = found + state
        if all(e.page != NOWHERE for e in entries):
            return
        pool.index.use(entries)
        there = pool.pin([e for e in entries if e.page != NOWHERE])
        away = [e for e in entries if e.page == NOWHERE and tiers.coming(e) is None][: pool.num_available // 2]
        if away:
            pages = pool.allocate(len(away))
            tiers.fetched(away)
            tiers.load(away, pages.tolist(), Loading(-1, away))
            pool.release(pages)
        pool.release(there)

    def loaded(self, request: Request, waiting: Loading) -> None:
        """Start the prefill of a request whose loads have all succeeded."""
        s, pool, slot = self._slots, self._pool, waiting.slot
        count = int(s.published[slot])
        for i, entry in enumerate(waiting.entries):
            pages = s.page_table[slot] if s.states is None or i < count else s.states.attached[slot]
            at = i if i < count else i - count
            page = int(pages[at])
            if entry.page not in (NOWHERE, page):
                # Another request has computed the page meanwhile.
                pages[at] = pool.pin([entry])[0]
                pool.release(np.array([page], np.int32))
        request.loading = None
        s.phase[slot] = Phase.PREFILL

    def publish(self, slots: I32) -> None:
        """Add pages that became full and confirmed to the prefix index. Without the answers', if a prompt with the same
        tokens would have other bits there."""
        s, pool, page_size = self._slots, self._pool, self._pool.page_size
        computed = s.confirmed.take(slots)
        if s.replays:
            computed = np.minimum(computed, s.prompt_len.take(slots))
        full = computed // page_size
        due = full > s.published.take(slots)
        for slot, pages in zip(slots[due].tolist(), full[due].tolist(), strict=True):
            request = s.of(slot)
            for i in range(int(s.published[slot]), pages):
                s.published[slot] = i + 1
                if not request.publishable:
                    self._publish_state(request, i + 1, None)
                    continue
                tokens = s.token_ids[slot, i * page_size : (i + 1) * page_size].tobytes()
                tokens += request.image_parts.get(i, b"")
                parent, page = request.last_entry, int(s.page_table[slot, i])
                key = pool.index.chain(request.last_key, tokens)
                entry = None
                if parent is None or pool.index.contains(parent):
                    entry = pool.index.publish(parent, key, tokens, request.salt)
                if entry is None:
                    request.publishable = False
                    self._publish_state(request, i + 1, None)
                    continue
                if entry.page == NOWHERE:
                    pool.adopt(entry, page)
                elif entry.page != page:
                    # Another request computed the same page first: use that one, and free ours after the fence.
                    s.page_table[slot, i] = pool.pin([entry])[0]
                    self._fences.release_after(int(s.last_step[slot]), -1, np.array([page], np.int32))
                entry.used = pool.index.clock
                if self._tiers is not None:
                    self._tiers.published(entry)
                request.last_entry, request.last_key = entry, key
                self._publish_state(request, i + 1, entry)

    def _publish_state(self, request: Request, pages: int, entry: PrefixEntry | None) -> None:
        if self._states is not None:
            self._states.publish(request, pages * self._pool.page_size, entry)

    def retain(self, request: Request, now: float) -> None:
        """Retain the first pages of a computed prompt as requested. `now` is in monotonic seconds."""
        page_size, index = self._pool.page_size, self._pool.index
        chain = chain_of(request.last_entry)[: request.prompt_len // page_size]
        # If all layers have windows, the first pages may have been dropped.
        chain = chain[: next((i for i, entry in enumerate(chain) if not index.contains(entry)), len(chain))]
        until: list[float] = []
        parts = [part for part in request.retention if part.seconds]
        for part in sorted(parts, key=lambda part: part.tokens):
            seconds = max(p.seconds for p in parts if p.tokens >= part.tokens)
            until += [now + seconds] * (min(part.tokens // page_size, len(chain)) - len(until))
            if self._states is not None and (states := self._states.below(chain[: len(until)])):
                # A state is retained after its page, so that it is released before it.
                count, state = max(states.items())
                self._pool.retain(chain[:count] + state, until[:count] + [until[count - 1]] * len(state))
        request.retained_tokens = self._pool.retain(chain[: len(until)], until) * self._pool.page_size


def chain_of(entry: PrefixEntry | None) -> list[PrefixEntry]:
    """Return the entries of the pages up to this one, first page first."""
    chain: list[PrefixEntry] = []
    while entry is not None:
        chain.append(entry)
        entry = entry.parent
    return chain[::-1]
