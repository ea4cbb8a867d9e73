"""`States`: where iterations read and write recurrent states, and which states the prefix index gets.

An iteration that reads a state at the end of a page writes the request's other state, else the same one. So the newest
state at a page's end stays until the next page ends, and the index gets it when the request loses its slot. A
checkpoint is a further state, which a chunk of a prompt writes on its way. The index gets it with the page that it
stands after. Nothing is copied. Positions are numbers of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from weft.engine.memory.pages import PagePool, Pages
from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry
from weft.engine.memory.tiers import Tiers
from weft.engine.runner.iteration.batch import Batch, StateRows
from weft.engine.scheduling.fences import Fences
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.page_keys import state_tokens

PLACES = {"gpu": "page", "host": "host", "ssd": "extent"}
"""The attribute of an entry with its copy's location, by tier."""


class StatePolicy(NamedTuple):
    """Which states are kept for later requests."""

    interval: int = 0
    """Tokens between checkpoints inside a prompt; 0: only at its end, marks and junctions with other prompts."""
    exact: bool = False
    """Keep only states whose bits do not depend on how tokens were divided into iterations: those of chunks, not those
    of decodes, at multiples of the chunk step."""
    page_bytes: int = 0
    """Bytes of a page, for statistics."""


class States:
    """The recurrent states of one scheduler's requests. Only for models that have any."""

    def __init__(
        self, slots: SlotTable, pool: PagePool, fences: Fences, tiers: Tiers | None, policy: StatePolicy,
        chunk_step: int,
    ) -> None:  # fmt: skip
        assert slots.states is not None
        self._slots, self._pool, self._fences, self._tiers = slots, pool, fences, tiers
        self._table, self.policy = slots.states, policy
        self._step = math.lcm(pool.page_size, chunk_step if policy.exact else 1)
        self._tokens = state_tokens(self._table.pages, pool.page_size)

    @property
    def pages(self) -> int:
        """Pages of one state."""
        return self._table.pages

    def below(self, entries: Sequence[PrefixEntry]) -> dict[int, list[PrefixEntry]]:
        """Return the entries of each complete state of a chain, by the number of pages that it stands after."""
        found = {i: entry.state_pages(self.pages) for i, entry in enumerate(entries, 1) if entry.state is not None}
        return {i: state for i, state in found.items() if state}

    # -- forming an iteration

    def plan(self, request: Request, matched: int) -> None:
        """Choose the positions of checkpoints in the prompt of a request that got a slot. `matched` is the number of
        pages whose K and V were found: others share the prompt up to there, and there may be no state."""
        step, slot = self._step, request.slot
        first, last = int(self._slots.scheduled[slot]), (int(self._slots.target[slot]) - 1) // step * step
        wanted = {last, matched * self._pool.page_size, *(part.tokens for part in request.retention)}
        if self.policy.interval:
            wanted.update(range(0, last, max(self.policy.interval, step)))
        request.checkpoints_wanted = sorted({at for at in (at // step * step for at in wanted) if first < at <= last})

    def rows(self, batch: Batch) -> StateRows:
        """Return where the requests of a batch find and leave their states. Advances the table."""
        table, slots, end = self._table, batch.slots, batch.kv_len
        start = end - batch.query_len
        current = table.current[slots]
        owned = current >= 0
        read = np.where(owned[:, None], table.own[slots, np.maximum(current, 0)], table.attached[slots])
        for slot in slots[~owned & (start > 0)].tolist():
            self._fences.release_after(batch.step, -1, table.detach(slot))
        turns = owned & (start % self._pool.page_size == 0)
        target = np.where(owned, current ^ turns, 0)
        table.at[slots, target] = end
        table.current[slots] = target
        return StateRows(read, start == 0, table.own[slots, target], *self._checkpoints(batch, start, end))

    def _checkpoints(self, batch: Batch, start: Pages, end: Pages) -> tuple[Pages, Pages, Pages]:
        """Return the rows, tokens and pages of the checkpoints of an iteration. One that finds no pages is left out."""
        pool, rows, tokens, pages = self._pool, list[int](), list[int](), list[Pages]()
        # One page stays for each running request, so that none is preempted for checkpoints.
        keep = len(self._slots.running())
        for row in range(batch.num_decodes, batch.num_requests):
            request = self._slots.of(int(batch.slots[row]))
            while request.checkpoints_wanted and request.checkpoints_wanted[0] <= end[row]:
                at = request.checkpoints_wanted.pop(0)
                if not request.publishable or pool.num_available < keep + self.pages:
                    continue
                request.checkpoints.append((at, pool.allocate(self.pages)))
                rows.append(row)
                tokens.append(at - int(start[row]))
                pages.append(request.checkpoints[-1][1])
        taken = np.concatenate(pages) if pages else np.zeros(0, np.int32)
        return np.array(rows, np.int32), np.array(tokens, np.int32), taken.reshape(-1, self.pages)

    # -- saving states

    def publish(self, request: Request, position: int, entry: PrefixEntry | None) -> None:
        """Save the request's checkpoint at a confirmed position, if it has one, below the page's `entry`. If that is
        None, the page could not be published, and its state is dropped."""
        if not request.checkpoints or request.checkpoints[0][0] > position:
            return
        at, pages = request.checkpoints.pop(0)
        assert at == position, "a checkpoint was passed over"
        if entry is not None:
            self._save(entry, pages)
        self._pool.release(pages)

    def save_newest(self, slot: int) -> None:
        """Save the newest state at the end of a published page, before the request loses its slot. States of steps in
        flight are not confirmed: the request may have ended before their tokens."""
        s, table, request = self._slots, self._table, self._slots.of(slot)
        entry, published = request.last_entry, int(s.published[slot])
        if entry is None or not request.publishable:
            return
        last = min(int(s.confirmed[slot]), published * self._pool.page_size)
        if self.policy.exact:
            last = min(last, int(s.target[slot]))
        at = max((at for at in table.at[slot].tolist() if at <= last and at % self._step == 0), default=-1)
        if at <= 0:
            return
        for _ in range(published - at // self._pool.page_size):
            entry = entry.parent if entry is not None else None
        if entry is not None and self._pool.index.contains(entry) and not entry.state_pages(self.pages):
            self._save(entry, table.own[slot, int(table.at[slot, 1] == at)])

    def _save(self, parent: PrefixEntry, pages: Pages) -> None:
        index, key = self._pool.index, parent.key
        for tokens, page in zip(self._tokens, pages.tolist(), strict=True):
            key = index.chain(key, tokens)
            entry = index.publish(parent, key, tokens, parent.salt)
            if entry is None:
                return
            if entry.page == NOWHERE:
                self._pool.adopt(entry, page)
            entry.used = index.clock
            if self._tiers is not None:
                self._tiers.published(entry)
            parent = entry

    def stats(self) -> tuple[dict[str, int], int]:
        """Return the number of saved states by tier, and the bytes of all states on the device."""
        index, pages = self._pool.index, self.pages
        saved = {tier: index.states[place] // pages for tier, place in PLACES.items()}
        held = 2 * pages * len(self._slots.running()) + index.states["page"]
        return saved, held * self.policy.page_bytes

    def check(self, slot: int) -> None:
        """Raise `AssertionError` unless the state that a row reads next stands at its next token."""
        s, table = self._slots, self._table
        current, attached = int(table.current[slot]), bool((table.attached[slot] > 0).all())
        if current >= 0:
            assert table.at[slot, current] == s.scheduled[slot], "a state is not at the next token"
            assert not table.attached[slot].any(), "a state that was read is still held"
        else:
            assert attached == (s.scheduled[slot] > 0), "a request starts without the state of its prefix"
            assert (table.at[slot] < 0).all(), "a request that has not run has a state"
