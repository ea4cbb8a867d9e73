"""A formula for the `MidConfig`s that fill waves of SMs best, for GEMMs that are not in the table."""

from __future__ import annotations

from functools import partial

from weft.kernels.matmul.mid_config import BLOCK_DEPTH, BLOCK_TOKENS, TALL, TALL_WIDTH, WIDTHS, MidConfig

MIN_TOKENS, MAX_TOKENS = 65, 2048  # Range in which `by_rule` was compared with measurements.
MANY_TOKENS = 512  # Above this, a narrower tile must be predicted to reach `MAX_TIME_RATIO`.
MAX_TIME_RATIO = 0.85
"""Maximum fraction of the time of 256-wide `mid_hopper` tiles, which represent the kernels for many tokens."""
MIN_STAGES = 3  # Minimum stages of a ring worth measuring.
MIN_TILES = 32  # Tiles of the smallest GEMM that was measured.

_TALL = tuple(
    config
    for config in (MidConfig(width, rows=TALL) for width in WIDTHS if width <= TALL_WIDTH)
    if config.stages_for("plain", whole=True) >= MIN_STAGES
)


def cost(c: MidConfig, *, tokens: int, features: int, depth: int, num_sms: int) -> float:
    """Estimate the time: steps of the busiest SM, each bound by its operands or its MMAs."""
    waves = -(-c.units(tokens, features, depth) // num_sms)
    step = max(c.width * c.rows * 0.0000182, (c.width + c.rows) * 0.00195)
    added = 0.0 if c.split == 1 else 3.0 + 2 * c.width * 0.008
    return waves * (depth / BLOCK_DEPTH / c.split) * step + added


def by_rule(tokens: int, features: int, depth: int, num_sms: int) -> MidConfig | None:
    """Return the unsplit tiles that fill waves best for an unmeasured shape, or None if not known to be faster.

    For 46 of 48 GEMMs of three models with 128 to 512 tokens it returns a configuration. 36 of these were the fastest
    of all candidates, on average 0.4 % slower than the fastest, and never slower than the choice without a table, which
    took 1.22 times as long. Large K with few tiles lost to splits. With 192 tokens four GEMMs were measured: it is the
    fastest for three, and takes 1.15 times as long for the one with large K.

    For 32 GEMMs of an 8B with 640 to 2,048 tokens it returns 12 configurations. A tile of `mid_hopper` was the fastest
    for 11 of these, with this width for eight. It takes precedence over start-up measurements of other kernels."""
    if not MIN_TOKENS <= tokens <= MAX_TOKENS:
        return None
    time = partial(cost, tokens=tokens, features=features, depth=depth, num_sms=num_sms)
    if tokens > MANY_TOKENS:
        best = min(map(MidConfig, WIDTHS), key=time)
        return best if time(best) <= MAX_TIME_RATIO * time(MidConfig(256)) else None
    # If the second tile of 128 tokens is half empty, load its live tokens alone, or use one tile of 192 for all.
    half = BLOCK_TOKENS < tokens <= TALL
    best = min([*(MidConfig(w, box=32 if half else BLOCK_TOKENS) for w in WIDTHS), *(_TALL if half else ())], key=time)
    units = best.units(tokens, features, depth)
    deep = tokens <= BLOCK_TOKENS and depth >= 8192 and units < 0.6 * num_sms
    return None if deep or units < MIN_TILES else best
