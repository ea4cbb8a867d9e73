"""`solve`: the bound to run with, of those that were measured."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

from weft.autosearch.advisor.curve import Curve, Point
from weft.engine.config import Objective
from weft.engine.errors import ConfigError

Aim = Literal["throughput", "energy"]
TIE = 0.01
"""points this close to the best are as good: the smallest of them is taken"""
OWN = 0.95
"""of a limit on itl: what the engine may take at the bound to advise"""
ONE = 1.5
"""requests that batch 1 may have had"""


class Verdict(NamedTuple):
    """One point against what is asked."""

    point: Point
    throughput: float
    """T(B), tokens a second"""
    efficiency: float
    """T(B) / (B T(1))"""
    late: tuple[Objective, ...]
    """objectives that it misses"""
    efficient: bool

    @property
    def fits(self) -> bool:
        return not self.late and self.efficient


class Solution(NamedTuple):
    best: Verdict | None
    """None: nothing that was measured fits"""
    verdicts: tuple[Verdict, ...]
    """by batch"""
    most: Verdict
    """MAX: the most throughput, whatever it takes"""
    knee: Verdict
    """the farthest above the line from the first to the last point"""
    why_not: str = ""
    """where there is no best: one line"""


def held(objectives: Sequence[Objective]) -> list[Objective]:
    """As a bound to advise is held to them: what is over is for the way to the client. So the time between tokens keeps
    its limit at any rate, and what is too much shows where requests wait."""
    return [o._replace(limit=OWN * o.limit) if o.measure == "itl" else o for o in objectives]


def judge(curve: Curve, objectives: Sequence[Objective], epsilon: float) -> tuple[Verdict, ...]:
    """Raises `ConfigError` when batch 1 was not measured."""
    points = curve.by_batch()
    if not points or points[0].batch > ONE:
        raise ConfigError("batch 1 was not measured: what throughput costs in efficiency is relative to it")
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
    """Equation 2 of the paper, §VI:

        B_opt = argmax T(B)  subject to  L(B) <= SLO  and  T(B) / (B T(1)) > epsilon

    B is the batch that really ran, not its bound; T(1) is measured, per request that ran. Of points within `tie` of the
    best the smallest is taken: they differ by noise. With the `aim` energy it is the one of the least joules an
    output token, under the same conditions. Raises `ConfigError` where batch 1 is missing, or joules are asked for and
    nobody counted them.
    """
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
    """Raises `ConfigError` where nothing counts them."""
    if not curve.machine.joules:
        raise _no_joules(curve)


def _no_joules(curve: Curve) -> ConfigError:
    return ConfigError(f"--objective energy: no joules were counted: {curve.machine.no_joules or 'no counter'}")


def _why_not(verdicts: Sequence[Verdict], objectives: Sequence[Objective], epsilon: float) -> str:
    kept = [v for v in verdicts if not v.late]
    if kept:
        best = max(kept, key=lambda v: v.efficiency)
        return (
            f"of the bounds that keep the objectives none has an efficiency above --epsilon {epsilon:g}: "
            f"{best.efficiency:.2f} at {best.point.bound}"
        )
    least = min(verdicts, key=lambda v: max((v.point.of(o) / o.limit for o in v.late), default=0.0))
    worst = max(least.late, key=lambda o: least.point.of(o) / o.limit)
    return (
        f"no bound keeps {', '.join(map(str, objectives))}: at {least.point.bound} running requests {worst.measure} is "
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
