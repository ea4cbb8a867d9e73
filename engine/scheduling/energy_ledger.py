"""`EnergyLedger`: charges metered energy to requests by their work, and separates the energy drawn while idle.

A counter is updated ten times a second, while an iteration takes about a hundredth of a second. So a request is charged
for its share of each iteration at the recent power, and the difference to the counter is spread over the next second of
work. Charges and idle energy add up to the counter, except for that second.
"""

from __future__ import annotations

import math
from collections import deque

from weft.engine.runner.device.energy_meter import EnergyMeter, Reading
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.cost_shares import CostShares
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.messages import EnergyStats

SMOOTHING_SECONDS = 1.0  # seconds of work over which power is averaged and differences are settled
IDLE_SECONDS = 10.0  # seconds over which idle power is averaged


class EnergyLedger:
    """The ledger of one engine. Times are seconds of `time.monotonic()`."""

    def __init__(self, meter: EnergyMeter, work: CostShares, slots: SlotTable) -> None:
        self._meter, self._work, self._slots = meter, work, slots
        self.source, self._last = meter.source, meter.latest
        self._working = False
        self._edges: deque[tuple[float, bool]] = deque()
        """(time, working) of starts and ends of work since the last reading."""
        self._was_working = False  # whether the engine worked at the last reading
        self._watts = 0.0
        self._idle_watts: float | None = None
        self._suspended = False
        self._others = 0.0  # joules drawn while another engine used the device
        self.idle_joules = 0.0
        self.drawn_at_work = 0.0
        self.charged = 0.0

    def working(self, now: float, working: bool) -> None:
        """Record that requests are open from now on, or that none are."""
        if working != self._working:
            self._working = working
            self._edges.append((now, working))

    def charge(self, batch: Batch, seconds: float) -> dict[int, float]:
        """Charge an iteration that is done and not committed yet; `seconds` is its device time. Returns the joules
        charged so far to metered requests, by handle."""
        self.settle()
        owed = self.drawn_at_work - self.charged
        joules = max(0.0, self._watts * seconds + owed * -math.expm1(-seconds / SMOOTHING_SECONDS))
        self.charged += joules
        s = self._slots
        live = s.epoch.take(batch.slots) == batch.epochs  # requests that have ended cannot be charged
        slots = batch.slots[live]
        s.joules[slots] += joules * self._work.shares(batch)[live]
        metered = slots[s.metered.take(slots)]
        return dict(zip(s.handle[metered].tolist(), s.joules[metered].tolist(), strict=True)) if len(metered) else {}

    def settle(self) -> None:
        """Process the meter's readings since the last call."""
        reading = self._meter.latest
        if self._suspended or reading.time <= self._last.time:
            return
        joules, seconds = reading.joules - self._last.joules, reading.time - self._last.time
        worked = self._worked_until(reading)
        if worked <= 0.0:
            watts, weight = joules / seconds, -math.expm1(-seconds / IDLE_SECONDS)
            self._idle_watts = watts if self._idle_watts is None else _towards(self._idle_watts, watts, weight)
            self.idle_joules += joules
        else:
            share = joules * (seconds - worked) / seconds
            idle = share if self._idle_watts is None else min(share, self._idle_watts * (seconds - worked))
            self.idle_joules += idle
            self.drawn_at_work += joules - idle
            watts = (joules - idle) / worked
            weight = -math.expm1(-worked / SMOOTHING_SECONDS)
            self._watts = _towards(self._watts, watts, weight) if self._watts else watts
        self._last = reading

    def _worked_until(self, reading: Reading) -> float:
        """Return the seconds of work since the last reading."""
        worked, at, working = 0.0, self._last.time, self._was_working
        while self._edges and self._edges[0][0] <= reading.time:
            turn, now_working = self._edges.popleft()
            worked += max(0.0, turn - at) if working else 0.0
            at, working = max(turn, at), now_working
        self._was_working = working
        return worked + (reading.time - at if working else 0.0)

    def suspend(self) -> None:
        """Stop counting: another engine uses the device from now on."""
        self.settle()
        self._suspended = True

    def resume(self) -> None:
        if self._suspended:
            reading = self._meter.latest
            self._others += reading.joules - self._last.joules
            self._last, self._suspended, self._was_working = reading, False, self._working
            self._edges.clear()

    def stats(self) -> EnergyStats:
        joules = self._last.joules - self._others
        return EnergyStats(source=self.source, joules=joules, idle_joules=self.idle_joules, charged=self.charged)

    def close(self) -> None:
        self._meter.close()


def _towards(value: float, target: float, weight: float) -> float:
    return value + weight * (target - value)
