"""`solve`: chooses the slot limit from the measured ones (Equation 2)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from weft.autosearch.advisor.curve import Curve, Point
from weft.engine.config import Objective
from weft.engine.errors import ConfigError

Aim = Literal["throughput", "energy"]
TIE = 0.01  # Relative distance to the best within which the smallest point is chosen.
ENGINE_SHARE = 0.95
"""Share of an itl limit that the engine may use. The rest is reserved for the network and the API process."""
ONE = 1.5  # Largest mean batch that counts as batch 1.


class Verdict(NamedTuple):
    """One point compared with the requirements."""

    point: Point
    throughput: float  # T(B), tokens per second.
    efficiency: float  # T(B) / (B T(1)).
    late: tuple[Objective, ...]
    efficient: bool

    @property
    def fits(self) -> bool:
        return not self.late and self.efficient


class Solution(NamedTuple):
    best: Verdict | None  # None if no measured point fits.
    verdicts: tuple[Verdict, ...]  # Sorted by batch.
    most: Verdict  # MAX: the highest throughput, regardless of the requirements.
    knee: Verdict  # The point farthest above the line from the first to the last point.
    why_not: str = ""  # Reason if there is no best.


def engine_objectives(objectives: Sequence[Objective]) -> list[Objective]:
    """Tighten itl objectives to the engine's share. The slot limit then meets them at any rate of requests."""
    return [o._replace(limit=ENGINE_SHARE * o.limit) if o.measure == "itl" else o for o in objectives]


def judge(curve: Curve, objectives: Sequence[Objective], epsilon: float) -> tuple[Verdict, ...]:
    """Judge all points. Raises `ConfigError` if batch 1 was not measured."""
    points = curve.by_batch()
    if not points or points[0].batch > ONE:
        raise ConfigError("batch 1 was not measured, but efficiency is relative to it")
    one = curve.throughput(points[0]) / points[0].batch
    out = []
    for point in points:
        throughput = curve.throughput(point)
        efficiency = throughput / (point.batch * one)
        late = tuple(o for o in objectives if not point.of(o) <= o.limit)
        out.append(Verdict(point, throughput, efficiency, late, efficiency > epsilon))
    return tuple(out)


def solve(
    curve: Curve, objectives: Sequence[Objective] = (), epsilon: float = 0.1, aim: Aim = "throughput", tie: float = TIE
) -> Solution:
    """Solve Equation 2 of the paper, §VI:

        B_opt = argmax T(B)  subject to  L(B) <= SLO  and  T(B) / (B T(1)) > epsilon

    B is the batch that ran, not the slot limit. T(1) is measured, per request that ran. Among points within `tie` of
    the best, which differ by noise only, the smallest is chosen. The aim "energy" minimizes joules per output token
    under the same conditions. Raises `ConfigError` if batch 1 is missing, or for "energy" without a joule counter."""
    verdicts = judge(curve, objectives, epsilon)
    most = max(verdicts, key=lambda v: v.throughput)
    fitting = [v for v in verdicts if v.fits]
    if aim == "energy" and all(v.point.joules_per_token is None for v in verdicts):
        raise _no_joules(curve)
    if not fitting:
        return Solution(None, verdicts, most, _knee(verdicts), _why_not(verdicts, objectives, epsilon))
    if aim == "energy":
        joules = {v.point.bound: j for v in fitting if (j := v.point.joules_per_token) is not None}
        least = min(joules.values(), default=math.inf)
        best = next((v for v in fitting if joules.get(v.point.bound, math.inf) <= least * (1 + tie)), fitting[0])
    else:
        highest = max(v.throughput for v in fitting)
        best = next(v for v in fitting if v.throughput >= highest * (1 - tie))
    return Solution(best, verdicts, most, _knee(verdicts))


def check_joules(curve: Curve) -> None:
    """Raise `ConfigError` if the machine has no joule counter."""
    if not curve.machine.joules:
        raise _no_joules(curve)


def _no_joules(curve: Curve) -> ConfigError:
    return ConfigError(f"--objective energy: no joules were counted: {curve.machine.no_joules or 'no counter'}")


def _why_not(verdicts: Sequence[Verdict], objectives: Sequence[Objective], epsilon: float) -> str:
    kept = [v for v in verdicts if not v.late]
    if kept:
        best = max(kept, key=lambda v: v.efficiency)
        return (
            f"no slot limit that meets the objectives has an efficiency above --epsilon {epsilon:g}: "
            f"{best.efficiency:.2f} at {best.point.bound}"
        )
    least = min(verdicts, key=lambda v: max((v.point.of(o) / o.limit for o in v.late), default=0.0))
    worst = max(least.late, key=lambda o: least.point.of(o) / o.limit)
    return (
        f"no slot limit meets {', '.join(map(str, objectives))}: at {least.point.bound} requests {worst.measure} is "
        f"{least.point.of(worst) * 1e3:.3g} ms, the limit {worst.limit * 1e3:.3g} ms"
    )


def _knee(verdicts: Sequence[Verdict]) -> Verdict:
    first, last = verdicts[0], verdicts[-1]
    width = last.point.batch - first.point.batch
    rise = last.throughput - first.throughput
    if width <= 0 or rise <= 0:
        return first

    def above(v: Verdict) -> float:
        return (v.throughput - first.throughput) / rise - (v.point.batch - first.point.batch) / width

    return max(verdicts, key=above)
