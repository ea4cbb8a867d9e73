"""How `packed_few_hopper` distributes a GEMM over SMs. Plain numbers: rules read them without Triton."""

from __future__ import annotations

import functools
from typing import NamedTuple

from weft.kernels.formats.packed_weight import STEP, PackedWeight
from weft.kernels.matmul.fp8_few_config import distribute

MAX_TOKENS = 32  # More tokens multiply faster in `packed_triton`.
LINES = {8: 64, 16: 64, 32: 128}  # Bytes of a line of codes in shared memory, by tokens of a tile.
WIDE = 128  # Rows of the weight in a tile.
MAX_SPLITS = 8  # Maximum programs that share a tile's steps.


class FewConfig(NamedTuple):
    stages: int
    per_sm: int = 2
    early: bool = False  # Whether the next kernel may start as soon as the previous one has ended.
    even: bool = False  # Whether programs share steps evenly, even if their ranges end within tiles.


def few_config(tokens: int) -> FewConfig:
    """Return the configuration for this many tokens, as measured on an H200."""
    return FewConfig(5) if tokens <= 16 else FewConfig(3, early=True, even=True)


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
