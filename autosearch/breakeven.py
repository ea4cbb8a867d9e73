"""Where each pipeline wins: the loads from which and up to which it beats the serial plan and its rivals."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import groupby, pairwise
from typing import NamedTuple

import msgspec

from weft.autosearch.bench_protocol import Load, PeriodBench
from weft.autosearch.refine import serial_for
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import TOKEN_STEP, Period

KV_FACTORS = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0)
TOKEN_SHARES = (0.5, 0.75, 0.875)
HALVINGS = 2
MIN_GAIN = 0.005
"""a pipeline must beat the serial plan by this share to be worth running"""


def scaled(load: Load, factor: float, capacity: int | None = None) -> Load:
    """The same iteration with so many times the KV per decode, of which the device holds `capacity` tokens."""
    return load._replace(context=max(1, round(load.context * factor))).within(capacity)


def fewer(load: Load, tokens: int) -> Load:
    """The same decodes beside less prefill; fewer decodes when not even they fit."""
    return load._replace(tokens=tokens, decodes=min(load.decodes, tokens))


class Placed(NamedTuple):
    """A period with its bounds, and the load within them where it gains most."""

    period: Period
    load: Load


class Row(NamedTuple):
    """One load and what it takes: the serial plan, less the gain that is asked for, then each period (ms)."""

    load: Load
    ms: tuple[float, ...]

    @property
    def winner(self) -> int:
        return min(range(len(self.ms)), key=self.ms.__getitem__)


def place(
    bench: PeriodBench, spec: ModelSpec, periods: Sequence[Period], load: Load,
    progress: Callable[[str], None] = lambda _: None, factors: Sequence[float] = KV_FACTORS,
    capacity: int | None = None,
) -> list[Placed]:  # fmt: skip
    """The periods with the KV and token counts at which they are the fastest, by rising KV; one may appear twice.

    capacity: KV tokens that the device holds; no load has more, so that each context is one KV count.
    Raises what the bench raises when its time is over; the loads nearest to `load` are measured first.

    Beyond the measured loads nothing is promised: there the serial plan runs.
    """
    if not periods or not load.decodes:
        return []

    def measure(context: int) -> Row:
        each = load._replace(context=context)
        progress(f"{each.kv_tokens:,} KV tokens")
        serial = bench.period(serial_for(spec, each, bench.num_sms), each).ms
        return Row(each, (serial * (1 - MIN_GAIN), *(_ms(bench, p, each) for p in periods)))

    contexts = {scaled(load, f).context for f in factors}
    if capacity is not None:
        contexts = {min(context, max(1, capacity // load.decodes)) for context in contexts}
    measured = [measure(context) for context in sorted(contexts, key=lambda c: abs(c - load.context))]
    rows = sorted(measured, key=lambda r: r.load.context)
    for _ in range(HALVINGS):  # look closer where the winner changes
        middles = [(a.load.context + b.load.context) // 2 for a, b in pairwise(rows) if a.winner != b.winner]
        known = {r.load.context for r in rows}
        rows = sorted([*rows, *(measure(c) for c in middles if c not in known)], key=lambda r: r.load.context)
    out = []
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
        out.append(Placed(msgspec.structs.replace(periods[winner - 1], **bounds), best))
    return out


def _ms(bench: PeriodBench, period: Period, load: Load) -> float:
    try:
        return bench.period(period, load).ms
    except ConfigError:
        return float("inf")


def _crossing(low: Row, high: Row) -> int:
    """KV tokens between two loads at which their winners take equally long, by straight lines."""
    a, b = low.winner, high.winner
    first, second = low.ms[a] - low.ms[b], high.ms[a] - high.ms[b]
    share = first / (first - second) if first != second and abs(first) != float("inf") else 0.5
    return round(low.load.kv_tokens + min(1.0, max(0.0, share)) * (high.load.kv_tokens - low.load.kv_tokens))


def _min_tokens(
    bench: PeriodBench, spec: ModelSpec, period: Period, load: Load, progress: Callable[[str], None]
) -> int:
    """The fewest tokens for which the period, padded to its bucket, still beats a serial plan padded to whole steps."""
    least = load.tokens
    for share in reversed(TOKEN_SHARES):
        tokens = round(period.tokens * share / TOKEN_STEP) * TOKEN_STEP
        if not 0 < tokens < least:
            continue
        progress(f"{tokens} tokens")
        part = fewer(load, tokens)
        serial = bench.period(serial_for(spec, part, bench.num_sms), part).ms
        if _ms(bench, period, part) > serial * (1 - MIN_GAIN):
            break
        least = tokens
    # more than one step less is another measurement; within a step the serial plan takes as long
    return (least - 1) // TOKEN_STEP * TOKEN_STEP + 1
