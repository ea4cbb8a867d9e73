"""Expert GEMMs in plain Triton: one persistent loop over a list of tiles of all experts.

Rows are in expert order (see `experts`), so both operands are tiles of a tensor and arrive by TMA. One program sums a
tile over all of K, so a row's result depends on that row alone.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_tiles import accumulate, columns
from weft.kernels.reference.layer import OAI_ALPHA, OAI_LIMIT

ACTIVATIONS = ("silu", "swiglu_oai")
LIMIT, ALPHA = tl.constexpr(OAI_LIMIT), tl.constexpr(OAI_ALPHA)


@triton.jit
def hidden_of(gate, up, OAI: tl.constexpr):
    """Apply SwiGLU or gpt-oss's variant; float32."""
    if OAI:
        gate = tl.minimum(gate, LIMIT)
        up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        return (up + 1.0) * gate / (1.0 + tl.exp(gate * -ALPHA))
    else:
        return gate * up / (1.0 + tl.exp(-gate))


@triton.jit
def inside_group(inside, size):
    """Return (tile of rows, tile of features) in a group of `size` tiles of rows.

    The last tile of a group has less work. Programs take every n-th unit, and n is often a multiple of `size`, so the
    order of tiles changes from round to round; otherwise some programs would get only short tiles."""
    column = inside // size
    return (inside + column * size // tl.num_programs(0)) % size, column


@triton.jit
def unit_of(unit, tiles, tiles_n, FIELDS: tl.constexpr):
    """Return a program's next tile: (its expert, tile of rows, tile of features).

    Tiles of a group go through all feature tiles together: the weights are read once for all of them."""
    entry = tiles + unit // tiles_n * FIELDS
    expert = tl.load(entry)
    first = tl.load(entry + 1)
    size = tl.load(entry + 2)
    inside = unit - first * tiles_n
    tile_m, tile_n = inside_group(inside, size)
    return expert, first + tile_m, tile_n


@triton.jit
def grouped_kernel(
    a, w, bias, out, tiles, number, N, K, GATED: tl.constexpr, OAI: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, SWAP: tl.constexpr, SLICES: tl.constexpr, FIELDS: tl.constexpr, OUT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Compute `out = a @ w[expert].T` by tiles of rows, with bias; GATED: pairs of columns become one."""
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, BK)
    W: tl.constexpr = BN // SLICES
    begin(PDL)
    units = tl.load(number) * tiles_n
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0), flatten=True):
        expert, tile_m, tile_n = unit_of(unit, tiles, tiles_n, FIELDS)
        acc = accumulate(a, w, tile_m * BM, expert * N + tile_n * BN, 0, steps, BM, BN, BK, SWAP)
        total = tl.trans(acc) if SWAP else acc
        for s in tl.static_range(SLICES):
            col = tile_n * BN + s * W
            y = columns(total, s, SLICES)
            if bias is not None:
                at = col + tl.arange(0, W)
                y += tl.load(bias + expert * N + at, mask=at < N, other=0.0).to(tl.float32)[None, :]
            if GATED:
                gate, up = tl.split(tl.reshape(y, (BM, W // 2, 2)))
                out.store([tile_m * BM, col // 2], hidden_of(gate, up, OAI).to(OUT))
            else:
                out.store([tile_m * BM, col], y.to(OUT))
    release(PDL)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch_grouped(
    kind: str, a: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, tiles: Tensor, number: Tensor,
    config: GemmConfig, grid: int, activation: str,
) -> None:  # fmt: skip
    """Run `grouped_kernel` for `kind` "plain" or "gate_up": a `[R, K]`, weight `[E, N, K]`, out `[R, N or N / 2]`."""
    c, (_, n, k) = config, weight.shape
    gated = kind == "gate_up"
    width = c.features // c.slices

    def blocks(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, cols])

    grouped_kernel[(grid,)](
        blocks(a, c.tokens, c.depth), blocks(weight.view(-1, k), c.features, c.depth), bias,
        blocks(out, c.tokens, width // 2 if gated else width), tiles, number, n, k, GATED=gated,
        OAI=activation == "swiglu_oai", BM=c.tokens, BN=c.features, BK=c.depth, SWAP=c.swap, SLICES=c.slices,
        FIELDS=tiles.shape[1], OUT=_DTYPES[out.dtype], num_warps=c.warps, num_stages=c.stages, **pdl_options(),
    )  # fmt: skip
