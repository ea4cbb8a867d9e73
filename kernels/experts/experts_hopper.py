"""Expert GEMMs on Hopper, warp-specialized: `gemm_hopper`'s loop over a list of tiles of all experts.

Two warpgroups own 64 rows each of a 128 x 256 tile; one producer warp streams both operands by TMA. An expert's last
tile is rarely full: if its tokens end within the first 64 rows, the second warpgroup multiplies nothing and its rows
are not fetched.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.hopper import follow_previous, load_tile, ring_barriers, skip_stages, store_tile
from weft.kernels.experts.experts_triton import hidden_of, inside_group
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_hopper import multiply, split_halves

BLOCK_ROWS, BLOCK_FEATURES, BLOCK_DEPTH = 128, 256, 64


@gluon.jit
def unit_of(unit, units, tiles, tiles_n, FIELDS: gl.constexpr):
    """Return (expert, tile of rows, tile of features, live rows) of a unit; arbitrary past the last unit."""
    unit = gl.maximum(gl.minimum(unit, units - 1), 0)
    entry = tiles + unit // tiles_n * FIELDS
    expert = gl.load(entry)
    first = gl.load(entry + 1)
    size = gl.load(entry + 2)
    rows = gl.load(entry + 3)
    inside = unit - first * tiles_n
    tile_m, tile_n = inside_group(inside, size)
    return expert, first + tile_m, tile_n, rows - tile_m * 128


# The barriers are those of `gemm_hopper` without x: `full[stage]` has one arrival (the producer's `expect`) and the
# bytes of both operands; `empty[stage]` has an arrival of each warpgroup. A warpgroup without rows still waits for
# `full` and arrives at `empty`: otherwise its arrivals could complete a phase without the other's.


@gluon.jit
def produce_tiles(
    a, w, tiles, units, tiles_n, steps, N, a_smem, w_smem, full, empty,
    BN: gl.constexpr, BK: gl.constexpr, BYTES: gl.constexpr, STAGES: gl.constexpr, FIELDS: gl.constexpr,
):  # fmt: skip
    """BK, BYTES: columns and bytes of a row in one step."""
    count = 0
    expert, tile_m, tile_n, rows = unit_of(gl.program_id(0), units, tiles, tiles_n, FIELDS)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col, both = tile_m * 128, expert * N + tile_n * BN, rows > 64
        expert, tile_m, tile_n, rows = unit_of(unit + gl.num_programs(0), units, tiles, tiles_n, FIELDS)
        for step in range(steps):
            stage = count % STAGES
            mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
            bar = full.index(stage)
            a_stage = a_smem.index(stage)
            if both:
                mbarrier.expect(bar, (128 + BN) * BYTES)
                load_tile(a, [row + 64, step * BK], bar, a_stage.slice(64, 64))
            else:
                mbarrier.expect(bar, (64 + BN) * BYTES)
            load_tile(a, [row, step * BK], bar, a_stage.slice(0, 64))
            load_tile(w, [col, step * BK], bar, w_smem.index(stage))
            count += 1


@gluon.jit
def _consume(
    out, bias, tiles, units, tiles_n, steps, N, a_smem, w_smem, io_smem, full, empty, WG: gl.constexpr,
    GATED: gl.constexpr, OAI: gl.constexpr, HALVES: gl.constexpr, HAS_BIAS: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, FIELDS: gl.constexpr, DTYPE: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    HALF: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN // 2, 16])
    io = io_smem.index(WG)
    count = 0
    expert, tile_m, tile_n, rows = unit_of(gl.program_id(0), units, tiles, tiles_n, FIELDS)
    for unit in range(gl.program_id(0), units, gl.num_programs(0)):
        row, col, of, mine = tile_m * 128 + WG * 64, tile_n * BN, expert * N, rows > WG * 64
        expert, tile_m, tile_n, rows = unit_of(unit + gl.num_programs(0), units, tiles, tiles_n, FIELDS)
        if mine:
            acc, count = multiply(a_smem, w_smem, full, empty, count, steps, WG, BN, ACC, BN, STAGES)
            if HAS_BIAS:
                at = col + gl.arange(0, BN, layout=gl.SliceLayout(0, ACC))
                acc += gl.load(bias + of + at, mask=at < N, other=0.0).to(gl.float32)[None, :]
            if GATED:
                gate, up = gl.split(gl.reshape(acc, (64, BN // 2, 2)))
                h = hidden_of(gate, up, OAI)
                tma.store_wait(0)
                io.store(gl.convert_layout(h.to(DTYPE), HALF))
                fence_async_shared()
                store_tile(out, [row, col // 2], io)
            elif HALVES:
                left, right = split_halves(acc)
                for half in gl.static_range(2):
                    y = gl.convert_layout(left if half == 0 else right, HALF)
                    tma.store_wait(0)
                    io.store(y.to(DTYPE))
                    fence_async_shared()
                    store_tile(out, [row, col + half * (BN // 2)], io)
            else:
                tma.store_wait(0)
                io.store(acc.to(DTYPE))
                fence_async_shared()
                store_tile(out, [row, col], io)
        else:
            count = skip_stages(full, empty, count, steps, STAGES)
    tma.store_wait(0)


@gluon.jit
def grouped_kernel(
    a, w, bias, out, tiles, number, N, K, GATED: gl.constexpr, OAI: gl.constexpr, HALVES: gl.constexpr,
    STAGES: gl.constexpr, HAS_BIAS: gl.constexpr, FIELDS: gl.constexpr, DTYPE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = 256
    BK: gl.constexpr = 64
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    IO: gl.constexpr = BN // 2 if GATED or HALVES else BN
    a_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 128, BK], shared)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BK], shared)
    io_smem = gl.allocate_shared_memory(DTYPE, [2, 64, IO], shared)
    full, empty = ring_barriers(STAGES, 2)
    follow_previous(PDL)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    units = gl.load(number) * tiles_n
    gl.warp_specialize(
        [
            (_consume, (out, bias, tiles, units, tiles_n, steps, N, a_smem, w_smem, io_smem, full, empty, 0,
                        GATED, OAI, HALVES, HAS_BIAS, BN, STAGES, FIELDS, DTYPE)),
            (_consume, (out, bias, tiles, units, tiles_n, steps, N, a_smem, w_smem, io_smem, full, empty, 1,
                        GATED, OAI, HALVES, HAS_BIAS, BN, STAGES, FIELDS, DTYPE)),
            (produce_tiles, (a, w, tiles, units, tiles_n, steps, N, a_smem, w_smem, full, empty, BN, BK, 2 * BK, STAGES,
                             FIELDS)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_SHARED = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)


def launch_grouped(
    kind: str, a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tiles: Tensor, number: Tensor,
    config: GemmConfig, grid: int, activation: str,
) -> None:  # fmt: skip
    """Run `grouped_kernel` for `kind` "plain" or "gate_up": a `[R, K]`, weight `[E, N, K]`, out `[R, N or N / 2]`."""
    _, n, k = weight.shape
    gated = kind == "gate_up"
    halves = not gated and config.stages > 3  # shared memory has space for half a tile of the result only
    width = BLOCK_FEATURES // 2 if gated or halves else BLOCK_FEATURES

    def blocks(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, cols], _SHARED)

    grouped_kernel[(grid,)](
        blocks(a, 64, BLOCK_DEPTH), blocks(weight.view(-1, k), BLOCK_FEATURES, BLOCK_DEPTH), bias,
        blocks(out, 64, width), tiles, number, n, k, GATED=gated, OAI=activation == "swiglu_oai", HALVES=halves,
        STAGES=config.stages, HAS_BIAS=bias is not None, FIELDS=tiles.shape[1],
        DTYPE={torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[a.dtype], num_warps=4, **pdl_options(),
    )  # fmt: skip
