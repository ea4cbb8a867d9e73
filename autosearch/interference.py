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
    beside: Resource
    """what the partner is short of"""


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
    """Slowdowns by resource and SM count, measured in pairs; what holds for pairs is taken to hold for three."""

    def __init__(self, profile: Profile, curves: Curves, resources: dict[str, Resource]) -> None:
        """resources: operation -> what it is short of. Pairs with an operation that is not there are left out."""
        self.num_sms = curves.num_sms
        self._samples: dict[Resource, list[Sample]] = {r: [] for r in Resource}
        self._pairs: list[tuple[Resource, float, float]] = []
        sides = [
            (
                (p.compute, p.compute_work, p.compute_sms, p.compute_ms),
                (p.guest, p.guest_work, p.guest_sms, p.guest_ms),
            )
            for p in profile.pairs
        ]
        sides += [
            (
                (p.memory, p.memory_work, p.memory_sms, p.memory_ms),
                (p.network, p.network_work, p.network_sms, p.network_ms),
            )
            for p in profile.guest_pairs
        ]
        for pair in sides:
            if any(side[0] not in resources for side in pair):
                continue
            performance: list[float] = []
            for (name, work, sms, ms), other in zip(pair, reversed(pair), strict=True):
                kept, own = curves.ms(name, work, self.num_sms) / ms, resources[name]
                performance.append(kept)
                slowdown = ms / curves.ms(name, work, sms)
                self._samples[own].append(Sample(name, sms, slowdown, kept, resources[other[0]]))
            if resources[pair[0][0]] is Resource.COMPUTE:
                self._pairs.append((resources[pair[1][0]], performance[0], performance[1]))
        self._curve = {r: _means([(s.sms, s.slowdown) for s in self._in_lanes(r)]) for r in Resource}
        beside_network = {r: [s for s in self._samples[r] if s.beside is Resource.NETWORK] for r in Resource}
        self._beside_network = {r: _means([(s.sms, s.slowdown) for s in own]) for r, own in beside_network.items()}

    def slowdown(self, resource: Resource, sms: int) -> float:
        """How much longer an operation takes beside a partner than alone on the same SMs; 1 with no pair measured.

        What a collective costs its partner is not in it: see `drag`.
        """
        return _at(self._curve[resource], sms)

    def drag(self, resource: Resource, sms: int) -> float:
        """How much longer still, while a collective runs beside it.

        Collectives are short: a product that lasts ten times as long is not slowed down by one all of its time.
        """
        return max(1.0, _at(self._beside_network[resource], sms) / self.slowdown(resource, sms))

    def _in_lanes(self, resource: Resource) -> list[Sample]:
        own = self._samples[resource]
        return [s for s in own if resource is Resource.NETWORK or s.beside is not Resource.NETWORK]

    def table(self, resource: Resource) -> list[Row]:
        """R -> P with its spread, by rising share. What is slowed down by collectives is left out, they are not."""
        rows = []
        for sms in sorted({s.sms for s in self._in_lanes(resource)}):
            kept = [s.performance for s in self._in_lanes(resource) if s.sms == sms]
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


def _at(curve: tuple[np.ndarray, np.ndarray], sms: int) -> float:
    counts, means = curve
    return max(1.0, float(np.interp(sms, counts, means))) if len(counts) else 1.0


def _means(samples: list[tuple[int, float]]) -> tuple[np.ndarray, np.ndarray]:
    counts = sorted({sms for sms, _ in samples})
    means = [statistics.fmean(v for sms, v in samples if sms == c) for c in counts]
    return np.array(counts, float), np.array(means)
