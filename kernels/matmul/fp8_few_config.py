"""How `fp8_few_hopper` distributes a GEMM over SMs. Plain numbers: rules and tuning read them without Triton."""

from __future__ import annotations

import functools

from weft.kernels.matmul.gemm_config import GemmConfig

MAX_TOKENS = 16  # Columns of its MMA.
STEP = 128  # Columns of K per step.
STAGES = {128: 5, 256: 3}
"""Stages of the ring, by features of a tile. A program takes 92 or 120 KiB at least, so two kernels fit on an SM,
except two with tiles of 256, which never follow each other."""
MAX_SPLITS = 8  # Maximum programs that share a tile's steps.
MIN_BUSY = 0.7  # Fraction of the SMs that saturates memory.
MAX_STEPS = 128  # Maximum steps of a program, because it holds their scales.


@functools.cache
def distribute(features: int, depth: int, wide: int, num_sms: int) -> tuple[int, int]:
    """Return the steps of a program, and the maximum number of programs that share a tile's steps.

    If at least `MIN_BUSY` of the SMs stay busy, no program's range ends within two tiles: two partial sums cost more
    than idle SMs, because fewer SMs saturate memory."""
    steps, tiles = -(-depth // STEP), -(-features // wide)
    even = -(-tiles * steps // num_sms)

    def whole(share: int) -> bool:
        return share % steps == 0 or (steps % share == 0 and steps // share <= MAX_SPLITS)

    shares = range(even, int(even / MIN_BUSY) + 1)
    share = next(filter(whole, shares), max(even, -(-steps // (MAX_SPLITS - 2))))
    return share, max((tile * steps + steps - 1) // share - tile * steps // share + 1 for tile in range(tiles))


def is_few(config: GemmConfig) -> bool:
    """Return whether the configuration selects `fp8_few_hopper`."""
    return config.special and config.tokens <= MAX_TOKENS


def few_config(kind: str, features: int, depth: int, num_sms: int) -> GemmConfig:
    """Return the configuration of `fp8_few_hopper` for a `kind` of GEMM; not `special` if it does not support it."""
    wide = 256 if kind == "gate_up" else 128  # gives one block of 128 gated columns
    fits = distribute(features, depth, wide, num_sms)[0] <= MAX_STEPS
    return GemmConfig(MAX_TOKENS, wide, STEP, STAGES[wide], 4, special=fits)
