"""`Tiles`: a matrix of 4- or 8-bit codes in the layout that the CPU's products read.

A tile has 16 rows and 32 columns. Numbers are `scale * (code - centre) + low`; `group` columns share a scale. A 64-byte
load holds 4 columns of 16 rows; with 4 bits, the upper halves of its bytes hold the columns 16 further on.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

LANES, BLOCK = 16, 32  # rows and columns of a tile
PIECE = 64  # Row tiles that are packed at once: a table is most of a small model, and copies of it would double it.


@dataclass(frozen=True, slots=True)
class Tiles:
    """A matrix `[rows, columns]`."""

    codes: Tensor  # [row tiles, blocks, 64 * bits] uint8.
    scale: Tensor  # [row tiles, groups, 16] float16 or float32.
    low: Tensor | None  # The same shape and dtype.
    rows: int
    columns: int
    bits: int  # 4 or 8.
    group: int  # 16, or a multiple of 32.
    centre: int  # 0 to 128.

    def __post_init__(self) -> None:
        tiles, blocks = -(-self.rows // LANES), -(-self.columns // BLOCK)
        scales = (tiles, -(-blocks * BLOCK // self.group), LANES)
        if self.bits not in {4, 8} or (self.group != LANES and self.group % BLOCK) or not 0 <= self.centre <= 128:
            raise ValueError(f"no tiles of {self.bits} bits, groups of {self.group} and centre {self.centre}")
        if self.codes.dtype != torch.uint8 or self.codes.shape != (tiles, blocks, 64 * self.bits):
            raise ValueError(f"codes of {self.rows} x {self.columns} cannot be {tuple(self.codes.shape)}")
        for t in (self.scale, self.low):
            if t is not None and (t.shape != scales or t.dtype not in {torch.float16, torch.float32}):
                raise ValueError(f"scales of {self.rows} x {self.columns} cannot be {tuple(t.shape)} {t.dtype}")
        if self.low is not None and self.low.dtype != self.scale.dtype:
            raise ValueError("scale and low have different dtypes")
        if not all(t is None or (t.is_contiguous() and t.device.type == "cpu") for t in self.tensors()):
            raise ValueError("tiles must be contiguous and in host memory")

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.codes, self.scale, self.low


def pack(
    codes: Tensor, scale: Tensor, low: Tensor | None = None, *, bits: int, group: int, centre: int = 0
) -> Tiles:  # fmt: skip
    """Pack codes `[rows, columns]` uint8, one a byte; scale and low `[rows, groups]`. Padding has scale 0."""
    rows, columns = codes.shape
    tiles, blocks = -(-rows // LANES), -(-columns // BLOCK)
    packed = torch.empty(tiles, blocks, 64 * bits, dtype=torch.uint8)
    # [row tiles, 16 rows, blocks, loads of 4 columns, 4] -> [row tiles, blocks, loads, 16 rows, 4]
    whole = rows // LANES if columns % BLOCK == 0 else 0
    for begin in range(0, tiles, PIECE):
        own = codes[begin * LANES : (begin + PIECE) * LANES]
        if begin + PIECE > whole:
            own = F.pad(own, (0, -columns % BLOCK, 0, -len(own) % LANES))
        loads = own.unflatten(1, (blocks, 8, 4)).unflatten(0, (-1, LANES)).permute(0, 2, 3, 1, 4)
        if bits == 4:
            loads = loads[:, :, :4] | loads[:, :, 4:] << 4
        packed[begin : begin + PIECE].view(loads.shape).copy_(loads)

    def by_tile(t: Tensor) -> Tensor:
        t = F.pad(t, (0, -(-blocks * BLOCK // group) - t.shape[1], 0, -rows % LANES))
        return t.view(-1, LANES, t.shape[1]).transpose(1, 2).contiguous()

    lows = None if low is None else by_tile(low)
    return Tiles(packed, by_tile(scale), lows, rows, columns, bits, group, centre)


def unpack(w: Tiles) -> tuple[Tensor, Tensor, Tensor | None]:
    """Return codes `[rows, columns]` uint8, scale and low `[rows, groups]`, as `pack` took them."""
    lows = None if w.low is None else _rows_of(w.low, w.rows)
    return _codes(w, slice(None))[: w.rows, : w.columns], _rows_of(w.scale, w.rows), lows


def _rows_of(t: Tensor, rows: int) -> Tensor:
    return t.transpose(1, 2).reshape(-1, t.shape[1])[:rows]


def _codes(w: Tiles, tiles: slice) -> Tensor:
    """Return the codes of some row tiles, one a byte: [16 * tiles, 32 * blocks]."""
    own = w.codes[tiles]
    loads = own.view(*own.shape[:2], w.bits, LANES, 4)
    if w.bits == 4:
        loads = torch.cat((loads & 15, loads >> 4), 2)
    return loads.permute(0, 3, 1, 2, 4).reshape(LANES * len(own), -1)


def values(w: Tiles, rows: Tensor | None = None) -> Tensor:
    """Return the numbers `[rows, columns]` float32, or those of some rows `[N]` int64."""
    if rows is None:
        codes, scale, low = unpack(w)
    else:
        tile, lane = rows // LANES, rows % LANES
        own = w.codes.view(len(w.codes), -1, w.bits, LANES, 4)[tile, :, :, lane]  # [N, blocks, loads, 4]
        if w.bits == 4:
            own = torch.cat((own & 15, own >> 4), 2)
        codes, scale = own.flatten(1)[:, : w.columns], w.scale[tile, :, lane]
        low = None if w.low is None else w.low[tile, :, lane]
    group = torch.arange(w.columns) // w.group
    wide = (codes.int() - w.centre).float() * scale.float()[:, group]
    return wide if low is None else wide + low.float()[:, group]
