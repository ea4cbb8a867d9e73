"""`ChunkLimit`: how many prompt tokens an iteration may compute without making its decodes late.

No clock and no I/O. The forecast time (`IterationCost`) must stay below the limit less a margin. The margin covers the
spread of single iterations, plus a correction: it rises with each late iteration and falls with each one in time, in
the proportion that the objective allows. In the long run no more are late than that, however good the forecast is.

Prompts never starve: every iteration computes at least `least` tokens of them. Once a prompt has been first in line
for `patience` seconds it gets more, up to the whole budget after twice that time.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from weft.engine.config import Objective
from weft.engine.runner.iteration.cost_shares import Costs
from weft.engine.scheduling.iteration_cost import IterationCost, Load

BOUNDS = ("slo", "least", "waited")
"""Reasons to cut an iteration's prompts. slo: the limit. least: minimum of prompt tokens. waited: raised minimum."""
STRICTER = 0.5
"""Share of the late iterations allowed by the objective that is used, because gaps are not spread evenly over them."""
EACH_SECOND = 0.005
"""Share of seconds that may have a late iteration if each second must keep a percentile: of the few iterations in a
second (25 at 40 ms), one late is too many."""
STEP = 0.05  # increase of the margin, a logarithm, after a late iteration
MOST_MARGIN = 0.4
HICCUP = 0.4
"""log(measured / forecast) above which a late iteration does not move the margin: prompts were not the cause."""


class Headroom(NamedTuple):
    """What an iteration has left for prompts."""

    decodes: Load
    target: float  # seconds that the whole iteration may take
    least: int  # prompt tokens to compute in any case
    waited: bool  # `least` is raised because the first in line has waited


class ChunkLimit:
    """The limit of one engine. `late` and `kept` count iterations cut by the limit that passed it, or did not."""

    def __init__(
        self, objective: Objective, cost: IterationCost, costs: Costs, *, least: int, most: int, patience: float,
        each_second: bool = False,
    ) -> None:  # fmt: skip
        """`least` and `most` bound the prompt tokens of an iteration; `patience` is in seconds. `each_second`: every
        second must keep the objective, not only all of them together."""
        self.objective = objective
        self.limit = objective.limit
        self.cost, self.patience = cost, patience
        self.least = min(least, most)
        self._costs, self._most = costs, most
        allowed = 0.5 if objective.statistic is None else 1 - min(objective.statistic, 99.9) / 100
        self._allowed = min(0.5, STRICTER * allowed)
        if each_second:
            self._allowed = min(self._allowed, EACH_SECOND * self.limit)
        self._deviations = NormalDist().inv_cdf(1 - self._allowed)
        self.margin = 0.0  # the learned part of the margin, a logarithm
        self.late = 0
        self.kept = 0

    @property
    def target(self) -> float:
        """Maximum forecast of an iteration, in seconds."""
        return self.limit * math.exp(-max(0.0, self.margin + self._deviations * self.cost.spread))

    def headroom(self, decodes: Load, waited: float) -> Headroom:
        """`waited` is how long the first prompt has been first in line, in seconds."""
        share = min(1.0, max(0.0, waited / self.patience - 1))
        return Headroom(decodes, self.target, self.least + round(share * (self._most - self.least)), share > 0)

    def pairs(self, context: int, tokens: int) -> float:
        """Return the attention pairs of a chunk after `context` tokens, in all layers."""
        return tokens * self._costs.seen(context + 0.5 * (tokens + 1))

    def fits(self, load: Load, target: float, context: int, tokens: int) -> int:
        """Return how many of a prompt's `tokens`, after `context` computed ones, keep the target."""

        def keeps(count: int) -> bool:
            more = load._replace(
                tokens=load.tokens + count, pairs=load.pairs + self.pairs(context, count), chunks=load.chunks + 1
            )
            return self.cost.seconds(more) <= target

        if keeps(tokens):
            return tokens
        low, high = 0, tokens  # invariant: low keeps the target or is 0; high does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low

    def observe(self, load: Load, seconds: float, bound: str) -> None:
        """Learn from an iteration with decodes. `bound` is one of `BOUNDS`, or "" if its prompts were not cut."""
        shifts = self.cost.shifts
        error = self.cost.observe(load, seconds)
        if self.cost.shifts > shifts:
            self.margin = min(0.0, self.margin)
        if bound != "slo" or not seconds > 0:
            return
        late = seconds > self.limit
        self.late += late
        self.kept += not late
        if not late or error < HICCUP:
            step = STEP * (float(late) - self._allowed) / (1 - self._allowed)
            lowest = -0.5 * self._deviations * self.cost.spread
            self.margin = min(MOST_MARGIN, max(lowest, self.margin + step))
