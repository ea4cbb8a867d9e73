"""Products of packed weights: C++ and torch give the same bits, and a token's result does not depend on the others."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from weft.kernels.native import library, products, tiles
from weft.kernels.native.tiles import Tiles, pack, unpack, values


class Form(NamedTuple):
    bits: int
    group: int
    centre: int
    has_low: bool
    dtype: torch.dtype


FORMS = (
    Form(4, 32, 0, True, torch.float16),  # Q4_1
    Form(4, 32, 8, False, torch.float16),  # Q4_0
    Form(4, 32, 0, True, torch.float32),  # Q4_K
    Form(4, 128, 0, True, torch.float16),  # AWQ and GPTQ
    Form(8, 32, 128, False, torch.float16),  # Q8_0
    Form(8, 16, 32, False, torch.float32),  # Q6_K
    Form(8, 32, 0, True, torch.float32),  # Q5_K
    Form(8, 16, 0, True, torch.float32),  # Q2_K
    Form(4, 16, 4, True, torch.float16),
    Form(8, 96, 16, False, torch.float16),
)
SHAPES = ((16, 32), (19, 71), (1, 1), (48, 640), (130, 288))


def made(form: Form, rows: int, columns: int, seed: int = 0) -> Tiles:
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(1 << form.bits, (rows, columns), generator=generator, dtype=torch.uint8)
    groups = -(-(-(-columns // 32) * 32) // form.group)
    scale, low = (torch.randn(2, rows, groups, generator=generator) * 0.1).to(form.dtype)
    return pack(
        codes, scale, low if form.has_low else None, bits=form.bits, group=form.group, centre=form.centre
    )  # fmt: skip


@pytest.fixture(scope="module", params=[name for name, _, _ in library.VARIANTS])
def variant(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Load each variant in turn."""
    if request.param not in library.variants(library.cpu_flags()):
        pytest.skip(f"this CPU has no {request.param}")
    try:
        found = library.open_variant(request.param, tmp_path_factory.getbasetemp())
    except library.NoLibrary as error:
        pytest.skip(str(error))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(library, "_loaded", found)
        yield request.param


