"""`SlotLimitKeeper`: adapts a scheduler's slot limit to the objective on the time between tokens."""

from __future__ import annotations

import time

from weft.engine.config import EngineConfig
from weft.engine.runner.iteration.batch import StepResult
from weft.engine.scheduling.listeners import Listener
from weft.engine.scheduling.pace import Pace
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slot_limit import SlotLimitControl


class SlotLimitKeeper(Listener):
    """Passes what `Pace` measures to `SlotLimitControl`, and its decision to the scheduler."""

    def __init__(self, scheduler: Scheduler, pace: Pace, control: SlotLimitControl) -> None:
        self._scheduler = scheduler
        self._pace = pace
        self._control = control
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
