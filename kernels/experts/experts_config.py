"""Tiles for the GEMMs of an expert layer: the rule, and the candidates for tuning.

One `GemmConfig` serves both GEMMs of a layer: rows are laid out for its `tokens`, and both read them.
"""

from __future__ import annotations

from weft.kernels.matmul.gemm_config import SPECIAL, GemmConfig


def _height(rows: float) -> int:
    """Return the height of small tiles for this many rows per expert."""
    return 16 if rows <= 10 else 32 if rows <= 20 else 64


def by_rule(tokens: int, count: int, top: int, *, hopper: bool) -> GemmConfig:
    """Return the tiles for evenly spread tokens. hopper: the GPU has the warp-specialized kernel."""
    rows = tokens * top / count  # rows per expert
    if rows > 40:
        return SPECIAL if hopper else GemmConfig(128, 128, 64, 4, 8, 8, 1, False, 1, 1)
    height = _height(rows)
    return GemmConfig(height, 128, 128, 4 if height <= 32 else 3, 8, 8, 1, True, 1, 1)


def candidates(tokens: int, count: int, top: int, *, hopper: bool) -> tuple[GemmConfig, ...]:
    """Return configurations worth measuring besides the rule's choice."""
    rows = tokens * top / count
    height = _height(rows)
    small = GemmConfig(height, 64, 128, 6 if height <= 32 else 5, 4, 8, 1, True, 1, 1)
    if rows <= 20:
        return (small, small._replace(stages=4, per_sm=2))
    special = (SPECIAL, SPECIAL._replace(stages=3)) if hopper else ()
    if rows <= 40:
        return (small, *special)
    return (*special, GemmConfig(128, 128, 64, 4, 8, 8, 1, False, 1, 1), GemmConfig(128, 256, 64, 3, 8, 8))
