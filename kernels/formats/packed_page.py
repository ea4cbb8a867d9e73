"""`PackedPage`: a lossless page of bf16 KV in about 12 bits per scalar, and its numpy reference implementation.

A scalar keeps its sign and 7 mantissa bits in one byte, plus 4 bits of exponent: the distance below the largest
exponent of its channel in this page (layer, K or V, head and channel, over the page's tokens). Code 15 is an escape:
the page's list holds the full exponent. A page with more escapes than the list has entries is stored unpacked. A
packed page can be read on its own.

| field | bytes | content |
|---|---|---|
| count | 4, then 12 of 0 | uint32: the page's escapes; more than `capacity`: not packed |
| escapes | 4 `capacity` | uint32, unordered: index of the scalar << 8, its exponent |
| bases | 1 for each channel | the largest exponent |
| codes | 1/2 for each scalar | the lower 4 bits are the former of two scalars |
| lows | 1 for each scalar | sign << 7, mantissa |

Each field is aligned to 16 bytes; scalars and channels keep the page's order.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]

ESCAPE = 15
MAX_VALUES = 1 << 24  # Limit of an escape's 24-bit index.
SCALARS_PER_ESCAPE = 256  # Scalars per list entry of 4 bytes, which costs an eighth of a bit per scalar.
SLAB_VALUES = 1 << 16  # Scalars per step, so that a step fits in a CPU cache.


def _padded(size: int) -> int:
    return -(-size // 16) * 16


@dataclass(frozen=True, slots=True)
class PackedPage:
    """The layout of pages `[blocks, rows, width]` bf16: a block is a layer's K or V, rows tokens, columns channels."""

    values: int  # Scalars of a page.
    rows: int
    width: int

    @property
    def possible(self) -> bool:
        """Whether pages of this size can be packed: two scalars share a byte, and indices have 24 bits."""
        return self.width % 2 == 0 and self.values % (self.rows * self.width) == 0 and self.values <= MAX_VALUES

    @property
    def blocks(self) -> int:
        return self.values // (self.rows * self.width)

    @property
    def capacity(self) -> int:
        """Number of escapes that the list can hold."""
        return max(16, self.values // SCALARS_PER_ESCAPE)

    @property
    def escapes_at(self) -> int:
        return 16

    @property
    def bases_at(self) -> int:
        return self.escapes_at + _padded(4 * self.capacity)

    @property
    def codes_at(self) -> int:
        return self.bases_at + _padded(self.values // self.rows)

    @property
    def lows_at(self) -> int:
        return self.codes_at + _padded(self.values // 2)

    @property
    def nbytes(self) -> int:
        """Bytes of a packed page."""
        return self.lows_at + _padded(self.values)

    def num_escapes(self, packed: Bytes) -> int:
        return int(packed[:4].view(np.uint32)[0])

    def holds(self, packed: Bytes) -> bool:
        """Return whether this is a packed page rather than one with too many escapes."""
        return self.num_escapes(packed) <= self.capacity

    def pack(self, page: Bytes, out: Bytes) -> bool:
        """Pack `page [2 * values]` uint8 into `out [nbytes]` uint8, both contiguous.

        Returns False if there are too many escapes; `out` then holds only their count."""
        blocks, rows, width = self.blocks, self.rows, self.width
        words = page.view(np.uint16).reshape(blocks, rows, width)
        bases = out[self.bases_at : self.bases_at + blocks * width].reshape(blocks, 1, width)
        codes = out[self.codes_at : self.codes_at + self.values // 2].reshape(blocks, rows * width // 2)
        lows = out[self.lows_at : self.lows_at + self.values].reshape(blocks, rows, width)
        escapes = out[self.escapes_at : self.escapes_at + 4 * self.capacity].view(np.uint32)
        out[: self.escapes_at] = 0
        count = 0
        for some in self._slabs():
            word, base = words[some], bases[some]
            exponent = (word >> 7).astype(np.uint8)
            np.max(exponent, axis=1, keepdims=True, out=base)
            below = base - exponent
            far = np.flatnonzero(below >= ESCAPE)
            if len(far):
                places = far.astype(np.uint32) + np.uint32(some.start * rows * width)
                room = escapes[count : count + len(far)]
                room[:] = (places << 8 | exponent.reshape(-1)[far])[: len(room)]
                count += len(far)
                np.minimum(below, ESCAPE, out=below)
            pairs = below.reshape(len(word), -1).view(np.uint16)
            codes[some] = pairs | pairs >> 4
            lows[some] = word & 0x7F | word >> 8 & 0x80
        out[:4].view(np.uint32)[0] = count
        return count <= self.capacity

    def unpack(self, packed: Bytes, page: Bytes) -> None:
        """Restore `page [2 * values]` uint8. Raises `ValueError` if `packed` is not a packed page."""
        blocks, rows, width = self.blocks, self.rows, self.width
        words = page.view(np.uint16).reshape(blocks, rows, width)
        bases = packed[self.bases_at : self.bases_at + blocks * width].reshape(blocks, 1, width)
        codes = packed[self.codes_at : self.codes_at + self.values // 2].reshape(blocks, rows * width // 2)
        lows = packed[self.lows_at : self.lows_at + self.values].reshape(blocks, rows, width)
        for some in self._slabs():
            pairs = codes[some].astype(np.uint16)
            below = ((pairs | pairs << 4) & 0x0F0F).view(np.uint8).reshape(lows[some].shape)
            word, low = words[some], lows[some].astype(np.uint16)
            np.left_shift(bases[some] - below, 7, out=word, dtype=np.uint16)
            word |= low & 0x7F
            word |= (low & 0x80) << 8
        count = self.num_escapes(packed)
        places, exponents = np.divmod(packed[self.escapes_at :][: 4 * count].view(np.uint32), 256)
        if count > self.capacity or (places >= self.values).any():
            raise ValueError("not a packed page")
        flat = words.reshape(-1)
        flat[places] = flat[places] & 0x807F | exponents.astype(np.uint16) << 7

    def _slabs(self) -> list[slice]:
        step = max(1, SLAB_VALUES // (self.rows * self.width))
        return [slice(first, min(first + step, self.blocks)) for first in range(0, self.blocks, step)]
