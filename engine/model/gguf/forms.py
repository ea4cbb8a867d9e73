"""`form_of`: the formats in which matrices of ggml's types stay packed. Without torch, see `PackedForm`."""

from __future__ import annotations

from weft.kernels.formats.packed_form import PackedForm

_FORMS = {
    "Q4_0": PackedForm(4, 32, 8, low=False),
    "Q4_1": PackedForm(4, 32, 0, low=True),
    "Q5_0": PackedForm(8, 32, 16, low=False),
    "Q5_1": PackedForm(8, 32, 0, low=True),
    "Q8_0": PackedForm(8, 32, 128, low=False),
    "Q2_K": PackedForm(4, 16, 0, low=True),
    "Q3_K": PackedForm(4, 16, 4, low=False),
    "Q4_K": PackedForm(4, 32, 0, low=True),
    "Q5_K": PackedForm(8, 32, 0, low=True),
    "Q6_K": PackedForm(8, 16, 32, low=False),
}


def form_of(kind: str) -> PackedForm | None:
    """Return the form of a type's matrices, or None if they are not kept packed."""
    return _FORMS.get(kind)
