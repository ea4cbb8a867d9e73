"""Discrete-event simulation of a period over many layers, with launch order, dependencies and SM counts."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Period

LAYERS = 32
Drag = Callable[[int, Collection[int]], float]
"""Slowdown factor of an operation (its index) while other operations (their indices) run concurrently."""
Node = tuple[int, int]  # (turn, operation).


class Run(NamedTuple):
    """One run of a nano-operation (its index in the period). Times in ms."""

    turn: int
    operation: int
    start: float
    end: float


class Timeline(NamedTuple):
    """A steady period. Times in ms."""

    ms: float  # Length of the period: time per layer.
    starts: tuple[float, ...]
    """Start of each nano-operation after the first. An operation may end after the period does."""
    lasts: tuple[float, ...]


def simulate(
    period: Period, spec: ModelSpec, durations: Sequence[float], num_sms: int, layers: int = LAYERS,
    drag: Drag | None = None,
) -> Timeline:  # fmt: skip
    """Return the steady period. durations: in ms, before `drag` stretches them. Raises what `play` raises."""
    runs = {(r.turn, r.operation): r for r in play(period, spec, durations, num_sms, layers, drag)}
    # from one third to two thirds of the layers the pipeline neither fills nor drains
    first, last = max(1, layers // 3), max(2, 2 * layers // 3)
    origin = runs[last, 0].start
    steady = [runs[last, i] for i in range(len(period.operations))]
    return Timeline(
        (origin - runs[first, 0].start) / (last - first),
        tuple(r.start - origin for r in steady),
        tuple(r.end - r.start for r in steady),
    )


def play(
    period: Period, spec: ModelSpec, durations: Sequence[float], num_sms: int, layers: int, drag: Drag | None = None
) -> list[Run]:
    """Return every nano-operation of `layers` layers in the order of their ends.

    An operation starts once its predecessor in the lane and all its dependencies have ended and its SMs are free. SMs
    go to the operation that became ready first. Raises `ValueError` if nothing can proceed."""
    ops = period.operations
    missing, children = _graph(period, spec, layers)
    ready = [(0.0, turn, i) for (turn, i), count in missing.items() if not count]
    heapq.heapify(ready)
    running: dict[Node, _Progress] = {}
    done: list[Run] = []
    now, free = 0.0, num_sms
    while ready or running:
        later = []
        while ready:
            since, turn, i = heapq.heappop(ready)
            if ops[i].sms <= free:
                free -= ops[i].sms
                running[turn, i] = _Progress(now, now + durations[i])
            else:
                later.append((since, turn, i))
        ready = later
        if not running:
            raise ValueError("an operation needs more SMs than there are")
        if drag is not None:
            present = [i for _, i in running]
            for (_, i), progress in running.items():
                progress.slow_down(now, drag(i, [j for j in present if j != i]))
        now = min(p.end for p in running.values())
        for turn, i in sorted(key for key, p in running.items() if p.end <= now):
            done.append(Run(turn, i, running.pop((turn, i)).start, now))
            free += ops[i].sms
            for child in children.get((turn, i), ()):
                missing[child] -= 1
                if not missing[child]:
                    heapq.heappush(ready, (now, *child))
    if len(done) != len(missing):
        raise ValueError("the nano-operations wait for each other")
    return done


def _graph(period: Period, spec: ModelSpec, layers: int) -> tuple[dict[Node, int], dict[Node, list[Node]]]:
    """Return the number of dependencies and the dependents of every node of `layers` layers."""
    ops = period.operations
    waits: list[list[tuple[int, int]]] = [[] for _ in ops]  # (before, periods away)
    for edge in period.dependencies(spec):
        waits[edge.after].append((edge.before, edge.distance))
    for members in members_of_lanes(period):
        for place, i in enumerate(members):
            waits[i].append((members[place - 1], 0 if place else -1))
    # the first period runs only operations of the next layer, the last one only those of its own layer
    runs = {(t, i) for t in range(layers + 1) for i, op in enumerate(ops) if op.next_layer or t}
    runs -= {(layers, i) for i, op in enumerate(ops) if op.next_layer}
    missing: dict[Node, int] = {}
    children: dict[Node, list[Node]] = {}
    for turn, i in runs:
        parents = {(turn + d, j) for j, d in waits[i]} & runs
        missing[turn, i] = len(parents)
        for parent in parents:
            children.setdefault(parent, []).append((turn, i))
    return missing, children


def members_of_lanes(period: Period) -> list[list[int]]:
    """Indices of the operations of each lane, in order."""
    lanes: dict[str, list[int]] = {}
    for i, op in enumerate(period.operations):
        lanes.setdefault(op.lane, []).append(i)
    return list(lanes.values())


class _Progress:
    """A running operation and its end, unless concurrent operations change."""

    __slots__ = ("_drag", "end", "start")

    def __init__(self, start: float, end: float) -> None:
        self.start, self.end = start, end
        self._drag = 1.0

    def slow_down(self, now: float, drag: float) -> None:
        if drag != self._drag:
            self.end = now + (self.end - now) * drag / self._drag
            self._drag = drag
