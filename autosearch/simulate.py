"""Plays a period over many layers, event by event: lanes run in launch order, dependencies hold, SMs are counted."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import NamedTuple

from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Period

LAYERS = 32


class Timeline(NamedTuple):
    """A steady period. Times in ms."""

    ms: float
    """length of the period: time per layer"""
    starts: tuple[float, ...]
    """of each nano-operation, from the start of the period's first one; one may end after the period does"""


def simulate(
    period: Period, spec: ModelSpec, durations: Sequence[float], num_sms: int, layers: int = LAYERS
) -> Timeline:
    """The steady period. Every operation lasts its duration (ms), whatever runs beside it. Raises as `play` does."""
    starts = {(turn, i): start for turn, i, start in play(period, spec, durations, num_sms, layers)}
    # between a third and two thirds of the way it neither fills nor drains
    first, last = max(1, layers // 3), max(2, 2 * layers // 3)
    length = (starts[last, 0] - starts[first, 0]) / (last - first)
    return Timeline(length, tuple(starts[last, i] - starts[last, 0] for i in range(len(period.operations))))


def play(
    period: Period, spec: ModelSpec, durations: Sequence[float], num_sms: int, layers: int
) -> list[tuple[int, int, float]]:
    """(turn, index of the operation, start in ms) of every nano-operation of `layers` layers, in the order of starts.

    An operation starts when the one before it in its lane and all that it depends on have ended and its SMs are free;
    of two that wait for SMs the one that was ready first starts first. Raises `ValueError` when nothing can proceed.
    """
    ops = period.operations
    waits: list[list[tuple[int, int]]] = [[] for _ in ops]  # (before, periods away)
    for edge in period.dependencies(spec):
        waits[edge.after].append((edge.before, edge.distance))
    lanes: dict[str, list[int]] = {}
    for i, op in enumerate(ops):
        lanes.setdefault(op.lane, []).append(i)
    for members in lanes.values():
        for place, i in enumerate(members):
            waits[i].append((members[place - 1], 0 if place else -1))
    # the first period holds only what belongs to the layer after it, the last one only what does not
    runs = {(t, i) for t in range(layers + 1) for i, op in enumerate(ops) if op.next_layer or t}
    runs -= {(layers, i) for i, op in enumerate(ops) if op.next_layer}
    missing: dict[tuple[int, int], int] = {}
    children: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for turn, i in runs:
        parents = {(turn + d, j) for j, d in waits[i]} & runs
        missing[turn, i] = len(parents)
        for parent in parents:
            children.setdefault(parent, []).append((turn, i))
    ready = [(0.0, turn, i) for (turn, i), count in missing.items() if not count]
    heapq.heapify(ready)
    ends: list[tuple[float, int, int]] = []
    starts: dict[tuple[int, int], float] = {}
    now, free = 0.0, num_sms
    while ready or ends:
        later = []
        while ready:
            since, turn, i = heapq.heappop(ready)
            if ops[i].sms <= free:
                starts[turn, i] = now
                free -= ops[i].sms
                heapq.heappush(ends, (now + durations[i], turn, i))
            else:
                later.append((since, turn, i))
        ready = later
        if not ends:
            raise ValueError("an operation needs more SMs than there are")
        now = ends[0][0]
        while ends and ends[0][0] <= now:
            _, turn, i = heapq.heappop(ends)
            free += ops[i].sms
            for child in children.get((turn, i), ()):
                missing[child] -= 1
                if not missing[child]:
                    heapq.heappush(ready, (now, *child))
    if len(starts) != len(runs):
        raise ValueError("the nano-operations wait for each other")
    return [(turn, i, start) for (turn, i), start in starts.items()]
