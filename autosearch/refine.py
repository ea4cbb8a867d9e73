"""Measured refinement: hill climbing on a bench over SM shares, sizes, order and kernel configurations.

Measurements are sustained, so a pipeline that is faster only until the power limit is reached does not win.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import NamedTuple

import msgspec

from weft.autosearch.bench_protocol import Load, PeriodBench, Timing
from weft.engine.errors import ConfigError, WeftError
from weft.engine.model.operations import Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import TOKEN_STEP, Edge, Period, serial_period
from weft.kernels.matmul.gemm_config import GemmConfig

MIN_GAIN = 0.002  # Relative difference below which medians are equal.
SCREEN = 1.01  # A first measurement slower by this factor is not repeated.
REPEATS = 3
SM_STEP = 4
Clock = Callable[[], float]
Move = tuple[str, Period]


class OutOfTime(WeftError):
    """A measurement would not finish in the available time."""


class Refined(NamedTuple):
    """The result of `Refiner`."""

    period: Period
    ms: float  # Last measurement, or the median of several.
    tried: int
    accepted: tuple[str, ...]  # Accepted changes, in order.


class Refiner:
    """Climbs from a period. `configs`: kernel configurations to try for GEMMs."""

    def __init__(
        self, bench: PeriodBench, spec: ModelSpec, load: Load, configs: Sequence[GemmConfig] = (),
        progress: Callable[[str], None] = lambda _: None, clock: Clock = time.monotonic,
    ) -> None:  # fmt: skip
        self._bench, self._spec, self._load, self._configs = bench, spec, load, configs
        self._progress, self._clock = progress, clock
        self._resource = {o.name: o.resource for o in spec.layer_operations()}
        # bound by compute, but can run in the memory lane too
        self._movable = [o.name for o in spec.layer_operations() if o.role is Role.PREFILL_ATTENTION]
        self._tried: dict[bytes, float] = {}

    def run(self, candidates: Sequence[Period], budget_s: float) -> Refined | None:
        """Climb from the best of `candidates`. Returns None if none of them can run."""
        end = self._clock() + budget_s
        first = [(t.ms, i) for i, p in enumerate(candidates) if (t := self._measure(p)) is not None]
        if not first:
            return None
        current = candidates[min(first)[1]]
        accepted: list[str] = []
        rng = random.Random(0)
        improved = True
        while improved and self._clock() < end:
            improved = False
            moves = list(self.moves(current))
            rng.shuffle(moves)
            for text, period in moves:
                if self._clock() >= end:
                    break
                if self._better(period, current):
                    current, improved = period, True
                    accepted.append(text)
                    self._progress(f"accepted: {text}")
                    break
        return Refined(current, self._tried[period_key(current)], len(self._tried), tuple(accepted))

    def _measure(self, period: Period) -> Timing | None:
        """Return None if this GPU cannot run the period or no time is left."""
        try:
            period.check(self._spec, self._bench.num_sms)
            timing = self._bench.period(period, self._load)
        except OutOfTime:
            return None
        except ConfigError:
            self._tried[period_key(period)] = float("inf")
            return None
        self._tried[period_key(period)] = timing.ms
        self._progress(f"pipeline {len(self._tried)}: {timing.ms:.3f} ms per layer")
        return timing

    def _better(self, period: Period, current: Period) -> bool:
        if period_key(period) in self._tried:
            return False
        timing = self._measure(period)
        if timing is None or timing.ms > self._tried[period_key(current)] * SCREEN:
            return False
        self._progress("repeating 2 pipelines")
        try:
            new, old = medians(self._bench, [period, current], self._load)
        except OutOfTime:
            return False
        self._tried[period_key(period)], self._tried[period_key(current)] = new.ms, old.ms
        return new.ms < old.ms * (1 - MIN_GAIN)

    # -- moves

    def moves(self, period: Period) -> Iterator[Move]:
        """Yield every neighbor. Many are invalid, which `Period.check` detects."""
        yield from self._shares(period)
        yield from _sizes(period)
        yield from _orders(period)
        for edge in period.waits:
            waits = tuple(e for e in period.waits if e != edge)
            yield "one wait fewer", msgspec.structs.replace(period, waits=waits)
        yield from self._other_configs(period)
        for name, other in product(self._movable, ("compute", "memory")):
            if any(o.operation == name and o.lane != other for o in period.operations):
                yield f"{name} on the {other} lane", _changed(period, name, lane=other)

    def _shares(self, period: Period) -> Iterator[Move]:
        total = self._bench.num_sms
        for step in (-SM_STEP, SM_STEP):
            operations = tuple(
                op if op.sms == total else msgspec.structs.replace(
                    op, sms=op.sms - step if self._resource[op.operation] is Resource.COMPUTE else op.sms + step
                )
                for op in period.operations
            )  # fmt: skip
            yield f"guests {step:+d} SMs", msgspec.structs.replace(period, operations=operations)
            for i, op in enumerate(period.operations):
                yield f"{op.label} {step:+d} SMs", _changed(period, i, sms=op.sms + step)
        for i, op in enumerate(period.operations):
            if op.sms != total:
                yield f"{op.label} on all SMs", _changed(period, i, sms=total)

    def _other_configs(self, period: Period) -> Iterator[Move]:
        for name in dict.fromkeys(o.operation for o in period.operations if o.config is not None):
            for config in self._configs:
                text = f"{name} with {config.tokens}x{config.features}x{config.depth} group {config.group}"
                yield text, _changed(period, name, config=config)


def medians(bench: PeriodBench, periods: Sequence[Period], load: Load) -> list[Timing]:
    """Return the median of `REPEATS` measurements of each period, alternating so that clock drift affects all alike.

    Uses fewer measurements if time runs out. Raises `OutOfTime` if there is not even one of each."""
    repeats: list[list[Timing]] = []
    for _ in range(REPEATS):
        try:
            repeats.append([bench.period(p, load) for p in periods])
        except OutOfTime:
            if not repeats:
                raise
            break
    return [median(each) for each in zip(*repeats, strict=True)]


def median(timings: Sequence[Timing]) -> Timing:
    return Timing(*(statistics.median(values) for values in zip(*timings, strict=True)))


def period_key(period: Period) -> bytes:
    """Identify what a measurement depends on: tokens, operations and waits."""
    return msgspec.json.encode((period.tokens, period.operations, period.waits))


def _changed(period: Period, which: str | int, **change: object) -> Period:
    """Change one nano-operation, given its index, or all of one operation, given its name."""
    operations = (
        msgspec.structs.replace(o, **change) if which in (i, o.operation) else o
        for i, o in enumerate(period.operations)
    )  # fmt: skip
    return msgspec.structs.replace(period, operations=tuple(operations))


def _sizes(period: Period) -> Iterator[Move]:
    """Move a boundary between token ranges by one step, for every operation that is cut there."""
    for place in period.begins[1:]:
        for step in (-TOKEN_STEP, TOKEN_STEP):
            to = place + step
            if 0 < to < period.tokens and to not in period.begins:
                operations = (
                    msgspec.structs.replace(
                        o, begin=to if o.begin == place else o.begin, end=to if o.end == place else o.end
                    )
                    for o in period.operations
                )  # fmt: skip
                text = f"cut at {to} instead of {place}"
                yield text, msgspec.structs.replace(period, operations=tuple(operations))


def _orders(period: Period) -> Iterator[Move]:
    """Swap neighbors in a lane."""
    last: dict[str, int] = {}
    for j, op in enumerate(period.operations):
        if (i := last.get(op.lane)) is not None:
            operations = list(period.operations)
            operations[i], operations[j] = operations[j], operations[i]
            swap = {i: j, j: i}
            waits = tuple(
                Edge(swap.get(e.before, e.before), swap.get(e.after, e.after), e.distance) for e in period.waits
            )
            yield (
                f"{op.label} before {period.operations[i].label}",
                msgspec.structs.replace(period, operations=tuple(operations), waits=waits),
            )
        last[op.lane] = j


def without_overlap(period: Period, num_sms: int) -> Period:
    """Run the same nano-operations in sequence on all SMs. This isolates the cost of cutting the batch (paper §6.4)."""
    operations = (msgspec.structs.replace(op, lane="compute", sms=num_sms) for op in period.operations)
    return msgspec.structs.replace(period, operations=tuple(operations), waits=())


def serial_for(spec: ModelSpec, load: Load, num_sms: int) -> Period:
    """Return the serial plan of an iteration, padded to full steps like the engine's buckets."""
    tokens = -(-load.tokens // TOKEN_STEP) * TOKEN_STEP
    return serial_period(spec, tokens, num_sms, decode_only=not load.prefill_tokens)
