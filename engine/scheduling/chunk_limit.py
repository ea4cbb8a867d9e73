"""`ChunkLimit`: how many tokens of prompts an iteration may compute beside decodes, so that these are not late.

No clock and no I/O. It takes as many as keep the foreseen time (`IterationCost`) within the limit, less a margin: what
single iterations stray, and what `margin` learns from those that were late all the same. The margin goes up with each
late one and down with each that was not, in the proportion that the objective allows, so that in the long run no more
are late than that, whatever the forecast is worth.

Prompts are never starved: `least` tokens go into every iteration, whatever it takes, and more once a prompt has been
first in line for `patience` seconds, up to all there is room for at twice that.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import NamedTuple

from weft.engine.config import Objective
from weft.engine.runner.work import Costs
from weft.engine.scheduling.iteration_cost import IterationCost, Load

BOUNDS = ("slo", "least", "waited")
"""what cut an iteration's prompts short: the limit; the tokens that prompts get in any case; those that they get
because the first in line has waited"""
STRICTER = 0.5
"""late iterations, of those that the objective allows: gaps are not spread evenly over them"""
EACH_SECOND = 0.005
"""seconds that have a late iteration, where every single one is to keep a percentile: of the few that it has (25 at 40
ms) one is too many"""
STEP = 0.05
"""of the margin, a logarithm, behind an iteration that was late"""
MOST_MARGIN = 0.4
HICCUP = 0.4
"""an iteration that took so much longer than foreseen, a logarithm, was not late because of its prompts: the margin is
not for that"""


class Room(NamedTuple):
    """What an iteration has for prompts. Times in seconds."""

    decodes: Load
    target: float
    """that the whole iteration shall take"""
    least: int
    """tokens, whatever they take"""
    waited: bool
    """`least` is more than usual, because the first in line has waited"""


class ChunkLimit:
    """Of one engine. `late`, `kept`: iterations cut by the limit that passed it, and that did not."""

    def __init__(
        self, objective: Objective, cost: IterationCost, costs: Costs, *, least: int, most: int, patience: float,
        each_second: bool = False,
    ) -> None:  # fmt: skip
        """`least`, `most`: tokens of prompts in an iteration; `patience`: seconds; `each_second`: every single one is
        to keep the objective, not all of them together."""
        self.objective = objective
        self.limit = objective.limit
        self.cost = cost
        self.patience = patience
        self.least = min(least, most)
        self._costs, self._most = costs, most
        allowed = 0.5 if objective.statistic is None else 1 - min(objective.statistic, 99.9) / 100
        self._allowed = min(0.5, STRICTER * allowed)
        if each_second:
            self._allowed = min(self._allowed, EACH_SECOND * self.limit)
        self._deviations = NormalDist().inv_cdf(1 - self._allowed)
        self.margin = 0.0
        """a logarithm, beside what iterations stray"""
        self.late = 0
        self.kept = 0

    @property
    def target(self) -> float:
        """Seconds that an iteration may be foreseen to take."""
        return self.limit * math.exp(-max(0.0, self.margin + self._deviations * self.cost.spread))

    def room(self, decodes: Load, waited: float) -> Room:
        """`waited`: seconds that the prompt has been first in line."""
        share = min(1.0, max(0.0, waited / self.patience - 1))
        return Room(decodes, self.target, self.least + round(share * (self._most - self.least)), share > 0)

    def pairs(self, context: int, tokens: int) -> float:
        """Of a chunk behind so many tokens, in all layers."""
        return tokens * self._costs.seen(context + 0.5 * (tokens + 1))

    def fits(self, load: Load, target: float, context: int, tokens: int) -> int:
        """The most of `tokens` of a prompt, behind `context` of its own, that keep the target."""

        def keeps(count: int) -> bool:
            more = load._replace(
                tokens=load.tokens + count, pairs=load.pairs + self.pairs(context, count), chunks=load.chunks + 1
            )
            return self.cost.seconds(more) <= target

        if keeps(tokens):
            return tokens
        low, high = 0, tokens  # the first keeps it, or is nothing; the second does not
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if keeps(middle) else (low, middle)
        return low

    def observe(self, load: Load, seconds: float, bound: str) -> None:
        """An iteration with decodes is done. `bound`: of `BOUNDS`, or "" where nothing cut its prompts short."""
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
