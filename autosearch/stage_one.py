"""Stage I (NanoFlow §4.1.2): number, sizes and order of nano-operations, without interference. CP-SAT.

The layer repeats, so this is a modulo schedule: every nano-operation has a place `r` in the period of length T and
belongs to this layer or, marked `next_layer`, to the one after. T is minimised.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

from ortools.sat.python import cp_model

from weft.autosearch.bench_protocol import Load
from weft.autosearch.machine import Machine
from weft.autosearch.profile import work_of
from weft.autosearch.solver import solver_for
from weft.autosearch.structure import Structure, attention, can_grow, first_structures
from weft.engine.model.operations import Resource
from weft.engine.plans.plan import TOKEN_STEP, NanoOperation, Period

TICKS = 6000
"""the serial period in the solver's unit of time"""
LEAST_SECONDS = 0.3
"""of a clock, in which the solver finds some period"""
NETWORK_SHARE = 0.125
"""of the SMs: few are enough for a link's speed"""
MIN_GAIN = 0.002
"""a longer structure must be shorter in time by this share"""


class Solved(NamedTuple):
    """A structure with sizes and an order."""

    ms: float
    period: Period
    structure: Structure
    starts: tuple[float, ...]
    ends: tuple[float, ...]
    """ms from the start of the period, in its order"""


class Tables(NamedTuple):
    """Durations of one structure's nano-operations by size."""

    smallest: int
    """steps of a token range that attention is cut into: its share of the decodes must fit"""
    ms: dict[str, list[float]]
    """operation -> ms for 0, 1, … steps of TOKEN_STEP tokens"""


