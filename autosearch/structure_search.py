"""Stage I (NanoFlow §4.1.2): find the number, sizes and order of nano-operations, without interference. Uses CP-SAT.

The layer repeats, so this is a modulo schedule: every nano-operation has a position `r` in the period of length T and
belongs to this layer or, if marked `next_layer`, to the following one. The solver minimizes T.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import combinations
from typing import NamedTuple

from ortools.sat.python import cp_model

from weft.autosearch.bench_protocol import Load
from weft.autosearch.machine import Machine
from weft.autosearch.pipeline_structure import Structure, attention, can_grow, first_structures
from weft.autosearch.profile import work_of
from weft.autosearch.simulate import members_of_lanes
from weft.engine.model.operations import Resource
from weft.engine.plans.plan import TOKEN_STEP, NanoOperation, Period

TICKS = 6000  # Length of the serial or incumbent period in the solver's unit of time.
LEAST_SECONDS = 0.3  # Wall-clock seconds within which the solver finds some period.
NETWORK_SHARE = 0.125  # Share of the SMs for collectives. Few SMs saturate a link.
MIN_GAIN = 0.002  # Minimum gain, as a share, that justifies a structure with more nano-batches.


class SolvedStructure(NamedTuple):
    """A structure with its token ranges and launch order. Times in ms."""

    ms: float
    period: Period
    structure: Structure
    starts: tuple[float, ...]
    ends: tuple[float, ...]  # Offsets from the start of the period, in launch order.


def duration_tables(
    machine: Machine, load: Load, structure: Structure, guest_sms: int
) -> tuple[int, dict[str, list[float]]]:
    """Return the minimum size of attention ranges, which must fit their decodes, and durations without interference.

    Sizes are in steps of TOKEN_STEP tokens; durations map each operation to ms for 0, 1, … steps.

    guest_sms: SMs of memory operations, and of collectives up to `NETWORK_SHARE`. If it is all SMs, GEMMs also get all
    of them, as in the paper. Otherwise GEMMs get the others, which sets how many tokens fill the last wave of tiles."""
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
    return max(1, -(-load.decodes // (parts * TOKEN_STEP))), ms


class _Schedule:
    """The modulo schedule of one structure as a CP-SAT model."""

    def __init__(self, machine: Machine, load: Load, structure: Structure, guest_sms: int) -> None:
        self._machine, self._load, self._structure = machine, load, structure
        self._groups = structure.groups
        self._base = structure.period(machine.spec)
        self._smallest, self._table = duration_tables(machine, load, structure, guest_sms)
        self._tick = machine.serial_ms(load) / TICKS  # ms
        self.model = model = cp_model.CpModel()
        steps, bound, places = load.tokens // TOKEN_STEP, 2 * TICKS, range(len(self._groups))
        self._sizes = [model.new_int_var(1, steps, f"u{k}") for k in range(structure.pieces)]
        model.add(sum(self._sizes) == steps)
        self._period = model.new_int_var(1, bound, "T")
        self._starts = [model.new_int_var(0, bound, f"r{i}") for i in places]
        self._ahead = [model.new_bool_var(f"n{i}") for i in places]  # `next_layer`
        self._lengths = [self._add_length(i) for i in places]
        self._add_dependencies()
        self._add_lanes()
        self._fix_beginning()
        model.minimize(self._period)

    def _add_length(self, i: int) -> cp_model.IntVar:
        """Add the duration of operation i as a function of its size. It must fit into the period."""
        model, (name, a, b) = self.model, self._groups[i]
        size = sum(self._sizes[a:b])
        if name in attention(self._machine.spec):
            model.add(size >= self._smallest)
        ticks = [max(1, round(ms / self._tick)) for ms in self._table[name]]
        length = model.new_int_var(min(ticks), max(ticks), f"d{i}")
        model.add_element(size, ticks, length)
        model.add(self._starts[i] < self._period)
        model.add(length <= self._period)
        return length

    def _after(self, j: int, i: int, shift: int, *only: cp_model.LiteralT) -> None:
        """Require operation i to start after j of `shift` periods earlier has ended, if all `only` literals hold."""
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
            else:  # the previous layer must be done
                model.add_implication(ahead[j], ahead[i])
                after(j, i, 0, ahead[i], ahead[j].negated())
                after(j, i, 1, ahead[j])
                after(j, i, 1, ahead[i].negated())

    def _add_lanes(self) -> None:
        """Require each lane to run one operation at a time, also across the end of the period."""
        for members in members_of_lanes(self._base):
            self.model.add(self._period >= sum(self._lengths[i] for i in members))
            for i, j in combinations(members, 2):
                first = self.model.new_bool_var(f"{i}<{j}")
                self._after(i, j, 0, first)
                self._after(j, i, 1, first)
                self._after(j, i, 0, first.negated())
                self._after(i, j, 1, first.negated())

    def _fix_beginning(self) -> None:
        """Break the symmetry: the period begins with this layer's GEMM that depends on attention."""
        is_compute = {name: op.resource is Resource.COMPUTE for name, op in self._machine.operations.items()}
        for i, (name, a, _) in enumerate(self._groups):
            parents = self._machine.operations[name].parents
            if a == 0 and is_compute[name] and not all(is_compute[parent] for parent in parents):
                self.model.add(self._starts[i] == 0)
                self.model.add(self._ahead[i] == 0)
                return

    def solution(self, solver: cp_model.CpSolver) -> SolvedStructure:
        """Convert the solver's result."""
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
        return SolvedStructure(solver.value(self._period) * tick, period, self._structure, begins, ends)


