"""The whole search: profile, interference, two stages, measured refinement, break-even loads; a plan and a report.

Without a GPU it runs on a recorded profile and everything in the report is predicted.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Protocol

import msgspec

from weft.autosearch import breakeven, gantt, limits
from weft.autosearch.accelerators import accelerator
from weft.autosearch.alternatives import compare
from weft.autosearch.bar import SearchBar
from weft.autosearch.bench_protocol import Bench, Load, PeriodBench, Timing
from weft.autosearch.given import find_profile, known_plan
from weft.autosearch.journal import Journal, unfinished
from weft.autosearch.machine import Machine
from weft.autosearch.modelled import modelled_profile
from weft.autosearch.options import OneLineParser, add_search_flags
from weft.autosearch.profile import Profile, cache_path, kv_capacity
from weft.autosearch.profiler import Grid, Profiler, configs_of, open_gpu, today
from weft.autosearch.refine import REPEATS, OutOfTime, Refiner, medians, serial_for, without_overlap
from weft.autosearch.report import Line, Result, report
from weft.autosearch.stages import Choice, Stages, keep_stages, predict, read_stages
from weft.autosearch.structure import described
from weft.autosearch.timely import Timely
from weft.autosearch.workload import workload_load
from weft.engine.config import PRESETS, EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.model.directory import read_spec
from weft.engine.model.hub import find_model
from weft.engine.model.implementation import in_format
from weft.engine.model.operations import Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.choose import COLLECTIVES
from weft.engine.plans.plan import TOKEN_STEP, Period, Plan, Target
from weft.engine.wire.cores import cores

REFINED = 3
"""pipelines of one load where its refinement may begin"""
DENSE_STEPS = 5
"""dense batches that are looked at: the largest, then each TOKEN_STEP smaller"""
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
ALTERNATIVES_SHARE = 0.3
"""of the budget, for choosing among collectives where there are any"""
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
        self._unsolved = DENSE_STEPS + len(LOADS) - 1 + (2 if max_num_seqs else 0)
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
        alone = [(f"{d.decodes} decodes", d) for d in decode_batches(self._load, self._max_num_seqs, self._capacity)]
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
        name, full = LOADS[0][0], steady_within(self._load, self._capacity)
        serial = serial_for(self._spec, full, self._machine.num_sms)
        try:
            best = (bench.period(serial, full).ms * (1 - breakeven.MIN_GAIN) / full.tokens, full)
        except OutOfTime:
            return full
        batches = dense_batches(full)
        if self._workers > 1:  # else one by one, between measurements
            self._solve([(name, load) for load in batches])
        for load in batches:
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


def steady_within(load: Load, capacity: int | None) -> Load:
    """The same steady state with no more decodes than the KV pool has room for: the dense batch shrinks with them."""
    fitting = load.within(capacity)
    if fitting.decodes == load.decodes:
        return load
    steps = -(-load.tokens * fitting.decodes // (load.decodes * TOKEN_STEP))
    return fitting._replace(tokens=min(load.tokens, max(1, steps) * TOKEN_STEP))


def dense_batches(load: Load) -> list[Load]:
    """The load's own dense batch and smaller ones, with decodes in proportion: the same steady state."""
    sizes = [load.tokens - k * TOKEN_STEP for k in range(DENSE_STEPS)]
    return [load._replace(tokens=n, decodes=round(load.decodes * n / load.tokens)) for n in sizes if n >= TOKEN_STEP]


