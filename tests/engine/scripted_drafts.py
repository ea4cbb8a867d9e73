"""`ScriptedDrafter`: drafts that are right or wrong as a test requires."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from weft.engine.runner.iteration.batch import I32
from weft.engine.scheduling.drafter import Drafts
from weft.engine.scheduling.slots import SlotTable


class ScriptedDrafter:
    """`truth` returns the token that follows a request's tokens; `wrong` returns another one. Each request gets `most`
    drafts: those beyond its room are cut. The first `right` of them are right, then comes a wrong one."""

    def __init__(
        self, slots: SlotTable, truth: Callable[[int, list[int]], int], wrong: Callable[[int], int], most: int = 3,
        right: Callable[[], int] = lambda: 99,
    ) -> None:  # fmt: skip
        self._slots, self._truth, self._wrong = slots, truth, wrong
        self.active, self.most, self.right = True, most, right
        self.drafted = self.accepted = self.rounds = 0

    def propose(self, slots: I32, room: I32, budget: int) -> Drafts:
        s = self._slots
        assert (s.in_flight[slots] == 0).all(), "drafts without the newest token"
        assert (room >= 0).all()
        assert budget >= 0
        tokens = np.full((len(slots), self.most), -5, np.int32)
        for row, slot in enumerate(slots.tolist()):
            text, right = s.token_ids[slot, : s.known[slot]].tolist(), self.right()
            for i in range(self.most):
                token = self._truth(int(s.handle[slot]), text)
                tokens[row, i] = token if i < right else self._wrong(token)
                text.append(int(tokens[row, i]))
        return Drafts(tokens, np.full(len(slots), self.most, np.int32))

    def verified(self, slots: I32, drafted: I32, accepted: I32) -> None:
        assert len(np.unique(slots)) == len(slots)
        assert (drafted > 0).all()
        assert (accepted <= drafted).all()
        assert (accepted >= 0).all()
        self.drafted += int(drafted.sum())
        self.accepted += int(accepted.sum())
        self.rounds += 1
