"""`EnergyLedger`: what the meter counted, charged to requests by their work, and what was drawn at rest.

A counter moves ten times a second, an iteration takes a hundredth of one: a request is charged for its share of each
iteration at the power measured lately, and what that leaves owing, or was too much, is spread over the second of work
that follows. So what all requests are charged and what was drawn at rest add up to the counter, but for that second.
"""

from __future__ import annotations

import math
from collections import deque

from weft.engine.runner.device.energy_meter import EnergyMeter, Reading
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.work import Work
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import EnergyStats

SMOOTHING_SECONDS = 1.0
"""of work: over how long power is averaged and a debt is paid"""
REST_SECONDS = 10.0
"""over how long the power at rest is averaged"""


class EnergyLedger:
    """One engine's. Times are `time.monotonic()`."""

    def __init__(self, meter: EnergyMeter, work: Work, slots: SlotTable) -> None:
        self._meter = meter
        self._work = work
        self._slots = slots
        self._last = meter.latest
        self._working = False
        self._turns: deque[tuple[float, bool]] = deque()
        """when work began or ended, since the last reading"""
        self._was_working = False
        """at that reading"""
        self._watts = 0.0
        self._rest_watts: float | None = None
        self._left = False
        self._others = 0.0
        """drawn while another engine had the device"""
        self.idle_joules = 0.0
        self.drawn_at_work = 0.0
        self.charged = 0.0

    @property
    def source(self) -> str:
        return self._meter.source

    def working(self, now: float, working: bool) -> None:
        """Requests are open from now on, or there are none."""
        if working != self._working:
            self._working = working
            self._turns.append((now, working))

    def charge(self, batch: Batch, seconds: float) -> dict[int, float]:
        """An iteration is done, and not committed yet. Returns by handle what those who asked have been charged so far.

        seconds: of the device.
        """
        self.settle()
        owed = self.drawn_at_work - self.charged
        joules = max(0.0, self._watts * seconds + owed * -math.expm1(-seconds / SMOOTHING_SECONDS))
        self.charged += joules
        s = self._slots
        live = s.epoch.take(batch.slots) == batch.epochs  # others have had their last word
        slots = batch.slots[live]
        s.joules[slots] += joules * self._work.shares(batch)[live]
        asked = slots[s.metered.take(slots)]
        return dict(zip(s.handle[asked].tolist(), s.joules[asked].tolist(), strict=True)) if len(asked) else {}

    def settle(self) -> None:
        """Take in what the meter has read since."""
        reading = self._meter.latest
        if self._left or reading.time <= self._last.time:
            return
        joules, seconds = reading.joules - self._last.joules, reading.time - self._last.time
        worked = self._worked_until(reading)
        if worked <= 0.0:
            watts, weight = joules / seconds, -math.expm1(-seconds / REST_SECONDS)
            self._rest_watts = watts if self._rest_watts is None else _towards(self._rest_watts, watts, weight)
            self.idle_joules += joules
        else:
            share = joules * (seconds - worked) / seconds
            rest = share if self._rest_watts is None else min(share, self._rest_watts * (seconds - worked))
            self.idle_joules += rest
            self.drawn_at_work += joules - rest
            watts = (joules - rest) / worked
            weight = -math.expm1(-worked / SMOOTHING_SECONDS)
            self._watts = _towards(self._watts, watts, weight) if self._watts else watts
        self._last = reading

    def _worked_until(self, reading: Reading) -> float:
        """Seconds of work since the last reading."""
        worked, at, working = 0.0, self._last.time, self._was_working
        while self._turns and self._turns[0][0] <= reading.time:
            turn, now_working = self._turns.popleft()
            worked += max(0.0, turn - at) if working else 0.0
            at, working = max(turn, at), now_working
        self._was_working = working
        return worked + (reading.time - at if working else 0.0)

    def leave(self) -> None:
        """Another engine has the device from now on: what is drawn is that one's to count."""
        self.settle()
        self._left = True

    def resume(self) -> None:
        if self._left:
            reading = self._meter.latest
            self._others += reading.joules - self._last.joules
            self._last, self._left, self._was_working = reading, False, self._working
            self._turns.clear()

    def stats(self) -> EnergyStats:
        joules = self._last.joules - self._others
        return EnergyStats(source=self._meter.source, joules=joules, idle_joules=self.idle_joules, charged=self.charged)

    def close(self) -> None:
        self._meter.close()


def _towards(value: float, target: float, weight: float) -> float:
    return value + weight * (target - value)
