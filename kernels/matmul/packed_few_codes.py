"""Codes and activations of a step as operands of the MMA, for `packed_few_hopper`.

A thread reads 16 bytes of codes from shared memory, which are the 32 columns that it needs for its part of eight MMAs:
the order of K within a step is free if activations have the same. So codes become operands without a move between
threads.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2


def _unpacking(magic: int, one: int, minus: int, type_: str) -> gl.constexpr:
    """Return PTX that makes 16-bit numbers of the low and the high halves of four bytes, in the order 0, 2, 1, 3. The
    bits of a code are the last of a mantissa (`magic`), from which a constant (`minus`) is subtracted, exactly."""
    bits, factor, addend = (f"0x{value:04x}{value:04x}" for value in (magic, one, minus))
    text = f".reg .b32 t<4>, q, r; mov.b32 q, {factor}; mov.b32 r, {addend};"
    for index, (out, by) in enumerate(((0, 0), (1, 8), (2, 4), (3, 12))):
        text += f"shr.b32 t{index}, $4, {by}; lop3.b32 t{index}, t{index}, 0x000f000f, {bits}, 0xea;"
        text += f"fma.rn.{type_} ${out}, t{index}, q, r;"
    return gl.constexpr("{ " + text + "}")


_FROM_0_BF16, _FROM_8_BF16 = (_unpacking(0x4300, 0x3F80, 0xC300 + centre, "bf16x2") for centre in (0, 8))
_FROM_0_FP16, _FROM_8_FP16 = (_unpacking(0x6400, 0x3C00, 0xE400 + centre, "f16x2") for centre in (0, 8))


@gluon.constexpr_function
def _columns_of(group):
    """Return which columns of 64 a thread has, as bases of its registers and of the four threads with the same row."""
    if group == 32:
        return [[0, 1], [0, 2], [0, 4], [0, 32]], [[0, 8], [0, 16]]
    return [[0, 1], [0, 2], [0, 4], [0, 8]], [[0, 16], [0, 32]]


@gluon.constexpr_function
def codes_layout(rows, group, line):
    """Return the layout of codes `[BN * 64 / line, line]`: a thread has rows g and g + 8 of a warp's 16, and of another
    64. A line holds one row or two."""
    own, others = _columns_of(group)
    if line == 64:
        return gl.DistributedLinearLayout(
            [*own, [8, 0], [64, 0]], [*others, [1, 0], [2, 0], [4, 0]], [[16, 0], [32, 0]], [], [rows, 64]
        )
    return gl.DistributedLinearLayout(
        [*own, [4, 0], [32, 0]], [*others, [0, 64], [1, 0], [2, 0]], [[8, 0], [16, 0]], [], [rows // 2, 128]
    )


@gluon.constexpr_function
def rows_layout(tokens, group):
    """Return the layout of activations `[BM, 64]`: a thread has the same columns of every eighth row."""
    own, others = _columns_of(group)
    more = [[1 << i, 0] for i in range(3, tokens.bit_length() - 1)]
    return gl.DistributedLinearLayout(
        [*own, *more], [*others, [1, 0], [2, 0], [4, 0]], [[0, 0], [0, 0]], [], [tokens, 64]
    )


@gluon.jit
def halves(codes, CENTRE: gl.constexpr, DTYPE: gl.constexpr):
    """Return the low and high halves of bytes minus the centre, exactly, with bytes in the order 0, 2, 1, 3."""
    if gl.bfloat16 == DTYPE:
        return gl.inline_asm_elementwise(
            _FROM_0_BF16 if CENTRE == 0 else _FROM_8_BF16, "=r,=r,=r,=r,r", [codes], dtype=(gl.bfloat16, gl.bfloat16),
            is_pure=True, pack=4,
        )  # fmt: skip
    else:
        return gl.inline_asm_elementwise(
            _FROM_0_FP16 if CENTRE == 0 else _FROM_8_FP16, "=r,=r,=r,=r,r", [codes], dtype=(gl.float16, gl.float16),
            is_pure=True, pack=4,
        )  # fmt: skip


@gluon.jit
def _weights_of(half, A: gl.constexpr):
    """Reorder 64 columns of a step as the MMA's operand: no thread gives another anything."""
    ROWS: gl.constexpr = half.shape[0]
    own = gl.permute(gl.reshape(half, (ROWS, 4, 4, 2, 2)), (0, 2, 3, 1, 4))
    return gl.convert_layout(gl.reshape(own, (ROWS, 64)), A)


@gluon.jit
def _rows_of(x, B: gl.constexpr):
    """Reorder 64 columns of activations `[BM, 64]` in the same way, and transpose."""
    BM: gl.constexpr = x.shape[0]
    own = gl.permute(gl.reshape(x, (BM, 4, 4, 2, 2)), (2, 4, 1, 3, 0))
    return gl.convert_layout(gl.reshape(own, (64, BM)), B)


