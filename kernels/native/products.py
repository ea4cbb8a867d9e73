"""Products of `Tiles` and 8-bit activations: in C++ if a library is loaded, else in torch with the same bits.

A token's activations are quantized in blocks of 32 columns, whose largest magnitude becomes 127. The integer products
of a block are exact. Sums of blocks are float32, added in the order of columns, without fused operations. So a row's
result depends neither on the other rows and tokens nor on the CPU.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.native import library
from weft.kernels.native.tiles import BLOCK, LANES, Tiles, pack, unpack

SMALLEST = 1e-30  # Blocks of smaller activations count as zero.
ELEMENTS = 1 << 24  # Limit on the integer products that the torch code holds at once.


class CPacked(ctypes.Structure):
    """`Packed` of products.h."""

    _fields_ = (
        ("codes", ctypes.c_void_p), ("scale", ctypes.c_void_p), ("low", ctypes.c_void_p), ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64), ("bits", ctypes.c_int32), ("group", ctypes.c_int32), ("centre", ctypes.c_int32),
        ("wide", ctypes.c_int32),
    )  # fmt: skip


class CInput(ctypes.Structure):
    """`Input` of products.h."""

    _fields_ = (("data", ctypes.c_void_p), ("stride", ctypes.c_int64), ("brain", ctypes.c_int32))


def start(cache: Path) -> str | None:
    """Load the library, compiled if need be, and check it. Returns why there is none; None: there is one."""
    if library.load(cache) is not None and not _is_right():
        library.discard("the compiled library computes wrong results")
    return library.reason()


def packed_pointer(w: Tiles) -> CPacked:
    low = None if w.low is None else w.low.data_ptr()
    wide = w.scale.dtype == torch.float32
    return CPacked(w.codes.data_ptr(), w.scale.data_ptr(), low, w.rows, w.columns, w.bits, w.group, w.centre, wide)


def multiply(
    x: Tensor, w: Tiles, *, norm: Tensor | None = None, row_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Return `[T, rows]` float32: x `[T, columns]` float32 or bfloat16 times the matrix, plus bias `[rows]` float32.

    norm `[columns]` float32 multiplies x before it is quantized; row_scale `[T]` float32 multiplies the product."""
    _check(x, w, norm, row_scale, bias)
    if (native := library.loaded()) is None:
        return multiply_in_torch(x, w, norm=norm, row_scale=row_scale, bias=bias)
    x = x if x.stride(-1) == 1 else x.contiguous()
    y = torch.empty(len(x), w.rows)
    vectors = [None if t is None else t.contiguous() for t in (norm, row_scale, bias)]
    given = CInput(x.data_ptr(), x.stride(0), x.dtype == torch.bfloat16)
    failed = native.weft_multiply(
        ctypes.byref(packed_pointer(w)), ctypes.byref(given), ctypes.c_int64(len(x)),
        *(None if t is None else ctypes.c_void_p(t.data_ptr()) for t in vectors), ctypes.c_void_p(y.data_ptr()),
        torch.get_num_threads(),
    )  # fmt: skip
    if failed:
        raise MemoryError("no memory for quantized activations")
    return y


def _check(x: Tensor, w: Tiles, norm: Tensor | None, row_scale: Tensor | None, bias: Tensor | None) -> None:
    if x.ndim != 2 or x.shape[1] != w.columns or x.dtype not in {torch.float32, torch.bfloat16}:
        raise ValueError(f"x {tuple(x.shape)} {x.dtype} does not fit a matrix of {w.columns} columns")
    for t, size in ((norm, w.columns), (row_scale, len(x)), (bias, w.rows)):
        if t is not None and (t.shape != (size,) or t.dtype != torch.float32):
            raise ValueError(f"a vector {tuple(t.shape)} {t.dtype} must be ({size},) float32")


def quantize(
    x: Tensor, norm: Tensor | None = None, row_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return int8 values `[T, blocks, 32]` and float32 scales `[T, blocks]`.

    Blocks with NaN or infinity have scale NaN."""
    v = x.float()
    if norm is not None:
        v = v * norm
    v = F.pad(v, (0, -v.shape[1] % BLOCK)).unflatten(-1, (-1, BLOCK))
    most = v.abs().amax(-1)
    finite, zero = most.isfinite(), most < SMALLEST
    # not `127 / most`, which torch computes as a product with the reciprocal
    inverse = torch.where(finite & ~zero, torch.full_like(most, 127.0) / most, 0.0)
    q = torch.where(finite[..., None], v * inverse[..., None], 0.0).round().to(torch.int8)
    scale = torch.where(finite, torch.where(zero, 0.0, most / 127.0), torch.nan)
    return q, scale if row_scale is None else scale * row_scale[:, None]


def multiply_in_torch(
    x: Tensor, w: Tiles, *, norm: Tensor | None = None, row_scale: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """`multiply` in torch."""
    q, scale = quantize(x, norm, row_scale)
    codes, weight_scale, low = unpack(w)
    codes = F.pad(codes, (0, -w.columns % BLOCK))
    y = torch.empty(len(x), w.rows)
    rows = max(1, ELEMENTS // max(1, q.shape[1] * len(x)))
    for first in range(0, w.rows, rows):
        own = slice(first, first + rows)
        lows = None if low is None else low[own].float()
        y[:, own] = _sums(q, scale, codes[own], weight_scale[own].float(), lows, w)
    return y if bias is None else y + bias


def _sums(q: Tensor, scale: Tensor, codes: Tensor, weight_scale: Tensor, low: Tensor | None, w: Tiles) -> Tensor:
    """Return `[T, rows]` of codes `[rows, columns]` and weight_scale, low `[rows, groups]`."""
    step = min(w.group, BLOCK)
    x = q.flatten(1).unflatten(1, (-1, step)).float().transpose(0, 1)  # [steps, T, step]
    # float32 is exact: sums stay below 2^24
    dots = torch.bmm(x, (codes.float() - w.centre).unflatten(1, (-1, step)).permute(1, 2, 0))
    sums = x.sum(-1)
    y = torch.zeros(len(q), len(codes))
    for i, dot in enumerate(dots):
        group, own = i * step // w.group, scale[:, i * step // BLOCK]
        y = y + dot * (own[:, None] * weight_scale[:, group])
        if low is not None:
            y = y + (own * sums[i])[:, None] * low[:, group]
    return y


def _is_right() -> bool:
    """Return whether the library gives the bits of the torch code, in both widths."""
    generator = torch.Generator().manual_seed(0)
    for bits in (4, 8):
        rows, columns, group = LANES + 3, 2 * BLOCK + 7, BLOCK
        codes = torch.randint(1 << bits, (rows, columns), generator=generator, dtype=torch.uint8)
        scale, low = torch.randn(2, rows, 3, generator=generator).half()
        w = pack(codes, scale, low, bits=bits, group=group)
        x = torch.randn(MOST_TOKENS + 3, columns, generator=generator)
        if not torch.equal(multiply(x, w), multiply_in_torch(x, w)):
            return False
    return True


MOST_TOKENS = 8  # that C++ computes together
