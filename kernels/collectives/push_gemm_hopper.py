"""The warp-specialized GEMM of `gemm_hopper` with tiles that go to other ranks by bulk copies (see `push_gemm`).

A tile's copies run while the next tile is multiplied. Before a warpgroup refills its part of shared memory it waits
until they are complete, at the destination too, and sets the tile's flags. So the tensor cores wait for the network
only after the last tile.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from weft.kernels.collectives.peer import Peers
from weft.kernels.common.hopper import barrier, follow_previous, live_tokens, load_operands, ring_barriers, store_tile
from weft.kernels.matmul.gemm_hopper import BLOCK_DEPTH, BLOCK_FEATURES, BLOCK_TOKENS, SHARED, multiply, with_bias
from weft.kernels.matmul.gemm_launch import Launch
from weft.kernels.matmul.gemm_tiles import tile_of

MAX_RANKS = 8
STAGES = 3
MAX_GROUP = 4  # Token tiles that are multiplied by all columns before the next ones.


@gluon.jit
def _tile_from(tile, tiles_m, tiles_n, turn, GROUP: gl.constexpr):
    """Like `tile_of`, with the feature tiles from `turn` on first: see `push_gemm.first_tile`."""
    tile_m, tile_n = tile_of(tile, tiles_m, tiles_n, GROUP)
    return tile_m, (tile_n + turn) % tiles_n


@gluon.jit
def _produce(
    a, w, a_smem, w_smem, full, empty, tiles_m, tiles_n, steps, turn, BN: gl.constexpr, BK: gl.constexpr,
    STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    count = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_from(tile, tiles_m, tiles_n, turn, GROUP)
        for step in range(steps):
            count = load_operands(a, w, tile_m * 128, tile_n * BN, step, a_smem, w_smem, full, empty, count, BK,
                                  (128 + BN) * BK * 2, STAGES)  # fmt: skip


@gluon.jit
def _set_flag(addresses, flags, at, number, owner, R: gl.constexpr, STEPS: gl.constexpr):
    """Wait until this warpgroup's copies are complete, not only read, then set the flag of their tile."""
    gl.inline_asm_elementwise("cp.async.bulk.wait_group 0; // $0", "=r", [], dtype=gl.int32, is_pure=False, pack=1)
    barrier()
    if STEPS == 1:
        for peer in gl.static_range(R):
            flag = (gl.load(addresses + peer) + flags + at * 4).to(gl.pointer_type(gl.int32), bitcast=True)
            gl.atomic_xchg(flag, number, sem="release", scope="sys")
    else:
        flag = (gl.load(addresses + owner) + flags + at * 4).to(gl.pointer_type(gl.int32), bitcast=True)
        gl.atomic_xchg(flag, number, sem="release", scope="sys")


@gluon.jit
def _send(out, io, row, col, W, OWNER: gl.constexpr, STEPS: gl.constexpr):
    if STEPS == 1:
        store_tile(out, [row, col], io)
    else:
        if col // W == OWNER:
            store_tile(out, [row, col - OWNER * W], io)


@gluon.jit
def _consume(
    o0, o1, o2, o3, o4, o5, o6, o7, a_smem, w_smem, io_smem, full, empty, tiles_m, tiles_n, steps, N, W, bias,
    addresses, number, flags, turn, WG: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
    HAS_BIAS: gl.constexpr, DTYPE: gl.constexpr, R: gl.constexpr, STEPS: gl.constexpr,
):  # fmt: skip
    ACC: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BN, 16])
    io = io_smem.index(WG)
    count = 0
    before = -1
    owner = 0
    for tile in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        tile_m, tile_n = _tile_from(tile, tiles_m, tiles_n, turn, GROUP)
        row0 = tile_m * 128 + WG * 64
        col0 = tile_n * BN
        acc, count = multiply(a_smem, w_smem, full, empty, count, steps, WG, BN, ACC, BN, STAGES)
        if before >= 0:
            _set_flag(addresses, flags, before, number, owner, R, STEPS)
        io.store(with_bias(acc, bias, col0, N, HAS_BIAS, ACC).to(DTYPE))
        fence_async_shared()
        _send(o0, io, row0, col0, W, 0, STEPS)
        _send(o1, io, row0, col0, W, 1, STEPS)
        if R > 2:
            _send(o2, io, row0, col0, W, 2, STEPS)
        if R > 3:
            _send(o3, io, row0, col0, W, 3, STEPS)
        if R > 4:
            _send(o4, io, row0, col0, W, 4, STEPS)
        if R > 5:
            _send(o5, io, row0, col0, W, 5, STEPS)
        if R > 6:
            _send(o6, io, row0, col0, W, 6, STEPS)
        if R > 7:
            _send(o7, io, row0, col0, W, 7, STEPS)
        before = (2 * tile_m + WG) * tiles_n + tile_n
        owner = col0 // W
    if before >= 0:
        _set_flag(addresses, flags, before, number, owner, R, STEPS)


