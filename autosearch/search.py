"""The search on one profile: both stages for each load, measured refinement, break-even loads, plan and report.

The solver runs first. Measurements share the remaining time. Without a bench everything is predicted.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext

from weft.autosearch import break_even, dense_batch, gantt
from weft.autosearch.bench_protocol import Bench, Load, Timing
from weft.autosearch.break_even import wins, with_figures
from weft.autosearch.machine import Machine
from weft.autosearch.pipeline_structure import Candidate
from weft.autosearch.profile import today
from weft.autosearch.profiler import configs_of
from weft.autosearch.refine import REPEATS, OutOfTime, Refiner, medians, serial_for, without_overlap
from weft.autosearch.report import Line, Result
from weft.autosearch.time_budget import TimeBudget
from weft.autosearch.timed_bench import TimedBench
from weft.autosearch.two_stage_search import LoadSolver, StageResults, StageStore
from weft.engine.errors import ConfigError
from weft.engine.model.operations import Resource
from weft.engine.plans.plan import Period, Plan

CURE = "a larger --budget-seconds may find a better one"
REFINED = 3  # Pipelines of one load from which refinement may start.
MEASURED_EACH = 3 * REPEATS  # Measurements per load after its refinement: the reported medians.
MIN_MEASUREMENTS = 2  # Measurements that compare a pipeline with the serial plan.
REFINING_SHARE = 0.4
"""Minimum share of a load group's time for its pipelines. The rest finds their break-even loads."""
BREAK_EVEN = 3.5  # Maximum loads that a break-even search measures, per initial load.
FINAL_MEASUREMENTS = 2 * REPEATS  # Final measurements of each pipeline of a load group and of the serial plan.
DECODE_FACTORS = (0.25, 0.5, 0.75, 1.0)
"""KV per decode relative to the workload's, for iterations of decodes that fill the pool."""
LOADS = (("typical", 1.0), ("light", 0.5), ("heavy", 1.5))
"""Loads and their KV per decode relative to the workload's."""


