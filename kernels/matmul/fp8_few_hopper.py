"""FP8 GEMMs of a layer for up to 16 tokens on Hopper, which fetch weights while the previous kernel ends.

With few tokens the time is that of reading the weight. The overhead is between two GEMMs, where memory idles: partial
sums, an epilogue, the wait for the previous kernel, the first bytes. So a program here leaves space in an SM's shared
memory and lets the next kernel start when it has all its sums. The next kernel's programs run next to it and fill their
rings with weights, which depend on no kernel, before they wait. An earlier start gains nothing: memory requests of one
kernel delay those of the other.

The weight's tiles of `BN` features, in steps of 128 of K, form one list that all programs share evenly (stream-K). A
tile's sums come from all programs that have some of its steps: each writes its own to the workspace, and the last one
adds them in order of K. The weight is the left operand of the MMA.

`fp8_projections` launches these for weights with a scale per channel. In 16 bits, with twice the bytes, the same design
was no faster than plain Triton.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.hopper import await_previous, barrier, let_next_start, load_tile
from weft.kernels.formats.fp8 import Fp8Rows, Fp8Weight
from weft.kernels.formats.fp8_triton import power_of_two
from weft.kernels.matmul.fp8_few_config import MAX_TOKENS, distribute, few_config
from weft.kernels.matmul.fp8_hopper import gated
from weft.kernels.matmul.gemm_activations import activate
from weft.kernels.matmul.gemm_hopper import page_rows
from weft.kernels.matmul.gemm_launch import Workspace
from weft.kernels.matmul.gemm_tiles import rotated


@gluon.jit
def _ask_weights(w, w_smem, full, unit, steps, stage, BN: gl.constexpr, BM: gl.constexpr):
    mbarrier.expect(full.index(stage), (BN + BM) * 128)
    load_tile(w, [unit // steps * BN, unit % steps * 128], full.index(stage), w_smem.index(stage))


@gluon.jit
def _rows_factor(sumsq, live, stride, width, eps, PARTS: gl.constexpr, MOST: gl.constexpr, L: gl.constexpr):
    """Return 1 / rms of each token from sums of squares `[PARTS, T]`; MOST: PARTS rounded up to a power of two."""
    part = gl.arange(0, MOST, layout=gl.SliceLayout(1, L))
    tok = gl.arange(0, 16, layout=gl.SliceLayout(0, L))
    there = (part < PARTS)[:, None] & (tok < live)[None, :]
    sums = gl.load(sumsq + part[:, None] * stride + tok[None, :], mask=there, other=0.0)
    return gl.rsqrt(gl.sum(sums, axis=0) / width + eps)


@gluon.jit
def _pairs(y):
    """Split `[2 R, T]` into even and odd rows `[R, T]`."""
    ROWS: gl.constexpr = y.shape[0] // 2
    return gl.split(gl.permute(gl.reshape(y, (ROWS, 2, y.shape[1])), (0, 2, 1)))


@gluon.jit
def _leave_quantized(z, q_out, q_scale, stride_q, feat, tok, live, block, N):
    """Write a block of 128 columns of the next GEMM's operand, `z [128, T]`, at columns `feat` of rows of length N."""
    real = (tok < live)[None, :] & (feat < N)[:, None]
    z = gl.where(real, z, 0.0)
    scale, inverse = power_of_two(gl.max(gl.abs(z), axis=0))
    gl.store(q_scale + block * stride_q + tok, scale, mask=(tok < live) & (block * 128 < N))
    at = q_out + tok[None, :] * N + feat[:, None]
    gl.store(at, (z * inverse[None, :]).to(gl.float8e4nv), mask=real)


