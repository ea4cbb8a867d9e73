"""`pack`: converts ggml blocks to `PackedRows`, with the same codes.

Scales of the K types are products of a float16 and a small integer; they are rounded to float16."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from weft.engine.model.gguf import blocks as ggml
from weft.engine.model.gguf.forms import form_of
from weft.kernels.formats.packed_rows import pack_rows

Parts = tuple[Tensor, Tensor, Tensor | None]
"""Codes `[n, values]` uint8, scales and lows `[n, groups]` float32 of `n` blocks."""


def _q4_0(blocks: Tensor) -> Parts:
    return ggml.nibbles(blocks[:, 2:]), ggml.half(blocks, 0), None


def _q4_1(blocks: Tensor) -> Parts:
    return ggml.nibbles(blocks[:, 4:]), ggml.half(blocks, 0), ggml.half(blocks, 2)


def _q5_0(blocks: Tensor) -> Parts:
    return ggml.nibbles(blocks[:, 6:]).bitwise_or_(ggml.bits(blocks[:, 2:6], 16)), ggml.half(blocks, 0), None


def _q5_1(blocks: Tensor) -> Parts:
    codes = ggml.nibbles(blocks[:, 8:]).bitwise_or_(ggml.bits(blocks[:, 4:8], 16))
    return codes, ggml.half(blocks, 0), ggml.half(blocks, 2)


def _q8_0(blocks: Tensor) -> Parts:
    # Adding 128 to a signed byte flips its highest bit.
    return blocks[:, 2:] ^ 128, ggml.half(blocks, 0), None


def _q2_k(blocks: Tensor) -> Parts:
    scales = blocks[:, :16]
    codes = ggml.fields(blocks[:, 16:80].unflatten(1, (2, 32)), 2).flatten(1)
    return codes, ggml.half(blocks, 80) * (scales & 15), -(ggml.half(blocks, 82) * (scales >> 4))


def _q3_k(blocks: Tensor) -> Parts:
    codes, scales = ggml.q3_k_parts(blocks)
    return codes, scales, None


def _q4_k(blocks: Tensor) -> Parts:
    scales, lows = ggml.scales_and_lows(blocks)
    return ggml.fields(blocks[:, 16:].unflatten(1, (4, 32)), 4).flatten(1), scales, -lows


def _q5_k(blocks: Tensor) -> Parts:
    scales, lows = ggml.scales_and_lows(blocks)
    return ggml.q5_k_codes(blocks).flatten(1), scales, -lows


def _q6_k(blocks: Tensor) -> Parts:
    codes, scales = ggml.q6_k_parts(blocks)
    return codes.flatten(1), scales, None


_PARTS: dict[str, Callable[[Tensor], Parts]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q2_K": _q2_k,
    "Q3_K": _q3_k,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
}


def pack(raw: Tensor, kind: str, columns: slice = slice(None)) -> Tensor:
    """Convert rows of blocks `[rows, bytes]` uint8 to the bytes of `PackedRows`; columns: whole groups of each row."""
    form, parts = form_of(kind), _PARTS[kind]
    assert form is not None
    size = ggml.block_of(kind)[1]
    codes, scale, low = parts(raw.reshape(-1, size))
    groups = slice(*(None if at is None else at // form.group for at in (columns.start, columns.stop)))
    floats = [None if part is None else part.reshape(len(raw), -1)[:, groups] for part in (scale, low)]
    assert floats[0] is not None
    return pack_rows(codes.reshape(len(raw), -1)[:, columns], floats[0], floats[1], form)
