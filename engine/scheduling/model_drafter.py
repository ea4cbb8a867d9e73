"""`ModelDrafter`: asks the runner for drafts of its model, as many as pay.

With measured depths a draft's chance is learned from those that were verified, by its place and by its request. The
time of an iteration is measured by its deepest draft and its rows, so it includes the drafter's own passes.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weft.engine.config.speculation import MOST_DRAFTS, DraftOptions
from weft.engine.runner.iteration.batch import I32, UNDRAFTED, StepResult
from weft.engine.scheduling.draft_chances import HIGHEST, OWN_MEMORY, OWN_WEIGHT, PRIOR_WEIGHT
from weft.engine.scheduling.draft_depth import Choice, RowTimes, best_depth
from weft.engine.scheduling.draft_switch import DraftSwitch
from weft.engine.scheduling.drafter import Drafts
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import SpeculationStats

FIRST_CHANCE = 0.6  # of a draft, given that those before it are right, before anything is learned
MEMORY = 0.999  # weight that earlier drafts keep with each verification: deeper places are tried again some time
DRIFT = 0.97  # weight that a request's own drafts keep with each token without drafts: it gets some again later
SLOW_DRIFT = 0.998  # likewise while drafts are off


class ModelDrafter:
    """The `Drafter` of an engine whose runner has a model that drafts. Drafts are known once they are verified, so
    requests with grammars have none: their masks depend on the drafts."""

    def __init__(self, slots: SlotTable, options: DraftOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self._slots, self._options = slots, options
        self._switch = DraftSwitch(options.measured, clock)
        self._times = [RowTimes() for _ in range(options.depth + 1)]  # by the deepest draft of the iteration
        self._deepest = 0  # of the iteration in flight
        self._accepted = 0  # draft tokens of the iteration that is committed now
        self._known = np.zeros((2, options.depth))
        """Drafts that were right and that were tried, given that those before them were right, by place."""
        self._own = np.zeros((2, slots.num_slots))
        """Drafts of the request in each slot that were right, and that were expected to be."""
        self._epochs = np.full(slots.num_slots, -1, np.int64)
        self.predicted: dict[int, tuple[int, int]] = {}  # see `TextDrafter`
        self.drafts = self.draft_tokens = 0
        self._right = np.zeros(MOST_DRAFTS, np.int64)  # accepted drafts by their place
        self._foreseen = 0.0
        self._last = (0, 0)  # requests and draft tokens of the last iteration

    @property
    def active(self) -> bool:
        s = self._slots
        slots = s.decoding()
        return self._switch.on and bool((s.max_drafts[slots] * ~s.masked[slots]).any())

    def propose(self, slots: I32, room: I32, budget: int) -> Drafts:
        room = self._room(slots, room)
        if self._options.measured:
            survival = self._survival(slots, room)
            choice, depth = self._best(survival, budget)
            length = _lengths(survival[:, :depth], choice)
            self._own[:, slots[(length == 0) & (room > 0)]] *= DRIFT
        else:
            length = np.minimum(room, np.maximum(budget - (np.cumsum(room) - room), 0)).astype(np.int32)
        self._deepest, self._last = int(length.max(initial=0)), (len(slots), int(length.sum()))
        self._switch.proposed(self._last[1])
        return Drafts(np.full((len(slots), self._deepest), UNDRAFTED, np.int32), length)

    def _room(self, slots: I32, room: I32) -> I32:
        s = self._slots
        room = np.minimum(np.minimum(room, s.max_drafts[slots]), self._options.depth_at(len(slots)))
        room[s.masked[slots]] = 0
        return np.asarray(room, np.int32)

    @property
    def _chances(self) -> npt.NDArray[np.float64]:
        """The chance of a draft that those before it are right, by place."""
        right, tried = self._known
        return np.asarray((right + PRIOR_WEIGHT * FIRST_CHANCE) / (tried + PRIOR_WEIGHT))

    def _survival(self, slots: I32, room: I32) -> npt.NDArray[np.float64]:
        """Return `[n, depth]` the chance that a draft and all before it are right; 0 where there is no room."""
        new = self._epochs[slots] != self._slots.epoch[slots]
        self._epochs[slots] = self._slots.epoch[slots]
        self._own[:, slots[new]] = 0.0
        right, expected = self._own[:, slots]
        factor = (right + OWN_WEIGHT) / (expected + OWN_WEIGHT)
        survival = np.minimum(self._chances * factor[:, None], HIGHEST).cumprod(1)
        survival[np.arange(self._options.depth) >= room[:, None]] = 0.0
        return survival

    def _best(self, survival: npt.NDArray[np.float64], budget: int) -> tuple[Choice, int]:
        """Return the number of drafts with the most tokens a second, and the depth up to which they are chosen."""
        rows, best, found = len(survival), Choice(0, 0.0, 0.0, 1.0), 0
        slower = [self._switch.plain]
        limit = min(budget, 2 * max(rows, *(times.largest for times in self._times)) - rows)
        for depth, times in enumerate(self._times):
            # A depth that was not tried counts as fast as the one before it, so it is tried once.
            own = [one[one > 0] for one in survival[:, :depth]]
            most = min(limit, sum(map(len, own)))
            seconds = times.at(np.arange(rows, rows + most + 1), *slower)
            if np.isnan(seconds).any():
                return Choice(0, 0.0, 0.0, 1.0), 0
            choice = best_depth(rows, [one.tolist() for one in own], most, seconds)
            if choice.rate > best.rate:
                best, found = choice, depth
            slower.insert(0, times)
        return best, found

    def verified(self, slots: I32, drafted: I32, accepted: I32) -> None:
        self.drafts += len(slots)
        chances = self._chances
        survival = chances.cumprod()
        self._known *= MEMORY ** len(slots)
        for slot, number, right in zip(slots.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            tried = min(right + 1, number)
            self._foreseen += float(survival[:number].sum())
            self._known[1, :tried] += 1
            self._known[0, :right] += 1
            self._own[:, slot] = self._own[:, slot] * OWN_MEMORY + (right, chances[:tried].sum())
            self._right[:right] += 1
        self.draft_tokens += int(drafted.sum())
        self._accepted += int(accepted.sum())

    def ended(self, result: StepResult, now: float) -> None:
        """Take in an iteration that ended at `now` and is not committed yet."""
        self._accepted = 0
        if (seconds := self._switch.ended(result, now)) is not None:
            self._times[self._deepest].add(result.batch.num_tokens, seconds, now)

    def committed(self, busy: bool) -> None:
        """Decide how to go on, after a commit."""
        period = self._switch.committed(busy, self._accepted)
        if not self._switch.on:
            self._last = (0, 0)
            self._own *= SLOW_DRIFT
        if period is not None and len(slots := self._slots.decoding().astype(np.int32)):
            room = self._room(slots, np.full(len(slots), self._options.depth, np.int32))
            choice, _ = self._best(self._survival(slots, room), self._options.depth * len(slots))
            self._switch.consider(choice, len(slots))

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            drafts=self.drafts, draft_tokens={"model": self.draft_tokens},
            accepted_tokens={"model": int(self._right.sum())},
            accepted_by_position={str(i): n for i, n in enumerate(self._right.tolist()) if n},
            foreseen_tokens=self._foreseen, last_requests=self._last[0], last_draft_tokens=self._last[1],
            pauses=self._switch.guard.pauses,
        )  # fmt: skip


def _lengths(survival: npt.NDArray[np.float64], choice: Choice) -> I32:
    """Return `[n]` drafts of each request: `choice.extra` in all, the likeliest ones."""
    length = (survival >= choice.least).sum(1) if choice.extra else np.zeros(len(survival))
    over = int(length.sum()) - choice.extra
    # Equal chances may exceed the number: those of the last rows go.
    for row in np.flatnonzero((survival == choice.least).any(1))[::-1].tolist() if over > 0 else ():
        cut = min(over, int((survival[row] == choice.least).sum()))
        length[row] -= cut
        over -= cut
    return length.astype(np.int32)