@gluon.jit(do_not_specialize=["M", "turn"])
def push_kernel(
    a, w, o0, o1, o2, o3, o4, o5, o6, o7, num_tokens, M, N, K, W, bias, addresses, epoch, flags, turn,
    STAGES: gl.constexpr, GROUP: gl.constexpr, HAS_BIAS: gl.constexpr, HAS_COUNT: gl.constexpr, DTYPE: gl.constexpr,
    R: gl.constexpr, STEPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    BN: gl.constexpr = 256
    BK: gl.constexpr = 64
    shared: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    a_smem = gl.allocate_shared_memory(DTYPE, [STAGES, 128, BK], shared)
    w_smem = gl.allocate_shared_memory(DTYPE, [STAGES, BN, BK], shared)
    io_smem = gl.allocate_shared_memory(DTYPE, [2, 64, BN], shared)
    full, empty = ring_barriers(STAGES, 2)
    follow_previous(PDL)
    number = gl.load(epoch)
    live = live_tokens(num_tokens, M, HAS_COUNT)
    tiles_m = gl.cdiv(live, 128)
    tiles_n = gl.cdiv(N, BN)
    steps = gl.cdiv(K, BK)
    gl.warp_specialize(
        [
            (_consume, (o0, o1, o2, o3, o4, o5, o6, o7, a_smem, w_smem, io_smem, full, empty, tiles_m, tiles_n, steps,
                        N, W, bias, addresses, number, flags, turn, 0, BN, STAGES, GROUP, HAS_BIAS, DTYPE, R, STEPS)),
            (_consume, (o0, o1, o2, o3, o4, o5, o6, o7, a_smem, w_smem, io_smem, full, empty, tiles_m, tiles_n, steps,
                        N, W, bias, addresses, number, flags, turn, 1, BN, STAGES, GROUP, HAS_BIAS, DTYPE, R, STEPS)),
            (_produce, (a, w, a_smem, w_smem, full, empty, tiles_m, tiles_n, steps, turn, BN, BK, STAGES, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


class _RemoteMatrix(NamedTuple):
    """A matrix in another rank's memory, in the form that descriptors accept."""

    address: int
    dtype: torch.dtype

    def data_ptr(self) -> int:
        return self.address


def launch_push(
    peers: Peers, number: Tensor, launch: Launch, a: Tensor, weight: Tensor, bias: Tensor | None,
    num_tokens: Tensor | None, *, width: int, flags: int, partial: int, turn: int, steps: int,
) -> None:  # fmt: skip
    """partial, flags: of this rank's tiles, byte offsets into the arenas. See `push_gemm.push_project`."""

    def tiles(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, cols], SHARED)

    shape, block = [a.shape[0], width], [64, BLOCK_FEATURES]
    there = [
        TensorDescriptor(_RemoteMatrix(base + partial, a.dtype), shape, [width, 1], block, SHARED)
        for base in peers.bases
    ]
    places = [*there, *[None] * (MAX_RANKS - len(there))]
    # Rows finish one group after the other, and SMs that no wave needs are left to the sum. Smaller groups leave fewer
    # rows to add after the GEMM: for 2,048 tokens of a 70B on four H200s, groups of 4 token tiles saved 1.1 % of a
    # layer compared with groups of 8, although the weight is read twice as often.
    tiles_m = -(-a.shape[0] // BLOCK_TOKENS)
    count = tiles_m * -(-weight.shape[0] // BLOCK_FEATURES)
    programs = -(-count // -(-count // launch.grid[0]))
    group = min(launch.config.group, MAX_GROUP, max(1, tiles_m // 2))
    push_kernel[(programs,)](
        tiles(a, BLOCK_TOKENS, BLOCK_DEPTH), tiles(weight, BLOCK_FEATURES, BLOCK_DEPTH), *places, num_tokens,
        a.shape[0], weight.shape[0], a.shape[1], width, bias, peers.addresses, number, flags, turn, STAGES=STAGES,
        GROUP=group, HAS_BIAS=bias is not None, HAS_COUNT=num_tokens is not None,
        DTYPE={torch.bfloat16: gl.bfloat16, torch.float16: gl.float16}[a.dtype], R=peers.ranks, STEPS=steps,
        num_warps=4, PDL=launch.options["PDL"], **({"launch_pdl": True} if launch.options["PDL"] else {}),
    )  # fmt: skip
