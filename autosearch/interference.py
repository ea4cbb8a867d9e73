"""The exchange of SMs for speed while two operations share the card (NanoFlow §4.1.1, Table 3).

A kernel is told its SMs, so its share R of them is exact here, where the paper infers it from the product's loss. What
a partner costs beyond the SMs it takes (memory, L2, power) is `slowdown`; P is what a kernel keeps of its solo speed.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import numpy as np

from weft.autosearch.profile import Curves, Profile
from weft.engine.model.operations import Resource


class Sample(NamedTuple):
    """One side of a pair."""

    operation: str
    sms: int
    slowdown: float
    """time beside the partner / time alone on the same SMs"""
    performance: float
    """P: time alone on all SMs / time beside the partner"""


class Row(NamedTuple):
    """One column of Table 3 for one kind of kernel."""

    share: float
    """R, of the SMs"""
    performance: float
    """P, mean over pairs"""
    spread: float
    """standard deviation / mean of P over pairs"""
    pairs: int


class Interference:
    """Slowdowns by resource and SM count, measured in pairs."""

    def __init__(self, profile: Profile, curves: Curves, resources: dict[str, Resource]) -> None:
        """resources: operation -> what it is short of."""
        self.num_sms = curves.num_sms
        self._samples: dict[Resource, list[Sample]] = {r: [] for r in Resource}
        self._pairs: list[tuple[Resource, float, float]] = []
        for pair in profile.pairs:
            sides = (
                (pair.compute, pair.compute_work, pair.compute_sms, pair.compute_ms),
                (pair.guest, pair.guest_work, pair.guest_sms, pair.guest_ms),
            )
            performance: list[float] = []
            for name, work, sms, ms in sides:
                kept = curves.ms(name, work, self.num_sms) / ms
                performance.append(kept)
                self._samples[resources[name]].append(Sample(name, sms, ms / curves.ms(name, work, sms), kept))
            self._pairs.append((resources[pair.guest], performance[0], performance[1]))
        self._curve = {r: _means([(s.sms, s.slowdown) for s in samples]) for r, samples in self._samples.items()}

    def slowdown(self, resource: Resource, sms: int) -> float:
        """How much longer an operation takes beside a partner than alone on the same SMs; 1 with no pair measured."""
        counts, means = self._curve[resource]
        return max(1.0, float(np.interp(sms, counts, means))) if len(counts) else 1.0

    def table(self, resource: Resource) -> list[Row]:
        """R -> P with its spread, by rising share."""
        rows = []
        for sms in sorted({s.sms for s in self._samples[resource]}):
            kept = [s.performance for s in self._samples[resource] if s.sms == sms]
            mean = statistics.fmean(kept)
            spread = statistics.stdev(kept) / mean if len(kept) > 1 else 0.0
            rows.append(Row(sms / self.num_sms, mean, spread, len(kept)))
        return rows

    def exchange(self, guest: Resource) -> list[tuple[float, float]]:
        """The paper's own Table 3: (R, P) of a guest, R what the product beside it loses.

        Pairs in which another one costs the product less and gives the guest more are left out.
        """
        pairs = sorted((1 - compute, kept) for resource, compute, kept in self._pairs if resource is guest)
        frontier: list[tuple[float, float]] = []
        for share, kept in pairs:
            if not frontier or kept > frontier[-1][1]:
                frontier.append((share, kept))
        return frontier


def _means(samples: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    counts = sorted({sms for sms, _ in samples})
    means = [statistics.fmean(v for sms, v in samples if sms == c) for c in counts]
    return np.array(counts, float), np.array(means)
