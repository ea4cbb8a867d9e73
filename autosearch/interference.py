"""Interference: the exchange of SMs for speed while two operations share the GPU (NanoFlow §4.1.1, Table 3).

A kernel receives its number of SMs, so its share R is exact; the paper infers R from the GEMM's loss. `slowdown` is the
cost of a concurrent operation beyond its SMs (memory, L2, power). P is the share of its solo speed that a kernel keeps.
"""

from __future__ import annotations

import statistics
from typing import NamedTuple

import msgspec
import numpy as np

from weft.autosearch.profile import Curves, Profile
from weft.engine.model.operations import Resource


class Sample(NamedTuple):
    """One operation of a pair."""

    sms: int
    slowdown: float  # Time in the pair / time alone on the same SMs.
    performance: float  # P: time alone on all SMs / time in the pair.
    partner: Resource  # Bottleneck of the other operation.


class Row(NamedTuple):
    """One column of Table 3: the share R of the SMs, the mean of P over pairs, and its relative standard deviation."""

    share: float
    performance: float
    spread: float
    pairs: int


class Interference:
    """Slowdowns by resource and SM count, measured in pairs. Three operations are assumed to behave as pairs do."""

    def __init__(self, profile: Profile, curves: Curves, resources: dict[str, Resource]) -> None:
        """resources: operation -> its bottleneck. Pairs with any other operation are ignored."""
        self.num_sms = curves.num_sms
        self._samples: dict[Resource, list[Sample]] = {r: [] for r in Resource}
        self._pairs: list[tuple[Resource, float, float]] = []
        for point in (*profile.pairs, *profile.guest_pairs):
            values = msgspec.structs.astuple(point)
            pair = values[:8:2], values[1:8:2]  # (name, work, SMs, ms) of both operations
            if any(side[0] not in resources for side in pair):
                continue
            performance: list[float] = []
            for (name, work, sms, ms), other in zip(pair, reversed(pair), strict=True):
                kept, own = curves.ms(name, work, self.num_sms) / ms, resources[name]
                performance.append(kept)
                slowdown = ms / curves.ms(name, work, sms)
                self._samples[own].append(Sample(sms, slowdown, kept, resources[other[0]]))
            if resources[pair[0][0]] is Resource.COMPUTE:
                self._pairs.append((resources[pair[1][0]], performance[0], performance[1]))
        self._curve = {r: _means(self._lasting(r)) for r in Resource}
        self._with_network = {
            r: _means([s for s in self._samples[r] if s.partner is Resource.NETWORK]) for r in Resource
        }

    def slowdown(self, resource: Resource, sms: int) -> float:
        """Time of an operation in a pair / time alone on the same SMs; 1 if no pair was measured.

        The cost of concurrent collectives is excluded: see `drag`."""
        return _at(self._curve[resource], sms)

    def drag(self, resource: Resource, sms: int) -> float:
        """Additional slowdown while a collective runs.

        It is separate because collectives are short: one slows a ten times longer GEMM for a part of its time only."""
        return max(1.0, _at(self._with_network[resource], sms) / self.slowdown(resource, sms))

    def _lasting(self, resource: Resource) -> list[Sample]:
        """Samples without the cost of concurrent collectives."""
        own = self._samples[resource]
        return [s for s in own if resource is Resource.NETWORK or s.partner is not Resource.NETWORK]

    def table(self, resource: Resource) -> list[Row]:
        """Return R -> P with its spread, by rising R. Operations slowed by collectives are excluded."""
        rows = []
        for sms in sorted({s.sms for s in self._lasting(resource)}):
            kept = [s.performance for s in self._lasting(resource) if s.sms == sms]
            mean = statistics.fmean(kept)
            spread = statistics.stdev(kept) / mean if len(kept) > 1 else 0.0
            rows.append(Row(sms / self.num_sms, mean, spread, len(kept)))
        return rows

    def exchange(self, guest: Resource) -> list[tuple[float, float]]:
        """Table 3 as in the paper: (R, P) of a memory or network operation; R is the loss of the concurrent GEMM.

        Returns the Pareto frontier only."""
        pairs = sorted((1 - compute, kept) for resource, compute, kept in self._pairs if resource is guest)
        frontier: list[tuple[float, float]] = []
        for share, kept in pairs:
            if not frontier or kept > frontier[-1][1]:
                frontier.append((share, kept))
        return frontier


def _at(curve: tuple[np.ndarray, np.ndarray], sms: int) -> float:
    counts, means = curve
    return max(1.0, float(np.interp(sms, counts, means))) if len(counts) else 1.0


def _means(samples: list[Sample]) -> tuple[np.ndarray, np.ndarray]:
    """Mean slowdown by SM count."""
    counts = sorted({s.sms for s in samples})
    means = [statistics.fmean(s.slowdown for s in samples if s.sms == c) for c in counts]
    return np.array(counts, float), np.array(means)
