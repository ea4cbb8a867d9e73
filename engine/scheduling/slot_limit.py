"""`SlotLimitControl`: adapts the number of requests that may run at once to the objective on the time between tokens.

No clock and no I/O: it gets measured windows of about a second and returns the slot limit. It only moves on
measurements. A raise goes to where the line through two measured limits, made steeper by their errors, meets the
objective, or as far as constant throughput would allow. A cut goes to where the line to a limit that kept the objective
meets it. Measurements are dropped when the same limit suddenly behaves differently.

"Level" is what was measured at one limit; "strain" is the time between tokens divided by the objective.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

START = 16  # initial slot limit
MARGIN = 3.0  # standard deviations of a window between the mean and the objective: one window in 700 is above it
GUARD = 0.003  # further distance of the mean from the objective, a logarithm
NOISE, NOISE_WEIGHT, LEAST_NOISE = 0.02, 4.0, 0.004
"""Prior of a window's deviation, its weight in windows, and the minimum deviation."""
GROWTH = 2.0  # maximum factor of one raise, and of one cut
DEADBAND = 0.02  # relative size below which a raise is skipped
SUDDEN = ((0.05, 3), (0.12, 2), (0.5, 1))
"""(size, count) of a change that is not noise: a deviation of the logarithm, in this many windows in a row."""
FAR = 0.5  # distance below the objective, a logarithm, at which one window suffices for a raise
BACKOFF = 60  # Windows until a limit that was late is tried again. Doubles each time.
MEMORY = 30  # windows over which the mean of a level is taken
LONG = 100  # windows in which a level may be late once
REACH = 4.0  # if a limit smaller by this factor is about as late, the number of slots is not the cause
PATIENCE = 120  # windows until a smaller limit is tried again after that
WORSE, SURE = 0.93, 2.0
"""Throughput after a raise, relative to before, below which the raise did harm, and the standard errors it must differ
by. Requests that start together end together, and a second with their prompts has few tokens."""
JUDGED = 12
"""Windows after a raise in which it can be judged. Later, the load may have changed."""

REASONS = ("room", "late", "shift", "worse", "out_of_reach")
"""Reasons of changes. room: headroom below the objective. late: a missed objective. shift: a limit suddenly behaves
differently. worse: more slots reduced throughput. out_of_reach: fewer slots did not help."""


class Window(NamedTuple):
    """Measurements of about a second of serving."""

    strain: float
    """The objective's statistic of the time between tokens, divided by its limit; NaN if there are too few tokens."""
    running: float  # mean of running requests
    rate: float  # tokens per second
    short: bool  # requests waited only for a slot


@dataclass
class _Level:
    """Measurements at one slot limit."""

    mean: float  # mean of log(strain)
    rate: float
    n: int = 1
    late: int = 0  # late windows, of about the last `LONG`
    failed: int = 0  # times that it was left because it was late
    barred: bool = False  # its throughput was lower than with fewer slots

    def add(self, x: float, rate: float) -> float:
        """Add a window, and return the change of the mean."""
        self.n += 1
        weight = 1 / min(self.n, MEMORY)
        step = weight * (x - self.mean)
        self.mean += step
        self.rate += weight * (rate - self.rate)
        return step