class Search:
    """One search. It uses the profile alone if `bench` is None."""

    def __init__(
        self, machine: Machine, load: Load, bench: Bench | None, budget: TimeBudget, *, max_num_seqs: int = 0,
        known: Sequence[Period] = (), store: StageStore | None = None, workers: int = 1,
    ) -> None:  # fmt: skip
        """max_num_seqs: largest decode-only iteration to search; 0: none. known: pipelines that compete at loads of
        their token count. workers: loads to solve in parallel."""
        self._machine, self._load, self._budget = machine, load, budget
        self._max_num_seqs, self._known = max_num_seqs, known
        self._spec, self._profile = machine.spec, machine.profile
        self._capacity = self._profile.kv_capacity(self._spec)
        self._bench = TimedBench(bench, machine, budget) if bench is not None else None
        loads = dense_batch.DENSE_STEPS + len(LOADS) - 1 + (2 if max_num_seqs else 0)
        self._solver = LoadSolver(
            machine, budget, store or StageStore(), loads, measured=bench is not None, workers=workers
        )  # fmt: skip
        self._lines: list[Line] = []
        self._sequential: list[tuple[int, Period, Load]] = []
        """Index of a line, and its period without overlap. It decides nothing, so it is measured last."""
        self._accepted: tuple[str, ...] = ()
        self._dropped: list[str] = []
        self._final: list[Period] = []
        self._undecided: list[str] = []
        self._predicted: list[str] = []

    def run(self, workload: str, found: Callable[[Plan], None] = lambda _: None) -> Result:
        """Search. found: receives intermediate plans. Raises `ConfigError` if OR-Tools is needed but not installed."""
        full = dense_batch.steady_within(self._load, self._capacity)
        self._load, self._lines = dense_batch.choose_dense_batch(
            LOADS[0][0], full, self._machine, self._bench, self._solver, self._budget
        )  # fmt: skip
        loads = [(name, break_even.scaled(self._load, factor, self._capacity)) for name, factor in LOADS]
        decodes = dense_batch.decode_batches(self._load, self._max_num_seqs, self._capacity)
        decode_only = [(f"{load.decodes} decodes", load) for load in decodes]
        self._solver.solve(loads + decode_only)  # first, so that measurements get all of the remaining time
        groups: list[tuple[Load, list[tuple[str, Load]], Sequence[float]]]
        groups = [(self._load, loads, break_even.KV_FACTORS)]
        groups += [(load, [(name, load)], DECODE_FACTORS) for name, load in decode_only]
        left = len(loads) + len(decode_only)
        for load, members, factors in groups:
            for _ in self._group(load, members, factors, len(members) / left):
                found(self._plan(workload))
            left -= len(members)
        self._measure_sequential()
        plan = self._plan(workload)
        interference = self._machine.interference
        exchange = {r: rows for r in Resource if (rows := interference.table(r))}
        table_3: dict[Resource, list[tuple[float, float]]] = {}
        table_3 |= {r: interference.exchange(r) for r in exchange if r is not Resource.COMPUTE}
        notes = []
        if cut := self._solver.unfinished():
            notes.append(f"out of time before all pipelines were tried ({CURE}): {'; '.join(cut)}")
        if self._undecided:
            notes.append(f"out of time, not compared with the serial plan: {', '.join(self._undecided)}")
        if self._predicted:
            notes.append(f"out of time, break-even loads partly predicted: {', '.join(self._predicted)}")
        return Result(
            plan, self._lines, exchange, table_3, self._accepted, tuple(self._dropped), self._budget.spent,
            self._bench is not None, self._load, tuple(notes), self._source,
        )  # fmt: skip

    @property
    def _source(self) -> str:
        return "formulas" if self._profile.modelled else "a recorded profile"

    def _plan(self, workload: str) -> Plan:
        """Build the plan from the results so far."""
        final = tuple(self._final)
        made = f"{today()}, {'measured' if self._bench else f'predicted from {self._source}'}"
        made += f", {self._budget.spent:.0f} s"
        if self._budget.stop_requested():
            made += gantt.ENDED_EARLY
        elif self._solver.unfinished():
            made += gantt.OUT_OF_TIME
        dense = self._load.tokens if any(p.tokens == self._load.tokens for p in final) else 0
        sums = dict(self._spec.sums) if final else {}
        return Plan(self._profile.target, workload, final, dense_batch=dense, made=made, sums=sums)

    def _group(
        self, load: Load, loads: Sequence[tuple[str, Load]], factors: Sequence[float], share: float
    ) -> Iterator[None]:
        """Add the best pipelines of `loads` to the plan, with the loads around `load` at which they win.

        A pipeline that has won is in the plan at once, for the loads at which it probably wins. Yields after each
        change of the plan. share: of the remaining time."""
        begun, cost = self._budget.clock(), self._bench.cost if self._bench is not None else 0.0
        end = begun + share * self._budget.left
        refined_by = end - cost * (FINAL_MEASUREMENTS * len(loads) + BREAK_EVEN * len(factors) * (1 + len(loads)))
        refined_by = max(refined_by, begun + REFINING_SHARE * (end - begun))
        before, periods = self._final, list[Period]()
        for i, (name, each) in enumerate(loads):
            results = self._solver.results(name, each)
            # if time is too short for all loads, compare the first ones
            seconds = max(MIN_MEASUREMENTS * cost, (refined_by - self._budget.clock()) / (len(loads) - i))
            with self._until(self._budget.clock() + seconds):
                best = self._best(name, each, results, seconds)
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
        bench, progress = self._bench or self._machine, self._reporter("break-even")
        last = min(cost * FINAL_MEASUREMENTS * len(periods), (end - self._budget.clock()) / 2)
        try:
            with self._until(end - last):
                placed = break_even.place(bench, self._spec, periods, load, progress, factors, self._capacity)
        except OutOfTime:
            self._predicted += [name for name, _ in loads]
            placed = self._placed(load, periods, factors)
        with self._until(end):
            self._final = before + self._kept([self._described(p.period, p.load) for p in placed])
        yield

    def _placed(
        self, load: Load, periods: Sequence[Period], factors: Sequence[float]
    ) -> list[break_even.PlacedPeriod]:  # fmt: skip
        """Place periods by the record: break-even loads may be predicted, the load of each period was measured."""
        assert self._bench is not None
        record = self._bench.record
        placed = []
        for each in break_even.place(record, self._spec, periods, load, factors=factors, capacity=self._capacity):
            own = each.period
            gains = {}
            for at in record.loads(own):
                plain = record.measured(serial_for(self._spec, at, self._machine.num_sms), at)
                timing = record.measured(own, at)
                if plain is not None and timing is not None and own.min_kv_tokens <= at.kv_tokens < own.max_kv_tokens:
                    gains[at] = plain.ms / timing.ms
            if gains:
                placed.append(break_even.PlacedPeriod(own, max(gains, key=gains.__getitem__)))
        return placed

    def _measure_sequential(self) -> None:
        """Measure the cost of cutting the batch if time is left."""
        if self._bench is None:
            return
        for i, period, load in self._sequential:
            self._reporter(self._lines[i].load)(self._lines[i].stage)
            with contextlib.suppress(OutOfTime, ConfigError):
                self._lines[i] = self._lines[i]._replace(measured=medians(self._bench, [period], load)[0])

    def _until(self, end: float) -> contextlib.AbstractContextManager[None]:
        return self._bench.until(end) if self._bench is not None else nullcontext()

    def _best(self, name: str, load: Load, results: StageResults, seconds: float) -> Period | None:
        """Return the best pipeline for this load, refined for `seconds` if there is a bench.

        Returns None if the serial plan is faster or there was no time to compare."""
        serial = serial_for(self._spec, load, self._machine.num_sms)
        self._lines.append(Line(name, "stage I, no interference", results.structure_ms, None))
        known = [Candidate(self._machine.period(p, load).ms, p) for p in self._known if p.tokens == load.tokens]
        choices = results.choices[:REFINED] + known
        if not choices:
            return None
        chosen = choices[0] if self._bench is not None else min(choices, key=lambda c: c.ms)
        if self._bench is None:
            sequential_ms = self._machine.period(without_overlap(chosen.period, self._machine.num_sms), load).ms
            serial_ms = self._machine.fastest_serial(load).serial_ms(load)
            self._lines.append(Line(name, "serial", serial_ms, None))
            if serial_ms < results.serial_ms:
                self._lines.append(Line(name, "serial, same collectives", results.serial_ms, None))
            self._lines.append(Line(name, "nano-batches in sequence", sequential_ms, None))
            self._lines.append(Line(name, "stage II", chosen.ms, None))
            return chosen.period if chosen.ms < serial_ms else None
        refiner = Refiner(
            self._bench, self._spec, load, configs_of(self._spec), self._reporter(name), self._budget.clock
        )
        with contextlib.suppress(OutOfTime):  # first, so that there is a baseline whenever the search ends
            self._bench.period(serial, load)
        affordable = int(seconds / self._bench.cost) if self._bench.cost else len(choices)
        candidates = choices[: max(1, affordable - MIN_MEASUREMENTS + 1)]
        climbing = max(self._bench.cost * len(candidates), seconds - self._bench.cost * MEASURED_EACH)
        with self._until(self._budget.clock() + climbing):
            refined = refiner.run([c.period for c in candidates], climbing)
        best = refined.period if refined is not None else chosen.period
        if refined is None and self._bench.record.measured(best, load) is None:
            if self._bench.over:  # otherwise none of them can run here
                self._undecided.append(name)
            return None
        self._reporter(name)("repeating the best pipeline and the serial plan")
        others = [chosen.period] if chosen.period != best and self._bench.record.loads(chosen.period) else []
        last, plain, *rest = self._medians([best, serial, *others], load)
        first = last if chosen.period == best else rest[0] if rest else None
        sequential = without_overlap(best, self._machine.num_sms)
        self._lines.append(Line(name, "serial", results.serial_ms, plain))
        self._sequential.append((len(self._lines), sequential, load))
        self._lines.append(Line(name, "nano-batches in sequence", self._machine.period(sequential, load).ms, None))
        self._lines.append(Line(name, "stage II", chosen.ms, first))
        if refined is not None:
            predicted = self._machine.period(best, load).ms
            self._lines.append(Line(name, f"refined, {refined.tried} tried", predicted, last))
            self._accepted += tuple(f"{name}: {text}" for text in refined.accepted)
        if last is None or plain is None:
            self._undecided.append(name)
            return None
        return best if last.ms < plain.ms else None

    def _medians(self, periods: Sequence[Period], load: Load) -> list[Timing | None]:
        """Measure medians. Once time is over, use earlier measurements, if any."""
        assert self._bench is not None
        try:
            return list(medians(self._bench, periods, load))
        except OutOfTime:
            return [self._bench.record.measured(p, load) for p in periods]

    def _kept(self, described: Sequence[Period]) -> list[Period]:
        """Keep the periods that win again. The first time, the luckiest of many measurements decided."""
        for period in described:
            if not wins(period):
                at = f"{period.tokens} tokens, {period.figures['kv_tokens']:,.0f} KV tokens"
                gain = period.figures["gain"]
                self._dropped.append(f"{at}: gain {gain:.3f} when measured again, the serial plan runs")
        return [period for period in described if wins(period)]

    def _reporter(self, name: str) -> Callable[[str], None]:
        return lambda text: self._budget.report(f"{name}: {text}")

    def _described(self, period: Period, load: Load, *, again: bool = True) -> Period:
        """Add the period's figures at `load`. again: measure it and the serial plan once more."""
        if self._bench is None:
            return with_figures(self._machine, period, load, None)
        serial = serial_for(self._spec, load, self._machine.num_sms)
        if again:
            self._budget.report(f"{load.tokens} tokens, {load.kv_tokens:,} KV tokens: final measurement")
            own, plain = self._medians([period, serial], load)
        else:
            own, plain = (self._bench.record.measured(p, load) for p in (period, serial))
        assert own is not None
        assert plain is not None
        return with_figures(self._machine, period, load, (own, plain))
