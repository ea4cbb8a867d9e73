"""Pages of bf16 KV to pack: like those of models, and adversarial ones."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from weft.kernels.formats.packed_page import ESCAPE, Bytes, PackedPage

Words = npt.NDArray[np.uint16]
SPECIAL = np.array(
    [0x0000, 0x8000, 0x0001, 0x807F, 0x0080, 0x7F80, 0xFF80, 0x7FC0, 0xFFC1, 0x7F81, 0x7FFF, 0xFFFF, 0x7F7F, 0x3F80],
    np.uint16,
)
"""zeros, denormals, the smallest, infinities, quiet and signalling NaNs with payloads, the largest, one"""


def bf16(values: npt.NDArray[np.floating]) -> Words:
    """bf16 by truncation, not rounding: any bits are allowed."""
    return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def like_a_models(form: PackedPage, rng: np.random.Generator, spread: float = 1.0) -> Words:
    """Normal, with channels of scales e^N(0, spread) and a few that stand out."""
    shape = (form.blocks, form.rows, form.width)
    scales = np.exp(spread * rng.standard_normal((form.blocks, 1, form.width)))
    scales[:, :, :: max(1, form.width // 3)] *= 40
    return bf16(rng.standard_normal(shape) * scales + (rng.random(shape[2]) < 0.05) * 30.0)


def of_kind(kind: int, form: PackedPage, rng: np.random.Generator) -> Words:
    """One of ten kinds, `[blocks, rows, width]`."""
    shape = (form.blocks, form.rows, form.width)
    words = like_a_models(form, rng)
    flat = words.reshape(-1)
    few = rng.choice(flat.size, min(flat.size, form.capacity), replace=False)
    if kind == 1:  # any bits
        words = rng.integers(0, 1 << 16, shape, np.uint16)
    elif kind == 2:  # a few special values
        some = few[: len(few) // 2]
        flat[some] = rng.choice(SPECIAL, len(some))
    elif kind == 3:  # only special values
        words = rng.choice(SPECIAL, shape)
    elif kind == 4:  # one word everywhere
        words = np.full(shape, rng.choice(SPECIAL))
    elif kind == 5:  # every exponent in turn in each channel
        words = (np.arange(flat.size) % 256 << 7 | rng.integers(0, 128, flat.size)).astype(np.uint16).reshape(shape)
    elif kind == 6:  # exponents at and just beyond the range
        below = rng.integers(0, 15 + (rng.random() < 0.5), shape)
        words = ((140 - below) << 7 | rng.integers(0, 128, shape) | rng.integers(0, 2, shape) << 15).astype(np.uint16)
    elif kind == 7:  # denormals
        words = (rng.integers(0, 2, shape) << 15 | rng.integers(0, 128, shape)).astype(np.uint16)
    elif kind == 8:  # the list is full, or has one too many
        words[:] = 0x3F80 | words & 0x807F
        far = rng.choice(flat.size, min(flat.size, form.capacity + int(rng.integers(0, 2))), replace=False)
        words.reshape(-1)[far] = rng.integers(0, 112, len(far)) << 7
    elif kind == 9:  # a NaN hides a channel
        words[:, rng.integers(form.rows), rng.integers(form.width)] = 0xFFC5
    return words


def cell_of(form: PackedPage, words: Words) -> Bytes | None:
    """The cell packed by the reference; None if the page does not pack. The previous content must not matter."""
    out = np.full(form.nbytes, 0xA5, np.uint8)
    return out if form.pack(words.reshape(-1).view(np.uint8), out) else None


def words_of(form: PackedPage, cell: Bytes) -> Words:
    page = np.full(2 * form.values, 0x5A, np.uint8)
    form.unpack(cell, page)
    return page.view(np.uint16)


def far(form: PackedPage, words: Words) -> int:
    """Scalars whose exponent is too far below their channel's largest, counted in another way than the reference
    does."""
    exponents = (words.reshape(form.blocks, form.rows, form.width).astype(int) >> 7) & 255
    return int((exponents.max(1, keepdims=True) - exponents >= ESCAPE).sum())


def pages(form: PackedPage, count: int, seed: int) -> Iterator[Words]:
    """Every kind in turn; half of them resemble a model's pages."""
    rng = np.random.default_rng(seed)
    for i in range(count):
        yield of_kind(i // 2 % 10 if i % 2 else 0, form, rng)
