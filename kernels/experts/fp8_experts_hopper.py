"""FP8 expert GEMMs on Hopper, warp-specialized: `experts_hopper`'s list of tiles with `fp8_hopper`'s sums.

Two warpgroups own 64 rows each of a tile of 128 rows, one producer warp streams both operands by TMA, and a step is 128
of K. As in 16 bits, if an expert's rows end within the first 64 of its last tile, the second warpgroup multiplies
nothing and its rows are not fetched.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.hopper import follow_previous, ring_barriers, skip_stages, store_tile
from weft.kernels.experts.experts_hopper import produce_tiles, unit_of
from weft.kernels.experts.experts_triton import hidden_of
from weft.kernels.formats.fp8 import Fp8Rows, Fp8Weight
from weft.kernels.formats.fp8_triton import power_of_two
from weft.kernels.matmul.fp8_hopper import dequantized, promoted
from weft.kernels.matmul.gemm_config import GemmConfig

BLOCK_DEPTH = 128


@gluon.jit
def _hidden(y, col, half, OAI: gl.constexpr, PAIRS: gl.constexpr):
    """Return columns `col ..` of the hidden part from pairs of features; zero from `half` on."""
    gate, up = gl.split(gl.reshape(y, (64, 64, 2)))
    h = gl.convert_layout(hidden_of(gate, up, OAI), PAIRS)
    at = col + gl.arange(0, 64, layout=gl.SliceLayout(0, PAIRS))
    return gl.where((at < half)[None, :], h, 0.0)


@gluon.jit
def _consume(
    out, q_desc, q_scale, stride_q, sa, stride_sa, sw, stride_sw, factor, bias, tiles, units, tiles_n, steps, R, N,
    a_smem, w_smem, io_smem, q_smem, full, empty, WG: gl.constexpr, GATED: gl.constexpr, OAI: gl.constexpr,
    HAS_BIAS: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr, W_BLOCKS: gl.constexpr,
    DTYPE: gl.constexpr,
):  # fmt: skip
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 32])
    PAIRS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 64, 32])
    PIECES: gl.constexpr = BN // 128
    count = 0
    lane = gl.arange(0, 128, layout=gl.SliceLayout(0, HALF))
    expert, tile_m, tile_n, used = unit_of(gl.program_id(0), units, tiles, tiles_n, FIELDS)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row0, col0, of, mine, block_n = tile_m * 128 + WG * 64, tile_n * BN, expert * N, used > WG * 64, tile_n * PIECES
        expert, tile_m, tile_n, used = unit_of(unit + gl.num_programs(0), units, tiles, tiles_n, FIELDS)
        if mine:
            rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, HALF))
            own = sw + of.to(gl.int64) * stride_sw
            left, right, count = promoted(
                a_smem, w_smem, full, empty, sa, stride_sa, own, stride_sw, rows, lane, R, block_n, gl.cdiv(N, 128), N,
                count, steps, WG, BN, HALF, STAGES, True, W_BLOCKS,
            )  # fmt: skip
            shift = bias
            if HAS_BIAS:
                shift = bias + of
            if GATED:
                gl.static_assert(BN == 256, "a block of 128 columns comes of 256 features")
                scale = gl.load(factor + rows)
                y = dequantized(left, scale, own, shift, col0, N, W_BLOCKS, True, HAS_BIAS, HALF)
                h_left = _hidden(y, col0 // 2, N // 2, OAI, PAIRS)
                y = dequantized(right, scale, own, shift, col0 + 128, N, W_BLOCKS, True, HAS_BIAS, HALF)
                h_right = _hidden(y, col0 // 2 + 64, N // 2, OAI, PAIRS)
                amax = gl.maximum(gl.max(gl.abs(h_left), axis=1), gl.max(gl.abs(h_right), axis=1))
                h_scale, inverse = power_of_two(amax)
                h_rows = row0 + gl.arange(0, 64, layout=gl.SliceLayout(1, PAIRS))
                gl.store(q_scale + (col0 // 256).to(gl.int64) * stride_q + h_rows, h_scale)
                tma.store_wait(0)
                q_mine = q_smem.index(WG)
                q_mine.slice(0, 64, dim=1).store((h_left * inverse[:, None]).to(gl.float8e4nv))
                q_mine.slice(64, 64, dim=1).store((h_right * inverse[:, None]).to(gl.float8e4nv))
                fence_async_shared()
                store_tile(q_desc, [row0, col0 // 2], q_mine)
            else:
                for piece in gl.static_range(PIECES):
                    y = dequantized(left if piece == 0 else right, rows, own, shift, col0 + piece * 128, N, W_BLOCKS,
                                  False, HAS_BIAS, HALF)  # fmt: skip
                    io = io_smem.index(WG)
                    tma.store_wait(0)
                    io.store(y.to(DTYPE))
                    fence_async_shared()
                    store_tile(out, [row0, col0 + piece * 128], io)
        else:
            count = skip_stages(full, empty, count, steps, STAGES)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["R", "stride_sa", "stride_q"])
def grouped_kernel(
    a, w, out, q_desc, q_scale, stride_q, sa, stride_sa, sw, stride_sw, factor, bias, tiles, number, R, N, K,
    GATED: gl.constexpr, OAI: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, HAS_BIAS: gl.constexpr,
    FIELDS: gl.constexpr, W_BLOCKS: gl.constexpr, DTYPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """See `fp8_experts_triton.grouped_kernel`."""
    eight: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=8, rank=2)
    sixteen: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, 128, 128], eight)
    w_smem = gl.allocate_shared_memory(gl.float8e4nv, [STAGES, BN, 128], eight)
    # unused buffers are one small tile
    io_smem = gl.allocate_shared_memory(DTYPE, [1, 8, 64] if GATED else [2, 64, 128], sixteen)
    q_smem = gl.allocate_shared_memory(gl.float8e4nv, [2, 64, 128] if GATED else [1, 8, 128], eight)
    full, empty = ring_barriers(STAGES, 2)
    follow_previous(PDL)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, 128)
    units = gl.load(number) * tiles_n
    gl.warp_specialize(
        [
            (_consume, (out, q_desc, q_scale, stride_q, sa, stride_sa, sw, stride_sw, factor, bias, tiles, units,
                        tiles_n, steps, R, N, a_smem, w_smem, io_smem, q_smem, full, empty, 0, GATED, OAI, HAS_BIAS,
                        BN, STAGES, FIELDS, W_BLOCKS, DTYPE)),
            (_consume, (out, q_desc, q_scale, stride_q, sa, stride_sa, sw, stride_sw, factor, bias, tiles, units,
                        tiles_n, steps, R, N, a_smem, w_smem, io_smem, q_smem, full, empty, 1, GATED, OAI, HAS_BIAS,
                        BN, STAGES, FIELDS, W_BLOCKS, DTYPE)),
            (produce_tiles, (a, w, tiles, units, tiles_n, steps, N, a_smem, w_smem, full, empty, BN, 128, 128, STAGES,
                             FIELDS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_LAYOUTS = {bits: gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=bits, rank=2) for bits in (8, 16)}


def stages_of(features: int, *, gated: bool) -> int:
    """Return the steps of both operands that fit in shared memory with the epilogue's buffers."""
    kept = 17408 if gated else 33792
    return (227 * 1024 - 1024 - kept) // ((128 + features) * BLOCK_DEPTH)


