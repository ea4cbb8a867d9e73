"""Break-even loads: the range of loads in which a pipeline beats the serial plan and the other pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

from weft.autosearch.bench_protocol import Load, PeriodBench, Timing
from weft.autosearch.machine import Machine
from weft.autosearch.refine import serial_for
from weft.engine.errors import ConfigError
from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import TOKEN_STEP, Period

KV_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
TOKEN_SHARES = (0.5, 0.75, 0.875)
HALVINGS = 2
MIN_GAIN = 0.005  # Share by which a pipeline must beat the serial plan to be worth running.


def scaled(load: Load, factor: float, capacity: int | None = None) -> Load:
    """Scale the KV tokens per decode. capacity: KV tokens that the device holds, if known."""
    return load._replace(context=max(1, round(load.context * factor))).within(capacity)


class PlacedPeriod(NamedTuple):
    """A period with its range of loads, and the load in that range where it gains most."""

    period: Period
    load: Load


class Row(NamedTuple):
    """The times at one load in ms: the serial plan less `MIN_GAIN`, then each period."""

    load: Load
    ms: tuple[float, ...]

    @property
    def winner(self) -> int:
        return min(range(len(self.ms)), key=self.ms.__getitem__)


def place(
    bench: PeriodBench, spec: ModelSpec, periods: Sequence[Period], load: Load,
    progress: Callable[[str], None] = lambda _: None, factors: Sequence[float] = KV_FACTORS,
    capacity: int | None = None,
) -> list[PlacedPeriod]:  # fmt: skip
    """Return the periods with the ranges of KV and tokens in which they are fastest, by rising KV. Periods may repeat.

    capacity: KV tokens that the device holds. No load exceeds it, so that each context is one KV count. Loads nearest
    to `load` are measured first. Outside the measured loads the serial plan runs. Raises the errors of the bench."""
    if not periods or not load.decodes:
        return []

    def measure(context: int) -> Row:
        each = load._replace(context=context)
        progress(f"{each.kv_tokens:,} KV tokens")
        serial = serial_ms(bench, spec, each)
        return Row(each, (serial * (1 - MIN_GAIN), *(_ms(bench, p, each) for p in periods)))

    contexts = {scaled(load, f).context for f in factors}
    if capacity is not None:
        contexts = {min(context, max(1, capacity // load.decodes)) for context in contexts}
    measured = [measure(context) for context in sorted(contexts, key=lambda c: abs(c - load.context))]
    rows = sorted(measured, key=lambda r: r.load.context)
    for _ in range(HALVINGS):  # refine where the winner changes
        middles = [(a.load.context + b.load.context) // 2 for a, b in pairwise(rows) if a.winner != b.winner]
        known = {r.load.context for r in rows}
        rows = sorted([*rows, *(measure(c) for c in middles if c not in known)], key=lambda r: r.load.context)
    out: list[PlacedPeriod] = []
    for winner, run in groupby(range(len(rows)), key=lambda k: rows[k].winner):
        span = list(run)
        if winner == 0:
            continue
        low, high = rows[0].load.kv_tokens, rows[-1].load.kv_tokens + 1
        if span[0] > 0:
            low = _crossing(rows[span[0] - 1], rows[span[0]])
        if span[-1] + 1 < len(rows):
            high = _crossing(rows[span[-1]], rows[span[-1] + 1])
        best = max((rows[k] for k in span), key=lambda r: r.ms[0] / r.ms[winner]).load
        tokens = _min_tokens(bench, spec, periods[winner - 1], best, progress)
        bounds = {"min_tokens": tokens, "min_kv_tokens": low, "max_kv_tokens": high}
        out.append(PlacedPeriod(msgspec.structs.replace(periods[winner - 1], **bounds), best))
    return out


def serial_ms(bench: PeriodBench, spec: ModelSpec, load: Load) -> float:
    """Milliseconds of the serial plan; if predicted, with the collectives that suit it best."""
    if isinstance(bench, Machine):
        bench = bench.fastest_serial(load)
        spec = bench.spec
    return bench.period(serial_for(spec, load, bench.num_sms), load).ms


def _ms(bench: PeriodBench, period: Period, load: Load) -> float:
    try:
        return bench.period(period, load).ms
    except ConfigError:
        return float("inf")


def _crossing(low: Row, high: Row) -> int:
    """Interpolate the KV tokens between two loads at which their winners take equally long."""
    a, b = low.winner, high.winner
    first, second = low.ms[a] - low.ms[b], high.ms[a] - high.ms[b]
    share = first / (first - second) if first != second and abs(first) != float("inf") else 0.5
    return round(low.load.kv_tokens + min(1.0, max(0.0, share)) * (high.load.kv_tokens - low.load.kv_tokens))


def _min_tokens(
    bench: PeriodBench, spec: ModelSpec, period: Period, load: Load, progress: Callable[[str], None]
) -> int:
    """Return the fewest tokens for which the period, padded to its bucket, beats the padded serial plan."""
    least = load.tokens
    for share in reversed(TOKEN_SHARES):
        tokens = round(period.tokens * share / TOKEN_STEP) * TOKEN_STEP
        if not 0 < tokens < least:
            continue
        progress(f"{tokens} tokens")
        fewer = load._replace(tokens=tokens, decodes=min(load.decodes, tokens))
        serial = serial_ms(bench, spec, fewer)
        if _ms(bench, period, fewer) > serial * (1 - MIN_GAIN):
            break
        least = tokens
    # within a step the serial plan takes equally long
    return (least - 1) // TOKEN_STEP * TOKEN_STEP + 1


def with_figures(machine: Machine, period: Period, load: Load, measured: tuple[Timing, Timing] | None) -> Period:
    """Fill in the period's `figures` for the plan file: times, energy, gain, and when each operation runs.

    measured: timings of the pipeline and of the serial plan; without them `gain` is the predicted one."""
    fastest = machine.fastest_serial(load)
    serial = serial_for(fastest.spec, load, machine.num_sms)
    timeline, durations = machine.timeline(period, load)
    plain = fastest.period(serial, load)
    figures = {
        "kv_tokens": float(load.kv_tokens),
        "predicted_ms": timeline.ms,
        "serial_predicted_ms": plain.ms,
        "predicted_joules": machine.period(period, load).joules,
        "serial_predicted_joules": plain.joules,
    }
    for prefix, timing in zip(("", "serial_"), measured or (), strict=False):
        figures |= {
            f"{prefix}measured_ms": timing.ms, f"{prefix}measured_watts": timing.watts,
            f"{prefix}measured_mhz": timing.mhz, f"{prefix}measured_joules": timing.joules,
        }  # fmt: skip
    kind = "predicted" if measured is None else "measured"
    figures["gain"] = figures[f"serial_{kind}_ms"] / figures[f"{kind}_ms"]
    for i, (start, ms) in enumerate(zip(timeline.starts, durations, strict=True)):
        figures |= {f"start.{i}": start, f"ms.{i}": ms}
    for op, work in zip(serial.operations, fastest.works(serial, load), strict=True):
        figures[f"serial.{op.operation}"] = machine.curves.ms(op.operation, work, machine.num_sms, serial=True)
    # Pages are offloaded during the largest GEMM, gate-up of the FFN: memory is idlest for longest there (§4.2.2).
    gemms = [o for o in machine.spec.layer_operations() if o.role in (Role.PROJECTION, Role.EXPERTS)]
    return msgspec.structs.replace(
        period,
        figures={k: round(v, 6) for k, v in figures.items()},
        offload=max(gemms, key=lambda o: o.parameters).name,
    )


def wins(period: Period) -> bool:
    return period.figures["gain"] > 1 + MIN_GAIN
