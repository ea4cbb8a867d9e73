"""`PackedRows`: rows of a matrix in 4 or 8 bits, as read from a checkpoint and before they are laid out for a kernel.

A row is one run of bytes, so packing can move rows without knowing the format: codes, then float16 scales, then float16
lows. Columns of a group share a scale and a low. A value is `(code - centre) * scale + low`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.formats.packed_form import COLUMNS, PackedForm, common_form


class PackedRows(NamedTuple):
    """A matrix, or some rows of one."""

    data: Tensor  # `[rows, row_bytes]` uint8.
    form: PackedForm
    columns: int
    order: Tensor | None = None  # `[columns]` int64: the column that is stored at each place; None: in order.

    @property
    def shape(self) -> tuple[int, int]:
        return len(self.data), self.columns

    def codes(self) -> Tensor:
        """Return one code per byte, `[rows, columns]` uint8."""
        bits = self.form.bits
        stored = self.data[:, : self.columns * bits // 8]
        if bits == 8:
            return stored
        halves = stored.unflatten(1, (-1, 1, COLUMNS // 2))
        return torch.cat((halves & 15, halves >> 4), 2).flatten(1)

    def scale(self) -> Tensor:
        """Return `[rows, groups]` float16."""
        return self._floats(0)

    def low(self) -> Tensor | None:
        """Return `[rows, groups]` float16, or None."""
        return self._floats(1) if self.form.low else None

    def _floats(self, which: int) -> Tensor:
        width = 2 * (self.columns // self.form.group)
        begin = self.columns * self.form.bits // 8 + which * width
        return self.data[:, begin : begin + width].contiguous().view(torch.float16)

    def values(self, dtype: torch.dtype) -> Tensor:
        """Return `[rows, columns]` in the order of the checkpoint's columns, rounded once to `dtype`."""
        form, low = self.form, self.low()
        if self.data.is_meta:
            return torch.empty(self.shape, dtype=dtype, device="meta")
        values = (self.codes().float() - form.centre).unflatten(1, (-1, form.group))
        values = values.mul_(self.scale().float()[..., None])
        if low is not None:
            values.add_(low.float()[..., None])
        made = values.flatten(1).to(dtype)
        if self.order is None:
            return made
        out = torch.empty_like(made)
        out[:, self.order] = made
        return out


def pack_rows(codes: Tensor, scale: Tensor, low: Tensor | None, form: PackedForm) -> Tensor:
    """Return the bytes of rows: codes `[rows, columns]` uint8, scale and low `[rows, groups]` of any float type."""
    if form.bits == 4:
        halves = codes.unflatten(1, (-1, 2, COLUMNS // 2))
        codes = (halves[:, :, 0] | halves[:, :, 1] << 4).flatten(1)
    floats = (part.to(torch.float16).contiguous().view(torch.uint8) for part in (scale, low) if part is not None)
    return torch.cat((codes, *floats), 1)


def in_form(rows: PackedRows, form: PackedForm) -> PackedRows:
    """Return the same values in another form, one of `common_form`."""
    own = rows.form
    if own == form:
        return rows
    if rows.data.is_meta:
        made = torch.empty(len(rows.data), form.row_bytes(rows.columns), dtype=torch.uint8, device="meta")
        return rows._replace(data=made, form=form)
    repeats = own.group // form.group
    codes, scale = rows.codes(), rows.scale().repeat_interleave(repeats, 1)
    low = rows.low()
    low = torch.zeros_like(scale) if low is None else low.repeat_interleave(repeats, 1)
    shift = form.centre - own.centre
    if form.bits == 4 and shift:  # Codes have no room to move.
        low = (low.float() + shift * scale.float()).to(torch.float16)
    elif shift:
        codes = (codes.to(torch.int16) + shift).to(torch.uint8)
    return rows._replace(data=pack_rows(codes, scale, low if form.low else None, form), form=form)


def by_rows(change: Callable[..., Tensor], *matrices: PackedRows) -> PackedRows | None:
    """Apply `change`, which only moves rows, to matrices in their common form. Returns None if their columns are in
    different orders."""
    first = matrices[0]
    if any(not _same(first.order, other.order) for other in matrices[1:]):
        return None
    form = common_form([own.form for own in matrices])
    return first._replace(data=change(*(in_form(own, form).data for own in matrices)), form=form)


def _same(one: Tensor | None, other: Tensor | None) -> bool:
    if one is None or other is None:
        return one is other
    return torch.equal(one, other)


def times(rows: PackedRows, factor: float) -> PackedRows:
    """Return the matrix times a factor; scales and lows are rounded once."""
    if rows.data.is_meta:
        return rows
    low = rows.low()
    low = None if low is None else low.float() * factor
    return rows._replace(data=pack_rows(rows.codes(), rows.scale().float() * factor, low, rows.form))


def floats_of(data: Tensor, form: PackedForm, columns: int) -> Tensor:
    """Return all scales and lows of rows, float16."""
    return data[:, columns * form.bits // 8 :].contiguous().view(torch.float16)
