"""Stage II (NanoFlow §4.1.3): assign each nano-operation of a given structure its share R of the SMs. Uses CP-SAT.

Concurrent operations use at most all SMs together. An operation takes D_best / P(R). R is one of a few SM counts, which
makes "share times overlap" linear: two operations whose counts do not fit together must not overlap.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, pairwise, product

import msgspec
from ortools.sat.python import cp_model

from weft.autosearch.bench_protocol import Load
from weft.autosearch.machine import Machine
from weft.autosearch.pipeline_structure import Candidate
from weft.autosearch.simulate import members_of_lanes
from weft.autosearch.structure_search import TICKS, make_solver
from weft.engine.model.operations import Resource
from weft.engine.plans.plan import Edge, NanoOperation, Period

SM_STEP = 4
POLISH_ROUNDS = 4
NETWORK_LEVELS = 4  # SM counts of collectives to try with each SM count of attention.


def guest_levels(num_sms: int) -> tuple[int, ...]:
    """SM counts for memory and network operations that share the GPU: up to half, in steps of 4."""
    step = SM_STEP if num_sms >= 2 * SM_STEP else 1
    return tuple(range(step, num_sms // 2 + 1, step))


class ResourceAssignment:
    """Chooses the SM shares of one period."""

    def __init__(self, machine: Machine, period: Period, load: Load) -> None:
        self._machine, self._period, self._load = machine, period, load
        works = machine.works(period, load)
        total, levels = machine.num_sms, self._guest_levels()
        self._levels = [
            (*((total - n for n in reversed(levels)) if self._is_compute(op) else levels), total)
            for op in period.operations
        ]
        self._duration = [
            {n: machine.duration(op.operation, work, n, serial=op.config is None) for n in self._levels[i]}
            for i, (op, work) in enumerate(zip(period.operations, works, strict=True))
        ]

    def _is_compute(self, op: NanoOperation) -> bool:
        return self._machine.resource(op.operation) is Resource.COMPUTE

    def _guest_levels(self) -> tuple[int, ...]:
        """Use every second count if there are three lanes; the solver then gets much further in its time."""
        levels = guest_levels(self._machine.num_sms)
        return levels[1::2] or levels if len(members_of_lanes(self._period)) > 2 else levels

    def evaluate(self, period: Period) -> Candidate:
        return Candidate(self._machine.timeline(period, self._load)[0].ms, period)

    def greedy(self) -> Candidate:
        """Try one SM count per lane of guests, with the remaining SMs for all GEMMs. Operations start when they can."""
        total = self._machine.num_sms
        guests = sorted({op.lane for op in self._period.operations if not self._is_compute(op)} - {"compute"})
        found = [self.evaluate(with_sms(self._period, [total] * len(self._period.operations)))]
        tried = {lane: self._guest_levels() for lane in guests}
        if len(guests) > 1:
            tried["network"] = tried["network"][:NETWORK_LEVELS]
        for counts in product(*tried.values()):
            of_lane = dict(zip(guests, counts, strict=True))
            for taken in {sum(counts), max(counts, default=0)}:  # all guests at once, or one at a time
                rest = [
                    total - taken if self._is_compute(op) else of_lane.get(op.lane, total)
                    for op in self._period.operations
                ]
                if all(count in levels for count, levels in zip(rest, self._levels, strict=True)):
                    found.append(self.evaluate(with_sms(self._period, rest)))
        return min(found, key=lambda c: c.ms)

    def polish(self, choice: Candidate, stop_requested: Callable[[], bool] = lambda: False) -> Candidate:
        """Change the SMs of one operation at a time while the simulated period gets shorter."""
        for _ in range(POLISH_ROUNDS):
            if stop_requested():
                break
            best = min((self.evaluate(p) for p in self._neighbours(choice.period)), key=lambda c: c.ms, default=choice)
            if best.ms >= choice.ms * (1 - 1e-4):
                break
            choice = best
        return choice

    def _neighbours(self, period: Period) -> Iterator[Period]:
        total, step = self._machine.num_sms, guest_levels(self._machine.num_sms)[0]
        counts = [op.sms for op in period.operations]
        for i, op in enumerate(period.operations):
            for count in sorted({op.sms - step, op.sms + step, total} - {op.sms}):
                lowest = total - guest_levels(total)[-1] if self._is_compute(op) else step
                if lowest <= count <= total:
                    yield with_sms(period, [*counts[:i], count, *counts[i + 1 :]])

    def solve(self, hint: Candidate, effort: float, seconds: float = float("inf")) -> Candidate:
        """Return the solver's best candidate as simulated, or `hint` if that is no better.

        effort: deterministic solver time, roughly seconds. seconds: wall-clock limit."""
        ops = self._period.operations
        tick = max(hint.ms, 1e-9) / TICKS
        model = cp_model.CpModel()
        length = model.new_int_var(1, TICKS + len(ops), "T")
        starts = [model.new_int_var(0, 2 * TICKS, f"s{i}") for i in range(len(ops))]
        chosen, lengths = [], []
        for i, levels in enumerate(self._levels):
            ticks = {n: max(1, round(self._duration[i][n] / tick)) for n in levels}
            # a count with which the operation outlasts the incumbent period is no candidate
            ticks = {n: t for n, t in ticks.items() if t <= TICKS} or {max(levels): min(TICKS, ticks[max(levels)])}
            sms = model.new_int_var_from_domain(cp_model.Domain.from_values(list(ticks)), f"R{i}")
            duration = model.new_int_var(min(ticks.values()), max(ticks.values()), f"d{i}")
            model.add_allowed_assignments([sms, duration], list(ticks.items()))
            model.add(duration <= length)
            chosen.append(sms)
            lengths.append(duration)
        for op, sms in zip(hint.period.operations, chosen, strict=True):
            model.add_hint(sms, op.sms)
        for edge in self._period.dependencies(self._machine.spec):
            model.add(starts[edge.after] >= starts[edge.before] + lengths[edge.before] + edge.distance * length)
        lanes = members_of_lanes(self._period)
        for members in lanes:
            for a, b in pairwise(members):
                model.add(starts[b] >= starts[a] + lengths[a])
            model.add(starts[members[0]] + length >= starts[members[-1]] + lengths[members[-1]])
            model.add(length >= sum(lengths[i] for i in members))
        model.add(starts[0] <= length)
        disjoint = self._disjoint(model, starts, lengths, length)
        self._capacity(model, chosen, disjoint, lanes)
        model.minimize(length)
        solver = make_solver(effort, max(0.0, seconds))
        if solver.solve(model) not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return hint
        values = [solver.value(s) for s in starts]
        ends = [v + solver.value(d) for v, d in zip(values, lengths, strict=True)]
        period = with_sms(self._period, [solver.value(n) for n in chosen])
        found = self.evaluate(self._ordered(period, values, ends, solver.value(length)))
        return min(hint, found, key=lambda c: c.ms)

    def _disjoint(
        self, model: cp_model.CpModel, starts: list[cp_model.IntVar], lengths: list[cp_model.IntVar],
        length: cp_model.IntVar,
    ) -> dict[tuple[int, int], cp_model.IntVar]:  # fmt: skip
        """Return a literal for every two operations of different lanes that implies they never run concurrently."""
        ops = self._period.operations
        out = {}
        for i, j in combinations(range(len(ops)), 2):
            if ops[i].lane == ops[j].lane:
                continue
            cases = []
            for turn in (0, 1):  # j of `turn` periods later lies between i and the next i
                case = model.new_bool_var(f"{i}|{j}@{turn}")
                model.add(starts[j] + turn * length >= starts[i] + lengths[i]).only_enforce_if(case)
                model.add(starts[i] + length >= starts[j] + turn * length + lengths[j]).only_enforce_if(case)
                cases.append(case)
            out[i, j] = model.new_bool_var(f"{i}|{j}")
            model.add_bool_or([out[i, j].negated(), *cases])
        return out

    def _capacity(
        self, model: cp_model.CpModel, chosen: list[cp_model.IntVar], disjoint: dict[tuple[int, int], cp_model.IntVar],
        lanes: list[list[int]],
    ) -> None:  # fmt: skip
        total = self._machine.num_sms
        for (i, j), literal in disjoint.items():
            model.add(chosen[i] + chosen[j] <= total).only_enforce_if(literal.negated())
        if len(lanes) < 3:
            return
        for i, j, k in product(*lanes):
            together = [disjoint[min(p), max(p)].negated() for p in ((i, j), (i, k), (j, k))]
            model.add(chosen[i] + chosen[j] + chosen[k] <= total).only_enforce_if(together)

    def _ordered(self, period: Period, starts: list[int], ends: list[int], length: int) -> Period:
        """Order the period by start times, and add a wait between successive operations that do not fit together.

        Without the wait the later one would start as soon as its inputs are ready and take SMs assigned to the other.
        """
        order = sorted(range(len(starts)), key=lambda i: (starts[i], i))
        ops = period.operations
        result = msgspec.structs.replace(period, operations=tuple(ops[i] for i in order))
        needed = []
        for (p, i), (q, j) in combinations(enumerate(order), 2):
            if ops[i].lane == ops[j].lane or ops[i].sms + ops[j].sms <= self._machine.num_sms:
                continue
            # i starts no later than j, so j of the same period follows i
            if starts[j] >= ends[i] and starts[i] + length >= ends[j]:
                needed += [Edge(p, q, 0), Edge(q, p, -1)]
        return without_implied(result, self._machine, needed)


def without_implied(period: Period, machine: Machine, needed: Sequence[Edge]) -> Period:
    """Return the period with the `needed` waits that dependencies and lanes do not already imply."""
    never = -99
    places = range(len(period.operations))
    # Distance in periods at which the second operation must wait for the first. The largest is the strongest.
    reach = {(a, b): 0 if a == b else never for a in places for b in places}

    def add(edge: Edge) -> None:
        for a in places:
            for b in places:
                path = reach[a, edge.before] + edge.distance + reach[edge.after, b]
                reach[a, b] = max(reach[a, b], path)

    for edge in period.dependencies(machine.spec):
        add(edge)
    for members in members_of_lanes(period):
        for a, b in pairwise(members):
            add(Edge(a, b, 0))
        add(Edge(members[-1], members[0], -1))
    waits = []
    # strongest first: nearest period, then latest operation to wait for, then earliest waiting operation
    for edge in sorted(needed, key=lambda e: (-e.distance, -e.before, e.after)):
        if reach[edge.before, edge.after] < edge.distance:
            waits.append(edge)
            add(edge)
    return msgspec.structs.replace(period, waits=tuple(waits))


def with_sms(period: Period, sms: Sequence[int]) -> Period:
    operations = (msgspec.structs.replace(op, sms=n) for op, n in zip(period.operations, sms, strict=True))
    return msgspec.structs.replace(period, operations=tuple(operations))


def assign(
    machine: Machine, period: Period, load: Load, effort: float, seconds: float = float("inf"),
    stop_requested: Callable[[], bool] = lambda: False,
) -> Candidate:  # fmt: skip
    """Assign shares to a period of stage I: greedily, then with the solver, then by single changes.

    seconds: wall-clock limit of the solver; the other steps take less than a second."""
    end = time.monotonic() + seconds
    shares = ResourceAssignment(machine, period, load)
    first = shares.greedy()
    if len(members_of_lanes(period)) < 3:  # with three lanes single changes help little before the solver
        first = shares.polish(first, stop_requested)
    if stop_requested() or time.monotonic() >= end:
        return first
    return shares.polish(shares.solve(first, effort, end - time.monotonic()), stop_requested)
