"""`ReplicaAdvice`: how many engines the freed memory has room for, and whether more than one would gain anything."""

from __future__ import annotations

from typing import NamedTuple

from weft.autosearch.advisor.curve import Curve, ReplicaPoint
from weft.autosearch.advisor.solve import Verdict

SLACK = 1.1
"""pages for a bound, times the most that were held at it"""
WORTH = 1.05
"""a gain below this is none"""
MOST = 64


class ReplicaAdvice(NamedTuple):
    replicas: int
    """to run"""
    reason: str
    fit: int
    """engines at this bound, with one copy of the weights"""
    needed_pages: int
    freed: int
    """bytes of KV pages that this bound does not need"""
    most_gain: float
    """that filling all of the device's gaps could bring: 1 / (1 - idle share)"""


def advise_replicas(curve: Curve, best: Verdict) -> ReplicaAdvice:
    """More than one only on a measured gain: several engines that had more throughput than the best single one.

    What replicas fill is the time in which the device waits for the CPU (paper §VI-B): its share bounds what they can
    gain by taking turns. That kernels of two engines side by side are quicker than behind each other (MPS) no idle
    share tells; it is believed when it was measured.
    """
    m, point = curve.machine, best.point
    needed = min(m.pages, round(SLACK * point.kv_pages) + 1)
    fit = max(1, min(MOST, (m.memory - m.weights) // max(1, m.working + needed * m.page_bytes)))
    most_gain = 1 / max(1e-9, 1 - min(point.idle_share, 0.999))
    freed = max(0, m.pages - needed) * m.page_bytes
    tried = [r for r in curve.replicas if r.bound == point.bound]
    one = max([best.throughput, *(curve.throughput(r) for r in tried if r.replicas == 1)])
    winner = max((r for r in tried if r.replicas > 1), key=curve.throughput, default=None)
    replicas, reason = _decision(curve, best, one, winner, most_gain, fit)
    return ReplicaAdvice(replicas, reason, fit, needed, freed, most_gain)


def _decision(
    curve: Curve, best: Verdict, one: float, winner: ReplicaPoint | None, most_gain: float, fit: int
) -> tuple[int, str]:
    """one: throughput of a single engine at this bound, the highest that was measured."""
    idle = f"the device waits for the CPU {best.point.idle_share:.1%} of the time"
    if winner is not None:
        single = max(curve.throughput(p) for p in curve.points)
        gain, over_max = curve.throughput(winner) / one, curve.throughput(winner) / max(single, one)
        measured = f"{winner.replicas} engines had {gain:.2f} times the throughput of one, measured"
        if gain >= WORTH and over_max >= 1.0 and winner.replicas <= fit:
            return winner.replicas, measured
        if gain >= WORTH and winner.replicas <= fit:
            return 1, f"{measured}, but one engine with more running requests has {1 / over_max:.2f} times theirs"
        return 1, f"{measured}: nothing to gain"
    if fit < 2:
        return 1, "the memory has room for one engine"
    if most_gain < WORTH:
        return 1, f"{idle}: filling all of it would gain {most_gain - 1:.1%} at most"
    return 1, (
        f"{idle}, so replicas could gain {most_gain - 1:.0%} at most; nobody measured that they do (--measure-replicas)"
    )
