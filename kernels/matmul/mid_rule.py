"""Which `MidConfig`s fill waves of SMs best, by a formula: what is tried for a table, and what serves without one."""

from __future__ import annotations

from functools import partial

from weft.kernels.matmul.mid_config import BLOCK_DEPTH, BLOCK_TOKENS, MAX_SPLIT, TALL, TALL_WIDTH, WIDTHS, MidConfig

FEWEST_TOKENS, MOST_TOKENS = 65, 2048
"""between which `by_rule` was held against measurements"""
MANY_TOKENS = 512
"""above these a narrower tile must promise `PROMISE`"""
PROMISE = 0.85
"""of the time of tiles of `mid_hopper` 256 wide, which stand for the kernels for many tokens"""
FEWEST_STAGES = 3
"""of a ring that is worth a measurement"""
FEWEST_UNITS = 32
"""tiles of the smallest product that was measured"""

_TALL = tuple(
    config
    for config in (MidConfig(width, rows=TALL) for width in WIDTHS if width <= TALL_WIDTH)
    if config.stages_for("plain", whole=True) >= FEWEST_STAGES
)


def candidates(kind: str, tokens: int, features: int, depth: int, num_sms: int) -> tuple[MidConfig, ...]:
    """What is worth a measurement: what fills the waves of SMs that it takes best, whole and cut, wide tiles first."""
    cost = partial(_cost, tokens=tokens, features=features, depth=depth, num_sms=num_sms)

    def of(rows: int) -> tuple[list[MidConfig], list[MidConfig]]:
        widths = [
            w
            for w in WIDTHS
            if (rows == BLOCK_TOKENS or w <= TALL_WIDTH)
            and MidConfig(w, rows=rows).stages_for(kind, whole=True) >= FEWEST_STAGES
        ]
        parts = [
            MidConfig(w, s, rows=rows)
            for w in (256, 128, 64)
            for s in range(2, MAX_SPLIT + 1)
            if w in widths and depth // BLOCK_DEPTH >= 4 * s
        ]
        cut = [config for config in parts if config.units(tokens, features, depth) <= 2 * num_sms]
        return sorted((MidConfig(w, rows=rows) for w in widths), key=cost), sorted(cut, key=cost)

    whole, cut = of(BLOCK_TOKENS)
    boxed = [config._replace(box=32) for config in whole[:3] + cut[:2]]
    best = sorted(whole[:3] + cut[:4], key=cost)
    tall = of(TALL) if tokens > BLOCK_TOKENS and -tokens % TALL <= -tokens % BLOCK_TOKENS else ([], [])
    return (*best, best[0]._replace(ahead=4), *tall[0][:3], *tall[1][:2], *boxed)


def _cost(c: MidConfig, *, tokens: int, features: int, depth: int, num_sms: int) -> float:
    """About the time: steps of the fullest SM, each as long as its operands take or its products."""
    waves = -(-c.units(tokens, features, depth) // num_sms)
    step = max(c.width * c.rows * 0.0000182, (c.width + c.rows) * 0.00195)
    added = 0.0 if c.split == 1 else 3.0 + 2 * c.width * 0.008
    return waves * (depth / BLOCK_DEPTH / c.split) * step + added


def by_rule(tokens: int, features: int, depth: int, num_sms: int) -> MidConfig | None:
    """For a shape that was not measured: the whole tiles that fill waves best. None where that is not known to pay.

    Of 48 products of three models with 128 to 512 tokens it says something of 46. For 36 that was the quickest of all
    that was tried, on the mean 0.4 % slower than it, and never slower than the choice without a table, which took 1.22
    times as long (measured on 2026-11-23). Deep products of few tiles lost to cut ones. Of 192
    tokens four products were measured: it says the quickest of three, and of the deep one what takes 1.15 times as
    long.

    Of 32 products of an 8B with 640 to 2,048 tokens it says something of 12. For 11 of these a tile of `mid_hopper` was
    the quickest, for eight one of the width it says. It goes before what a start has measured of other kernels.
    """
    if not FEWEST_TOKENS <= tokens <= MOST_TOKENS:
        return None
    cost = partial(_cost, tokens=tokens, features=features, depth=depth, num_sms=num_sms)
    if tokens > MANY_TOKENS:
        best = min(map(MidConfig, WIDTHS), key=cost)
        return best if cost(best) <= PROMISE * cost(MidConfig(256)) else None
    # A second tile of 128 tokens that is half empty: its live tokens alone are loaded, or one tile of 192 has them all.
    half = BLOCK_TOKENS < tokens <= TALL
    best = min([*(MidConfig(w, box=32 if half else BLOCK_TOKENS) for w in WIDTHS), *(_TALL if half else ())], key=cost)
    units = best.units(tokens, features, depth)
    deep = tokens <= BLOCK_TOKENS and depth >= 8192 and units < 0.6 * num_sms
    return None if deep or units < FEWEST_UNITS else best