@gluon.jit
def _halves_of_pairs(half, A: gl.constexpr):
    """Like `_weights_of` for spans of 32 columns: return the operands `[ROWS, 32]` of two pairs."""
    ROWS: gl.constexpr = half.shape[0]
    own = gl.permute(gl.reshape(half, (ROWS, 2, 4, 2, 2, 2)), (0, 3, 4, 2, 5, 1))
    one, other = gl.split(own)
    return gl.convert_layout(gl.reshape(one, (ROWS, 32)), A), gl.convert_layout(gl.reshape(other, (ROWS, 32)), A)


@gluon.jit
def _rows_of_spans(x, B: gl.constexpr):
    """Like `_rows_of` for spans of 32 columns: return the operands `[32, BM]` of a pair's two spans."""
    BM: gl.constexpr = x.shape[0]
    own = gl.permute(gl.reshape(x, (BM, 2, 4, 2, 2, 2)), (3, 5, 2, 4, 0, 1))
    one, other = gl.split(own)
    return gl.convert_layout(gl.reshape(one, (32, BM)), B), gl.convert_layout(gl.reshape(other, (32, BM)), B)


@gluon.jit
def _of(factors, group, ACC: gl.constexpr):
    """Return a group's scales or lows, `[BN, 1]` float32."""
    return factors.index(group).load(gl.SliceLayout(1, ACC)).to(gl.float32)[:, None]


@gluon.jit
def add_products(acc, w0, w1, x0, x1, scales, lows, first, A: gl.constexpr, B: gl.constexpr, ACC: gl.constexpr,
         GROUP: gl.constexpr, HAS_LOW: gl.constexpr):  # fmt: skip
    """Add a step's products: halves of codes `[BN, 64]`, activations `[tokens, 64]` of the step's two halves."""
    ROWS: gl.constexpr = acc.shape[0]
    zeros = gl.zeros([ROWS, acc.shape[1]], gl.float32, layout=ACC)
    if GROUP == 32:
        v0, v1 = _halves_of_pairs(w0, A)
        v2, v3 = _halves_of_pairs(w1, A)
        p0, p2 = _rows_of_spans(x0, B)
        p1, p3 = _rows_of_spans(x1, B)
        acc += mma_v2(v0, p0, zeros) * _of(scales, first, ACC)
        acc += mma_v2(v2, p2, zeros) * _of(scales, first + 1, ACC)
        acc += mma_v2(v1, p1, zeros) * _of(scales, first + 2, ACC)
        acc += mma_v2(v3, p3, zeros) * _of(scales, first + 3, ACC)
        if HAS_LOW:
            ones = gl.full([ROWS, 32], 1.0, x0.dtype, layout=A)
            acc += mma_v2(ones, p0, zeros) * _of(lows, first, ACC)
            acc += mma_v2(ones, p2, zeros) * _of(lows, first + 1, ACC)
            acc += mma_v2(ones, p1, zeros) * _of(lows, first + 2, ACC)
            acc += mma_v2(ones, p3, zeros) * _of(lows, first + 3, ACC)
    else:
        AFTER: gl.constexpr = 128 // GROUP - 1
        p0 = _rows_of(x0, B)
        p1 = _rows_of(x1, B)
        y0 = mma_v2(_weights_of(w0, A), p0, zeros)
        y1 = mma_v2(_weights_of(w1, A), p1, zeros)
        if AFTER == 0:
            acc += (y0 + y1) * _of(scales, first, ACC)
        else:
            acc += y0 * _of(scales, first, ACC)
            acc += y1 * _of(scales, first + AFTER, ACC)
        if HAS_LOW:
            ones = gl.full([ROWS, 64], 1.0, x0.dtype, layout=A)
            acc += mma_v2(ones, p0, zeros) * _of(lows, first, ACC)
            acc += mma_v2(ones, p1, zeros) * _of(lows, first + AFTER, ACC)
    return acc


@gluon.jit
def add_part(
    acc, w0, w1, x0, x1, AT: gl.constexpr, scales, lows, first, A: gl.constexpr, B: gl.constexpr, ACC: gl.constexpr,
    X: gl.constexpr, GROUP: gl.constexpr, HAS_LOW: gl.constexpr,
):  # fmt: skip
    """Like `add_products`, with 16 tokens from `AT` of activations in shared memory."""
    r0 = x0.slice(AT, 16, 0).load(X)
    r1 = x1.slice(AT, 16, 0).load(X)
    return add_products(acc, w0, w1, r0, r1, scales, lows, first, A, B, ACC, GROUP, HAS_LOW)


@gluon.jit
def beside(one, other):
    """Join `[BN, T]` twice to `[BN, 2 T]`."""
    own = gl.permute(gl.join(one, other), (0, 2, 1))
    return gl.reshape(own, (one.shape[0], 2 * one.shape[1]))
