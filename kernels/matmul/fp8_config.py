"""Tile candidates that tuning tries for an FP8 GEMM besides the rule's (`fp8_projections.by_rule`)."""

from __future__ import annotations

from weft.kernels.matmul.gemm_config import GemmConfig

STEP = 128  # Columns of both operands in one step.
ROOM = 220 * 1024  # Bytes of shared memory for the steps of all programs on an SM.


def every(kind: str, tokens: int, depth: int, *, few: bool) -> tuple[GemmConfig, ...]:
    """Return all possible tiles for a `kind` of GEMM. few: the weight is the left operand (`fp8_triton`); else the
    kernel is the warp-specialized one."""
    if not few:
        widths = (256,) if kind == "gate_up" else (256, 128)
        groups = (4, 8, 16) if tokens > 512 else (8,)
        return tuple(GemmConfig(128, w, STEP, 4, 4, group=group, special=True) for w in widths for group in groups)
    block = min(64, max(16, 1 << (tokens - 1).bit_length()))
    ways = ((256, 3, 2), (256, 4, 1), (256, 5, 1)) if kind == "gate_up" else ((128, 4, 2), (128, 6, 1), (128, 3, 3))
    return tuple(
        GemmConfig(block, wide, STEP, stages, 8 if block * wide >= 8192 else 4, 8, split, True, per_sm, 1, ahead=2)
        for wide, stages, per_sm in ways
        for split in (1, 2, 4, 8)
        if (block + wide) * STEP * stages * per_sm <= ROOM and split * 4 <= -(-depth // STEP)
    )


def candidates(kind: str, tokens: int, depth: int, *, few: bool) -> tuple[GemmConfig, ...]:
    """Return the tiles of `every` measured at start-up: those with one group and at most two programs per SM."""
    tried = every(kind, tokens, depth, few=few)
    return tuple(config for config in tried if config.per_sm < 3 and config.group == 8)