def tables(machine: Machine, load: Load, structure: Structure, guest_sms: int) -> Tables:
    """Interference-free durations.

    guest_sms: SMs of memory operations, and of collectives up to `NETWORK_SHARE`. When they are all, so are those of
    products, as in the paper; else products have the others: how many tokens fill the last wave of tiles depends on it.
    """
    steps, total = load.tokens // TOKEN_STEP, machine.num_sms
    alone = guest_sms == total
    sms_of = {
        Resource.COMPUTE: total if alone else total - guest_sms,
        Resource.MEMORY: guest_sms,
        Resource.NETWORK: total if alone else min(guest_sms, max(1, round(total * NETWORK_SHARE))),
    }
    parts = max((len(cuts) + 1 for name, cuts in structure.cuts if name in attention(machine.spec)), default=1)
    ms = {}
    for name, op in machine.operations.items():
        sms = sms_of[op.resource]
        column = []
        for step in range(steps + 1):
            tokens = step * TOKEN_STEP
            decodes = min(tokens, -(-load.decodes // parts))
            part = load._replace(tokens=tokens, decodes=decodes)
            column.append(machine.curves.ms(name, work_of(op, part), sms))
        ms[name] = column
    return Tables(max(1, -(-load.decodes // (parts * TOKEN_STEP))), ms)


class _Schedule:
    """The modulo schedule of one structure as a CP-SAT model: variables, rules, and what a solution means."""

    def __init__(self, machine: Machine, load: Load, structure: Structure, guest_sms: int) -> None:
        self._machine, self._load, self._structure = machine, load, structure
        self._groups = structure.groups
        self._base = structure.period(machine.spec)
        self._table = tables(machine, load, structure, guest_sms)
        self._tick = machine.serial_ms(load) / TICKS
        """ms"""
        self.model = model = cp_model.CpModel()
        steps, bound, places = load.tokens // TOKEN_STEP, 2 * TICKS, range(len(self._groups))
        self._sizes = [model.new_int_var(1, steps, f"u{k}") for k in range(structure.pieces)]
        model.add(sum(self._sizes) == steps)
        self._period = model.new_int_var(1, bound, "T")
        self._starts = [model.new_int_var(0, bound, f"r{i}") for i in places]
        self._ahead = [model.new_bool_var(f"n{i}") for i in places]
        """`next_layer`"""
        self._lengths = [self._add_length(i) for i in places]
        self._add_dependencies()
        self._add_lanes()
        self._fix_beginning()
        model.minimize(self._period)

    def _add_length(self, i: int) -> cp_model.IntVar:
        """How long i takes, by its size; it fits into the period."""
        model, (name, a, b) = self.model, self._groups[i]
        size = sum(self._sizes[a:b])
        if name in attention(self._machine.spec):
            model.add(size >= self._table.smallest)
        ticks = [max(1, round(ms / self._tick)) for ms in self._table.ms[name]]
        length = model.new_int_var(min(ticks), max(ticks), f"d{i}")
        model.add_element(size, ticks, length)
        model.add(self._starts[i] < self._period)
        model.add(length <= self._period)
        return length

    def _after(self, j: int, i: int, shift: int, *only: cp_model.LiteralT) -> None:
        """i starts after j, `shift` periods earlier, has ended."""
        rule = self.model.add(self._starts[i] + shift * self._period >= self._starts[j] + self._lengths[j])
        if only:
            rule.only_enforce_if(*only)

    def _add_dependencies(self) -> None:
        model, ahead, after = self.model, self._ahead, self._after
        for edge in self._base.dependencies(self._machine.spec):
            j, i = edge.before, edge.after
            if edge.distance == 0:
                model.add_implication(ahead[i], ahead[j])
                after(j, i, 0, ahead[i])
                after(j, i, 0, ahead[j].negated())
                after(j, i, 1, ahead[j], ahead[i].negated())
            else:  # the layer before must be done
                model.add_implication(ahead[j], ahead[i])
                after(j, i, 0, ahead[i], ahead[j].negated())
                after(j, i, 1, ahead[j])
                after(j, i, 1, ahead[i].negated())

    def _add_lanes(self) -> None:
        """A lane does one operation at a time, also across the end of the period."""
        lanes: dict[str, list[int]] = {}
        for i, op in enumerate(self._base.operations):
            lanes.setdefault(op.lane, []).append(i)
        for members in lanes.values():
            self.model.add(self._period >= sum(self._lengths[i] for i in members))
            for i, j in combinations(members, 2):
                first = self.model.new_bool_var(f"{i}<{j}")
                self._after(i, j, 0, first)
                self._after(j, i, 1, first)
                self._after(j, i, 0, first.negated())
                self._after(i, j, 1, first.negated())

    def _fix_beginning(self) -> None:
        """A period may begin anywhere: it does at the product that waits for attention, which is of this layer."""
        for i, (name, a, _) in enumerate(self._groups):
            if a == 0 and _waits_for_guests(self._machine, name):
                self.model.add(self._starts[i] == 0)
                self.model.add(self._ahead[i] == 0)
                return

    def solved(self, solver: cp_model.CpSolver) -> Solved:
        """What the solver, which is done, has found."""
        machine, load, groups, tick = self._machine, self._load, self._groups, self._tick
        values = [solver.value(u) for u in self._sizes]
        edges = [TOKEN_STEP * sum(values[:k]) for k in range(self._structure.pieces + 1)]
        edges[-1] = load.tokens
        order = sorted(range(len(groups)), key=lambda i: (solver.value(self._starts[i]), i))
        operations = tuple(
            NanoOperation(
                groups[i][0], edges[groups[i][1]], edges[groups[i][2]], machine.num_sms, self._base.operations[i].lane,
                bool(solver.value(self._ahead[i])), machine.profile.configs.get(groups[i][0]),
            )
            for i in order
        )  # fmt: skip
        begins = tuple(solver.value(self._starts[i]) * tick for i in order)
        ends = tuple(b + solver.value(self._lengths[i]) * tick for b, i in zip(begins, order, strict=True))
        period = Period(load.tokens, operations)
        return Solved(solver.value(self._period) * tick, period, self._structure, begins, ends)


def solve(
    machine: Machine, load: Load, structure: Structure, guest_sms: int, effort: float, seconds: float = float("inf")
) -> Solved | None:  # fmt: skip
    """The shortest period of a structure; None when the solver found none.

    effort: the solver's deterministic time, about seconds. seconds: of a clock, which a busy machine needs more of.
    """
    schedule = _Schedule(machine, load, structure, guest_sms)
    solver = solver_for(effort, max(LEAST_SECONDS, seconds))
    found = solver.solve(schedule.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return schedule.solved(solver) if found else None


def _waits_for_guests(machine: Machine, name: str) -> bool:
    op = machine.operations[name]
    return op.resource is Resource.COMPUTE and any(
        machine.operations[p].resource is not Resource.COMPUTE for p in op.parents
    )


def bubble(solved: Solved) -> tuple[NanoOperation, NanoOperation] | None:
    """The operations before and after the longest pause of the compute lane; None when it never pauses."""
    lane = [
        (begin, end, op)
        for begin, end, op in zip(solved.starts, solved.ends, solved.period.operations, strict=True)
        if op.lane == "compute"
    ]
    pauses = []
    for i, (_, end, op) in enumerate(lane):
        begin, _, follower = lane[(i + 1) % len(lane)]
        pauses.append((begin + (solved.ms if i + 1 == len(lane) else 0) - end, i, op, follower))
    length, _, before, after = max(pauses, key=lambda p: (p[0], -p[1]))
    return (before, after) if length > solved.ms * MIN_GAIN else None


def grow(machine: Machine, solved: Solved) -> list[Structure]:
    """One more nano-batch for the operations beside the longest bubble, in each of the places where it can be cut."""
    beside = bubble(solved)
    if beside is None or not can_grow(solved.structure):
        return []
    names = {op.operation for op in beside}
    for name in list(names):  # and what the bubble waits for
        names.update(p for p in machine.operations[name].parents)
    if names & set(attention(machine.spec)):
        names.update(attention(machine.spec))
    everything = tuple(machine.operations)
    return [
        solved.structure.split(piece, chosen)
        for piece in range(solved.structure.pieces)
        for chosen in dict.fromkeys((tuple(sorted(names)), everything))
    ]


def search(
    machine: Machine, load: Load, guest_sms: int, effort: float, progress: Callable[[str], None] = lambda _: None,
    seconds: float = float("inf"), ended: Callable[[], bool] = lambda: False,
) -> list[Solved]:  # fmt: skip
    """Solved structures, shortest period first: two nano-batches, then more near bubbles until that stops helping.

    seconds: of a clock, at most, but for one structure. ended: nobody waits for more than there is.
    """
    end = time.monotonic() + seconds
    found: list[Solved] = []

    def attempt(structure: Structure, effort: float) -> Solved | None:
        left = 0.0 if ended() else end - time.monotonic()
        return solve(machine, load, structure, guest_sms, effort, left) if left > 0 or not found else None

    for structure in first_structures(machine.spec):
        progress("two nano-batches")
        if (solved := attempt(structure, effort)) is not None:
            found.append(solved)
    while found:
        best = min(found, key=_rank)
        grown = [s for structure in grow(machine, best) if (s := attempt(structure, effort * 2))]
        progress(f"{best.structure.pieces + 1} nano-batches")
        found.extend(grown)
        if not grown or min(grown, key=_rank).ms > best.ms * (1 - MIN_GAIN):
            break
    return sorted(found, key=_rank)


def _rank(solved: Solved) -> tuple[float, int]:
    return (solved.ms, len(solved.period.operations))
