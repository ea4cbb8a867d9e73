"""`PackedForm`: the format of a matrix in 4 or 8 bits. Without torch, which takes most of a second to import."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

COLUMNS = 32  # Columns are a multiple of this.


class PackedForm(NamedTuple):
    """The format of a matrix."""

    bits: int  # 4 or 8. Four bits: byte i of 16 holds columns i (low half) and i + 16 of 32.
    group: int  # Columns that share a scale.
    centre: int  # The code of a value of zero, but for the low.
    low: bool  # Whether groups have a low.

    def row_bytes(self, columns: int) -> int:
        return columns * self.bits // 8 + 2 * (1 + self.low) * (columns // self.group)

    @property
    def bytes_per_value(self) -> float:
        return self.bits / 8 + 2 * (1 + self.low) / self.group


def common_form(forms: Sequence[PackedForm]) -> PackedForm:
    """Return the smallest form that holds matrices of all these forms exactly."""
    if len(set(forms)) == 1:
        return forms[0]
    bits, group = max(form.bits for form in forms), math.gcd(*(form.group for form in forms))
    low, centres = any(form.low for form in forms), {form.centre for form in forms}
    if bits == 8:
        return PackedForm(8, group, 128, low)
    return PackedForm(4, group, centres.pop(), low) if len(centres) == 1 else PackedForm(4, group, 0, low=True)