def decode_batches(load: Load, max_num_seqs: int, capacity: int | None) -> list[Load]:
    """Iterations in which nobody waits for prefill: every running request decodes.

    As many as have room at the workload's context, and `max_num_seqs` at a context for which they have; in whole steps
    that can be halved. Where that is no smaller than the dense batch, none.
    """
    fitting = max_num_seqs if capacity is None else min(max_num_seqs, capacity // load.context)
    batches = []
    for tokens in sorted({-(-n // (2 * TOKEN_STEP)) * 2 * TOKEN_STEP for n in (fitting, max_num_seqs)}):
        context = load.context if capacity is None else min(load.context, capacity // max(1, tokens))
        if 0 < tokens < load.tokens and context:
            batches.append(load._replace(tokens=tokens, decodes=tokens, context=context))
    return batches


def search(
    arguments: argparse.Namespace, progress: Progress = lambda *_: None, ended: Callable[[], bool] = lambda: False,
    found: Callable[[Plan], None] = lambda _: None,
) -> Result:  # fmt: skip
    """`weft search`: everything up to the plan; `found` hears of plans on the way.

    Raises `ConfigError`, `ModelError`, and `WeftError` when it is ended before there is a profile.
    """
    name, ranks = str(arguments.model_preset or arguments.model), arguments.tensor_parallel_size
    model = PRESETS / EngineConfig.known_preset(name) if arguments.model_preset else find_model(name, weights=False)
    whole = in_format(read_spec(model), arguments.quantization)
    if whole.experts is not None:
        raise ConfigError(f"{name} has experts, which weft search cannot measure yet: it runs serially")
    if whole.quantization is not None:
        measured = num_gpus() and not arguments.predict_only and arguments.gpu is None
        if ranks > 1 or not (measured or arguments.profile):
            raise ConfigError(
                "products in FP8 are measured on one GPU: search there, with --tensor-parallel-size 1 and without "
                "--predict-only and --gpu, or give a recorded profile"
            )
    spec = whole.shard(0, ranks)
    load = workload_load(arguments.workload, arguments.tokens, arguments.max_num_seqs, arguments.lengths)
    start = known_plan(arguments.start, spec) if arguments.start is not None else None
    gpu, target = None, None
    started = time.monotonic()

    def preparing(text: str) -> None:
        if ended():
            raise WeftError("ended before there was a plan to write; the same command goes on from here")
        beside = arguments.full_profile  # asked for beside the budget
        progress(text, None if beside else (time.monotonic() - started) / arguments.budget_seconds)

    if not arguments.predict_only and arguments.gpu is None and num_gpus() >= ranks:
        heaviest = breakeven.scaled(load, max(breakeven.KV_FACTORS))
        gpu, target = open_gpu(
            spec, heaviest, progress=preparing, model=model, tuning_seconds=arguments.tuning_seconds
        )  # fmt: skip
    with closing(gpu) if gpu is not None else nullcontext():
        bench: Bench | None = None
        if gpu is not None and target is not None:
            file = unfinished(target, load, "measured")
            if arguments.fresh:
                file.unlink(missing_ok=True)
            bench = journal = Journal(gpu, file)
            if journal.known:
                told = f"going on from a search that was interrupted, with {journal.known} measurements (else --fresh)"
                print(f"weft search: {told}", file=sys.stderr, flush=True)
        result, profile = _search(
            arguments, name, spec, load, bench, target, start, started, progress, preparing, ended, found
        )  # fmt: skip
    best, line = limits.optimum(profile, spec, whole)
    notes = [*result.notes, line]
    for stage, ms in _fastest(result):
        notes.append(limits.reached(stage, result.load.tokens, ms, spec, best))
    return result._replace(notes=(*notes, *limits.provenance(profile)))


def _fastest(result: Result) -> list[tuple[str, float]]:
    """(what, ms of a layer) of the serial plan on the dense batch, and of the fastest pipeline where that is faster."""
    load = LOADS[0][0]
    times: dict[str, float] = {}
    for line in result.lines:
        ms = line.measured.ms if line.measured is not None else line.predicted_ms
        if line.load == load and ms is not None and line.stage.startswith(("serial", "stage II", "refined")):
            kind = "serial plan" if line.stage == "serial" else "pipeline"
            times[kind] = min(ms, times.get(kind, ms))
    return [(kind, ms) for kind, ms in times.items() if kind == "serial plan" or ms < times.get("serial plan", ms)]


def _search(
    arguments: argparse.Namespace, name: str, spec: ModelSpec, load: Load, bench: Bench | None, target: Target | None,
    start: Plan | None, started: float, progress: Progress, preparing: Callable[[str], None],
    ended: Callable[[], bool], found: Callable[[Plan], None],
) -> tuple[Result, Profile]:  # fmt: skip
    profile: Profile | None
    if arguments.gpu is not None:
        profile = modelled_profile(spec, load, accelerator(arguments.gpu))
    else:
        profile = None if arguments.full_profile else find_profile(spec, load, arguments.profile, target)
    capacity = profile.kv_capacity(spec) if profile is not None else kv_capacity(bench.memory if bench else 0, spec)
    if capacity is not None and capacity < load.context:
        raise ConfigError(
            f"this GPU has no room for one request of {load.context} tokens beside the weights of "
            f"{name}: search on a larger one, or on more of them (--tensor-parallel-size)"
        )
    if profile is None:
        assert bench is not None
        assert target is not None
        profiler = Profiler(
            bench, spec, load, Grid.coarse(load, bench.num_sms),
            lambda text, i, n: preparing(f"profile: {text}, {i} of {n}"), Grid.full(load, bench.num_sms), COLLECTIVES,
        )  # fmt: skip
        seconds = float("inf") if arguments.full_profile else min(150.0, arguments.budget_seconds / 3)
        began = time.monotonic()
        profile = profiler.run(target, seconds, today())
        profile.save(cache_path(target))
        if arguments.full_profile:
            started += time.monotonic() - began  # asked for beside the budget
    if bench is not None:
        bench.seconds = arguments.measure_seconds
    solved = unfinished(profile.target, load, "solved", msgspec.json.encode(profile))
    if arguments.fresh:
        solved.unlink(missing_ok=True)
    keep_in = solved if arguments.stages is None else arguments.stages
    try:
        kept = read_stages(keep_in, profile.target, load)
    except ConfigError:
        if arguments.stages is not None:
            raise
        kept = {}
    budget = arguments.budget_seconds

    def behind(share: float = 0.0) -> float:
        return max(share, (time.monotonic() - started) / budget)

    ways = compare(
        spec, profile, steady_within(load, capacity), kept,
        lambda text, share: progress(text, behind(ALTERNATIVES_SHARE * share)), ALTERNATIVES_SHARE * budget, ended,
    )  # fmt: skip
    if not ways:
        raise ConfigError(f"the profile lacks operations of this model; it has {', '.join(profile.features)}")
    chosen = ways[0]
    known = start.periods if start is not None and start.sums == dict(chosen.spec.sums) else ()
    first = min(1.0, behind(ALTERNATIVES_SHARE if bench is None and len(ways) > 1 else 0.0))

    def rest(text: str, share: float | None = None) -> None:
        progress(text, None if share is None else first + (1 - first) * share)

    one = Search(
        chosen.spec, load, profile, bench, budget - (time.monotonic() - started), rest,
        max_num_seqs=arguments.max_num_seqs, known=(*known, *(c.period for c in chosen.stages.choices[:1])),
        ended=ended, workers=cores(), keep=lambda: keep_stages(keep_in, profile.target, load, kept), found=found,
    )  # fmt: skip
    one.stages = kept
    result = one.run(f"lengths of {arguments.lengths.name}" if arguments.lengths else arguments.workload)
    if arguments.stages is not None:
        keep_stages(arguments.stages, profile.target, load, one.stages)
    if len(ways) > 1:
        result = result._replace(notes=(*(f"collectives: {a.line}" for a in ways), *result.notes))
    files = [solved] if bench is None else [solved, unfinished(profile.target, load, "measured")]
    return result._replace(unfinished=tuple(files)), profile


def num_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def run(arguments: argparse.Namespace) -> int:
    """The command: progress on stderr, the report on stdout."""
    from rich.console import Console

    if arguments.tensor_parallel_size < 1:
        raise ConfigError(f"--tensor-parallel-size {arguments.tensor_parallel_size}: must be at least 1")
    if arguments.gpu is not None and (arguments.profile is not None or arguments.full_profile):
        raise ConfigError("--gpu searches on a modelled profile: leave out --profile and --full-profile")
    if arguments.full_profile:
        if arguments.profile is not None or arguments.predict_only:
            raise ConfigError("--full-profile measures a new profile: leave out --profile and --predict-only")
        if (here := num_gpus()) < (ranks := arguments.tensor_parallel_size):
            needed = "a GPU, and there is none here" if not here else f"{ranks} GPUs, and there are {here} here"
            raise ConfigError(f"--full-profile measures on {needed}")
    for option in ("budget", "measure"):
        seconds = getattr(arguments, f"{option}_seconds")
        if seconds <= 0:
            raise ConfigError(f"--{option}-seconds {seconds:g}: must be more than 0")
    if arguments.tuning_seconds < 0:
        raise ConfigError(f"--tuning-seconds {arguments.tuning_seconds:g}: must be 0 or more")
    for option in ("out", "svg", "stages"):  # before minutes of search
        path = getattr(arguments, option)
        if path is not None and not (path.parent.is_dir() and os.access(path.parent, os.W_OK) and not path.is_dir()):
            raise ConfigError(f"--{option} {path}: there is no folder {path.parent} to write such a file in")
    out: Path = arguments.out
    # a device, or what a link names, is written and not replaced
    ordinary = not os.path.lexists(out) or (out.is_file() and not out.is_symlink())
    partial = out.with_name(f"{out.name}.partial") if ordinary else out

    def keep(plan: Plan) -> None:
        if partial == out:
            return
        whole = partial.with_name(f"{partial.name}.{os.getpid()}")
        with contextlib.suppress(OSError):  # a full disk ends no search
            plan.save(whole)
            whole.replace(partial)

    with SearchBar(arguments.budget_seconds) as bar:
        result = search(arguments, bar, lambda: bar.ended, keep)
        result.plan.save(partial)
        if partial != out:
            partial.replace(out)
    if not bar.ended:  # else the same command goes on from there
        for file in result.unfinished:
            file.unlink(missing_ok=True)
    if arguments.svg is not None and result.plan.periods:
        shown = max(result.plan.periods, key=lambda p: p.figures["gain"])
        arguments.svg.write_text(gantt.svg(shown, f"{result.plan.target.gpu}, {result.plan.workload}"))
    report(result, Console())
    for i, period in enumerate(result.plan.periods):
        gantt.draw(period, Console(), title=f"pipeline {i + 1} of {len(result.plan.periods)}")
    print(f"{arguments.out}: {gantt.summary(result.plan)}")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """The command without the rest of weft, for a machine that has only a GPU."""
    parser = OneLineParser(prog="weft.autosearch.search", description=main.__doc__)
    add_search_flags(parser)
    try:
        return run(parser.parse_args(argv))
    except WeftError as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main())
