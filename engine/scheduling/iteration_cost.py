"""`IterationCost`: how long an iteration will take, learned from those that were measured.

    seconds = m · (weights, tokens below the knee, tokens above it, far above it, decodes' context, prefill pairs)
              · step of the tokens' tiles

with m >= 0. What the model and the device say of it is where it begins (`runner.work.Costs`, bytes of memory traffic:
up to the knee an iteration reads weights, beyond it multiplies); the unit, and then each multiplier, is measured. No
clock and no I/O. Iterations with prompts and those without are remembered apart, so that an hour of the one kind does
not make it forget the other.

Products compute tokens by tiles, and as many tiles at once as the device has room for: one tile more may take nothing,
or a fifth of the iteration (an 8B on an H200: 32 ms for 1,020 tokens, 39 for 1,030), which no line tells. So tokens
count as whole tiles, and what iterations of so many tiles with prompts are off by is foreseen too.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from weft.engine.plans.plan import Plan
from weft.engine.runner.batch import Batch
from weft.engine.runner.work import Costs

PRIOR = (1.0, 0.1, 1.0, 0.0, 1.0, 1.0)
"""multipliers before anything is measured, in seconds a byte"""
TRUST = 0.05
"""of each of them, in iterations that say otherwise"""
MEMORY = 0.98
"""of what is known of a kind of iterations, for each that is measured"""
SWEEPS = 6
"""of coordinate descent, from where the last one ended"""
SPREAD, LEAST_SPREAD = 0.05, 0.01
"""standard deviation of the logarithm of measured over foreseen: at first, and at least"""
OUTLIER, LEAST_OUTLIER = 4.0, 0.2
"""deviations, and a logarithm, beyond which an iteration counts only as much as one at this bound"""
SUDDEN = 4
"""outliers in a row, all too long or all too short, that are a device that does something else"""
FORGET = 0.1
"""what then is left of what was known, at the new speed"""
STEP_MEMORY = 0.1
"""least weight of an iteration in what those of its tiles are off by"""
FIRST = 8
"""iterations of a kind that are believed whatever they say: nothing is known that they could stray from"""


class Load(NamedTuple):
    """What an iteration's time depends on."""

    tokens: int
    seen: float = 0.0
    """positions that decodes read, in all layers"""
    pairs: float = 0.0
    """of a prompt's token and a position that it attends to, in all layers"""
    chunks: int = 0
    """of prompts"""


def load_of(batch: Batch, costs: Costs) -> Load:
    """Of an iteration that was formed."""
    d = batch.num_decodes
    tokens, ends = batch.query_len[d:], batch.kv_len[d:]
    seen = float(costs.all_seen(batch.kv_len[:d]).sum())
    pairs = float((tokens * costs.all_seen(ends - 0.5 * (tokens - 1))).sum())
    return Load(batch.num_tokens, seen, pairs, len(tokens))


class _Kind:
    """What is remembered of iterations with prompts, or without: sums of products, the latest counting most."""

    def __init__(self) -> None:
        n = len(PRIOR)
        self.gram = [[0.0] * n for _ in range(n)]
        self.right = [0.0] * n
        self.spread = SPREAD
        self.number = 0
        self.odd: list[float] = []
        """logarithms of measured over foreseen, of outliers in a row"""

    def add(self, parts: list[float], seconds: float) -> None:
        relative = [part / seconds for part in parts]
        for row, a in zip(self.gram, relative, strict=True):
            for j, b in enumerate(relative):
                row[j] = MEMORY * row[j] + a * b
        self.right = [MEMORY * old + new for old, new in zip(self.right, relative, strict=True)]
        self.number += 1

    def fade(self, factor: float) -> None:
        """What is known now counts for little, and of a device that takes `factor` times as long."""
        self.gram = [[FORGET / factor**2 * value for value in row] for row in self.gram]
        self.right = [FORGET / factor * value for value in self.right]
        self.odd = []


