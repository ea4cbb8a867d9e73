"""GEMMs of 4-bit weights for few tokens on Hopper, in the way of `fp8_few_hopper`: the steps of all tiles form one
list that the programs share evenly, and a program's ring is full of weights before the previous kernel ends.

With few tokens the time is that of reading codes, and of what GEMMs do not do at the same time: partial sums, an
epilogue, the wait for the previous kernel. So two kernels fit an SM. The next one starts as soon as the previous one
has ended, and fills its rings while this one computes.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.hopper import await_previous, barrier, let_next_start, load_tile
from weft.kernels.formats.packed_weight import PackedWeight
from weft.kernels.matmul.gemm_activations import activate, gate_with
from weft.kernels.matmul.gemm_hopper import page_rows
from weft.kernels.matmul.gemm_launch import Workspace
from weft.kernels.matmul.packed_few_codes import add_part, add_products, beside, codes_layout, halves, rows_layout
from weft.kernels.matmul.packed_few_config import LINES, MAX_TOKENS, WIDE, FewConfig, few_config, share_of
from weft.kernels.matmul.packed_few_epilogues import pairs, rows_factor, to_heads


@gluon.jit
def _ask_weights(w, w_smem, full, tile, step, stage, BM: gl.constexpr, LINE: gl.constexpr):
    """Request a step's codes: two blocks of 64 rows. The barrier also waits for the activations."""
    mbarrier.expect(full.index(stage), 2 * 64 * 64 + BM * 256)
    load_tile(w, [tile * 2, step * (4096 // LINE), 0], full.index(stage), w_smem.index(stage))


@gluon.jit
def _refill(
    w, a, w_smem, a_smem, full, tile, step, more, steps, stage, BM: gl.constexpr, LINE: gl.constexpr
):  # fmt: skip
    """Request step `step` of a tile, if `more`, in the stage that all warps have read. Returns what to request next."""
    barrier()
    if more:
        _ask_weights(w, w_smem, full, tile, step, stage, BM, LINE)
        load_tile(a, [0, step * 128], full.index(stage), a_smem.index(stage))
        step += 1
        if step == steps:
            step = 0
            tile += 1
    return tile, step


@gluon.jit
def _factors_of(table, own, begin, end, steps, padded, CAP: gl.constexpr, BN: gl.constexpr, PER: gl.constexpr):
    """Copy the scales or lows of a program's steps to shared memory, `[CAP * PER, BN]`."""
    L: gl.constexpr = gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0])
    index = gl.arange(0, CAP * PER, layout=gl.SliceLayout(1, L))
    lane = gl.arange(0, BN, layout=gl.SliceLayout(0, L))
    unit = begin + index // PER
    at = table + ((unit % steps) * PER + index % PER)[:, None] * padded + (unit // steps * BN)[:, None] + lane[None, :]
    own.store(
        gl.load(at, mask=(unit < end)[:, None] & ((unit // steps * BN)[:, None] + lane[None, :] < padded), other=0.0)
    )


@gluon.jit(do_not_specialize=["M", "layer", "stride_sumsq"])
def packed_few_kernel(
    a, w, scale, low, x, out, normed, next_norm, partial, arrived, share, num_tokens, M, N, K, padded,
    sumsq, stride_sumsq, eps, bias, rotary, positions, slots, kv, layer, layers, q_norm, k_norm,
    KIND: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    LINE: gl.constexpr, EARLY: gl.constexpr, CENTRE: gl.constexpr,
    MOST: gl.constexpr, CAP: gl.constexpr, SQUARES: gl.constexpr, PARTS: gl.constexpr, HQ: gl.constexpr,
    HKV: gl.constexpr, D: gl.constexpr, PAGE: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_NORM: gl.constexpr,
    HAS_COUNT: gl.constexpr, HAS_LOW: gl.constexpr, WEIGHTED: gl.constexpr, DTYPE: gl.constexpr, ACT: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """`KIND` is "linear", "residual", "gate_up" or "qkv"; inputs that its epilogue does not read are None."""
    lines: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=LINE, element_bitwidth=8, rank=2)
    blocks: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=LINE, element_bitwidth=8, rank=3)
    sixteen: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    line: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[1, 0])
    ACC: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    A: gl.constexpr = gl.DotOperandLayout(0, ACC, 2)
    B: gl.constexpr = gl.DotOperandLayout(1, ACC, 2)
    CODES: gl.constexpr = codes_layout(BN, GROUP, LINE)
    PART: gl.constexpr = 16 if BM > 16 else BM
    X: gl.constexpr = rows_layout(PART, GROUP)
    L: gl.constexpr = gl.BlockedLayout([BN // 32, 1], [32, 1], [1, 4], [0, 1])
    FACTORS: gl.constexpr = gl.BlockedLayout([1, 4], [8, 4], [4, 1], [1, 0])
    TOK: gl.constexpr = gl.SliceLayout(0, L)
    PER: gl.constexpr = 128 // GROUP
    w_smem = gl.allocate_shared_memory(gl.uint8, [STAGES, 2, 4096 // LINE, LINE], blocks)
    a_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BM, 128], sixteen)
    scales = gl.allocate_shared_memory(gl.float16, [CAP * PER, BN], line)
    lows = scales
    if HAS_LOW:
        lows = gl.allocate_shared_memory(gl.float16, [CAP * PER, BN], line)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
    steps = gl.cdiv(K, 128)
    units = gl.cdiv(N, BN) * steps
    begin = gl.program_id(0) * share
    end = gl.minimum(begin + share, units)
    for slot in gl.static_range(STAGES):
        if begin + slot < end:
            _ask_weights(w, w_smem, full, (begin + slot) // steps, (begin + slot) % steps, slot, BM, LINE)
    _factors_of(scale, scales._reinterpret(gl.float16, [CAP * PER, BN], plain), begin, end, steps, padded, CAP, BN, PER)
    if HAS_LOW:
        _factors_of(low, lows._reinterpret(gl.float16, [CAP * PER, BN], plain), begin, end, steps, padded, CAP, BN, PER)
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
    if PDL:  # noqa: SIM102
        if EARLY:
            let_next_start()
    factor = gl.full([BM], 1.0, gl.float32, layout=TOK)
    if PARTS > 0:
        factor = rows_factor(sumsq, live, stride_sumsq, K, eps, PARTS, SQUARES, BM, FACTORS)
        factor = gl.convert_layout(factor, TOK)
    acc_feat = gl.arange(0, BN, layout=gl.SliceLayout(1, ACC))
    acc_tok = gl.arange(0, BM, layout=gl.SliceLayout(0, ACC))
    codes_of = w_smem._reinterpret(gl.uint8, [STAGES, BN * 64 // LINE, LINE], lines)
    rows_of = a_smem._reinterpret(DTYPE, [STAGES * 2, BM, 64], sixteen)
    barrier()
    count = 0
    unit = begin
    ask_tile = (begin + STAGES) // steps
    ask_step = (begin + STAGES) % steps
    while unit < end:
        tile = unit // steps
        last = gl.minimum((tile + 1) * steps, end)
        feat = tile * BN + lane
        # fetch the epilogue's inputs while the weight arrives
        if HAS_BIAS:
            added = gl.load(bias + feat, mask=feat < N, other=0.0).to(gl.float32)
        inside = (tok < live)[None, :] & (feat < N)[:, None]
        place = tok[None, :] * N + feat[:, None]
        if KIND == "residual":
            before = gl.load(x + place, mask=inside, other=0.0).to(gl.float32)
            if WEIGHTED:
                weight = gl.load(next_norm + feat, mask=feat < N, other=0.0).to(gl.float32)
        acc = gl.zeros([BN, PART], gl.float32, layout=ACC)
        other_acc = acc
        for step in range(unit, last):
            stage = count % STAGES
            mbarrier.wait(full.index(stage), (count // STAGES) & 1)
            codes = gl.reshape(codes_of.index(stage).load(CODES), (BN, 64))
            first = (step - begin) * PER
            x0 = rows_of.index(stage * 2)
            x1 = rows_of.index(stage * 2 + 1)
            more = step + STAGES < end
            if BM <= 16:
                r0 = x0.load(X)
                r1 = x1.load(X)
                ask_tile, ask_step = _refill(
                    w, a, w_smem, a_smem, full, ask_tile, ask_step, more, steps, stage, BM, LINE
                )
                w0, w1 = halves(codes, CENTRE, DTYPE)
                acc = add_products(acc, w0, w1, r0, r1, scales, lows, first, A, B, ACC, GROUP, HAS_LOW)
            else:  # 16 tokens at a time, because the sums of a step do not fit the registers
                w0, w1 = halves(codes, CENTRE, DTYPE)
                acc = add_part(acc, w0, w1, x0, x1, 0, scales, lows, first, A, B, ACC, X, GROUP, HAS_LOW)
                other_acc = add_part(other_acc, w0, w1, x0, x1, 16, scales, lows, first, A, B, ACC, X, GROUP, HAS_LOW)
                ask_tile, ask_step = _refill(
                    w, a, w_smem, a_smem, full, ask_tile, ask_step, more, steps, stage, BM, LINE
                )
            count += 1

        if BM == 32:
            sums_of = gl.convert_layout(beside(acc, other_acc), ACC)
        else:
            sums_of = acc
        if PDL:  # noqa: SIM102 (the outer one is settled when compiled)
            if not EARLY and last == end:
                let_next_start()
        is_last = True
        if MOST > 1:
            # through the workspace `[tile, part, T, BN]`, which returns neighboring features
            first_of = tile * steps // share
            parts = ((tile + 1) * steps - 1) // share - first_of + 1
            sums = partial + tile * (MOST * BM * BN)
            mine = sums + (gl.program_id(0) - first_of) * (BM * BN)
            gl.store(mine + acc_tok[None, :] * BN + acc_feat[:, None], sums_of, mask=(acc_tok < live)[None, :])
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
                y = gl.convert_layout(sums_of, L)
            y = y * factor[None, :]
            if HAS_BIAS:
                y += added[:, None]
            if KIND == "linear":
                gl.store(out + place, activate(y, ACT).to(DTYPE), mask=inside)
            if KIND == "residual":
                y = (before + y).to(DTYPE)
                gl.store(out + place, y, mask=inside)
                z = gl.where(inside, y.to(gl.float32), 0.0)
                gl.store(sumsq + tile * stride_sumsq + tok, gl.sum(z * z, axis=0), mask=tok < live)
                if WEIGHTED:
                    gl.store(normed + place, (z * weight[:, None]).to(DTYPE), mask=inside)
            if KIND == "gate_up":
                gate, up = pairs(y)
                h = gate_with(gate, up, ACT).to(DTYPE)
                HALF: gl.constexpr = h.type.layout
                h_tok = gl.arange(0, BM, layout=gl.SliceLayout(0, HALF))
                h_feat = tile * (BN // 2) + gl.arange(0, BN // 2, layout=gl.SliceLayout(1, HALF))
                real = (h_tok < live)[None, :] & (h_feat < N // 2)[:, None]
                gl.store(out + h_tok[None, :] * (N // 2) + h_feat[:, None], h, mask=real)
            if KIND == "qkv":
                to_heads(y, tile, tok, live, eps, cos_sin, page_row, q_norm, k_norm, out, kv, HQ, HKV, D, PAGE,
                         HAS_NORM, DTYPE, L)  # fmt: skip
        unit = last


_BLOCKS = {line: gl.NVMMASharedLayout(swizzle_byte_width=line, element_bitwidth=8, rank=3) for line in LINES.values()}
_SIXTEEN = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
_FIELDS: dict[str, Any] = dict.fromkeys(
    ("sumsq", "bias", "rotary", "positions", "slots", "kv", "q_norm", "k_norm", "next_norm", "normed"), None
) | {"stride_sumsq": 0, "eps": 0.0, "layer": 0, "layers": 0, "PARTS": 0, "HQ": 1, "HKV": 1, "D": 128, "PAGE": 1,
     "ACT": ""}  # fmt: skip


def launch_few(
    kind: str, a: Tensor, weight: PackedWeight, out: Tensor, num_tokens: Tensor | None, space: Workspace | None,
    x: Tensor | None = None, *, num_sms: int, config: FewConfig | None = None, **fields: Any,
) -> None:  # fmt: skip
    """Run `packed_few_kernel` for a `kind`; `fields` are the epilogue's inputs.

    Raises `ValueError` without a workspace or with one that is too small."""
    config = config or few_config(len(a))
    m, n, k = len(a), weight.rows, weight.columns
    share, parts = share_of(n, k, weight.group, num_sms, config)
    count, tokens = -(-n // WIDE), max(8, 1 << (m - 1).bit_length())
    if m > MAX_TOKENS:
        raise ValueError(f"{m} tokens exceed the limit of {MAX_TOKENS}")
    if space is None or space.arrived.numel() < count or space.partial.numel() < count * parts * tokens * WIDE:
        raise ValueError(f"split sums of {count} tiles need a larger workspace")
    programs = -(-count * weight.codes.shape[1] // share)
    dtype, line = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[a.dtype], LINES[tokens]
    codes = TensorDescriptor.from_tensor(
        weight.codes.view(len(weight.codes), -1, line), [2, 4096 // line, line], _BLOCKS[line]
    )
    packed_few_kernel[(programs,)](
        TensorDescriptor.from_tensor(a, [tokens, 128], _SIXTEEN), codes, weight.scale, weight.low, x, out,
        partial=space.partial, arrived=space.arrived, share=share, num_tokens=num_tokens, M=m, N=n, K=k,
        padded=weight.scale.shape[1], **(_FIELDS | fields), KIND=kind, BN=WIDE, BM=tokens, STAGES=config.stages,
        GROUP=weight.group, LINE=line, EARLY=config.early, CENTRE=weight.centre, MOST=parts,
        CAP=max(16, 1 << (share - 1).bit_length()), SQUARES=1 << max(3, (fields.get("PARTS", 0) - 1).bit_length()),
        HAS_BIAS=fields.get("bias") is not None, HAS_NORM=fields.get("q_norm") is not None,
        HAS_COUNT=num_tokens is not None, HAS_LOW=weight.low is not None,
        WEIGHTED=fields.get("next_norm") is not None, DTYPE=dtype, num_warps=4, **pdl_options(),
    )  # fmt: skip
