"""Pages in 12 bits a scalar: every bit is restored, or the page is known not to be packed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from packed_pages import Words, bf16, cell_of, far, of_kind, pages, words_of

from weft.kernels.formats.packed_page import MAX_VALUES, PackedPage

FORM = PackedPage(2 * 3 * 16 * 64, 16, 64)
NARROW = PackedPage(5 * 6 * 4, 5, 6)


def check(form: PackedPage, words: Words) -> bool:
    cell = cell_of(form, words)
    assert (cell is not None) == (far(form, words) <= form.capacity)
    if cell is not None:
        assert form.holds(cell)
        assert np.array_equal(words_of(form, cell), words.reshape(-1))
    return cell is not None


@pytest.mark.parametrize("form", [FORM, NARROW, PackedPage(2, 1, 2)])
def test_every_bit_is_restored(form: PackedPage) -> None:
    counts = [check(form, words) for words in pages(form, 400, 0)]
    assert sum(counts) > 100
    assert form.values < 100 or not all(counts)


@pytest.mark.nightly
def test_every_bit_of_ten_thousand_pages_is_restored() -> None:
    counts = [check(FORM, words) for words in pages(FORM, 10_000, 1)]
    assert 5_000 < sum(counts) < 10_000


@settings(max_examples=60, deadline=None)
@given(arrays(np.uint16, NARROW.values, elements=st.integers(0, 0xFFFF)))
def test_any_bits_are_restored(words: Words) -> None:
    check(NARROW, words)


def test_a_page_of_a_model_packs_into_twelve_bits_and_a_quarter() -> None:
    llama = PackedPage(32 * 2 * 64 * 8 * 128, 64, 8 * 128)
    assert 16 / 12.26 < 2 * llama.values / llama.nbytes < 16 / 12.24
    rng = np.random.default_rng(2)
    cells = [cell_of(FORM, of_kind(0, FORM, rng)) for _ in range(50)]
    escapes = [FORM.num_escapes(cell) for cell in cells if cell is not None]
    assert len(escapes) == 50
    assert np.mean(escapes) < 0.1 * FORM.capacity


def test_each_channel_has_its_own_base() -> None:
    """Channels of every size: none of them hides the others, as one shared base would."""
    rng = np.random.default_rng(3)
    sizes = 2.0 ** np.linspace(-60, 60, FORM.width)
    words = bf16(rng.uniform(1, 2, (FORM.blocks, FORM.rows, FORM.width)) * sizes)
    cell = cell_of(FORM, words)
    assert cell is not None
    assert FORM.num_escapes(cell) == 0


def test_an_invalid_packed_page_is_refused() -> None:
    cell = cell_of(NARROW, of_kind(0, NARROW, np.random.default_rng(4)))
    assert cell is not None
    cell[:4].view(np.uint32)[0] = NARROW.capacity + 1
    assert not NARROW.holds(cell)
    with pytest.raises(ValueError, match="not a packed page"):
        words_of(NARROW, cell)
    cell[:4].view(np.uint32)[0] = 1
    cell[16:20].view(np.uint32)[0] = NARROW.values << 8
    with pytest.raises(ValueError, match="not a packed page"):
        words_of(NARROW, cell)


def test_not_every_page_has_this_form() -> None:
    assert not PackedPage(15, 5, 3).possible
    assert not PackedPage(2 * MAX_VALUES, 64, 1024).possible
    assert PackedPage(MAX_VALUES, 64, 1024).possible
