"""`ModelDrafter`: asks the runner for drafts of its model, the same number for each request."""

from __future__ import annotations

import numpy as np

from weft.engine.config.speculation import MOST_DRAFTS, DraftOptions
from weft.engine.runner.iteration.batch import I32, UNDRAFTED, StepResult
from weft.engine.scheduling.drafter import Drafts
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import SpeculationStats


class ModelDrafter:
    """The `Drafter` of an engine whose runner has a model that drafts. Drafts are known once they are verified, so
    requests with grammars have none: their masks depend on the drafts."""

    def __init__(self, slots: SlotTable, options: DraftOptions) -> None:
        self._slots, self._options = slots, options
        self.predicted: dict[int, tuple[int, int]] = {}  # see `TextDrafter`
        self.drafts = self.draft_tokens = 0
        self._tried = np.zeros(MOST_DRAFTS, np.int64)  # drafts by their place, and those accepted
        self._right = np.zeros(MOST_DRAFTS, np.int64)
        self._foreseen = 0.0
        self._last = (0, 0)  # requests and draft tokens of the last iteration

    @property
    def active(self) -> bool:
        s = self._slots
        slots = s.decoding()
        return bool((s.max_drafts[slots] * ~s.masked[slots]).any())

    def propose(self, slots: I32, room: I32, budget: int) -> Drafts:
        s = self._slots
        length = np.minimum(np.minimum(room, s.max_drafts[slots]), self._options.depth_at(len(slots)))
        length[s.masked[slots]] = 0
        length = np.minimum(length, np.maximum(budget - (np.cumsum(length) - length), 0)).astype(np.int32)
        self._last = len(slots), int(length.sum())
        return Drafts(np.full((len(slots), int(length.max(initial=0))), UNDRAFTED, np.int32), length)

    def verified(self, slots: I32, drafted: I32, accepted: I32) -> None:
        self.drafts += len(slots)
        chances = np.cumprod((self._right + 1) / (self._tried + 2))
        for number, right in zip(drafted.tolist(), accepted.tolist(), strict=True):
            self._foreseen += float(chances[:number].sum())
            self._tried[: min(right + 1, number)] += 1
            self._right[:right] += 1
        self.draft_tokens += int(drafted.sum())

    def ended(self, result: StepResult, now: float) -> None:
        """Nothing is measured."""

    def committed(self, busy: bool) -> None:
        """Nothing is measured."""

    def stats(self) -> SpeculationStats:
        return SpeculationStats(
            drafts=self.drafts, draft_tokens={"model": self.draft_tokens},
            accepted_tokens={"model": int(self._right.sum())},
            accepted_by_position={str(i): n for i, n in enumerate(self._right.tolist()) if n},
            foreseen_tokens=self._foreseen, last_requests=self._last[0], last_draft_tokens=self._last[1],
        )  # fmt: skip
