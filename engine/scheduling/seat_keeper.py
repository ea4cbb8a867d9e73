"""`SeatKeeper`: gives a scheduler as many seats as keep the objective on the time between tokens."""

from __future__ import annotations

import time

from weft.engine.config import EngineConfig
from weft.engine.runner.batch import Batch
from weft.engine.scheduling.pace import Pace
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.seats import SeatControl


class SeatKeeper:
    """Between what an engine measures (`Pace`) and what decides (`SeatControl`)."""

    def __init__(self, scheduler: Scheduler, pace: Pace, control: SeatControl) -> None:
        self._scheduler = scheduler
        self._pace = pace
        self._control = control
        scheduler.limit_running(control.seats)
        scheduler.seat_changes = dict(control.changes)

    @classmethod
    def of(cls, config: EngineConfig, scheduler: Scheduler) -> SeatKeeper:
        pace = Pace(config.objectives, scheduler.slots, time.monotonic())
        return cls(scheduler, pace, SeatControl(scheduler.slots.num_slots))

    def committed(self, batch: Batch, now: float) -> None:
        """An iteration is done, and not committed yet."""
        scheduler = self._scheduler
        gaps = self._pace.committed(batch, now)
        if scheduler.chunk_keeper is not None:
            # Prompts fill what decodes leave of the limit: that is no reason for fewer of these.
            gaps = gaps * scheduler.chunk_keeper.part_of_decodes(batch.step)
        window = self._pace.window(gaps, scheduler.num_running, scheduler.short_of_seats, now)
        if window is None:
            return
        seats = self._control.observe(window)
        if seats != scheduler.slots.seats:
            scheduler.limit_running(seats)
        scheduler.seat_changes = dict(self._control.changes)

    def rest(self, now: float) -> None:
        """No request is open."""
        self._pace.rest(now)
