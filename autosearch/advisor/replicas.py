"""`ReplicaAdvice`: how many engines fit in the freed memory, and whether more than one is faster."""

from __future__ import annotations

from typing import NamedTuple

from weft.autosearch.advisor.curve import Curve, ReplicaPoint
from weft.autosearch.advisor.optimal_batch import Verdict

SLACK = 1.1  # Pages to provide, as a multiple of the most pages held.
WORTH = 1.05  # Minimum gain that counts.
MOST = 64


class ReplicaAdvice(NamedTuple):
    replicas: int
    reason: str
    fit: int  # Engines that fit at this slot limit, with one copy of the weights.
    needed_pages: int
    freed: int  # Bytes of KV pages that this slot limit does not need.
    most_gain: float  # Gain if all idle time were used: 1 / (1 - idle share).


def advise_replicas(curve: Curve, best: Verdict) -> ReplicaAdvice:
    """Advise more than one engine only if several measured faster than the best single one.

    Replicas use the time in which the device waits for the CPU (paper §VI-B), so the idle share limits their gain. A
    gain from running kernels of two engines concurrently (MPS) does not show in the idle share; it must be measured."""
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
    """one: highest measured throughput of a single engine at this slot limit."""
    idle = f"the device waits for the CPU {best.point.idle_share:.1%} of the time"
    if winner is not None:
        single = max(curve.throughput(p) for p in curve.points)
        gain, over_max = curve.throughput(winner) / one, curve.throughput(winner) / max(single, one)
        measured = f"{winner.replicas} engines had {gain:.2f} times the measured throughput of one"
        if gain >= WORTH and over_max >= 1.0 and winner.replicas <= fit:
            return winner.replicas, measured
        if gain >= WORTH and winner.replicas <= fit:
            return 1, f"{measured}, but one engine with more running requests reached {1 / over_max:.2f} times theirs"
        return 1, f"{measured}: nothing to gain"
    if fit < 2:
        return 1, "only one engine fits in memory"
    if most_gain < WORTH:
        return 1, f"{idle}: using all of it would gain at most {most_gain - 1:.1%}"
    return 1, (
        f"{idle}, so replicas could gain at most {most_gain - 1:.0%}, which was not measured (--measure-replicas)"
    )