class IterationCost:
    """Of one engine on one device. `measured`: iterations that it has seen."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._weights = max(costs.weights, costs.token)
        self._knee = self._weights / costs.token
        self._kinds = _Kind(), _Kind()
        self._m: list[float] | None = None
        self._steps: dict[int, tuple[float, int]] = {}
        """by tiles: the logarithm of measured over the line, and how often that was seen"""
        self.shifts = 0
        """times that the device began to do something else"""

    @property
    def measured(self) -> int:
        return sum(kind.number for kind in self._kinds)

    def seconds(self, load: Load) -> float:
        """Foreseen; infinite before anything was measured."""
        if self._m is None:
            return math.inf
        step, _ = self._steps.get(self._tiles(load), (0.0, 0))
        return self._line(load) * math.exp(step)

    def _line(self, load: Load) -> float:
        return sum(m * part for m, part in zip(self._m or (), self._parts(load), strict=True))

    def _tiles(self, load: Load) -> int:
        """0 where none are told apart: of decodes alone, of one tile."""
        tile = self._costs.tile
        return -(-load.tokens // tile) if tile > 1 and load.chunks and load.tokens > tile else 0

    @property
    def spread(self) -> float:
        """Standard deviation of the logarithm of measured over foreseen, of iterations with prompts."""
        return max(LEAST_SPREAD, self._kinds[1].spread)

    def observe_plan(self, plan: Plan, layers: int) -> None:
        """What was measured of its pipelines, for a model of so many layers: where the forecast begins."""
        for period in plan.periods:
            if (ms := period.figures.get("measured_ms")) is not None:
                seen = period.figures.get("kv_tokens", 0.0) * layers
                self.observe(Load(period.tokens, seen, chunks=1), ms * layers / 1e3)

    def observe(self, load: Load, seconds: float) -> float:
        """An iteration took so long. Returns the logarithm of that over what was foreseen, 0 where nothing was. What is
        not a positive number is no measurement."""
        if not (math.isfinite(seconds) and seconds > 0 and load.tokens > 0):
            return 0.0
        kind, error = self._kinds[load.chunks > 0], 0.0
        if self._m is not None and kind.number:
            error = math.log(seconds / self.seconds(load))
            seconds = self._believed(kind, error, seconds)
        if tiles := self._tiles(load):
            step = self._stepped(tiles, load, seconds)
            seconds *= math.exp(-step)
        kind.add(self._parts(load), seconds)
        self._solve()
        return error

    def _believed(self, kind: _Kind, error: float, seconds: float) -> float:
        """What an iteration counts as that was off by this, a logarithm."""
        bound = max(LEAST_OUTLIER, OUTLIER * kind.spread)
        if abs(error) <= bound or kind.number < FIRST:
            kind.odd = []
            weight, strayed = 1 / min(kind.number + 1, 50), min(error * error, bound * bound)
            kind.spread = math.sqrt((1 - weight) * kind.spread**2 + weight * strayed)
            return seconds
        kind.odd = [*kind.odd, error] if kind.odd and (kind.odd[0] > 0) == (error > 0) else [error]
        if len(kind.odd) < SUDDEN:
            return seconds * math.exp(math.copysign(bound, error) - error)
        factor = math.exp(sorted(kind.odd)[len(kind.odd) // 2])
        for each in self._kinds:
            each.fade(factor)
        self._m = [factor * m for m in self._m or ()]
        kind.spread = SPREAD
        self.shifts += 1
        return seconds

    def _stepped(self, tiles: int, load: Load, seconds: float) -> float:
        """What iterations of so many tiles are off by, with this one."""
        step, seen = self._steps.get(tiles, (0.0, 0))
        if self._m is not None:
            off = math.log(seconds / self._line(load))
            step += max(STEP_MEMORY, 1 / (seen + 2)) * (off - step)
            self._steps[tiles] = step, seen + 1
        return step

    def _parts(self, load: Load) -> list[float]:
        c, tiles, knee = self._costs, self._tiles(load), self._knee
        t = float(tiles * c.tile or load.tokens)
        return [
            self._weights, c.token * min(t, knee), c.token * max(0.0, t - knee), c.token * max(0.0, t - 4 * knee),
            c.position * load.seen, c.pair * load.pairs,
        ]  # fmt: skip

    def _solve(self) -> None:
        """Least squares of relative errors, never below zero, a little drawn to the prior times one unit for all."""
        n, (alone, mixed) = len(PRIOR), self._kinds
        gram = [[a + b for a, b in zip(*rows, strict=True)] for rows in zip(alone.gram, mixed.gram, strict=True)]
        right = [a + b for a, b in zip(alone.right, mixed.right, strict=True)]
        square = sum(PRIOR[i] * PRIOR[j] * gram[i][j] for i in range(n) for j in range(n))
        unit = sum(p * r for p, r in zip(PRIOR, right, strict=True)) / square
        pull = TRUST / (unit * unit)
        m = self._m or [unit * p for p in PRIOR]
        for _ in range(SWEEPS):
            for i in range(n):
                row = gram[i]
                rest = right[i] - sum(row[j] * m[j] for j in range(n)) + row[i] * m[i]
                m[i] = max(0.0, (rest + pull * unit * PRIOR[i]) / (row[i] + pull))
        self._m = m
