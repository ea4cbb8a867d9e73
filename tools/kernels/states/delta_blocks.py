"""What blocks of 64 tokens need from their own tokens for the gated delta rule (`delta_rule`), all at the same time.

That is the inverse of a triangular system, by forward substitution in blocks of 16 (products of powers would cancel for
similar keys), and with it the values and the reads of the state before the block. A block is computed in halves of
`ROWS` tokens.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl

from weft.kernels.common.dependent_launch import begin, release
from weft.tools.kernels.states.state_pages import ROWS, inside, rows_of, softplus


@triton.jit
def gates(a, b, a_log, dt_bias):
    """Return the logarithm of the decay and the share that is overwritten, float32 (`states.delta_gates`)."""
    decay = -tl.exp(a_log.to(tl.float32)) * softplus(a.to(tl.float32) + dt_bias.to(tl.float32))
    return decay, 1.0 / (1.0 + tl.exp(-b.to(tl.float32)))


@triton.jit
def _inverse(system, EXACT: tl.constexpr):
    """Return the inverse `[32, 32]` of 1 + system, which is strictly lower triangular."""
    tiles = tl.permute(tl.reshape(system, (2, 16, 2, 16)), (0, 2, 1, 3))
    diagonal = (tl.arange(0, 2)[:, None] == tl.arange(0, 2)[None, :])[:, :, None, None]
    own = tl.sum(tl.where(diagonal, tiles, 0.0), axis=1)
    row = tl.arange(0, 16)[None, :, None]
    column = tl.arange(0, 16)[None, None, :]
    found = tl.where(row == column, 1.0, 0.0) + tl.zeros([2, 16, 16], tl.float32)
    for i in range(1, 16):
        factors = tl.sum(tl.where(row == i, own, 0.0), axis=1)
        new = tl.sum(factors[:, :, None] * found, axis=1)
        found = tl.where(row == i, found - new[:, None, :], found)
    own = tl.reshape(tl.permute(tl.where(diagonal, found[:, None, :, :], 0.0), (0, 2, 1, 3)), (32, 32))
    i = tl.arange(0, 32)
    below = tl.where((i // 16)[:, None] > (i // 16)[None, :], system, 0.0)
    # (1 + step)^-1 = 1 - step, because step^2 is zero
    return own - tl.dot(tl.dot(own, below, input_precision=EXACT), own, input_precision=EXACT)


@triton.jit
def _inverse_length(x, eps):
    x = x.to(tl.float32)
    return tl.rsqrt(tl.sum(x * x, axis=1) + eps)


@triton.jit
def _rows(base, stride, half: tl.constexpr, tokens, SIZE: tl.constexpr, SP: tl.constexpr):
    """Load the rows `[32, SP]` of half a block."""
    row = half * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SP)
    mask = (row < tokens)[:, None] & inside(column, SIZE, SP)[None, :]
    return tl.load(base + (row[:, None] * stride + column[None, :]), mask=mask, other=0.0)


@triton.jit
def _store_rows(base, stride, half: tl.constexpr, tokens, values, SIZE: tl.constexpr, SP: tl.constexpr):
    row = half * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, SP)
    mask = (row < tokens)[:, None] & inside(column, SIZE, SP)[None, :]
    tl.store(base + (row[:, None] * stride + column[None, :]), values.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _store_weights(base, stride, half: tl.constexpr, other: tl.constexpr, tokens, weights):
    """Store the weights `[32, 32]` of half a block for the tokens of one."""
    row = half * ROWS + tl.arange(0, ROWS)
    column = other * ROWS + tl.arange(0, ROWS)
    at = base + (row[:, None] * stride + column[None, :])
    tl.store(at, weights.to(base.dtype.element_ty), mask=(row < tokens)[:, None])


@triton.jit
def _store_scales(base, stride, half: tl.constexpr, tokens, q_factor, k_factor):
    row = half * ROWS + tl.arange(0, ROWS)
    tl.store(base + row * stride + 1, q_factor, mask=row < tokens)
    tl.store(base + row * stride + 2, k_factor, mask=row < tokens)


@triton.jit
def _against(
    q, q_length, k, k_length, beta, total, earlier, earlier_length, earlier_total, half: tl.constexpr,
    other: tl.constexpr, EXACT: tl.constexpr,
):  # fmt: skip
    """Return weights and system `[32, 32]` of half a block for the keys of the same half or of an earlier one."""
    row = half * ROWS + tl.arange(0, ROWS)
    column = other * ROWS + tl.arange(0, ROWS)
    since = tl.where(row[:, None] >= column[None, :], total[:, None] - earlier_total[None, :], float("-inf"))
    since = tl.exp(since) * earlier_length[None, :]
    weights = tl.dot(q, tl.trans(earlier), input_precision=EXACT) * since * q_length[:, None]
    system = tl.dot(k, tl.trans(earlier), input_precision=EXACT) * since * (beta * k_length)[:, None]
    return weights, tl.where(row[:, None] > column[None, :], system, 0.0)


@triton.jit
def blocks_kernel(
    x, stride_x, b, a, stride_gate, a_log, dt_bias, values, reads, within, scales, blocks, counts, q_scale, norm_eps,
    HK: tl.constexpr, HV: tl.constexpr, DK: tl.constexpr, DV: tl.constexpr, KP: tl.constexpr, VP: tl.constexpr,
    BT: tl.constexpr, EXACT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    token = tl.arange(0, BT)
    dtype = x.dtype.element_ty
    for task in range(tl.program_id(0), tl.load(counts + 1) * HV, tl.num_programs(0)):
        head = task % HV
        block = blocks + (task // HV) * 4
        first = tl.load(block).to(tl.int64)
        tokens = tl.load(block + 1)
        real = token < tokens
        gate = first * stride_gate + head + token * stride_gate
        decay, beta = gates(
            tl.load(a + gate, mask=real, other=0.0), tl.load(b + gate, mask=real, other=0.0), tl.load(a_log + head),
            tl.load(dt_bias + head),
        )  # fmt: skip
        total = tl.cumsum(tl.where(real, decay, 0.0), axis=0)
        place = first * HV + head
        tl.store(scales + place * 3 + token * (3 * HV), total, mask=real)
        keys = x + first * stride_x + head // (HV // HK) * DK
        channels = x + first * stride_x + (2 * HK * DK + head * DV)
        total_0, total_1 = rows_of(total, 0, ROWS), rows_of(total, 1, ROWS)
        beta_0, beta_1 = rows_of(beta, 0, ROWS), rows_of(beta, 1, ROWS)

        k_0 = _rows(keys + HK * DK, stride_x, 0, tokens, DK, KP)
        k_length_0 = _inverse_length(k_0, norm_eps)
        q = _rows(keys, stride_x, 0, tokens, DK, KP)
        q_length = _inverse_length(q, norm_eps) * q_scale
        _store_scales(scales + place * 3, 3 * HV, 0, tokens, q_length * tl.exp(total_0), k_length_0)
        weights, system = _against(
            q, q_length, k_0, k_length_0, beta_0, total_0, k_0, k_length_0, total_0, 0, 0, EXACT
        )  # fmt: skip
        own = within + place * BT
        _store_weights(own, HV * BT, 0, 0, tokens, weights)
        _store_weights(own, HV * BT, 0, 1, tokens, tl.zeros_like(weights))
        solved_00 = _inverse(system, EXACT)

        k_1 = _rows(keys + HK * DK, stride_x, 1, tokens, DK, KP)
        k_length_1 = _inverse_length(k_1, norm_eps)
        q = _rows(keys, stride_x, 1, tokens, DK, KP)
        q_length = _inverse_length(q, norm_eps) * q_scale
        _store_scales(scales + place * 3, 3 * HV, 1, tokens, q_length * tl.exp(total_1), k_length_1)
        weights, cross = _against(
            q, q_length, k_1, k_length_1, beta_1, total_1, k_0, k_length_0, total_0, 1, 0, EXACT
        )  # fmt: skip
        _store_weights(own, HV * BT, 1, 0, tokens, weights)
        weights, system = _against(
            q, q_length, k_1, k_length_1, beta_1, total_1, k_1, k_length_1, total_1, 1, 1, EXACT
        )  # fmt: skip
        _store_weights(own, HV * BT, 1, 1, tokens, weights)
        solved_11 = _inverse(system, EXACT)
        solved_10 = tl.dot(tl.dot(solved_11, cross, input_precision=EXACT), solved_00, input_precision=EXACT)
        solved_00 *= beta_0[None, :]
        solved_10 *= -beta_0[None, :]
        solved_11 *= beta_1[None, :]

        factor_0 = (k_length_0 * tl.exp(total_0))[None, :]
        factor_1 = (k_length_1 * tl.exp(total_1))[None, :]
        own = reads + place * DK
        k = _rows(keys + HK * DK, stride_x, 0, tokens, DK, KP)
        looked = tl.dot((solved_00 * factor_0).to(dtype), k, input_precision=EXACT)
        _store_rows(own, HV * DK, 0, tokens, looked, DK, KP)
        looked = tl.dot((solved_10 * factor_0).to(dtype), k, input_precision=EXACT)
        k = _rows(keys + HK * DK, stride_x, 1, tokens, DK, KP)
        looked = tl.dot((solved_11 * factor_1).to(dtype), k, looked, input_precision=EXACT)
        _store_rows(own, HV * DK, 1, tokens, looked, DK, KP)
        own = values + place * DV
        v = _rows(channels, stride_x, 0, tokens, DV, VP)
        value = tl.dot(solved_00.to(dtype), v, input_precision=EXACT)
        _store_rows(own, HV * DV, 0, tokens, value, DV, VP)
        value = tl.dot(solved_10.to(dtype), v, input_precision=EXACT)
        v = _rows(channels, stride_x, 1, tokens, DV, VP)
        value = tl.dot(solved_11.to(dtype), v, value, input_precision=EXACT)
        _store_rows(own, HV * DV, 1, tokens, value, DV, VP)
