"""`Trial`: compares a pipeline with the serial plan on the iterations of real requests.

Iterations that the pipeline fits alternate between both plans, in the order serial, planned, planned, serial. Two
neighbours are a pair if they computed about the same work. A pair's figure is the logarithm of its serial time over
its planned time, so a steady drift of clocks cancels. The pipeline is kept if the mean of n pairs exceeds `LEAST` by
`ERRORS` standard errors, for n of `LOOKS`, and dropped if it lies below `LEAST` by as much, or after the last look.
"""

from __future__ import annotations

import math
from typing import NamedTuple

LOOKS = (32, 64, 128, 256)
"""Numbers of pairs at which a trial may end. A mean that is checked after every pair would cross any bound by luck."""
ERRORS = 3.0
"""Standard errors between the mean and the bound: at most one in 200 pipelines without a gain is kept."""
LEAST = 0.002  # Least logarithm of the gain: 0.2 %.
ALIKE = 0.02  # Relative difference of KV tokens within a pair. Both have the same token bucket.
MOST_LOST = 512
"""Consecutive iterations without a pair after which a trial ends without a decision."""


class Work(NamedTuple):
    """What an iteration computes: its tokens, and the KV tokens that its decodes read."""

    tokens: int
    kv_tokens: int

    def is_like(self, other: Work) -> bool:
        return all(abs(a - b) <= ALIKE * max(a, b) for a, b in zip(self, other, strict=True))


class Trial:
    """The trial of one pipeline."""

    def __init__(self) -> None:
        self.kept: bool | None = None  # None: undecided.
        self.pairs = 0
        self._mean = self._squares = 0.0  # Welford's sums.
        self._turn = 0
        self._running: dict[int, tuple[int, Work]] = {}  # Turn and work by step.
        self._first: tuple[int, Work, float] | None = None  # Turn, work and seconds of a pair's first half.
        self._lost = 0

    @property
    def gain(self) -> float:
        """Serial time over planned time, as far as it is known."""
        return math.exp(self._mean)

    @property
    def error(self) -> float:
        """Standard error of the mean logarithm of the gain; infinite for fewer than two pairs."""
        return math.sqrt(self._squares / (self.pairs - 1) / self.pairs) if self.pairs > 1 else math.inf

    @property
    def text(self) -> str:
        return f"{100 * (self.gain - 1):+.1f} % ± {100 * self.error:.1f} % in {self.pairs} pairs"

    def launched(self, step: int, work: Work) -> bool:
        """Note an iteration that the pipeline fits. Returns whether it shall run the pipeline."""
        if self.kept is not None:
            return self.kept
        turn, self._turn = self._turn, self._turn + 1
        self._running[step] = (turn, work)
        return planned(turn)

    def ended(self, step: int, seconds: float) -> bool:
        """Note the time of an iteration; steps that are not of the trial are ignored. Returns whether this decided."""
        if (found := self._running.pop(step, None)) is None or self.kept is not None:
            return False
        turn, work = found
        first, self._first = self._first, None
        if not (math.isfinite(seconds) and seconds > 0):
            return False
        if turn % 2 == 0:
            self._first = turn, work, seconds
        elif first is not None and first[0] == turn - 1 and first[1].is_like(work):
            return self._add(math.log(first[2] / seconds) * (1 if planned(turn) else -1))
        return self._lose()

    def _lose(self) -> bool:
        self._lost += 1
        if self._lost < MOST_LOST:
            return False
        self.kept = False
        return True

    def _add(self, value: float) -> bool:
        self._lost = 0
        self.pairs += 1
        off = value - self._mean
        self._mean += off / self.pairs
        self._squares += off * (value - self._mean)
        if self.pairs not in LOOKS:
            return False
        noise = ERRORS * self.error
        if self._mean - noise > LEAST:
            self.kept = True
        elif self._mean + noise < LEAST or self.pairs == LOOKS[-1]:
            self.kept = False
        return self.kept is not None


def planned(turn: int) -> bool:
    """Return whether the pipeline runs the trial's iteration of this number: no, yes, yes, no."""
    return turn % 4 in (1, 2)
