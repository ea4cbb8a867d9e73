"""`MidConfig`: how `mid_hopper` divides a GEMM of 33 to 2,048 tokens. Needs no Triton."""

from __future__ import annotations

from typing import NamedTuple

BLOCK_TOKENS, BLOCK_DEPTH = 128, 64
TALL = 192  # Tokens of a tile with three warpgroups, so up to 192 tokens read the weight only once.
TALL_WIDTH = 224  # Maximum features of such a tile: a warpgroup has 160 registers.
SHARED_BYTES = 232448 - 1024  # Shared memory left after the barriers, in bytes.
MAX_STAGES = 8
MAX_SPLIT = 8  # Maximum splits: their flags share one word.
WIDTHS = (64, 96, 128, 160, 192, 224, 256)
MAX_POLLS = 20000  # Maximum polls of a split for the others: about 10 ms.


class MidConfig(NamedTuple):
    width: int
    """Features of a tile: 64 to 256 in steps of 32; 64, 128 or 256 with splits. Narrower tiles would write more sums of
    squares than `projections.sumsq_buffer` has rows."""
    split: int = 1  # Programs that share one tile's K.
    ahead: int = 0  # Weight steps that a program prefetches into L2 while the previous kernel still runs.
    box: int = BLOCK_TOKENS  # Tokens per load: 128, or 32 to load only boxes with live tokens.
    rows: int = BLOCK_TOKENS  # Tokens of a tile: 128, or TALL.

    @property
    def pieces(self) -> tuple[int, int, int]:
        """The width as powers of two, largest first, padded with 0. Raises `ValueError` if it is unsupported."""
        found, left = [], self.width
        for size in (256, 128, 64, 32):
            if size <= left:
                found.append(size)
                left -= size
        cut = self.split > 1
        if left or not 64 <= self.width <= 256 or (cut and len(found) > 1):
            raise ValueError(f"tiles with {self.split} splits cannot be {self.width} features wide")
        if self.box not in (32, BLOCK_TOKENS):
            raise ValueError(f"tiles cannot load {self.box} tokens at a time")
        if self.rows not in (BLOCK_TOKENS, TALL):
            raise ValueError(f"tiles cannot have {self.rows} tokens")
        if self.rows == TALL and (self.width > TALL_WIDTH or self.box != BLOCK_TOKENS):
            raise ValueError(f"tiles of {TALL} tokens cannot be {self.width} features wide with loads of {self.box}")
        return tuple((*found, 0, 0)[:3])  # type: ignore[return-value]

    def stages_for(self, kind: str, *, whole: bool) -> int:
        """Return the steps of both operands that fit in shared memory with the buffers of a `kind`'s epilogue.

        whole: no splits, and results leave through shared memory."""
        kept = self.rows * self.width * (1 if kind == "gate_up" else 2) if whole else 0
        return min(MAX_STAGES, (SHARED_BYTES - kept) // ((self.rows + self.width) * BLOCK_DEPTH * 2))

    def splits_of(self, depth: int) -> int:
        """Return `split`, or fewer if K has fewer steps: no split is empty."""
        return min(self.split, -(-depth // BLOCK_DEPTH))

    def units(self, tokens: int, features: int, depth: int) -> int:
        """Return the number of tile splits."""
        return -(-tokens // self.rows) * -(-features // self.width) * self.splits_of(depth)
