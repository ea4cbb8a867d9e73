"""`SlotLimitKeeper`: adapts the slot limit to the objective on the time between tokens, which `Pace` measures."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from weft.engine.config import EngineConfig, Objective
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slot_limit import SlotLimitControl, Window
from weft.engine.scheduling.slots import SlotTable

WINDOW_SECONDS = 1.0
LONGEST_SECONDS = 5.0  # maximum length of a window, however few tokens it has
FEWEST = 20  # Minimum gaps for a mean. A percentile needs enough gaps to have one beyond it.


class Pace:
    """The pace of one engine. Times are seconds of `time.monotonic()`."""

    def __init__(self, objectives: Sequence[Objective], slots: SlotTable, now: float) -> None:
        """`objectives` are those on the time between tokens (itl)."""
        self._objectives, self._slots = objectives, slots
        self._last = np.zeros(slots.num_slots)  # time of each slot's last token
        self._epoch = np.full(slots.num_slots, -1, np.int64)  # epoch of the request that token belongs to
        needed = [o.statistic for o in objectives if o.statistic is not None]
        self._enough = max([FEWEST, *(round(1 / (1 - q / 100)) if q < 100 else FEWEST for q in needed)])
        self._begin(now)

    def _begin(self, now: float) -> None:
        self._begun = now
        self._gaps: list[np.ndarray] = []
        self._count = 0
        self._running: list[tuple[int, bool]] = []

    def committed(self, batch: Batch, now: float) -> np.ndarray:
        """Take in an iteration that is about to be committed, and return its gaps in seconds. A request's first token
        has no gap, nor has its first token after a preemption. Tokens that a request gets together have one gap."""
        s, rows = self._slots, np.unique(batch.sampled_rows) if batch.drafted else batch.sampled_rows
        slots, epochs = batch.slots.take(rows), batch.epochs.take(rows)
        live = s.epoch.take(slots) == epochs
        slots, epochs = slots[live], epochs[live]
        known = self._epoch.take(slots) == epochs
        gaps = now - self._last.take(slots)[known]
        self._last[slots], self._epoch[slots] = now, epochs
        return gaps

    def window(self, gaps: np.ndarray, running: int, short: bool, now: float) -> Window | None:
        """Add an iteration's gaps. Returns a window once it is long enough and has enough gaps, else None. `running`
        and `short` describe the iteration as in `Window`."""
        self._gaps.append(gaps)
        self._count += len(gaps)
        self._running.append((running, short))
        seconds = now - self._begun
        if seconds < WINDOW_SECONDS or (self._count < self._enough and seconds < LONGEST_SECONDS):
            return None
        values = np.concatenate(self._gaps)
        strain = max((o.of(values) / o.limit for o in self._objectives), default=float("nan"))
        running_short = np.array(self._running, np.float64)
        window = Window(
            strain if len(values) >= FEWEST else float("nan"),
            float(running_short[:, 0].mean()),
            len(values) / seconds,
            bool(running_short[:, 1].mean() > 0.5),
        )
        self._begin(now)
        return window

    def on_idle(self, now: float) -> None:
        self._begin(now)


class SlotLimitKeeper(Listener):
    """Passes what `Pace` measures to `SlotLimitControl`, and its decision to the scheduler."""

    def __init__(self, scheduler: Scheduler, pace: Pace, control: SlotLimitControl) -> None:
        self._scheduler, self._pace, self._control = scheduler, pace, control
        scheduler.limit_running(control.limit)
        scheduler.slot_limit_changes = dict(control.changes)

    @classmethod
    def of(cls, config: EngineConfig, scheduler: Scheduler) -> SlotLimitKeeper:
        pace = Pace(config.objectives, scheduler.slots, time.monotonic())
        return cls(scheduler, pace, SlotLimitControl(scheduler.slots.num_slots))

    def on_result(self, result: StepResult, now: float) -> None:
        scheduler, batch = self._scheduler, result.batch
        gaps = self._pace.committed(batch, now)
        if scheduler.chunk_keeper is not None:
            # Prompts use the time that decodes leave below the objective, which is no reason to run fewer requests.
            gaps = gaps * scheduler.chunk_keeper.share_of_decodes(batch.step)
        window = self._pace.window(gaps, scheduler.num_running, scheduler.short_of_slots, now)
        if window is None:
            return
        limit = self._control.observe(window)
        if limit != scheduler.slots.limit:
            scheduler.limit_running(limit)
        scheduler.slot_limit_changes = dict(self._control.changes)

    def on_idle(self, now: float) -> bool:
        self._pace.on_idle(now)
        return False
