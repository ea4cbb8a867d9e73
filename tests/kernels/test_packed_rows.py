"""Rows in 4 and 8 bits: packing is undone exactly, rows move without their format, forms widen without loss."""

from __future__ import annotations

import math

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.kernels.formats.packed_matrix import PackedMatrix, linear
from weft.kernels.formats.packed_rows import (
    PackedForm,
    PackedRows,
    by_rows,
    common_form,
    floats_of,
    in_form,
    pack_rows,
    times,
)

FORMS = [
    PackedForm(4, 32, 8, low=False), PackedForm(4, 32, 0, low=True), PackedForm(8, 32, 16, low=False),
    PackedForm(8, 32, 0, low=True), PackedForm(8, 32, 128, low=False), PackedForm(4, 16, 0, low=True),
    PackedForm(4, 16, 4, low=False), PackedForm(8, 16, 32, low=False), PackedForm(4, 128, 8, low=True),
]  # fmt: skip
"""those of GGUF's types, and of AWQ"""


def rows_of(form: PackedForm, rows: int, columns: int, seed: int = 0, order: torch.Tensor | None = None) -> PackedRows:
    generator = torch.Generator().manual_seed(seed)
    top = 16 if form.bits == 4 else min(256, 2 * form.centre or 32)
    codes = torch.randint(0, top, (rows, columns), generator=generator).to(torch.uint8)
    scale, low = torch.randn(2, rows, columns // form.group, generator=generator).half()
    scale[0, 0] = 0
    return PackedRows(pack_rows(codes, scale, low if form.low else None, form), form, columns, order)


def reference(rows: PackedRows) -> torch.Tensor:
    """The values, one after another."""
    codes, scale, low, form = rows.codes(), rows.scale(), rows.low(), rows.form
    return torch.tensor(
        [
            [
                (int(codes[i, j]) - form.centre) * float(scale[i, j // form.group])
                + (0.0 if low is None else float(low[i, j // form.group]))
                for j in range(rows.columns)
            ]
            for i in range(len(codes))
        ],
        dtype=torch.float32,
    )


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(FORMS), st.integers(1, 9), st.integers(1, 5), st.integers(0, 99))
def test_packing_is_undone_exactly(form: PackedForm, count: int, groups: int, seed: int) -> None:
    columns = math.lcm(32, form.group) * groups
    rows = rows_of(form, count, columns, seed)
    assert rows.data.shape == (count, form.row_bytes(columns))
    assert abs(form.bytes_per_value - form.row_bytes(columns) / columns) < 1e-9
    assert torch.equal(pack_rows(rows.codes(), rows.scale(), rows.low(), form), rows.data)
    assert torch.allclose(rows.values(torch.float32), reference(rows), rtol=1e-6, atol=0)
    floats = [part.flatten() for part in (rows.scale(), rows.low()) if part is not None]
    assert torch.equal(floats_of(rows.data, form, columns).flatten().sort()[0], torch.cat(floats).sort()[0])


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sampled_from(FORMS), min_size=1, max_size=3), st.integers(0, 99))
def test_a_common_form_holds_all_of_them(forms: list[PackedForm], seed: int) -> None:
    each = [rows_of(form, 3 + i, 256, seed + i) for i, form in enumerate(forms)]
    form = common_form(forms)
    joined = by_rows(lambda *parts: torch.cat(parts).flip(0), *each)
    assert joined is not None
    assert joined.form == form
    want = torch.cat([rows.values(torch.float32) for rows in each]).flip(0)
    # A centre of 4 bits that moves into a low rounds that low to float16.
    moved = form.bits == 4 and len({f.centre for f in forms}) > 1
    assert torch.allclose(joined.values(torch.float32), want, rtol=0, atol=2e-2 if moved else 1e-6)
    for rows in each:
        made = in_form(rows, form)
        assert torch.equal(made.scale(), rows.scale().repeat_interleave(rows.form.group // form.group, 1))


def test_columns_in_different_orders_are_not_joined() -> None:
    form = FORMS[0]
    plain, turned = rows_of(form, 2, 64), rows_of(form, 2, 64, order=torch.arange(64).flip(0))
    assert by_rows(lambda *each: torch.cat(each), plain, turned) is None
    assert by_rows(lambda *each: torch.cat(each), turned, turned) is not None
    assert torch.equal(turned.values(torch.float32), plain.values(torch.float32).flip(1))


def test_a_factor_scales_values() -> None:
    for form in FORMS:
        rows = rows_of(form, 4, 128)
        assert torch.allclose(
            times(rows, 0.22).values(torch.float32), rows.values(torch.float32) * 0.22, rtol=2e-3, atol=2e-2
        )


def quantized(x: torch.Tensor) -> torch.Tensor:
    """What a product makes of its input: int8 with a scale for 32 columns."""
    groups = x.unflatten(1, (-1, 32))
    scale = groups.abs().amax(-1, keepdim=True) / 127
    return (torch.where(scale > 0, groups / scale, 0.0).round() * scale).flatten(1)


def test_a_product_reads_int8_activations_with_the_norm_and_the_order() -> None:
    generator = torch.Generator().manual_seed(5)
    x, norm, bias = (torch.randn(size, generator=generator) for size in ((5, 128), (128,), (7,)))
    scale = torch.rand(5, generator=generator) + 0.5
    for form in FORMS:
        order = torch.randperm(128, generator=generator)
        for own in (None, order):
            rows = rows_of(form, 7, 128, order=own)
            values = rows.values(torch.float32)
            turned = slice(None) if own is None else own  # groups of activations are of columns as they are stored
            back = slice(None) if own is None else own.argsort()
            plain = linear(x, None, PackedMatrix.of(rows), bias)
            want = quantized(x[:, turned])[:, back] @ values.t() + bias
            assert torch.allclose(plain, want, rtol=1e-4, atol=1e-3)
            for centred in (False, True):
                h = (x - x.mean(-1, keepdim=True) if centred else x) * norm
                got = linear(x, scale, PackedMatrix.of(rows, norm, centred=centred), bias)
                want = quantized(h[:, turned])[:, back] @ values.t() * scale[:, None] + bias
                assert torch.allclose(got, want, rtol=1e-4, atol=1e-3)
            shift = torch.randn(128, generator=generator)
            got = linear(x, scale, PackedMatrix.of(rows, norm, shift), bias)
            want = quantized((x * scale[:, None] * norm + shift)[:, turned])[:, back] @ values.t() + bias
            assert torch.allclose(got, want, rtol=1e-4, atol=1e-3)


def test_a_table_gives_its_rows() -> None:
    for form in FORMS:
        rows = rows_of(form, 9, 128)
        at = torch.tensor([8, 0, 3, 3])
        assert torch.equal(PackedMatrix.of(rows).rows(at), rows.values(torch.float32)[at])
