"""The search on one profile: two stages for each load, measured refinement, break-even loads; a plan and a report.

The solver goes first; measurements share the time that is left. Without a bench everything is predicted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from weft.autosearch import batches, breakeven, gantt
from weft.autosearch.bench_protocol import Bench, Load, Timing
from weft.autosearch.budget import Budget
from weft.autosearch.dense_batch import choose_dense_batch
from weft.autosearch.figures import wins, with_figures
from weft.autosearch.machine import Machine
from weft.autosearch.profiler import configs_of, today
from weft.autosearch.refine import REPEATS, OutOfTime, Refiner, medians, serial_for, without_overlap
from weft.autosearch.report import Line, Result
from weft.autosearch.solving import Solving
from weft.autosearch.stages import Choice, KeptStages, Stages
from weft.autosearch.timely import Timely
from weft.engine.errors import ConfigError
from weft.engine.model.operations import Resource
from weft.engine.plans.plan import Period, Plan

REFINED = 3
"""pipelines of one load where its refinement may begin"""
MEASURED_EACH = 3 * REPEATS
"""measurements of one load behind its refinement: the medians of what is reported"""
LEAST_LOOK = 2
"""measurements that compare a pipeline with the serial plan"""
REFINING_SHARE = 0.4
"""of the time of one group of loads, at least, for its pipelines; what is left finds where they win"""
BREAK_EVEN = 3.5
"""loads that finding a break-even measures at most, for each that it begins with"""
LAST_LOOK = 2 * REPEATS
"""measurements of each pipeline that a group of loads ends with, and of the serial plan beside it"""
DECODE_FACTORS = (0.25, 0.5, 0.75, 1.0)
"""KV per decode where decodes fill the pool, in proportion"""
LOADS = (("typical", 1.0), ("light", 0.5), ("heavy", 1.5))
"""KV per decode, in proportion to the workload's"""


