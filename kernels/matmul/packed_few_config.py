"""How `packed_few_hopper` distributes a GEMM over SMs. Plain numbers: rules read them without Triton."""

from __future__ import annotations

import functools
from typing import NamedTuple

from weft.kernels.formats.packed_weight import STEP, PackedWeight
from weft.kernels.matmul.fp8_few_config import distribute

MAX_TOKENS = 32  # The kernel is right with more, but slower than other ways.
WIDE = 128  # Rows of the weight in a tile.
MAX_SPLITS = 8  # Maximum programs that share a tile's steps.


class FewConfig(NamedTuple):
    stages: int = 4
    per_sm: int = 2
    early: bool = True  # Whether the next kernel may start as soon as the previous one has ended.
    even: bool = True  # Whether programs share steps evenly, even if their ranges end within tiles.


def few_config(tokens: int) -> FewConfig:
    """Return the configuration for this many tokens: two kernels fit an SM at once."""
    return FewConfig(4 if tokens <= 16 else 3 if tokens <= 32 else 2)


@functools.cache
def share_of(rows: int, columns: int, group: int, num_sms: int, config: FewConfig) -> tuple[int, int]:
    """Return the steps of a program, and the maximum number of programs that share a tile's steps."""
    steps, tiles = -(-columns // STEP), -(-rows // WIDE)
    programs = num_sms * config.per_sm
    share = max(-(-tiles * steps // programs), -(-steps // (MAX_SPLITS - 2)))
    if not config.even:
        share = distribute(rows, columns, WIDE, programs)[0]
    share = min(share, group)  # because it holds their scales
    return share, max((tile * steps + steps - 1) // share - tile * steps // share + 1 for tile in range(tiles))


def is_few(tokens: int, weight: PackedWeight) -> bool:
    """Return whether the kernel multiplies this many tokens by this matrix."""
    return tokens <= MAX_TOKENS and weight.bits == 4 and weight.group >= 32 and weight.centre in (0, 8)
