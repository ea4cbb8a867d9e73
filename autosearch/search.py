"""The search on one profile: two stages for each load, measured refinement, break-even loads; a plan and a report.

The solver goes first; measurements share the time that is left. Without a bench everything is predicted.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Protocol

import msgspec

from weft.autosearch import batches, breakeven, gantt
from weft.autosearch.bench_protocol import Bench, Load, PeriodBench, Timing
from weft.autosearch.machine import Machine
from weft.autosearch.profile import Profile
from weft.autosearch.profiler import configs_of, today
from weft.autosearch.refine import REPEATS, OutOfTime, Refiner, medians, serial_for, without_overlap
from weft.autosearch.report import Line, Result
from weft.autosearch.stages import Choice, Stages, predict
from weft.autosearch.structure import described
from weft.autosearch.timely import Timely
from weft.engine.errors import ConfigError
from weft.engine.model.operations import Resource, Role
from weft.engine.model.spec import ModelSpec
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
SOLVER_SHARE, SOLVER_SHARE_MEASURED = 0.8, 0.5
"""of the time that the solver may have, without and with a GPU to measure on"""


class Progress(Protocol):
    """Told what is done now, and the share of the whole that is behind it where that is known."""

    def __call__(self, text: str, share: float | None = None, /) -> None: ...


class Search:
    """One search. `bench` None: on the profile alone."""

    def __init__(
        self, spec: ModelSpec, load: Load, profile: Profile, bench: Bench | None, budget_s: float,
        progress: Progress = lambda *_: None, clock: Callable[[], float] = time.monotonic, max_num_seqs: int = 0,
        known: Sequence[Period] = (), ended: Callable[[], bool] = lambda: False, workers: int = 1,
        keep: Callable[[], None] = lambda: None, found: Callable[[Plan], None] = lambda _: None,
    ) -> None:  # fmt: skip
        """max_num_seqs: also search iterations of up to so many decodes and nothing else; 0: none.
        known: pipelines that compete from the start where they fit the load's tokens.
        ended: somebody wants the best that there is by now. workers: loads that are solved at once. keep: called when
        there is more in `stages` than before. found: called with the plan that would be the result by now.
        """
        self._ended, self._workers, self._keep, self._found = ended, workers, keep, found
        self._telling = threading.Lock()
        self._unsolved = batches.DENSE_STEPS + len(LOADS) - 1 + (2 if max_num_seqs else 0)
        """loads that the solver has not looked at, about"""
        self._solvable = self._unsolved
        self._solving: dict[str, float] = {}
        """loads that the solver looks at now, and the share of each that is behind it"""
        self._share = 0.0
        """of the search that is behind it"""
        self._spec, self._load, self._profile = spec, load, profile
        self._max_num_seqs, self._known = max_num_seqs, known
        self._capacity = profile.kv_capacity(spec)
        self._machine = Machine(profile, spec)
        self._budget_s, self._progress, self._clock = budget_s, progress, clock
        self._started = clock()
        end = self._started + budget_s
        self._bench = Timely(bench, self._machine, end, clock, ended) if bench is not None else None
        self._lines: list[Line] = []
        self._in_turn: list[tuple[int, Period, Load]] = []
        """what explains and decides nothing: measured last, for the lines of these indices"""
        self._accepted: tuple[str, ...] = ()
        self._dropped: list[str] = []
        self._final: list[Period] = []
        self._undecided: list[str] = []
        self._predicted: list[str] = []
        self.stages: dict[str, Stages] = {}
        """by `_key`; what is there already is not searched again"""

    def run(self, workload: str) -> Result:
        """Raises `ConfigError` when OR-tools is needed and not installed."""
        self._load = self._dense_batch()
        loads = [(name, breakeven.scaled(self._load, factor, self._capacity)) for name, factor in LOADS]
        alone = [
            (f"{d.decodes} decodes", d) for d in batches.decode_batches(self._load, self._max_num_seqs, self._capacity)
        ]
        self._solve(loads + alone)  # the solver's time first: what is left belongs to measurements
        groups: list[tuple[Load, list[tuple[str, Load]], Sequence[float]]]
        groups = [(self._load, loads, breakeven.KV_FACTORS)]
        groups += [(load, [(name, load)], DECODE_FACTORS) for name, load in alone]
        left = len(loads) + len(alone)
        for load, members, factors in groups:
            self._group(workload, load, members, factors, len(members) / left)
            left -= len(members)
        self._measure_in_turn()
        plan = self._plan(workload)
        found = self._machine.interference
        exchange = {r: rows for r in Resource if (rows := found.table(r))}
        table_3: dict[Resource, list[tuple[float, float]]] = {}
        table_3 |= {r: found.exchange(r) for r in exchange if r is not Resource.COMPUTE}
        notes = []
        if self._undecided:
            notes.append(f"out of time, not compared with the serial plan: {', '.join(self._undecided)}")
        if self._predicted:
            notes.append(f"out of time, in part predicted where a pipeline wins: {', '.join(self._predicted)}")
        return Result(
            plan, self._lines, exchange, table_3, self._accepted, tuple(self._dropped), self._clock() - self._started,
            self._bench is not None, self._load, tuple(notes), self._source,
        )  # fmt: skip

    @property
    def _source(self) -> str:
        return "formulas" if self._profile.modelled else "a recorded profile"

    def _plan(self, workload: str) -> Plan:
        """Of what there is by now."""
        final = tuple(self._final)
        made = f"{today()}, {'measured' if self._bench else f'predicted from {self._source}'}"
        made += f", {self._clock() - self._started:.0f} s"
        if self._ended():
            made += gantt.ENDED_EARLY
        dense = self._load.tokens if any(p.tokens == self._load.tokens for p in final) else 0
        sums = dict(self._spec.sums) if final else {}
        return Plan(self._profile.target, workload, final, dense_batch=dense, made=made, sums=sums)

    def _group(
        self, workload: str, load: Load, loads: Sequence[tuple[str, Load]], factors: Sequence[float], share: float
    ) -> None:
        """The best pipelines of `loads`, with the loads around `load` at which they are worth running, to the plan.

        share: of the time that is left. As soon as a pipeline has won, the plan has it where it is likely to win again.
        """
        begun, cost = self._clock(), self._bench.cost if self._bench is not None else 0.0
        end = begun + share * self._left()
        refined_by = end - cost * (LAST_LOOK * len(loads) + BREAK_EVEN * len(factors) * (1 + len(loads)))
        refined_by = max(refined_by, begun + REFINING_SHARE * (end - begun))
        before, periods = self._final, list[Period]()
        for i, (name, each) in enumerate(loads):
            stages = self._staged(name, each)
            # with too little for all loads, the first ones are compared rather than none
            seconds = max(LEAST_LOOK * cost, (refined_by - self._clock()) / (len(loads) - i))
            with self._until(self._clock() + seconds):
                best = self._best(name, each, stages, seconds)
            if best is None or best in periods:
                continue
            periods.append(best)
            if self._bench is not None:
                by_record = [
                    self._described(p.period, p.load, again=False) for p in self._placed(load, periods, factors)
                ]
                self._final = before + [period for period in by_record if _wins(period)]
                self._found(self._plan(workload))
        if not periods:
            return
        bench, progress = self._bench or self._machine, self._about("break-even")
        last = min(cost * LAST_LOOK * len(periods), (end - self._clock()) / 2)
        try:
            with self._until(end - last):
                placed = breakeven.place(bench, self._spec, periods, load, progress, factors, self._capacity)
        except OutOfTime:
            self._predicted += [name for name, _ in loads]
            placed = self._placed(load, periods, factors)
        with self._until(end):
            self._final = before + self._kept([self._described(p.period, p.load) for p in placed])
        self._found(self._plan(workload))

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

    def _staged(self, name: str, load: Load) -> Stages:
        self._solve([(name, load)])
        if (found := self.stages.get(self._key(name, load))) is not None:
            return found
        return Stages(self._machine.serial_ms(load), float("inf"), [])  # it has ended

    def _key(self, name: str, load: Load) -> str:
        collectives = f"{described(self._spec)}: " if self._spec.sums else ""
        return collectives + _key(name, load)

    def _solve(self, loads: Sequence[tuple[str, Load]]) -> None:
        """Stages for these, so far as there are none: as many at once as there are workers. None once it has ended."""
        wanted = {key: load for name, load in loads if (key := self._key(name, load)) not in self.stages}
        if not wanted or self._ended():
            return
        at_once = min(self._workers, len(wanted))
        if at_once == 1:
            for key, load in wanted.items():
                self._solve_one(key, load, 1)
            return
        with ThreadPoolExecutor(at_once) as pool:  # the solver lets other threads run
            for done in [pool.submit(self._solve_one, key, load, at_once) for key, load in wanted.items()]:
                done.result()

    def _solve_one(self, key: str, load: Load, at_once: int) -> None:
        if self._ended():
            return
        share = SOLVER_SHARE if self._bench is None else SOLVER_SHARE_MEASURED
        # As much of what is left now as the loads to come have of what is to come: whatever took longer than it was
        # to, as kernels do that are compiled, takes from solving and measuring alike.
        each, rounds = share * at_once / self._solvable, max(1, -(-self._unsolved // at_once))
        seconds = self._left() * each / (each * rounds + 1 - share)

        def about(text: str, within: float) -> None:
            with self._telling:
                self._solving[key] = within
                behind = self._solvable - self._unsolved + sum(self._solving.values())
                self._tell(f"{key}: {text}", share * min(1.0, behind / self._solvable))

        found = predict(self._machine, load, about, seconds, self._clock, self._ended)
        with self._telling:
            self.stages[key] = found
            self._solving.pop(key, None)
            self._unsolved = max(0, self._unsolved - 1)
            if not self._ended():  # what was cut short is not for the next search
                self._keep()

    def _tell(self, text: str, solved: float = 0.0) -> None:
        """solved: share of the search that the solver has behind it; who measures as well uses all of the time."""
        spent = min(1.0, (self._clock() - self._started) / max(1e-9, self._budget_s))
        self._share = max(self._share, spent if self._bench is not None else max(solved, spent))
        self._progress(text, self._share)

    def _left(self) -> float:
        """Seconds."""
        return 0.0 if self._ended() else max(0.0, self._budget_s - (self._clock() - self._started))

    def _dense_batch(self) -> Load:
        """The load of the dense batch whose best pipeline takes the least time a token.

        Tiles and SMs must come out even: fewer tokens in whole waves can beat more of them. Where no pipeline is faster
        than the serial plan of the largest dense batch, it is that one.
        """
        bench: PeriodBench = self._bench or self._machine
        name, full = LOADS[0][0], batches.steady_within(self._load, self._capacity)
        serial = serial_for(self._spec, full, self._machine.num_sms)
        try:
            best = (bench.period(serial, full).ms * (1 - breakeven.MIN_GAIN) / full.tokens, full)
        except OutOfTime:
            return full
        candidates = batches.dense_batches(full)
        if self._workers > 1:  # else one by one, between measurements
            self._solve([(name, load) for load in candidates])
        for load in candidates:
            stages = self._staged(name, load)
            if not stages.choices:
                continue
            self._tell(f"{load.tokens} tokens")
            chosen = stages.choices[0]
            try:
                timing = bench.period(chosen.period, load)
            except OutOfTime:
                break
            measured = timing if self._bench is not None else None
            self._lines.append(Line(f"{load.tokens} tokens", "stage II", chosen.ms, measured))
            best = min(best, (timing.ms / load.tokens, load))
        return best[1]

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
        refiner = Refiner(self._bench, self._spec, load, configs_of(self._spec), self._about(name), self._clock)
        with contextlib.suppress(OutOfTime):  # first: whenever the search is ended, there is something to go by
            self._bench.period(serial, load)
        affordable = int(seconds / self._bench.cost) if self._bench.cost else len(choices)
        looked_at = choices[: max(1, affordable - LEAST_LOOK + 1)]
        climbing = max(self._bench.cost * len(looked_at), seconds - self._bench.cost * MEASURED_EACH)
        with self._until(self._clock() + climbing):
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
            if not _wins(period):
                at = f"{period.tokens} tokens, {period.figures['kv_tokens']:,.0f} KV tokens"
                gain = period.figures["gain"]
                self._dropped.append(f"{at}: gain {gain:.3f} when measured again, the serial plan runs")
        return [period for period in described if _wins(period)]

    def _about(self, name: str) -> Callable[[str], None]:
        return lambda text: self._tell(f"{name}: {text}")

    def _described(self, period: Period, load: Load, *, again: bool = True) -> Period:
        """With its figures at `load`, where it and the serial plan were measured. again: measure both once more."""
        serial = serial_for(self._spec, load, self._machine.num_sms)
        timeline, durations = self._machine.timeline(period, load)
        figures = {
            "kv_tokens": float(load.kv_tokens),
            "predicted_ms": timeline.ms,
            "serial_predicted_ms": self._machine.period(serial, load).ms,
            "predicted_joules": self._machine.period(period, load).joules,
            "serial_predicted_joules": self._machine.period(serial, load).joules,
        }
        if self._bench is not None:
            if again:
                self._tell(f"{load.tokens} tokens, {load.kv_tokens:,} KV tokens: the last look")
                own, plain = self._looked([period, serial], load)
            else:
                own, plain = (self._bench.record.measured(p, load) for p in (period, serial))
            assert own is not None
            assert plain is not None
            figures |= {
                "measured_ms": own.ms, "measured_watts": own.watts, "measured_mhz": own.mhz,
                "measured_joules": own.joules, "serial_measured_ms": plain.ms, "serial_measured_watts": plain.watts,
                "serial_measured_mhz": plain.mhz, "serial_measured_joules": plain.joules,
            }  # fmt: skip
        kind = "measured" if self._bench is not None else "predicted"
        figures["gain"] = figures[f"serial_{kind}_ms"] / figures[f"{kind}_ms"]
        for i, (start, ms) in enumerate(zip(timeline.starts, durations, strict=True)):
            figures |= {f"start.{i}": start, f"ms.{i}": ms}
        for op, work in zip(serial.operations, self._machine.works(serial, load), strict=True):
            figures[f"serial.{op.operation}"] = self._machine.curves.ms(
                op.operation, work, self._machine.num_sms, serial=True
            )
        return msgspec.structs.replace(
            period, figures={k: round(v, 6) for k, v in figures.items()}, offload=offload_beside(self._spec)
        )


def _wins(period: Period) -> bool:
    return period.figures["gain"] > 1 + breakeven.MIN_GAIN


def offload_beside(spec: ModelSpec) -> str:
    """The largest product, where memory is idlest for longest: gate-up of the FFN (paper §4.2.2)."""
    products = [o for o in spec.layer_operations() if o.role in (Role.PRODUCT, Role.EXPERTS)]
    return max(products, key=lambda o: o.parameters).name


def _key(name: str, load: Load) -> str:
    return f"{name}, {load.tokens} tokens"
