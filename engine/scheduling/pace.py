"""`Pace`: the time between a request's tokens, as the engine commits them, window by window."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from weft.engine.config import Objective
from weft.engine.runner.batch import Batch
from weft.engine.scheduling.seats import Window
from weft.engine.scheduling.slots import SlotTable

WINDOW_SECONDS = 1.0
LONGEST_SECONDS = 5.0
"""a window ends by then, with however few tokens"""
FEWEST = 20
"""gaps that a mean is made of; a percentile takes as many as it needs to have one beyond it"""


class Pace:
    """One engine's. Times are `time.monotonic()`."""

    def __init__(self, objectives: Sequence[Objective], slots: SlotTable, now: float) -> None:
        """`objectives`: on the time between tokens (itl); none: gaps are kept, and no window ends."""
        self._objectives = objectives
        self._slots = slots
        self._last = np.zeros(slots.num_slots)
        """when a row had its last token"""
        self._epoch = np.full(slots.num_slots, -1, np.int64)
        """whose that was"""
        needed = [o.statistic for o in objectives if o.statistic is not None]
        self._enough = max([FEWEST, *(round(1 / (1 - q / 100)) if q < 100 else FEWEST for q in needed)])
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._begun = now
        self._gaps: list[np.ndarray] = []
        self._count = 0
        self._seats: list[tuple[int, bool]] = []

    def committed(self, batch: Batch, now: float) -> np.ndarray:
        """An iteration is done, and not committed yet. Returns its gaps, in seconds.

        A request's first token has none, nor has the first one after a preemption.
        """
        s, rows = self._slots, batch.sampled_rows
        slots, epochs = batch.slots.take(rows), batch.epochs.take(rows)
        live = s.epoch.take(slots) == epochs
        slots, epochs = slots[live], epochs[live]
        known = self._epoch.take(slots) == epochs
        gaps = now - self._last.take(slots)[known]
        self._last[slots], self._epoch[slots] = now, epochs
        return gaps

    def window(self, gaps: np.ndarray, running: int, short: bool, now: float) -> Window | None:
        """Once a second, or when there are enough gaps: what it was like. `running`, `short`: as the iteration was."""
        self._gaps.append(gaps)
        self._count += len(gaps)
        self._seats.append((running, short))
        seconds = now - self._begun
        if seconds < WINDOW_SECONDS or (self._count < self._enough and seconds < LONGEST_SECONDS):
            return None
        values = np.concatenate(self._gaps)
        strain = max((o.of(values) / o.limit for o in self._objectives), default=float("nan"))
        seats = np.array(self._seats, np.float64)
        window = Window(
            strain if len(values) >= FEWEST else float("nan"),
            float(seats[:, 0].mean()),
            len(values) / seconds,
            bool(seats[:, 1].mean() > 0.5),
        )
        self._begin(now)
        return window

    def rest(self, now: float) -> None:
        """Nothing was open meanwhile: the time is nobody's."""
        self._begin(now)