class SlotLimitControl:
    """Keeps `limit` between 1 and `capacity`. `changes` counts its changes by reason."""

    def __init__(self, capacity: int, start: int = START) -> None:
        self.capacity = capacity
        self.limit = min(start, capacity)
        self.changes = dict.fromkeys(REASONS, 0)
        self._levels: dict[int, _Level] = {}
        self._variance = NOISE * NOISE
        self._samples = NOISE_WEIGHT
        self._rate_variance, self._rate_samples = NOISE * NOISE, NOISE_WEIGHT
        """Variance of log(throughput) between windows."""
        self._settling = 1  # windows to skip after a change, while the number of running requests adapts
        self._odd: list[float] = []  # consecutive windows that do not fit the level
        self._raised_from = 0  # the limit before the last change if that was a raise, else 0
        self._cut = False  # the last change was a cut because of lateness
        self._early = 0  # late windows while a raise settles
        self._over = 0  # consecutive late windows with free slots
        self._quiet = 0  # windows learned from since the last change
        self._remembered: _Level | None = None  # the earlier level of the current limit
        self._resigned = 0  # windows for which no smaller limit is tried

    def observe(self, window: Window) -> int:
        """Process a window, and return the slot limit from now on."""
        self._resigned = max(0, self._resigned - 1)
        if math.isnan(window.strain) or window.strain <= 0:
            return self.limit
        if window.running > self.limit * 1.02 + 0.5:
            return self.limit  # still above the limit: requests are not preempted
        if self._settling:
            self._settling -= 1
            self._early += self._raised_from > 0 and window.strain > 1
            return self.limit
        x = math.log(window.strain)
        if not window.short and window.running < 0.95 * self.limit:
            return self._with_free_slots(x, window)
        self._over = 0
        if (level := self._learn(x, window.rate)) is None:
            return self.limit
        return self._decide(level, x)

    @property
    def _noise(self) -> float:
        return max(LEAST_NOISE, math.sqrt(self._variance))

    @property
    def _target(self) -> float:
        """Maximum mean of log(strain)."""
        return -MARGIN * self._noise - GUARD

    def _with_free_slots(self, x: float, window: Window) -> int:
        """Process a window with free slots: a raise is useless. If late, cut the limit to the running requests."""
        self._over = self._over + 1 if x > 0 else 0
        running = max(1, round(window.running))
        if self._over >= 2 and not self._resigned and running < self.limit:
            self._levels = {running: _Level(x, window.rate)}
            return self._move(running, "late")
        return self.limit

    def _learn(self, x: float, rate: float) -> _Level | None:
        """Return the level of the current limit with this window added; None while the window may be an outlier."""
        level = self._levels.get(self.limit)
        if level is None:
            self._odd = []
            level = self._levels[self.limit] = _Level(x, rate, late=self._early + int(x > 0))
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
        if known:  # other levels drift likewise
            for limit, other in self._levels.items():
                if limit != self.limit:
                    other.mean += step
        return level

    def _forget(self, level: _Level | None = None) -> None:
        """Drop all measurements except `level`: the same limit behaves differently now."""
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
        """Raise the limit as far as the measurements allow."""
        # Allow for the uncertainty of this level's mean.
        objective = math.exp(self._target - self._noise / math.sqrt(level.n))
        at, strain = self.limit, math.exp(level.mean)
        if strain >= objective or at >= self.capacity:
            return at
        above = [limit for limit in self._levels if limit > at]
        if above:
            nearest = min(above)
            over = self._levels[nearest]
            if over.barred or self._quiet < BACKOFF * 2 ** min(over.failed, 6) // 2:
                return at
            wanted = min(nearest, _crossing(at, strain, nearest, math.exp(over.mean), objective))
        else:
            wanted = at * objective / strain  # keeps the objective unless throughput falls
            below = [limit for limit in self._levels if limit < at]
            if below:
                # The line may be steeper than the two means suggest, by their errors.
                other = self._levels[max(below)]
                error = SURE * self._noise * math.sqrt(1 / min(level.n, MEMORY) + 1 / min(other.n, MEMORY))
                line = _crossing(max(below), math.exp(other.mean - error), at, strain, objective)
                wanted = max(wanted, at + 0.6 * (line - at), at + 1 if line >= at + 1 else 0)
            wanted = min(wanted, GROWTH * at)
        more = min(int(wanted), self.capacity)
        least = 1.1 if level.n < 10 else 1 + DEADBAND  # small raises need more measurements
        return self._move(more, "room") if more >= min(at * least, at + 1) and more >= at * (1 + DEADBAND) else at

    def _fewer(self, level: _Level) -> int:
        at, strain, objective = self.limit, math.exp(level.mean), math.exp(self._target)
        if level.n >= 12:  # it has become late after a long time, so other measurements are outdated
            self._forget(level)
        elif self._cut and level.n <= 2:  # the smaller limits that the last cut relied on are outdated
            self._levels = {limit: other for limit, other in self._levels.items() if limit >= at}
        many = [
            limit for limit, other in self._levels.items() if limit >= REACH * at and other.mean < level.mean + 0.15
        ]
        if many or at == 1:
            self._resigned = PATIENCE
            level.late = 0
            return self._move(max([*many, at]), "out_of_reach")
        kept = [limit for limit, other in self._levels.items() if limit < at and other.mean <= self._target]
        if kept:
            wanted = max(max(kept), _crossing(max(kept), math.exp(self._levels[max(kept)].mean), at, strain, objective))
        else:
            wanted = max(at * objective / strain, at / GROWTH)
        level.failed += 1
        level.mean = max(level.mean, self._target + self._noise)  # it was late, even if its mean was not
        return self._move(max(1, int(min(at - 1, wanted))), "late")

    def _move(self, limit: int, why: str) -> int:
        if limit != self.limit or why == "out_of_reach":
            self.changes[why] += 1
        self._raised_from = self.limit if limit > self.limit else 0
        self._cut = why == "late"
        self.limit, self._settling, self._odd, self._over, self._early = limit, 1, [], 0, 0
        self._quiet = 0
        self._remembered = self._levels.pop(limit, None)  # it is measured again
        return limit


def _crossing(a: int, of_a: float, b: int, of_b: float, objective: float) -> float:
    """Return where the line through (a, of_a) and (b, of_b), a < b, reaches `objective`; infinite if it never does."""
    slope = (of_b - of_a) / (b - a)
    return math.inf if slope <= 0 else a + (objective - of_a) / slope
