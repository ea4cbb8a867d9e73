"""How many drafts pay: `RowTimes`, what an iteration of decodes takes by its number of rows, and the choice of depth.

Nothing is assumed about the device. An iteration with more rows than any measured one counts as fast as the largest
measured one, so it is tried once, and then its time is known. Each try at most doubles the rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

F64 = npt.NDArray[np.float64]

KNOTS = np.unique(np.concatenate((np.arange(1, 17), np.round(16 * 2 ** (np.arange(1, 41) / 5)))).astype(np.int64))
"""Numbers of rows whose times are kept apart: each up to 16, then five for each doubling, up to 4,096."""
WEIGHT = 0.1  # weight of a new time, once several are known
STRAY = 1.5  # factor by which a time may differ from the known one; more is clipped, as another process may cause it
NEAR = 1.25  # a time is known for a number of rows that differs by no more than this factor
FRESH_SECONDS = 30.0  # age after which a time must be measured again
TRIES = 2  # iterations with more rows before their time counts
ENOUGH = 4  # iterations that make a time known


class RowTimes:
    """Seconds from one iteration's end to the next, by rows, for iterations of decodes alone."""

    def __init__(self) -> None:
        self._seconds = np.full(len(KNOTS), np.nan)
        self._number = np.zeros(len(KNOTS), np.int64)
        self._at = np.full(len(KNOTS), -math.inf)

    @staticmethod
    def _knot(rows: int) -> int:
        above = min(int(np.searchsorted(KNOTS, rows)), len(KNOTS) - 1)
        return above - 1 if above and rows - KNOTS[above - 1] < KNOTS[above] - rows else above

    def add(self, rows: int, seconds: float, now: float) -> None:
        if not (seconds > 0 and math.isfinite(seconds)):
            return
        k = self._knot(rows)
        if now - self._at[k] > FRESH_SECONDS:
            self._number[k] = 0
        if n := self._number[k]:
            old = self._seconds[k]
            # The first iterations of a size take longer than later ones: caches are cold.
            if n < ENOUGH:
                seconds = min(old, seconds)
            else:
                seconds = old + WEIGHT * (min(max(seconds, old / STRAY), old * STRAY) - old)
        self._seconds[k] = seconds
        self._number[k] += 1
        self._at[k] = now

    def knows(self, rows: int, now: float) -> bool:
        """Whether the time of this many rows, or nearly as many, was measured lately."""
        near = (rows * NEAR >= KNOTS) & (rows / NEAR <= KNOTS)
        return bool((near & (self._number >= ENOUGH) & (now - self._at <= FRESH_SECONDS)).any())

    @property
    def largest(self) -> int:
        """The largest number of rows whose time is known; 0 if none is."""
        known = KNOTS[~np.isnan(self._seconds)]
        return int(known[-1]) if len(known) else 0

    def at(self, rows: npt.NDArray[np.int64], *instead: RowTimes) -> F64:
        """Return the time of each number of rows, ascending; nan if none is known. Each of `instead` has times to use
        where those before it have none. A number of rows that was tried once is not known: caches were cold."""
        seconds = np.where(self._number < TRIES, np.nan, self._seconds) if instead else self._seconds
        for other in instead:
            seconds = np.where(np.isnan(seconds), other._seconds, seconds)
        known = ~np.isnan(seconds)
        if not known.any():
            return np.full(len(rows), np.nan)
        # More rows never take less time: what says so is noise.
        return np.interp(rows, KNOTS[known], np.maximum.accumulate(seconds[known]))


class Choice(NamedTuple):
    """How many draft tokens to verify, and the tokens a second that are expected then."""

    extra: int
    rate: float
    foreseen: float
    """Draft tokens expected to be accepted."""
    least: float
    """Survival of the least likely token among them; 1 if there is none."""


def best_depth(rows: int, survivals: Sequence[Sequence[float]], most: int, seconds: F64) -> Choice:
    """Choose the number of draft tokens, up to `most`, with the most tokens a second for `rows` requests.
    `survivals`: of each request's draft tokens, descending within a request. `seconds[e]`: the time with e more rows.
    """
    flat = np.sort(np.concatenate([np.asarray(one, np.float64) for one in survivals] or [np.zeros(0)]))[::-1][:most]
    foreseen = np.concatenate(([0.0], np.cumsum(flat)))
    rates = (rows + foreseen) / seconds[: len(foreseen)]
    extra = int(rates.argmax())
    return Choice(extra, float(rates[extra]), float(foreseen[extra]), float(flat[extra - 1]) if extra else 1.0)


FIRST_PAUSE, LONGEST_PAUSE = 1.0, 64.0  # seconds
WINDOW_SECONDS, WINDOW_ITERATIONS = 0.1, 12
KEPT = 1.0  # share of the tokens without drafts below which drafts pause
CLEAR_ITERATIONS, CLEAR = 3, 0.9  # iterations, and the share of tokens, after which a loss needs no whole window


class Guard:
    """Stops drafts that do not pay, for a time that doubles each time. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._pause = FIRST_PAUSE
        self.until = -math.inf
        """Time at which drafts may be tried again."""
        self.pauses = 0
        self._begin()

    def _begin(self) -> None:
        self._seconds = self._tokens = self._without = 0.0
        self._iterations = 0

    def add(self, seconds: float, tokens: int, without: float, now: float) -> bool:
        """Take in an iteration that may have had drafts: its seconds, its tokens, and the tokens that these seconds
        would have brought without drafts. Returns False if drafts must pause now."""
        self._seconds += seconds
        self._tokens += tokens
        self._without += without
        self._iterations += 1
        clear = self._iterations >= CLEAR_ITERATIONS and self._tokens < CLEAR * self._without
        if not clear and (self._seconds < WINDOW_SECONDS or self._iterations < WINDOW_ITERATIONS):
            return True
        paid = self._tokens >= KEPT * self._without
        self._begin()
        if paid:
            self._pause = FIRST_PAUSE
            return True
        self.until = now + self._pause
        self._pause = min(2 * self._pause, LONGEST_PAUSE)
        self.pauses += 1
        return False
