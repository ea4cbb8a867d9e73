"""`GemmConfig`: how a matrix product is cut into tiles. Plain data: plans and searches read it without Triton."""

from __future__ import annotations

from typing import NamedTuple


class GemmConfig(NamedTuple):
    """How one product is cut. All block sizes are powers of two."""

    tokens: int
    """rows of `a` in a tile"""
    features: int
    """rows of the weight in a tile"""
    depth: int
    """columns of both in one step"""
    stages: int
    warps: int
    group: int = 8
    """token tiles that share a weight tile in L2 order"""
    split: int = 1
    """programs that share one tile's depth"""
    swap: bool = False
    """weight rows as the left operand"""
    per_sm: int = 1
    """programs resident on one SM"""
    slices: int = 2
    """column slices of the epilogue: fewer live registers and less shared memory"""
    special: bool = False
    """the warp-specialised kernel of `gemm_hopper`; its blocks are fixed"""
    ahead: int = 0
    """steps of the weight that a program asks the L2 for while the kernel before still runs"""

    @property
    def staged(self) -> int:
        """Numbers of both operands that lie in shared memory at once."""
        return (self.tokens + self.features) * self.depth * self.stages

    def widened(self, features: int) -> GemmConfig:
        """With tiles of so many features and no more shared memory: in shorter steps, then in fewer of them."""
        wide = self._replace(features=features)
        while wide.staged > self.staged and wide.depth > MIN_DEPTH:
            wide = wide._replace(depth=wide.depth // 2)
        while wide.staged > self.staged and wide.stages > 2:
            wide = wide._replace(stages=wide.stages - 1)
        return wide


MIN_DEPTH = 64
"""a shorter step is no full line of shared memory"""
SPECIAL = GemmConfig(128, 256, 64, 4, 4, special=True)
