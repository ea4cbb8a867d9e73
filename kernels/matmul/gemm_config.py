"""`GemmConfig`: how a GEMM is divided into tiles. Plain data: plans and searches read it without Triton."""

from __future__ import annotations

from typing import NamedTuple


class GemmConfig(NamedTuple):
    """Tiles of one GEMM. All block sizes are powers of two."""

    tokens: int  # Rows of `a` in a tile.
    features: int  # Rows of the weight in a tile.
    depth: int  # Columns of both in one step.
    stages: int
    warps: int
    group: int = 8  # Token tiles that share a weight tile in L2 order.
    split: int = 1  # Programs that share one tile's K.
    swap: bool = False  # Whether weight rows are the left operand.
    per_sm: int = 1  # Programs resident on one SM.
    slices: int = 2  # Column slices of the epilogue: fewer live registers and less shared memory.
    special: bool = False  # Whether this is the warp-specialized kernel of `gemm_hopper`, which has fixed blocks.
    ahead: int = 0  # Weight steps that a program prefetches into L2 while the previous kernel still runs.

    @property
    def staged(self) -> int:
        """Numbers of both operands held in shared memory at once."""
        return (self.tokens + self.features) * self.depth * self.stages

    def widened(self, features: int) -> GemmConfig:
        """Return tiles of this many features that use no more shared memory: shorter steps, then fewer of them."""
        wide = self._replace(features=features)
        while wide.staged > self.staged and wide.depth > MIN_DEPTH:
            wide = wide._replace(depth=wide.depth // 2)
        while wide.staged > self.staged and wide.stages > 2:
            wide = wide._replace(stages=wide.stages - 1)
        return wide


MIN_DEPTH = 64  # Shorter steps do not fill a line of shared memory.
SPECIAL = GemmConfig(128, 256, 64, 4, 4, special=True)
