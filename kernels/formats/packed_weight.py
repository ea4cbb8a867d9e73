"""`PackedWeight`: a matrix of 4- or 8-bit codes in the layout that the GPU's products read.

A number is `(code - centre) * scale + low`; `group` columns share a scale and a low. A block has `ROWS` rows and `STEP`
columns, and is contiguous in memory. Its columns are pairs of spans that lie within a group: with 4 bits, a byte holds
columns of the two spans of a pair, the first in its low half. Padding has scale 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.formats.packed_form import PackedForm
from weft.kernels.formats.packed_rows import PackedRows

ROWS, STEP = 64, 128  # Rows and columns of a block.
SPAN = STEP // 2  # Columns of the longest span.


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A matrix `[rows, columns]`."""

    codes: Tensor  # [row blocks, steps, 64, bytes of a row] uint8.
    scale: Tensor  # [groups, 64 * row blocks] float16.
    low: Tensor | None  # The same.
    norm: Tensor | None  # [columns] float32: the weight of the preceding norm, not folded in.
    rows: int
    columns: int
    bits: int  # 4 or 8.
    group: int  # A power of two from 16.
    centre: int

    @classmethod
    def of(cls, rows: PackedRows, norm: Tensor | None = None) -> PackedWeight:
        """Lay out rows, whose columns are in order, on their device."""
        form, columns = rows.form, rows.columns
        if rows.data.is_meta:
            return _shapes(len(rows.data), columns, norm, form)
        return pack_weight(
            rows.codes(), rows.scale(), rows.low(), norm, bits=form.bits, group=form.group, centre=form.centre
        )  # fmt: skip

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.rows, self.columns))

    @property
    def span(self) -> int:
        return min(SPAN, self.group)

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(t for t in (self.codes, self.scale, self.low, self.norm) if t is not None)


def pack_weight(
    codes: Tensor, scale: Tensor, low: Tensor | None = None, norm: Tensor | None = None, *, bits: int, group: int,
    centre: int,
) -> PackedWeight:  # fmt: skip
    """Lay out codes `[rows, columns]` uint8, one a byte; scale and low `[rows, groups]`. A group that is a multiple of
    `SPAN` but not a power of two is split."""
    rows, columns = codes.shape
    own = group & -group  # the largest power of two that divides the group
    own = min(own, STEP)
    if bits not in (4, 8) or own < 16 or columns % group or not 0 <= centre <= 128:
        raise ValueError(f"no packed weight of {bits} bits, groups of {group} and {columns} columns")
    if own != group:
        scale = scale.repeat_interleave(group // own, 1)
        low = None if low is None else low.repeat_interleave(group // own, 1)
    span = min(SPAN, own)
    codes = F.pad(codes, (0, -columns % STEP, 0, -rows % ROWS))
    pairs = codes.view(-1, ROWS, codes.shape[1] // STEP, SPAN // span, 2, span).permute(0, 2, 1, 3, 4, 5)
    laid = (pairs[..., 0, :] | pairs[..., 1, :] << 4 if bits == 4 else pairs).flatten(3)
    groups = codes.shape[1] // own

    def by_group(t: Tensor) -> Tensor:
        return F.pad(t.half(), (0, groups - t.shape[1], 0, -rows % ROWS)).t().contiguous()

    lows = None if low is None else by_group(low)
    norm = None if norm is None else norm.float().contiguous()
    return PackedWeight(laid.contiguous(), by_group(scale), lows, norm, rows, columns, bits, own, centre)


def _shapes(rows: int, columns: int, norm: Tensor | None, form: PackedForm) -> PackedWeight:
    """Return a matrix on the meta device."""
    group = min(form.group & -form.group, STEP)
    steps, blocks = -(-columns // STEP), -(-rows // ROWS)
    codes = torch.empty(blocks, steps, ROWS, STEP * form.bits // 8, dtype=torch.uint8, device="meta")
    scale = torch.empty(STEP * steps // group, ROWS * blocks, dtype=torch.float16, device="meta")
    low = torch.empty_like(scale) if form.low else None
    norm = None if norm is None else norm.float()
    return PackedWeight(codes, scale, low, norm, rows, columns, form.bits, group, form.centre)


def unpack_weight(weight: PackedWeight, dtype: torch.dtype) -> Tensor:
    """Return the numbers `[rows, columns]` times the norm, rounded once."""
    own = weight.codes
    if weight.bits == 4:
        own = own.unflatten(3, (-1, 1, weight.span))
        own = torch.cat((own & 15, own >> 4), 4)
    codes = own.view(*own.shape[:3], -1).permute(0, 2, 1, 3).reshape(len(own) * ROWS, -1).float() - weight.centre
    made = codes.unflatten(1, (-1, weight.group)) * weight.scale.t().float()[..., None]
    if weight.low is not None:
        made += weight.low.t().float()[..., None]
    made = made.flatten(1)[: weight.rows, : weight.columns]
    return (made if weight.norm is None else made * weight.norm).to(dtype)


Weight = Tensor | PackedWeight  # A matrix as the GPU's 16-bit products accept it.