def launch_grouped(
    a: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, factor: Tensor | None, out: Tensor | Fp8Rows, tiles: Tensor,
    number: Tensor, config: GemmConfig, grid: int, activation: str,
) -> None:  # fmt: skip
    """See `fp8_experts_triton.launch_grouped`. config: only `features` is read, for 16-bit results."""
    _, n, k = weight.values.shape
    gated, blocked = isinstance(out, Fp8Rows), weight.scale.dim() == 3
    w_blocks = 2 if blocked else 0
    if blocked and gated and n % 256 == 0:
        w_blocks = 3  # 128 gates and the 128 ups between them have a block each, in one matrix or in two
    features = 256 if gated else config.features

    def blocks(tensor: Tensor, rows: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, 128], _LAYOUTS[tensor.element_size() * 8])

    scale = weight.scale.view(-1, weight.scale.shape[-1]) if blocked else weight.scale.view(-1)
    dtype = torch.bfloat16 if isinstance(out, Fp8Rows) else out.dtype
    grouped_kernel[(grid,)](
        blocks(a.values, 64), blocks(weight.values.view(-1, k), features),
        None if isinstance(out, Fp8Rows) else blocks(out, 64),
        blocks(out.values, 64) if isinstance(out, Fp8Rows) else None,
        out.scale if isinstance(out, Fp8Rows) else None, out.scale.stride(0) if isinstance(out, Fp8Rows) else 0,
        a.scale, a.scale.stride(0), scale, scale.stride(0), factor, bias, tiles, number, len(a.values), n, k,
        GATED=gated, OAI=activation == "swiglu_oai", BN=features, STAGES=stages_of(features, gated=gated),
        HAS_BIAS=bias is not None, FIELDS=tiles.shape[1], W_BLOCKS=w_blocks,
        DTYPE={torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[dtype], num_warps=4, **pdl_options(),
    )  # fmt: skip
