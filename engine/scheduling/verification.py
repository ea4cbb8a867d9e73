"""`Verification`: checks several drafts of a request in one iteration, without changing any token.

A decode may carry drafts after its newest token. After each of these tokens it samples one with the draw of that index,
so its tokens are those of decodes one at a time. A draft is accepted if it equals the token that was sampled before it;
the sample after the last accepted draft is a new token too. K and V of rejected drafts are overwritten before they are
read. Drafts come last: they get the tokens that prompts leave, and no request loses pages to them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from weft.engine.memory.pages import PagePool
from weft.engine.runner.iteration.batch import I32, Batch
from weft.engine.scheduling import constraints
from weft.engine.scheduling.build import ChosenDrafts
from weft.engine.scheduling.drafter import Drafter, Drafts
from weft.engine.scheduling.grammar import Mask
from weft.engine.scheduling.slots import SlotTable


class Verification:
    """The drafts of one scheduler's requests. Without a drafter, only tokens that a grammar forces are drafts."""

    def __init__(
        self, slots: SlotTable, pool: PagePool, drafter: Drafter | None, max_sampled: int | None = None
    ) -> None:  # fmt: skip
        """max_sampled: the maximum of tokens that an iteration samples; None for any number."""
        if slots.states is not None:
            raise ValueError("recurrent states cannot be rolled back, so drafts cannot be verified")
        self._slots, self._pool, self._drafter, self._max_sampled = slots, pool, drafter, max_sampled
        self._forced = np.zeros(slots.num_slots, np.bool_)  # slots whose drafts in flight are from their grammar
        self.forced_drafted = self.forced_accepted = 0

    @property
    def waits(self) -> bool:
        """Whether the next iteration is launched only once those before it are committed."""
        return self._drafter is not None and self._drafter.active

    # -- forming an iteration

    def choose(self, decodes: I32, chunks: int, budget: int) -> ChosenDrafts | None:
        """Return the drafts, at most `budget`, of an iteration with these decodes and `chunks` chunks, and give them
        pages. Returns None if there are none."""
        s = self._slots
        if self._max_sampled is not None:
            budget = min(budget, self._max_sampled - len(decodes) - chunks)
        if s.replays and (s.scheduled.take(decodes) + 1 < s.known.take(decodes)).any():
            return None  # every decode of a batch with drafts samples
        room = self._room(decodes, budget)
        if not room.any():
            return None
        tokens, length = self._propose(decodes, room, budget)
        length = np.minimum(length, room)
        length = np.minimum(length, np.maximum(budget - (np.cumsum(length) - length), 0))
        length = self._within_pages(decodes, length)
        masks = self._restrict(decodes, tokens, length)
        if not length.any():
            return None
        self._grow(decodes, length)
        s.drafts[decodes] = length
        kept = np.arange(tokens.shape[1]) < length[:, None]
        return ChosenDrafts(tokens[kept], length, masks)

    def _room(self, decodes: I32, budget: int) -> I32:
        """Return the maximum of drafts of each decode. The sample after the last draft must be within the limit."""
        s = self._slots
        room = s.max_total_tokens.take(decodes) - 2 - s.scheduled.take(decodes)
        room[s.in_flight.take(decodes) > 0] = 0
        room = np.clip(room, 0, max(budget, 0))
        for i in np.flatnonzero(s.constrained.take(decodes) & (room > 0)).tolist():
            room[i] = constraints.room(s.of(decodes[i]), int(room[i]))
        return room

    def _propose(self, decodes: I32, room: I32, budget: int) -> tuple[I32, I32]:
        """Return drafts `[n, k]` and their number `[n]`: those that a grammar forces, or else the drafter's."""
        s, forced = self._slots, dict[int, list[int]]()
        for i in np.flatnonzero(s.constrained.take(decodes) & (room > 0)).tolist():
            if tokens := constraints.forced(s.of(decodes[i]), int(room[i])):
                forced[i] = tokens
        drafted = Drafts(np.zeros((len(decodes), 0), np.int32), np.zeros(len(decodes), np.int32))
        if self._drafter is not None and self._drafter.active:
            room = room.copy()
            room[list(forced)] = 0
            left = max(0, budget - sum(map(len, forced.values())))
            drafted = self._drafter.propose(decodes, room, left)
        width = max([drafted.tokens.shape[1], *map(len, forced.values())])
        merged = np.zeros((len(decodes), width), np.int32)
        merged[:, : drafted.tokens.shape[1]] = drafted.tokens
        length = drafted.length.astype(np.int32)
        for i, tokens in forced.items():
            merged[i, : len(tokens)], length[i] = tokens, len(tokens)
        self._forced[decodes] = False
        self._forced[decodes[list(forced)]] = True
        return merged, length

    def _within_pages(self, decodes: I32, length: I32) -> I32:
        """Shorten drafts to the pages that their requests hold and those that are available now. One page stays for
        each running request, so that none is preempted for drafts."""
        s, size = self._slots, self._pool.page_size
        spare = self._pool.num_available - len(s.running())
        fresh = self._fresh_pages(decodes, length)
        held = s.num_pages.take(decodes) * size - s.scheduled.take(decodes) - 1
        return np.where(np.cumsum(fresh) <= spare, length, np.minimum(length, held))

    def _fresh_pages(self, decodes: I32, length: I32) -> I32:
        """Return the pages that each decode lacks for this many drafts."""
        s, size = self._slots, self._pool.page_size
        needed = -(-(s.scheduled.take(decodes) + 1 + length) // size)
        return np.maximum(needed - s.num_pages.take(decodes), 0)

    def _restrict(self, decodes: I32, tokens: I32, length: I32) -> dict[int, list[Mask]]:
        """Shorten drafts, in place, to those that constraints allow. Returns the masks of all positions by slot."""
        s = self._slots
        rows = np.flatnonzero(s.masked.take(decodes) & (length > 0)).tolist()
        drafted = [(s.of(decodes[i]), tokens[i, : length[i]].tolist()) for i in rows]
        masks: dict[int, list[Mask]] = {}
        for i, of_row in zip(rows, constraints.with_drafts(drafted), strict=True):
            length[i] = len(of_row) - 1
            masks[int(decodes[i])] = of_row
        return masks

    def _grow(self, decodes: I32, length: I32) -> None:
        s = self._slots
        fresh = self._fresh_pages(decodes, length)
        if total := int(fresh.sum()):
            slots = np.repeat(decodes, fresh)
            place = np.arange(total) - np.repeat(np.cumsum(fresh) - fresh, fresh)
            s.page_table[slots, s.num_pages.take(slots) + place] = self._pool.allocate(total)
            s.num_pages[decodes] += fresh

    # -- committing an iteration

    def committed(self, batch: Batch, rows: I32, accepted: npt.NDArray[np.bool_]) -> I32:
        """Take in the new tokens of a batch with drafts: the row of each, and whether it was a draft. Rows of requests
        that had ended before have none. Returns `[R]` the positions that each row has computed for good."""
        s, d = self._slots, batch.num_decodes
        counts = np.bincount(rows, minlength=d)[:d]
        matches = np.bincount(rows[accepted], minlength=d)[:d]
        computed = batch.query_len.copy()
        live = np.flatnonzero((counts > 0) & (computed[:d] > 1))
        slots, drafted, right = batch.slots[live], computed[live] - 1, matches[live].astype(np.int32)
        computed[live] = counts[live]
        s.scheduled[slots] -= drafted + 1 - computed[live]
        s.drafts[slots] = 0
        forced = self._forced[slots]
        self.forced_drafted += int(drafted[forced].sum())
        self.forced_accepted += int(right[forced].sum())
        if self._drafter is not None and not forced.all():
            self._drafter.verified(slots[~forced], drafted[~forced], right[~forced])
        return computed
