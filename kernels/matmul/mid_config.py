"""`MidConfig`: how `mid_hopper` cuts a product of 64 to 2,048 tokens. No Triton is needed."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_TOKENS, BLOCK_DEPTH = 128, 64
TALL = 192
"""tokens of a tile of three warpgroups: of so many the weight is then read once"""
TALL_WIDTH = 224
"""features of such a tile, at most: a warpgroup has 160 registers"""
SHARED_BYTES = 232448 - 1024
"""of a program, but for its barriers"""
MAX_STAGES = 8
MAX_SPLIT = 8
"""parts whose bits lie in one word"""
WIDTHS = (64, 96, 128, 160, 192, 224, 256)
PATIENCE = 20000
"""how often a part looks for the others: some 10 ms"""


class MidConfig(NamedTuple):
    width: int
    """features of a tile: 64 to 256 in steps of 32; 64, 128 or 256 where the depth is cut. Narrower ones would
    leave more sums of squares than `projections.sumsq_buffer` has rows"""
    split: int = 1
    """programs that share one tile's depth"""
    ahead: int = 0
    """steps of the weight that a program asks the L2 for while the kernel before still runs"""
    box: int = BLOCK_TOKENS
    """tokens that are loaded at a time: 128, or 32, then as many boxes as hold live ones"""
    rows: int = BLOCK_TOKENS
    """tokens of a tile: 128, or TALL"""

    @property
    def pieces(self) -> tuple[int, int, int]:
        """The width as powers of two, largest first; 0 for none. Raises `ValueError` if no tile is so wide."""
        found, left = [], self.width
        for size in (256, 128, 64, 32):
            if size <= left:
                found.append(size)
                left -= size
        cut = self.split > 1
        if left or not 64 <= self.width <= 256 or (cut and len(found) > 1):
            raise ValueError(f"no tile is {self.width} features wide with its depth in {self.split} parts")
        if self.box not in (32, BLOCK_TOKENS):
            raise ValueError(f"no tile's tokens are loaded {self.box} at a time")
        if self.rows not in (BLOCK_TOKENS, TALL):
            raise ValueError(f"no tile has {self.rows} tokens")
        if self.rows == TALL and (self.width > TALL_WIDTH or self.box != BLOCK_TOKENS):
            raise ValueError(f"no tile of {TALL} tokens is {self.width} features wide, {self.box} loaded at a time")
        return tuple((*found, 0, 0)[:3])  # type: ignore[return-value]

    def stages_for(self, kind: str, *, whole: bool) -> int:
        """Steps of both operands that fit beside what the epilogue of a `kind` keeps in shared memory.

        whole: the depth is not cut, and results leave through shared memory.
        """
        kept = self.rows * self.width * (1 if kind == "gate_up" else 2) if whole else 0
        return min(MAX_STAGES, (SHARED_BYTES - kept) // ((self.rows + self.width) * BLOCK_DEPTH * 2))

    def parts_of(self, depth: int) -> int:
        """`split`, or fewer for a depth of fewer steps: no part is empty."""
        return min(self.split, -(-depth // BLOCK_DEPTH))

    def units(self, tokens: int, features: int, depth: int) -> int:
        """Parts of tiles."""
        return -(-tokens // self.rows) * -(-features // self.width) * self.parts_of(depth)


def part_of(part: int, parts: int, steps: int) -> tuple[int, int]:
    """(first step, behind the last one) of a tile's depth that a part adds up, as `mid_hopper` has it."""
    return part * steps // parts, (part + 1) * steps // parts