@gluon.jit
def _to_heads(
    y, tile, tok, live, eps, cos_sin, page_row, kv_inverse, layer, q_norm, k_norm, out, kv,
    HQ: gl.constexpr, HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HAS_NORM: gl.constexpr,
    KV8: gl.constexpr, DTYPE: gl.constexpr, L: gl.constexpr,
):  # fmt: skip
    """Write 128 features `y [128, T]` of q, K or V to `out` or the pages: head norm, then rotation."""
    lane = gl.arange(0, 128, layout=gl.SliceLayout(1, L))
    col = tile * 128 + lane
    if HAS_NORM:
        gl.static_assert(D == 128)
        weight = gl.load(q_norm + lane, mask=col < HQ * D, other=0.0).to(gl.float32)
        weight += gl.load(k_norm + lane, mask=(col >= HQ * D) & (col < (HQ + HKV) * D), other=0.0).to(gl.float32)
        inverse = gl.rsqrt(gl.sum(y * y, axis=0) / D + eps)
        y = gl.where((col < (HQ + HKV) * D)[:, None], y * inverse[None, :] * weight[:, None], y)
    a, b = _pairs(y)
    cos, sin = _pairs(cos_sin)
    a, b = rotated(a, b, cos, sin)
    turned = gl.join(a, b)
    turned = gl.convert_layout(gl.reshape(gl.permute(turned, (0, 2, 1)), (128, y.shape[1])), L)
    y = gl.where((col >= (HQ + HKV) * D)[:, None], y, turned).to(DTYPE)
    real = (tok < live)[None, :]
    gl.store(out + tok.to(gl.int64)[None, :] * (HQ * D) + col[:, None], y, mask=real & (col < HQ * D)[:, None])
    is_v = (col >= (HQ + HKV) * D).to(gl.int32)
    within = col - HQ * D + is_v * ((PAGE - 1) * HKV * D)
    kv_at = kv + page_row[None, :] * (HKV * D) + within[:, None]
    is_kv = (col >= HQ * D) & (col < (HQ + 2 * HKV) * D)
    if KV8:
        scale = gl.load(kv_inverse + layer * (2 * HKV) + (col - HQ * D) // D, mask=is_kv, other=1.0)
        gl.store(kv_at, (y.to(gl.float32) * scale[:, None]).to(gl.float8e4nv), mask=real & is_kv[:, None])
    else:
        gl.store(kv_at, y, mask=real & is_kv[:, None])


@gluon.jit(do_not_specialize=["M", "layer", "stride_sumsq", "stride_sa", "stride_q"])
def few_kernel(
    a, w, x, out, q_out, q_scale, stride_q, next_norm, partial, arrived, share, num_tokens, M, N, K, sa,
    stride_sa, sw, sumsq, stride_sumsq, eps, bias, rotary, positions, slots, kv, kv_inverse, layer, layers, q_norm,
    k_norm,
    KIND: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
    MOST: gl.constexpr, CAP: gl.constexpr, SQUARES: gl.constexpr, PARTS: gl.constexpr, HQ: gl.constexpr,
    HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr,
    HAS_COUNT: gl.constexpr, QUANTIZED: gl.constexpr, WEIGHTED: gl.constexpr, KV8: gl.constexpr,
    A_BLOCKS: gl.constexpr, DTYPE: gl.constexpr, ACT: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """`KIND` is "linear", "residual", "gate_up" or "qkv"; inputs that its epilogue does not read are None."""
    eight: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    row: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    rows: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BM, 32])
    L: gl.constexpr = gl.BlockedLayout([BN // 32, 1], [32, 1], [1, 4], [0, 1])
    FACTORS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    TOK: gl.constexpr = gl.SliceLayout(0, L)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, 128], eight)
    a_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BM, 128], eight)
    factors = gl.allocate_shared_memory(gl.float32, [CAP, BM], row)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    steps = gl.cdiv(K, 128)
    units = gl.cdiv(N, BN) * steps
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, units)
    for slot in gl.static_range(STAGES):
        if begin + slot < end:
            _ask_weights(w, w_smem, full, begin + slot, steps, slot, BN, BM)
    # Positions and the token count are older than the previous kernel, as work lists are, so they need no wait.
    live = M
    if HAS_COUNT:
        live = gl.minimum(gl.load(num_tokens), M)
    tok = gl.arange(0, BM, layout=TOK)
    lane = gl.arange(0, BN, layout=gl.SliceLayout(1, L))
    if KIND == "qkv":
        position = gl.load(positions + tok, mask=tok < live, other=0).to(gl.int64)
        cos_sin = gl.load(rotary + position[None, :] * D + (lane % D)[:, None])
        page_row = page_rows(slots, tok, live, layer, layers, PAGE)
    if PDL:
        await_previous()
    for slot in gl.static_range(STAGES):
        if begin + slot < end:
            load_tile(a, [0, (begin + slot) % steps * 128], full.index(slot), a_smem.index(slot))
    # scales of the activations for all of this program's steps
    index = gl.arange(0, CAP, layout=gl.SliceLayout(1, FACTORS))
    each = gl.arange(0, BM, layout=gl.SliceLayout(0, FACTORS))
    at = sa + ((begin + index) % steps if A_BLOCKS else index * 0)[:, None] * stride_sa + each[None, :]
    scales = gl.load(at, mask=(each < live)[None, :] & (begin + index < end)[:, None], other=0.0)
    factor = gl.full([BM], 1.0, gl.float32, layout=TOK)
    if PARTS > 0:
        factor = _rows_factor(sumsq, live, stride_sumsq, K, eps, PARTS, SQUARES, FACTORS)
        factor = gl.convert_layout(factor, TOK)
    together = factors._reinterpret(gl.float32, [CAP, BM], rows)
    together.store(scales)
    acc_feat = gl.arange(0, BN, layout=gl.SliceLayout(1, ACC))
    acc_tok = gl.arange(0, BM, layout=gl.SliceLayout(0, ACC))
    barrier()
    count = 0
    unit = begin
    while unit < end:
        tile = unit // steps
        last = gl.minimum((tile + 1) * steps, end)
        feat = tile * BN + lane
        # fetch the epilogue's inputs while the weight arrives
        channel = gl.load(sw + feat, mask=feat < N, other=0.0)
        if HAS_BIAS:
            added = gl.load(bias + feat, mask=feat < N, other=0.0).to(gl.float32)
        inside = (tok < live)[None, :] & (feat < N)[:, None]
        place = tok[None, :] * N + feat[:, None]
        if KIND == "residual":
            before = gl.load(x + place, mask=inside, other=0.0).to(gl.float32)
            if WEIGHTED:
                weight = gl.load(next_norm + feat, mask=feat < N, other=0.0).to(gl.float32)
        acc = gl.zeros([BN, BM], gl.float32, layout=ACC)
        zeros = gl.zeros([BN, BM], gl.float32, layout=ACC)
        for step in range(unit, last):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            b = a_smem.index(stage).permute((1, 0))
            part = warpgroup_mma(w_smem.index(stage), b, zeros, use_acc=False, is_async=True)
            scale = factors.index(step - begin).load(gl.SliceLayout(0, ACC))
            acc += warpgroup_mma_wait(0, deps=[part]) * scale[None, :]
            barrier()  # all warps have read the stage
            if step + STAGES < end:
                _ask_weights(w, w_smem, full, step + STAGES, steps, stage, BN, BM)
                load_tile(a, [0, (step + STAGES) % steps * 128], full.index(stage), a_smem.index(stage))
            count += 1

        if PDL:  # noqa: SIM102 (the outer one is settled when compiled)
            if last == end:
                let_next_start()
        is_last = True
        if MOST > 1:
            # through the workspace `[tile, part, T, BN]`, which returns neighboring features
            first_of = tile * steps // share
            parts = ((tile + 1) * steps - 1) // share - first_of + 1
            sums = partial + tile * (MOST * BM * BN)
            mine = sums + (gl.program_id(0) - first_of) * (BM * BN)
            gl.store(mine + acc_tok[None, :] * BN + acc_feat[:, None], acc, mask=(acc_tok < live)[None, :])
            barrier()  # all threads store their sums before the addition below
            is_last = gl.atomic_add(arrived + tile, 1, sem="acq_rel") == parts - 1
        if is_last:
            if MOST > 1:
                y = gl.zeros([BN, BM], gl.float32, layout=L)
                for other in gl.static_range(MOST):
                    left = sums + other * (BM * BN) + tok[None, :] * BN + lane[:, None]
                    there = (tok < gl.where(other < parts, live, 0))[None, :]
                    y += gl.load(left, mask=there, other=0.0, cache_modifier=".cg")
                gl.store(arrived + tile, 0)
            else:
                y = gl.convert_layout(acc, L)
            y = y * channel[:, None] * factor[None, :]
            if HAS_BIAS:
                y += added[:, None]
            if KIND == "linear":
                gl.store(out + place, activate(y, ACT).to(DTYPE), mask=inside)
            if KIND == "residual":
                y = (before + y).to(DTYPE)
                gl.store(out + place, y, mask=inside)
                z = gl.where(inside, y.to(gl.float32), 0.0)
                gl.store(sumsq + tile * stride_sumsq + tok, gl.sum(z * z, axis=0), mask=tok < live)
                if QUANTIZED:
                    if WEIGHTED:
                        z = z * weight[:, None]
                    _leave_quantized(z, q_out, q_scale, stride_q, feat, tok, live, tile, N)
            if KIND == "gate_up":
                HALF: gl.constexpr = gl.BlockedLayout([BN // 64, 1], [32, 1], [1, 4], [0, 1])
                gate, up = _pairs(y)
                h_tok = gl.arange(0, BM, layout=gl.SliceLayout(0, HALF))
                h_feat = tile * (BN // 2) + gl.arange(0, BN // 2, layout=gl.SliceLayout(1, HALF))
                gl.static_assert(BN == 256, "a block of 128 columns comes of 256 features")
                h = gl.convert_layout(gated(gate, up, ACT), HALF)
                _leave_quantized(h, q_out, q_scale, stride_q, h_feat, h_tok, live, tile, N // 2)
            if KIND == "qkv":
                _to_heads(y, tile, tok, live, eps, cos_sin, page_row, kv_inverse, layer, q_norm, k_norm, out,
                          kv, HQ, HKV, D, PAGE, HAS_NORM, KV8, DTYPE, L)  # fmt: skip
        unit = last


_EIGHT = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
_FIELDS: dict[str, Any] = dict.fromkeys(
    ("sumsq", "bias", "rotary", "positions", "slots", "kv", "kv_inverse", "q_norm", "k_norm", "next_norm"), None
) | {"stride_sumsq": 0, "eps": 0.0, "layer": 0, "layers": 0, "PARTS": 0, "HQ": 1, "HKV": 1, "D": 128, "PAGE": 1,
     "ACT": ""}  # fmt: skip


def launch_gemm(
    kind: str, a: Fp8Rows, weight: Fp8Weight, out: Tensor | None, quantized: Fp8Rows | None, num_tokens: Tensor | None,
    space: Workspace | None, x: Tensor | None, *, num_sms: int, dtype: torch.dtype, **fields: Any,
) -> None:  # fmt: skip
    """Run `few_kernel` for a `kind`; weights have a scale per channel, `fields` are the epilogue's inputs.

    Raises `ValueError` for more than `MAX_TOKENS` tokens, without a workspace or with one that is too small."""
    (m, k), n = a.values.shape, weight.values.shape[0]
    config = few_config(kind, n, k, num_sms)
    wide = config.features

    def tiles(tensor: Tensor, of: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [of, config.depth], _EIGHT)

    share, parts = distribute(n, k, wide, num_sms)
    count = -(-n // wide)
    if m > MAX_TOKENS:
        raise ValueError(f"{m} tokens exceed the limit of {MAX_TOKENS}")
    if space is None or space.arrived.numel() < count or space.partial.numel() < count * parts * MAX_TOKENS * wide:
        raise ValueError(f"split sums of {count} tiles need a larger workspace")
    kv = fields.get("kv")
    few_kernel[(num_sms,)](
        tiles(a.values, MAX_TOKENS), tiles(weight.values, wide), x, out,
        None if quantized is None else quantized.values,
        None if quantized is None else quantized.scale, 0 if quantized is None else quantized.scale.stride(0),
        partial=space.partial, arrived=space.arrived, share=share, num_tokens=num_tokens, M=m, N=n, K=k, sa=a.scale,
        stride_sa=a.scale.stride(0), sw=weight.scale, **(_FIELDS | fields), KIND=kind, BN=wide,
        BM=MAX_TOKENS, STAGES=config.stages, MOST=parts, CAP=max(32, 1 << (share - 1).bit_length()),
        SQUARES=1 << max(3, (fields.get("PARTS", 0) - 1).bit_length()), HAS_BIAS=fields.get("bias") is not None,
        HAS_NORM=fields.get("q_norm") is not None, HAS_COUNT=num_tokens is not None, QUANTIZED=quantized is not None,
        WEIGHTED=fields.get("next_norm") is not None, KV8=kv is not None and kv.element_size() == 1,
        A_BLOCKS=a.scale.shape[0] > 1,
        DTYPE={torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype],
        num_warps=4, **pdl_options(),
    )  # fmt: skip