class Search:
    """One search. `bench` None: on the profile alone."""

    def __init__(
        self, machine: Machine, load: Load, bench: Bench | None, budget: Budget, *, max_num_seqs: int = 0,
        known: Sequence[Period] = (), kept: KeptStages | None = None, workers: int = 1,
    ) -> None:  # fmt: skip
        """max_num_seqs: also search iterations of up to so many decodes and nothing else; 0: none.
        known: pipelines that compete from the start where they fit the load's tokens. workers: loads that are solved at
        once.
        """
        self._machine, self._load, self._budget = machine, load, budget
        self._max_num_seqs, self._known = max_num_seqs, known
        self._spec, self._profile = machine.spec, machine.profile
        self._capacity = self._profile.kv_capacity(self._spec)
        self._bench = Timely(bench, machine, budget) if bench is not None else None
        loads = batches.DENSE_STEPS + len(LOADS) - 1 + (2 if max_num_seqs else 0)
        self._solving = Solving(
            machine, budget, kept or KeptStages(), loads, measured=bench is not None, workers=workers
        )  # fmt: skip
        self._lines: list[Line] = []
        self._in_turn: list[tuple[int, Period, Load]] = []
        """what explains and decides nothing: measured last, for the lines of these indices"""
        self._accepted: tuple[str, ...] = ()
        self._dropped: list[str] = []
        self._final: list[Period] = []
        self._undecided: list[str] = []
        self._predicted: list[str] = []

    def run(self, workload: str, found: Callable[[Plan], None] = lambda _: None) -> Result:
        """found: called with the plan that would be the result by now.

        Raises `ConfigError` when OR-tools is needed and not installed.
        """
        full = batches.steady_within(self._load, self._capacity)
        self._load, self._lines = choose_dense_batch(
            LOADS[0][0], full, self._machine, self._bench, self._solving, self._budget
        )  # fmt: skip
        loads = [(name, breakeven.scaled(self._load, factor, self._capacity)) for name, factor in LOADS]
        alone = [
            (f"{d.decodes} decodes", d) for d in batches.decode_batches(self._load, self._max_num_seqs, self._capacity)
        ]
        self._solving.solve(loads + alone)  # the solver's time first: what is left belongs to measurements
        groups: list[tuple[Load, list[tuple[str, Load]], Sequence[float]]]
        groups = [(self._load, loads, breakeven.KV_FACTORS)]
        groups += [(load, [(name, load)], DECODE_FACTORS) for name, load in alone]
        left = len(loads) + len(alone)
        for load, members, factors in groups:
            for _ in self._group(load, members, factors, len(members) / left):
                found(self._plan(workload))
            left -= len(members)
        self._measure_in_turn()
        plan = self._plan(workload)
        interference = self._machine.interference
        exchange = {r: rows for r in Resource if (rows := interference.table(r))}
        table_3: dict[Resource, list[tuple[float, float]]] = {}
        table_3 |= {r: interference.exchange(r) for r in exchange if r is not Resource.COMPUTE}
        notes = []
        if self._undecided:
            notes.append(f"out of time, not compared with the serial plan: {', '.join(self._undecided)}")
        if self._predicted:
            notes.append(f"out of time, in part predicted where a pipeline wins: {', '.join(self._predicted)}")
        return Result(
            plan, self._lines, exchange, table_3, self._accepted, tuple(self._dropped), self._budget.spent,
            self._bench is not None, self._load, tuple(notes), self._source,
        )  # fmt: skip

    @property
    def _source(self) -> str:
        return "formulas" if self._profile.modelled else "a recorded profile"

    def _plan(self, workload: str) -> Plan:
        """Of what there is by now."""
        final = tuple(self._final)
        made = f"{today()}, {'measured' if self._bench else f'predicted from {self._source}'}"
        made += f", {self._budget.spent:.0f} s"
        if self._budget.ended():
            made += gantt.ENDED_EARLY
        dense = self._load.tokens if any(p.tokens == self._load.tokens for p in final) else 0
        sums = dict(self._spec.sums) if final else {}
        return Plan(self._profile.target, workload, final, dense_batch=dense, made=made, sums=sums)

    def _group(
        self, load: Load, loads: Sequence[tuple[str, Load]], factors: Sequence[float], share: float
    ) -> Iterator[None]:
        """The best pipelines of `loads`, with the loads around `load` at which they are worth running, to the plan.

        share: of the time that is left. As soon as a pipeline has won, the plan has it where it is likely to win again.
        Yields whenever the plan is another.
        """
        begun, cost = self._budget.clock(), self._bench.cost if self._bench is not None else 0.0
        end = begun + share * self._budget.left
        refined_by = end - cost * (LAST_LOOK * len(loads) + BREAK_EVEN * len(factors) * (1 + len(loads)))
        refined_by = max(refined_by, begun + REFINING_SHARE * (end - begun))
        before, periods = self._final, list[Period]()
        for i, (name, each) in enumerate(loads):
            stages = self._solving.stages(name, each)
            # with too little for all loads, the first ones are compared rather than none
            seconds = max(LEAST_LOOK * cost, (refined_by - self._budget.clock()) / (len(loads) - i))
            with self._until(self._budget.clock() + seconds):
                best = self._best(name, each, stages, seconds)
            if best is None or best in periods:
                continue
            periods.append(best)
            if self._bench is not None:
                by_record = [
                    self._described(p.period, p.load, again=False) for p in self._placed(load, periods, factors)
                ]
                self._final = before + [period for period in by_record if wins(period)]
                yield
        if not periods:
            return
        bench, progress = self._bench or self._machine, self._about("break-even")
        last = min(cost * LAST_LOOK * len(periods), (end - self._budget.clock()) / 2)
        try:
            with self._until(end - last):
                placed = breakeven.place(bench, self._spec, periods, load, progress, factors, self._capacity)
        except OutOfTime:
            self._predicted += [name for name, _ in loads]
            placed = self._placed(load, periods, factors)
        with self._until(end):
            self._final = before + self._kept([self._described(p.period, p.load) for p in placed])
        yield

    def _placed(
        self, load: Load, periods: Sequence[Period], factors: Sequence[float]
    ) -> list[breakeven.Placed]:  # fmt: skip
        """By the record: bounds are predicted where they were not measured, the load of each is one where it was."""
        assert self._bench is not None
        record = self._bench.record
        placed = []
        for each in breakeven.place(record, self._spec, periods, load, factors=factors, capacity=self._capacity):
            own = each.period
            gains = {}
            for at in record.loads(own):
                plain = record.measured(serial_for(self._spec, at, self._machine.num_sms), at)
                timing = record.measured(own, at)
                if plain is not None and timing is not None and own.min_kv_tokens <= at.kv_tokens < own.max_kv_tokens:
                    gains[at] = plain.ms / timing.ms
            if gains:
                placed.append(breakeven.Placed(own, max(gains, key=gains.__getitem__)))
        return placed

    def _measure_in_turn(self) -> None:
        """What cutting the batch costs by itself, where there is time left."""
        if self._bench is None:
            return
        for i, period, load in self._in_turn:
            self._about(self._lines[i].load)(self._lines[i].stage)
            with contextlib.suppress(OutOfTime, ConfigError):
                self._lines[i] = self._lines[i]._replace(measured=medians(self._bench, [period], load)[0])

    def _until(self, end: float) -> contextlib.AbstractContextManager[None]:
        return self._bench.until(end) if self._bench is not None else nullcontext()

    def _best(self, name: str, load: Load, stages: Stages, seconds: float) -> Period | None:
        """The pipeline for this load, refined for so many seconds where there is a bench.

        None when the serial plan is faster, or there was no time to find out.
        """
        serial = serial_for(self._spec, load, self._machine.num_sms)
        self._lines.append(Line(name, "stage I, no interference", stages.structure_ms, None))
        known = [Choice(self._machine.period(p, load).ms, p) for p in self._known if p.tokens == load.tokens]
        choices = stages.choices[:REFINED] + known
        if not choices:
            return None
        chosen = choices[0] if self._bench is not None else min(choices, key=lambda c: c.ms)
        if self._bench is None:
            apart = self._machine.period(without_overlap(chosen.period, self._machine.num_sms), load).ms
            self._lines.append(Line(name, "serial", stages.serial_ms, None))
            self._lines.append(Line(name, "nano-batches in turn", apart, None))
            self._lines.append(Line(name, "stage II", chosen.ms, None))
            return chosen.period if chosen.ms < stages.serial_ms else None
        refiner = Refiner(self._bench, self._spec, load, configs_of(self._spec), self._about(name), self._budget.clock)
        with contextlib.suppress(OutOfTime):  # first: whenever the search is ended, there is something to go by
            self._bench.period(serial, load)
        affordable = int(seconds / self._bench.cost) if self._bench.cost else len(choices)
        looked_at = choices[: max(1, affordable - LEAST_LOOK + 1)]
        climbing = max(self._bench.cost * len(looked_at), seconds - self._bench.cost * MEASURED_EACH)
        with self._until(self._budget.clock() + climbing):
            refined = refiner.run([c.period for c in looked_at], climbing)
        best = refined.period if refined is not None else chosen.period
        if refined is None and self._bench.record.measured(best, load) is None:
            if self._bench.over:  # else none of them can run here
                self._undecided.append(name)
            return None
        self._about(name)("repeating the best beside the serial plan")
        others = [chosen.period] if chosen.period != best and self._bench.record.loads(chosen.period) else []
        last, plain, *rest = self._looked([best, serial, *others], load)
        first = last if chosen.period == best else rest[0] if rest else None
        in_turn = without_overlap(best, self._machine.num_sms)
        self._lines.append(Line(name, "serial", stages.serial_ms, plain))
        self._in_turn.append((len(self._lines), in_turn, load))
        self._lines.append(Line(name, "nano-batches in turn", self._machine.period(in_turn, load).ms, None))
        self._lines.append(Line(name, "stage II", chosen.ms, first))
        if refined is not None:
            predicted = self._machine.period(best, load).ms
            self._lines.append(Line(name, f"refined, {refined.tried} tried", predicted, last))
            self._accepted += tuple(f"{name}: {text}" for text in refined.accepted)
        if last is None or plain is None:
            self._undecided.append(name)
            return None
        return best if last.ms < plain.ms else None

    def _looked(self, periods: Sequence[Period], load: Load) -> list[Timing | None]:
        """Medians; where time is over, of what was measured before, if anything was."""
        assert self._bench is not None
        try:
            return list(medians(self._bench, periods, load))
        except OutOfTime:
            return [self._bench.record.measured(p, load) for p in periods]

    def _kept(self, described: Sequence[Period]) -> list[Period]:
        """Those that still win where they were placed: of many measurements the luckiest one decided there."""
        for period in described:
            if not wins(period):
                at = f"{period.tokens} tokens, {period.figures['kv_tokens']:,.0f} KV tokens"
                gain = period.figures["gain"]
                self._dropped.append(f"{at}: gain {gain:.3f} when measured again, the serial plan runs")
        return [period for period in described if wins(period)]

    def _about(self, name: str) -> Callable[[str], None]:
        return lambda text: self._budget.tell(f"{name}: {text}")

    def _described(self, period: Period, load: Load, *, again: bool = True) -> Period:
        """With its figures at `load`, where it and the serial plan were measured. again: measure both once more."""
        if self._bench is None:
            return with_figures(self._machine, period, load, None)
        serial = serial_for(self._spec, load, self._machine.num_sms)
        if again:
            self._budget.tell(f"{load.tokens} tokens, {load.kv_tokens:,} KV tokens: the last look")
            own, plain = self._looked([period, serial], load)
        else:
            own, plain = (self._bench.record.measured(p, load) for p in (period, serial))
        assert own is not None
        assert plain is not None
        return with_figures(self._machine, period, load, (own, plain))
