"""`IterationCost`: forecasts the time of an iteration, learned from measured ones.

    seconds = m · (weights, tokens below the knee, tokens above it, far above it, decodes' context, prefill pairs)
              · step of the tokens' tiles

with m >= 0. The features are bytes of memory traffic (`runner.work.Costs`): up to the knee an iteration is bound by
reading weights, beyond it by arithmetic. The unit, and then each multiplier, is measured. No clock and no I/O.
Iterations with and without prompts are remembered separately, so that an hour of one kind does not erase the other.

GEMMs compute tokens in tiles, as many at once as the device has processors for: one more tile may cost nothing, or a
fifth of the iteration (an 8B on an H200: 32 ms for 1,020 tokens, 39 for 1,030). A line cannot express that. So tokens
count as whole tiles, and a correction per number of tiles is learned for iterations with prompts.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from weft.engine.plans.plan import Plan
from weft.engine.runner.iteration.batch import Batch
from weft.engine.runner.iteration.cost_shares import Costs

PRIOR = (1.0, 0.1, 1.0, 0.0, 1.0, 1.0)  # multipliers before the first measurement, in seconds per byte
TRUST = 0.05  # weight of each prior multiplier, in iterations
MEMORY = 0.98  # decay of earlier measurements of a kind of iterations, per measurement
SWEEPS = 6  # sweeps of coordinate descent per measurement, starting at the last solution
SPREAD, LEAST_SPREAD = 0.05, 0.01  # initial and minimum standard deviation of log(measured / forecast)
OUTLIER, LEAST_OUTLIER = 4.0, 0.2
"""Errors are clipped at this many standard deviations, and no lower than this logarithm."""
SUDDEN = 4  # consecutive outliers of one sign that mean that the device's speed has changed
FORGET = 0.1  # weight of the old knowledge, scaled to the new speed, after such a change
STEP_MEMORY = 0.1  # minimum weight of an iteration in the correction for its number of tiles
FIRST = 8  # first iterations of a kind, which are never outliers


class Load(NamedTuple):
    """The quantities that determine an iteration's time."""

    tokens: int
    seen: float = 0.0  # positions that decodes read, in all layers
    pairs: float = 0.0  # pairs of a prompt token and a position it attends to, in all layers
    chunks: int = 0  # prompt chunks


def load_of(batch: Batch, costs: Costs) -> Load:
    d = batch.num_decodes
    tokens, ends = batch.query_len[d:], batch.kv_len[d:]
    seen = float(costs.all_seen(batch.kv_len[:d]).sum())
    pairs = float((tokens * costs.all_seen(ends - 0.5 * (tokens - 1))).sum())
    return Load(batch.num_tokens, seen, pairs, len(tokens))


class _Kind:
    """Decayed normal equations of iterations with prompts, or without."""

    def __init__(self) -> None:
        n = len(PRIOR)
        self.gram = [[0.0] * n for _ in range(n)]
        self.right = [0.0] * n
        self.spread = SPREAD
        self.number = 0
        self.odd: list[float] = []  # log(measured / forecast) of consecutive outliers

    def add(self, parts: list[float], seconds: float) -> None:
        relative = [part / seconds for part in parts]
        for row, a in zip(self.gram, relative, strict=True):
            for j, b in enumerate(relative):
                row[j] = MEMORY * row[j] + a * b
        self.right = [MEMORY * old + new for old, new in zip(self.right, relative, strict=True)]
        self.number += 1

    def fade(self, factor: float) -> None:
        """Reduce the weight of earlier measurements and scale them to a device that takes `factor` times as long."""
        self.gram = [[FORGET / factor**2 * value for value in row] for row in self.gram]
        self.right = [FORGET / factor * value for value in self.right]
        self.odd = []


class IterationCost:
    """The forecast of one engine on one device."""

    def __init__(self, costs: Costs) -> None:
        self._costs = costs
        self._weights = max(costs.weights, costs.token)
        self._knee = self._weights / costs.token
        self._kinds = _Kind(), _Kind()
        self._m: list[float] | None = None
        self._steps: dict[int, tuple[float, int]] = {}
        """By number of tiles: log(measured / line), and how often it was measured."""
        self.shifts = 0  # number of sudden changes of the device's speed

    @property
    def measured(self) -> int:
        return sum(kind.number for kind in self._kinds)

    def seconds(self, load: Load) -> float:
        """Return the forecast in seconds; infinite before the first measurement."""
        if self._m is None:
            return math.inf
        step, _ = self._steps.get(self._tiles(load), (0.0, 0))
        return self._line(load) * math.exp(step)

    def _line(self, load: Load) -> float:
        return sum(m * part for m, part in zip(self._m or (), self._parts(load), strict=True))

    def _tiles(self, load: Load) -> int:
        """Return the number of tiles; 0 for decodes alone or a single tile, which have no correction."""
        tile = self._costs.tile
        return -(-load.tokens // tile) if tile > 1 and load.chunks and load.tokens > tile else 0

    @property
    def spread(self) -> float:
        """Standard deviation of log(measured / forecast) of iterations with prompts."""
        return max(LEAST_SPREAD, self._kinds[1].spread)

    def observe_plan(self, plan: Plan, layers: int) -> None:
        """Start the forecast from the measurements of a plan's pipelines, for a model of `layers` layers."""
        for period in plan.periods:
            if (ms := period.figures.get("measured_ms")) is not None:
                seen = period.figures.get("kv_tokens", 0.0) * layers
                self.observe(Load(period.tokens, seen, chunks=1), ms * layers / 1e3)

    def observe(self, load: Load, seconds: float) -> float:
        """Learn from a measured iteration. Returns log(measured / forecast), 0 without a forecast. Ignores times that
        are not positive and finite."""
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
        """Return the seconds to learn from an iteration whose log error is `error`: outliers are clipped."""
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
        """Return the correction, a logarithm, for this number of tiles, updated with this iteration."""
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
        """Solve non-negative least squares of relative errors, regularised towards the prior times a common unit."""
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
