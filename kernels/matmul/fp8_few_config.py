"""How `fp8_few_hopper` deals a product to the SMs. Plain numbers: rules and tuning read them without Triton."""

from __future__ import annotations

import functools

from weft.kernels.matmul.gemm_config import GemmConfig

MOST_TOKENS = 16
"""columns of its MMA"""
STEP = 128
"""of the depth"""
STAGES = {128: 5, 256: 3}
"""of the ring, by features of a tile: a program takes 92 or 120 KiB at least. Two kernels stand on an SM, but for two
with tiles of 256, which never follow each other"""
MOST_PARTS = 8
"""programs that a tile's steps may lie in"""
LEAST_BUSY = 0.7
"""share of the SMs: so many can ask for all that memory gives"""
MOST_STEPS = 128
"""of a program, which keeps their scales"""


@functools.cache
def shared_out(features: int, depth: int, wide: int, num_sms: int) -> tuple[int, int]:
    """Steps of a program, and in how many programs a tile's steps lie at most.

    Where it keeps at least `LEAST_BUSY` of the SMs at work, no stretch ends within two tiles: sums that meet twice cost
    more than SMs without work, since memory is busy with fewer.
    """
    steps, tiles = -(-depth // STEP), -(-features // wide)
    even = -(-tiles * steps // num_sms)

    def whole(share: int) -> bool:
        return share % steps == 0 or (steps % share == 0 and steps // share <= MOST_PARTS)

    shares = range(even, int(even / LEAST_BUSY) + 1)
    share = next(filter(whole, shares), max(even, -(-steps // (MOST_PARTS - 2))))
    return share, max((tile * steps + steps - 1) // share - tile * steps // share + 1 for tile in range(tiles))


def is_few(config: GemmConfig) -> bool:
    """Whether it names `fp8_few_hopper`."""
    return config.special and config.tokens <= MOST_TOKENS


def few(kind: str, features: int, depth: int, num_sms: int) -> GemmConfig:
    """What `fp8_few_hopper` does for a `kind` of product; not `special` where it cannot."""
    wide = 256 if kind == "gate_up" else 128  # of which a block of 128 gated columns comes
    fits = shared_out(features, depth, wide, num_sms)[0] <= MOST_STEPS
    return GemmConfig(MOST_TOKENS, wide, STEP, STAGES[wide], 4, special=fits)