@pytest.mark.parametrize("form", FORMS)
def test_packing_is_undone_and_widens_to_the_numbers(form: Form) -> None:
    for rows, columns in ((1, 1), (19, 71), (16, 96)):
        codes = torch.randint(1 << form.bits, (rows, columns), dtype=torch.uint8)
        groups = -(-(-(-columns // 32) * 32) // form.group)
        scale, low = torch.randn(2, rows, groups).to(form.dtype)
        lows = low if form.has_low else None
        w = pack(codes, scale, lows, bits=form.bits, group=form.group, centre=form.centre)
        again = unpack(w)
        assert torch.equal(again[0], codes)
        assert torch.equal(again[1], scale)
        assert (again[2] is None) if lows is None else torch.equal(again[2], lows)
        wide = torch.empty(rows, columns)
        for r in range(rows):
            for c in range(columns):
                number = scale[r, c // form.group].float() * (int(codes[r, c]) - form.centre)
                wide[r, c] = number if lows is None else number + lows[r, c // form.group].float()
        assert torch.equal(values(w), wide)
        some = torch.randint(rows, (5,))
        assert torch.equal(values(w, some), wide[some])


@pytest.mark.parametrize("form", FORMS[:5])
def test_pieces_are_packed_as_the_whole(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    for rows, columns in ((67, 64), (64, 40), (33, 96)):
        whole = made(form, rows, columns)
        with monkeypatch.context() as patch:
            patch.setattr(tiles, "PIECE", 2)
            pieces = made(form, rows, columns)
        assert torch.equal(whole.codes, pieces.codes)
        assert torch.equal(values(whole), values(pieces))


@pytest.mark.parametrize("form", FORMS)
def test_the_torch_code_is_within_the_error_of_int8_activations(form: Form) -> None:
    w = made(form, 96, 512)
    x, norm, scale, bias = torch.randn(7, 512), torch.rand(512) + 0.5, torch.rand(7) + 0.5, torch.randn(96)
    y = products.multiply_in_torch(x, w, norm=norm, row_scale=scale, bias=bias)
    exact = (x.double() * norm) @ values(w).double().T * scale[:, None] + bias
    assert (y - exact).norm() / exact.norm() < 0.01


def test_the_torch_code_is_exact_for_activations_that_are_int8() -> None:
    w = made(FORMS[1], 40, 96)
    x = torch.randint(-127, 128, (5, 96)).float()
    x[:, ::32] = 127
    exact = x.double() @ values(w).double().T
    assert (products.multiply_in_torch(x, w) - exact).abs().max() < 1e-4 * exact.abs().max()


@pytest.mark.parametrize("form", FORMS)
def test_every_number_of_tokens_gives_the_bits_of_the_torch_code(variant: str, form: Form) -> None:
    for rows, columns in SHAPES:
        w = made(form, rows, columns)
        x, norm, scale, bias = torch.randn(70, columns), torch.randn(columns), torch.rand(70), torch.randn(rows)
        whole = products.multiply_in_torch(x, w, norm=norm, row_scale=scale, bias=bias)
        for tokens in range(1, 71):
            own = products.multiply(x[-tokens:], w, norm=norm, row_scale=scale[-tokens:], bias=bias)
            assert torch.equal(own, whole[-tokens:]), (variant, rows, columns, tokens)


def test_many_tokens_and_threads_give_the_same_bits(variant: str) -> None:
    w, x = made(FORMS[0], 1040, 288), torch.randn(600, 288)  # more tokens than are quantized at once
    y = products.multiply_in_torch(x, w)
    before = torch.get_num_threads()
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            assert torch.equal(products.multiply(x, w), y), variant
    finally:
        torch.set_num_threads(before)


def test_bfloat16_and_strided_rows(variant: str) -> None:
    w = made(FORMS[0], 33, 64)
    x = torch.randn(9, 200).bfloat16()
    for own in (x[:, 8:72], x[::2, 8:72], x.t()[:64].t()):
        assert torch.equal(products.multiply(own, w), products.multiply_in_torch(own.float(), w)), variant


@settings(max_examples=60, deadline=None, database=None)
@given(
    tokens=st.integers(1, 12), form=st.sampled_from(FORMS), seed=st.integers(0, 1 << 20),
    special=st.sampled_from([0.0, 1e4, -1e4, float("nan"), float("inf"), 1e-38, 1e-42, 3e38, -0.0]),
)  # fmt: skip
def test_extreme_numbers(variant: str, tokens: int, form: Form, seed: int, special: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    w = made(form, 35, 100, seed)
    w.scale.view(-1)[:: seed % 7 + 1] = 0
    w.scale.view(-1)[1 :: seed % 5 + 1] = 1e-7  # subnormal in float16
    x = torch.randn(tokens, 100, generator=generator)
    x[seed % tokens, seed % 100] = special
    if seed % 3 == 0:
        x[seed % tokens, :40] = special
    y, z = products.multiply(x, w), products.multiply_in_torch(x, w)
    assert torch.equal(y.isnan(), z.isnan()), variant
    assert torch.equal(y.nan_to_num(), z.nan_to_num()), variant
    broken = torch.zeros(tokens, dtype=torch.bool)
    broken[seed % tokens] = special != special or abs(special) == float("inf")
    assert torch.equal(y.isnan().any(1), broken)


def test_all_codes_and_largest_activations_do_not_overflow(variant: str) -> None:
    for form in FORMS:
        for code in (0, (1 << form.bits) - 1, 1 << form.bits - 1):
            w = made(form, 16, 64)
            again = pack(
                torch.full((16, 64), code, dtype=torch.uint8), *unpack(w)[1:], bits=form.bits, group=form.group,
                centre=form.centre,
            )  # fmt: skip
            x = torch.ones(3, 64)
            x[1], x[2, ::2] = -1, -1
            assert torch.equal(products.multiply(x, again), products.multiply_in_torch(x, again)), (variant, form, code)


def test_arguments_that_do_not_fit_are_refused(variant: str) -> None:
    w, x = made(FORMS[0], 20, 64), torch.randn(3, 64)
    wrong: list[tuple[Tensor, dict[str, Tensor]]] = [
        (x[:, :32], {}), (x[0], {}), (x.double(), {}), (x, {"norm": torch.ones(63)}), (x, {"bias": torch.ones(16)}),
        (x, {"row_scale": torch.ones(4)}), (x, {"norm": torch.ones(64).bfloat16()}),
    ]  # fmt: skip
    for given_x, vectors in wrong:
        with pytest.raises(ValueError, match=r"must be|does not fit"):
            products.multiply(given_x, w, **vectors)
    with pytest.raises(ValueError, match="no tiles"):
        Tiles(w.codes, w.scale, w.low, 20, 64, bits=4, group=48, centre=0)
    with pytest.raises(ValueError, match="cannot be"):
        Tiles(w.codes, w.scale, w.low, 40, 64, bits=4, group=32, centre=0)
    with pytest.raises(ValueError, match="different dtypes"):
        Tiles(w.codes, w.scale, w.scale.float(), 20, 64, bits=4, group=32, centre=0)
    assert products.multiply(x[:0], w).shape == (0, 20), variant


def test_a_library_with_wrong_results_is_not_used(
    variant: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(library, "_reason", None)
    found = library.loaded()
    monkeypatch.setattr(library, "load", lambda _: found)
    assert products.start(tmp_path) is None
    monkeypatch.setattr(products, "SMALLEST", 10.0)  # the torch code now differs
    assert products.start(tmp_path) == "the compiled library computes wrong results", variant
    assert library.loaded() is None
