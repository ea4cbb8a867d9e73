"""`SlotLimitControl`: how many requests may run at once so that the time between tokens stays what was promised.

No clock and no I/O: it is told what a second of serving was like, and says how many seats there are from then on.
It moves on what it has measured: up to where the line through two measured bounds meets the limit, never further than
the limit would allow if throughput stood still; down to where the line to a bound that kept the limit meets it. What
was measured is forgotten when the same bound suddenly behaves otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

START = 16
"""seats before anything is known"""
MARGIN = 3.0
"""standard deviations of a window that the mean keeps below the limit: one window in 700 is above it"""
GUARD = 0.003
"""and so much beside that"""
NOISE, NOISE_WEIGHT, LEAST_NOISE = 0.02, 4.0, 0.004
"""what a window's deviation is believed to be, as much as so many windows say, and never less than this"""
GROWTH = 2.0
"""most seats at once, times those that there are; half as many at least"""
DEADBAND = 0.02
"""a smaller raise is none"""
SUDDEN = ((0.05, 3), (0.12, 2), (0.5, 1))
"""a change of the logarithm that is no noise: how large, and how often in a row it must be seen"""
FAR = 0.5
"""so far below the limit, in the logarithm, one window is enough to know that there is room"""
BACKOFF = 60
"""windows until a bound that was late is tried again; twice as many each time"""
MEMORY = 30
"""windows of one bound after which an old one counts as little as a new one"""
LONG = 100
"""windows in which a bound may be above the limit once"""
REACH = 4.0
"""seats are not what makes it late where so many times fewer are about as late"""
PATIENCE = 120
"""windows until that is tried again"""
WORSE, SURE = 0.93, 2.0
"""throughput behind a raise, of that before: more seats did harm. It is less by more than so many standard errors, too:
requests that begin together end together, and a second of their prompts has few tokens"""
JUDGED = 12
"""windows behind a raise in which that is asked: later, the load may be another one"""

REASONS = ("room", "late", "shift", "worse", "out_of_reach")
"""why the bound changed: there was room below the limit; the limit was passed; a bound does something else all at once;
more seats meant less throughput; fewer seats did not help"""


class Window(NamedTuple):
    """A second of serving, or as long as it takes to know something."""

    strain: float
    """time between tokens, as the objective takes it, divided by its limit: at most 1 is kept; NaN: too few tokens"""
    running: float
    """requests, mean"""
    rate: float
    """tokens a second"""
    short: bool
    """requests waited for a seat and for nothing else"""


@dataclass
class _Level:
    """What a bound was measured to do."""

    mean: float
    """of the logarithm of the strain"""
    rate: float
    n: int = 1
    late: int = 0
    """windows above the limit, of the last LONG"""
    failed: int = 0
    """times that it was left because it was late"""
    barred: bool = False
    """its throughput was less than that of fewer seats"""

    def add(self, x: float, rate: float) -> float:
        """Returns how far the mean went."""
        self.n += 1
        weight = 1 / min(self.n, MEMORY)
        step = weight * (x - self.mean)
        self.mean += step
        self.rate += weight * (rate - self.rate)
        return step