def make_solver(effort: float, seconds: float) -> cp_model.CpSolver:
    """Return a solver that gives the same answer every time if the wall-clock limit `seconds` suffices.

    effort: deterministic solver time, roughly seconds."""
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.catch_sigint_signal = False  # the command handles Ctrl-C
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = effort
    solver.parameters.max_time_in_seconds = seconds
    return solver


def solve(
    machine: Machine, load: Load, structure: Structure, guest_sms: int, effort: float, seconds: float = float("inf")
) -> SolvedStructure | None:  # fmt: skip
    """Return the shortest period of a structure, or None if the solver finds none.

    effort: deterministic solver time, roughly seconds. seconds: wall-clock limit; a busy machine needs more."""
    schedule = _Schedule(machine, load, structure, guest_sms)
    solver = make_solver(effort, max(LEAST_SECONDS, seconds))
    found = solver.solve(schedule.model) in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    return schedule.solution(solver) if found else None


def bubble(solved: SolvedStructure) -> tuple[NanoOperation, NanoOperation] | None:
    """Return the operations before and after the longest pause of the compute lane, or None if it never pauses."""
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


def grow(machine: Machine, solved: SolvedStructure) -> list[Structure]:
    """Add a nano-batch for the operations around the longest bubble, once for each piece that can be split."""
    adjacent = bubble(solved)
    if adjacent is None or not can_grow(solved.structure):
        return []
    names = {op.operation for op in adjacent}
    names.update(*(machine.operations[name].parents for name in names))  # and their inputs
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
    seconds: float = float("inf"), stop_requested: Callable[[], bool] = lambda: False,
) -> list[SolvedStructure]:  # fmt: skip
    """Search structures; returns the shortest period first.

    Starts with two nano-batches, then adds more around bubbles while that helps. At least one structure is solved, even
    if that takes longer than `seconds` (wall clock). The search stops early once `stop_requested()` is true."""
    end = time.monotonic() + seconds
    found: list[SolvedStructure] = []

    def attempt(structure: Structure, effort: float) -> SolvedStructure | None:
        left = 0.0 if stop_requested() else end - time.monotonic()
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


def _rank(solved: SolvedStructure) -> tuple[float, int]:
    return (solved.ms, len(solved.period.operations))
