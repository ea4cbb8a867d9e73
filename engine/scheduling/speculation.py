"""`TextDrafter`: drafts of text for running requests, as many as pay.

With measured depths, while drafts are off (`DraftSwitch`), the drafter only compares what it would have drafted with
the tokens that come: that costs no device time. While they are on, each iteration has the number of draft tokens that
the measured times make best.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from weft.engine.config.speculation import MOST_DRAFTS, DraftOptions
from weft.engine.progress import notice
from weft.engine.runner.iteration.batch import I32, StepResult
from weft.engine.scheduling.draft_chances import Chances, Own
from weft.engine.scheduling.draft_depth import Choice, RowTimes, best_depth
from weft.engine.scheduling.draft_switch import DraftSwitch
from weft.engine.scheduling.drafter import Drafts
from weft.engine.scheduling.events import Outbox
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.model_drafter import ModelDrafter
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.text_draft import NO_DRAFT, TextDraft, ngram_draft, suffix_draft
from weft.engine.scheduling.verification import Verification
from weft.engine.wire.messages import SpeculationStats

SHADOW_SHARE = 0.01  # share of the time that drafts may take while none are verified
LINE_SECONDS = 30.0  # seconds between log lines


class _Pending(NamedTuple):
    """A draft to compare with the tokens that come."""

    at: int  # tokens known when it was made
    draft: TextDraft


class _Slot:
    """What the drafter keeps of the request in a slot."""

    def __init__(self, epoch: int, prediction: I32 | None) -> None:
        self.epoch, self.prediction = epoch, prediction
        self.own = Own()
        self.pending: _Pending | None = None
        self.survival: list[float] = []  # of the proposed draft
        self.predicted = False  # the proposed draft comes from the client's prediction


class TextDrafter:
    """The `Drafter` of one engine. `SpeculationKeeper` passes it what the loop sees."""

    def __init__(self, slots: SlotTable, options: DraftOptions, clock: Callable[[], float] = time.monotonic) -> None:
        self.options = options
        self._slots, self._clock = slots, clock
        self._of_slot: dict[int, _Slot] = {}
        self._chances = Chances()
        self._switch = DraftSwitch(options.measured, clock)
        self._verifying = RowTimes()
        self._accepted = 0  # in the iteration that is committed now
        self._turn = 0
        self._allowance = 0.0  # seconds that unverified drafts may still take
        self._shadows: dict[int, list[float]] = {}
        self.predicted: dict[int, tuple[int, int]] = {}
        """By handle: accepted and rejected tokens of a prediction, for `Outbox.predicted`."""
        self.drafts = 0
        self.draft_tokens = {"text": 0, "prediction": 0}
        self.accepted_tokens = {"text": 0, "prediction": 0}
        self.by_position = np.zeros(MOST_DRAFTS, np.int64)
        self.foreseen = 0.0
        self.last = (0, 0)  # requests and draft tokens of the last iteration

    # -- the `Drafter` interface

    @property
    def active(self) -> bool:
        return self._switch.on and bool(self._slots.max_drafts[self._slots.decoding()].any())

    def propose(self, slots: I32, room: I32, budget: int) -> Drafts:
        room = np.minimum(room, np.minimum(self._slots.max_drafts[slots], self.options.depth_at(len(slots))))
        made = [self._draft(int(slot)) if most > 0 else NO_DRAFT for slot, most in zip(slots, room, strict=True)]
        length = np.minimum(np.array([len(draft.tokens) for draft in made], np.int32), room).astype(np.int32)
        survivals = [self._survival(int(slot), draft) for slot, draft in zip(slots, made, strict=True)]
        if self.options.measured:
            length = self._chosen(len(slots), survivals, length, budget)
        elif int(length.sum()) > budget:
            length = np.minimum(length, np.maximum(0, budget - (np.cumsum(length) - length))).astype(np.int32)
        tokens = np.zeros((len(slots), int(length.max(initial=0))), np.int32)
        for row, (slot, draft, number) in enumerate(zip(slots.tolist(), made, length.tolist(), strict=True)):
            tokens[row, :number] = draft.tokens[:number]
            if number:
                state = self._of_slot[slot]
                state.survival = survivals[row]
                state.predicted = state.prediction is not None and draft.source < len(state.prediction)
        self.last = len(slots), int(length.sum())
        self._switch.proposed(self.last[1])
        return Drafts(tokens, length)

    def verified(self, slots: I32, drafted: I32, accepted: I32) -> None:
        for slot, number, right in zip(slots.tolist(), drafted.tolist(), accepted.tolist(), strict=True):
            if not number or (state := self._of_slot.get(slot)) is None:
                continue
            source = "prediction" if state.predicted else "text"
            self.drafts += 1
            self.draft_tokens[source] += number
            self.accepted_tokens[source] += right
            self.by_position[:right] += 1
            self.foreseen += sum(state.survival[:number])
            self._accepted += right
            if state.predicted:
                request = self._slots.of(slot)
                before = request.predicted
                request.predicted = before[0] + right, before[1] + number - right
                self.predicted[request.handle] = request.predicted

    # -- drafts

    def _state(self, slot: int) -> _Slot:
        state, epoch = self._of_slot.get(slot), int(self._slots.epoch[slot])
        if state is None or state.epoch != epoch:
            state = self._of_slot[slot] = _Slot(epoch, self._slots.of(slot).prediction)
        return state

    def _draft(self, slot: int) -> TextDraft:
        """Draft as far as the options allow, and keep the draft to learn from it."""
        s, options, state = self._slots, self.options, self._state(slot)
        known = int(s.known[slot])
        text = s.token_ids[slot, :known]
        if state.prediction is not None:
            # -1 is no token: no match runs from the prediction into the prompt.
            text = np.concatenate((state.prediction, np.array([-1], np.int32), text))
        if options.method == "ngram":
            draft = ngram_draft(text, options.depth, shortest=options.shortest, longest=options.longest)
        else:
            draft = suffix_draft(text, options.depth, least=options.least, factor=options.factor, reach=options.reach)
        self._compare(slot, state, known)
        if state.pending is None and draft.tokens:
            state.pending = _Pending(known, draft)
        return draft

    def _compare(self, slot: int, state: _Slot, known: int) -> None:
        """Learn from the kept draft, once the text has contradicted it or reached its end."""
        if (pending := state.pending) is None:
            return
        draft = pending.draft
        came = self._slots.token_ids[slot, pending.at : min(known, pending.at + len(draft.tokens))].tolist()
        right = next((i for i, token in enumerate(came) if token != draft.tokens[i]), len(came))
        if right == len(came) < len(draft.tokens):
            return
        self._chances.learn(draft.match, draft.agreement, right, min(right + 1, len(draft.tokens)), state.own)
        state.pending = None

    def _survival(self, slot: int, draft: TextDraft) -> list[float]:
        if not draft.tokens:
            return []
        return self._chances.survival(draft.match, draft.agreement, self._of_slot[slot].own)

    def _chosen(self, rows: int, survivals: list[list[float]], length: I32, budget: int) -> I32:
        """Return the lengths that are expected to give the most tokens a second."""
        kept = [survival[:number] for survival, number in zip(survivals, length.tolist(), strict=True)]
        choice = self._best(rows, kept, budget)
        chosen = [sum(chance >= choice.least for chance in one) if choice.extra else 0 for one in kept]
        # Equal chances may exceed the number: those of the last rows go.
        over = sum(chosen) - choice.extra
        for row in range(len(chosen) - 1, -1, -1):
            cut = min(over, sum(chance == choice.least for chance in kept[row][: chosen[row]])) if over > 0 else 0
            chosen[row], over = chosen[row] - cut, over - cut
        return np.array(chosen, np.int32)

    def _best(self, rows: int, survivals: list[list[float]], budget: int) -> Choice:
        most = min(budget, sum(map(len, survivals)), 2 * max(rows, self._verifying.largest) - rows)
        seconds = self._verifying.at(np.arange(rows, rows + most + 1), self._switch.plain)
        if np.isnan(seconds).any():
            return Choice(0, 0.0, 0.0, 1.0)
        return best_depth(rows, survivals, most, seconds)

    # -- what the loop sees

    def ended(self, result: StepResult, now: float) -> None:
        """Take in an iteration that ended at `now` and is not committed yet."""
        self._accepted = 0
        if (seconds := self._switch.ended(result, now)) is not None:
            self._verifying.add(result.batch.num_tokens, seconds, now)

    def committed(self, busy: bool) -> None:
        """Decide how to go on, after a commit."""
        was_on = self._switch.on
        period = self._switch.committed(busy, self._accepted)
        if was_on and not self._switch.on:
            self._shadows.clear()
            self.last = (0, 0)
        if period is not None:
            seconds, requests = period
            self._allowance = min(self._allowance + SHADOW_SHARE * seconds, 0.01)
            self._consider(requests)

    def _consider(self, requests: int) -> None:
        """Draft for some requests in turn, without verifying, and begin to verify if that promises more tokens."""
        if self._allowance <= 0:
            return
        begin, s = self._clock(), self._slots
        slots = s.decoding()
        slots = slots[s.max_drafts[slots] > 0]
        if not len(slots):
            return
        for _ in range(min(len(slots), 8)):
            slot = int(slots[self._turn % len(slots)])
            self._turn += 1
            draft = self._draft(slot)
            most = min(int(s.max_drafts[slot]), self.options.depth_at(requests))
            self._shadows[slot] = self._survival(slot, draft)[:most]
            if (spent := self._clock() - begin) > self._allowance:
                break
        self._allowance -= spent
        seen = [self._shadows[slot] for slot in slots.tolist() if slot in self._shadows]
        # A sample stands for all.
        survivals = [seen[i % len(seen)] for i in range(len(slots))]
        choice = self._best(requests, survivals, MOST_DRAFTS * requests)
        self._switch.consider(choice, requests)
        if self._switch.on:
            self._shadows.clear()

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            drafts=self.drafts, draft_tokens=dict(self.draft_tokens), accepted_tokens=dict(self.accepted_tokens),
            accepted_by_position={str(i): n for i, n in enumerate(self.by_position.tolist()) if n},
            foreseen_tokens=self.foreseen,
            last_requests=self.last[0], last_draft_tokens=self.last[1], pauses=self._switch.guard.pauses,
        )  # fmt: skip


class SpeculationKeeper(Listener):
    """Passes the loop's events to the drafter, and its figures to clients and the log."""

    def __init__(self, drafter: TextDrafter | ModelDrafter, verification: Verification, outbox: Outbox) -> None:
        self._drafter, self._verification, self._outbox = drafter, verification, outbox
        self._logged = SpeculationStats()
        self._logged_at = time.monotonic()

    def on_result(self, result: StepResult, now: float) -> None:
        self._drafter.ended(result, now)

    def on_commit(self, busy: bool) -> None:
        self._drafter.committed(busy)
        if self._drafter.predicted:
            self._outbox.predicted, self._drafter.predicted = self._drafter.predicted, {}
        if (now := time.monotonic()) - self._logged_at >= LINE_SECONDS:
            self._log(now)

    def _log(self, now: float) -> None:
        stats, before, seconds = self._stats(), self._logged, now - self._logged_at
        self._logged, self._logged_at = stats, now
        if drafts := stats.drafts - before.drafts:
            drafted = sum(stats.draft_tokens.values()) - sum(before.draft_tokens.values())
            accepted = sum(stats.accepted_tokens.values()) - sum(before.accepted_tokens.values())
            notice(
                f"speculation: mean acceptance length {1 + accepted / drafts:.2f}, "
                f"{accepted / seconds:.1f} accepted and {drafted / seconds:.1f} drafted tokens/s, "
                f"{100 * accepted / drafted:.0f} % of drafted tokens accepted, {stats.pauses} pauses so far"
            )

    def stats(self) -> dict[str, Any]:
        return {"speculation": self._stats()}

    def _stats(self) -> SpeculationStats:
        stats, of = self._drafter.stats(), self._verification
        return replace(
            stats,
            draft_tokens={**stats.draft_tokens, "grammar": of.forced_drafted},
            accepted_tokens={**stats.accepted_tokens, "grammar": of.forced_accepted},
        )