class SlotLimitControl:
    """Between 1 and `capacity` seats; `seats` is how many there are now, `changes` how often that changed, and why."""

    def __init__(self, capacity: int, start: int = START) -> None:
        self.capacity = capacity
        self.limit = min(start, capacity)
        self.changes = dict.fromkeys(REASONS, 0)
        self._levels: dict[int, _Level] = {}
        self._variance = NOISE * NOISE
        self._samples = NOISE_WEIGHT
        self._rate_variance, self._rate_samples = NOISE * NOISE, NOISE_WEIGHT
        """of the logarithm of throughput, window by window"""
        self._settling = 1
        """windows to come that show how the bound changed, not what it does"""
        self._odd: list[float] = []
        """windows in a row that do not fit what the bound was measured to do"""
        self._raised_from = 0
        """seats before the last change, if that was a raise"""
        self._over = 0
        """windows in a row above the limit with seats to spare"""
        self._quiet = 0
        """windows that taught something since the last change"""
        self._remembered: _Level | None = None
        """what these seats had been measured to do before"""
        self._resigned = 0
        """windows for which fewer seats are not tried"""

    def observe(self, window: Window) -> int:
        """Take in what the last window was like; returns the seats from now on."""
        self._resigned = max(0, self._resigned - 1)
        if math.isnan(window.strain) or window.strain <= 0:
            return self.limit
        if window.running > self.limit * 1.02 + 0.5:
            return self.limit  # nobody is preempted: fewer run only when some have ended
        if self._settling:
            self._settling -= 1
            return self.limit
        x = math.log(window.strain)
        if not window.short and window.running < 0.95 * self.limit:
            return self._with_seats_to_spare(x, window)
        self._over = 0
        if (level := self._learn(x, window.rate)) is None:
            return self.limit
        return self._decide(level, x)

    @property
    def _noise(self) -> float:
        return max(LEAST_NOISE, math.sqrt(self._variance))

    @property
    def _target(self) -> float:
        """What the mean of the logarithm may be."""
        return -MARGIN * self._noise - GUARD

    def _with_seats_to_spare(self, x: float, window: Window) -> int:
        """More seats would be of no use. Where it is late all the same, there are no more of them than run."""
        self._over = self._over + 1 if x > 0 else 0
        running = max(1, round(window.running))
        if self._over >= 2 and not self._resigned and running < self.limit:
            self._levels = {running: _Level(x, window.rate)}
            return self._move(running, "late")
        return self.limit

    def _learn(self, x: float, rate: float) -> _Level | None:
        """The level of the seats that there are, with this window; None while it does not fit and may be a hiccup."""
        level = self._levels.get(self.limit)
        if level is None:
            self._odd = []
            level = self._levels[self.limit] = _Level(x, rate, late=int(x > 0))
            return level
        apart = abs(x - level.mean)
        if level.n >= 3 and apart > max(SUDDEN[0][0], 4 * self._noise):
            self._odd.append(x)
            if len(self._odd) < next(often for far, often in reversed(SUDDEN) if apart > far):
                return None
            self._forget()
            level = self._levels[self.limit] = _Level(sum(self._odd) / len(self._odd), rate, late=int(x > 0))
            self._odd = []
            return level
        self._odd = []
        if level.n >= 2:
            self._samples = min(self._samples + 1, 2.0 * MEMORY)
            surprise = min((x - level.mean) ** 2, 9 * self._noise**2)
            self._variance += (surprise - self._variance) / self._samples
        if rate > 0 and level.rate > 0:
            self._rate_samples = min(self._rate_samples + 1, 2.0 * MEMORY)
            self._rate_variance += (math.log(rate / level.rate) ** 2 - self._rate_variance) / self._rate_samples
        known = level.n >= 8
        step = level.add(x, rate)
        self._quiet += 1
        if self._remembered is not None and level.n >= 2:
            remembered, self._remembered = self._remembered, None
            level.failed = remembered.failed
            if abs(level.mean - remembered.mean) > max(SUDDEN[0][0], 3 * self._noise):
                self._forget(level)
        level.late = max(0, level.late + int(x > 0) - int(level.n % LONG == 0))
        if known:  # what drifts here drifts there
            for seats, other in self._levels.items():
                if seats != self.limit:
                    other.mean += step
        return level

    def _forget(self, level: _Level | None = None) -> None:
        """The same seats do something else now: what was measured says nothing any more, but for `level`."""
        self._levels = {} if level is None else {self.limit: level}
        self._resigned = 0
        self.changes["shift"] += 1

    def _decide(self, level: _Level, x: float) -> int:
        noise, target = self._noise, self._target
        late = (
            (level.n == 1 and x > noise)
            or (level.n >= 2 and level.mean > -noise)
            or (level.n >= 6 and level.mean > target + 0.5 * noise)
            or level.late >= 2
        )
        if late:
            return self.limit if self._resigned else self._fewer(level)
        before = self._levels.get(self._raised_from)
        if before is not None and 2 <= level.n <= JUDGED and self._did_harm(level, before):
            level.barred = True
            return self._move(self._raised_from, "worse")
        if level.n >= 2 or (level.mean < target - FAR and before is None):
            return self._more(level)
        return self.limit

    def _did_harm(self, level: _Level, before: _Level) -> bool:
        error = math.sqrt(self._rate_variance * (1 / min(level.n, MEMORY) + 1 / min(before.n, MEMORY)))
        return level.rate < before.rate * min(WORSE, math.exp(-SURE * error))

    def _more(self, level: _Level) -> int:
        """As many as the limit allows by what is known."""
        # What was seen of these seats is not all that they may do.
        limit = math.exp(self._target - self._noise / math.sqrt(level.n))
        at, strain = self.limit, math.exp(level.mean)
        if strain >= limit or at >= self.capacity:
            return at
        above = [seats for seats in self._levels if seats > at]
        if above:
            nearest = min(above)
            over = self._levels[nearest]
            if over.barred or self._quiet < BACKOFF * 2 ** min(over.failed, 6) // 2:
                return at
            wanted = min(nearest, _crossing(at, strain, nearest, math.exp(over.mean), limit))
        else:
            wanted = at * limit / strain  # where throughput does not fall by it, this is within the limit
            below = [seats for seats in self._levels if seats < at]
            if below:
                line = _crossing(max(below), math.exp(self._levels[max(below)].mean), at, strain, limit)
                wanted = max(wanted, at + 0.6 * (line - at), at + 1 if line >= at + 1 else 0)
            wanted = min(wanted, GROWTH * at)
        more = min(int(wanted), self.capacity)
        least = 1.1 if level.n < 10 else 1 + DEADBAND  # what is only just worth it is known better first
        return self._move(more, "room") if more >= min(at * least, at + 1) and more >= at * (1 + DEADBAND) else at

    def _fewer(self, level: _Level) -> int:
        at, strain, limit = self.limit, math.exp(level.mean), math.exp(self._target)
        if level.n >= 12:  # it was not late for long: what else was measured is as old
            self._forget(level)
        many = [
            seats for seats, other in self._levels.items() if seats >= REACH * at and other.mean < level.mean + 0.15
        ]
        if many or at == 1:
            self._resigned = PATIENCE
            level.late = 0
            return self._move(max([*many, at]), "out_of_reach")
        kept = [seats for seats, other in self._levels.items() if seats < at and other.mean <= self._target]
        if kept:
            wanted = max(max(kept), _crossing(max(kept), math.exp(self._levels[max(kept)].mean), at, strain, limit))
        else:
            wanted = max(at * limit / strain, at / GROWTH)
        level.failed += 1
        level.mean = max(level.mean, self._target + self._noise)  # it was too many, whatever its mean
        return self._move(max(1, min(at - 1, int(wanted))), "late")

    def _move(self, seats: int, why: str) -> int:
        if seats != self.limit or why == "out_of_reach":
            self.changes[why] += 1
        self._raised_from = self.limit if seats > self.limit else 0
        self.limit, self._settling, self._odd, self._over = seats, 1, [], 0
        self._quiet = 0
        self._remembered = self._levels.pop(seats, None)  # it is measured anew
        return seats


def _crossing(a: int, of_a: float, b: int, of_b: float, limit: float) -> float:
    """Where the line through (a, of_a) and (b, of_b) is at `limit`; a < b; without end where it does not rise."""
    slope = (of_b - of_a) / (b - a)
    return math.inf if slope <= 0 else a + (limit - of_a) / slope
