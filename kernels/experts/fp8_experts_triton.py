"""FP8 expert GEMMs in plain Triton: `experts_triton`'s loop with the two-level sums and scales of `fp8_triton`."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.experts.experts_triton import hidden_of, unit_of
from weft.kernels.formats.fp8 import BLOCK, Fp8Rows, Fp8Weight
from weft.kernels.matmul.fp8_triton import accumulate, dequantized, store_quantized
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_tiles import columns

PAIRS = 256  # Features of a tile that become one block of 128 columns of the next operand.


@triton.jit(do_not_specialize=["R", "stride_sa", "stride_q"])
def grouped_kernel(
    a, w, sa, stride_sa, sw, stride_sw, factor, bias, out, q_out, q_scale, stride_q, tiles, number, R, N, K,
    GATED: tl.constexpr, OAI: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SWAP: tl.constexpr,
    W_BLOCKS: tl.constexpr, FIELDS: tl.constexpr, OUT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `a @ w[expert].T` by tiles of rows, with bias.

    GATED: times the factor of each row; pairs of columns become one, in e4m3 with a scale per 128. Else 16 bits."""
    tiles_n = tl.cdiv(N, BN)
    steps = tl.cdiv(K, 128)
    begin(PDL)
    units = tl.load(number) * tiles_n
    for unit in tl.range(tl.program_id(0), units, tl.num_programs(0)):
        expert, tile_m, tile_n = unit_of(unit, tiles, tiles_n, FIELDS)
        first, end = expert * N, expert * N + N
        acc = accumulate(a, w, sa, stride_sa, sw, stride_sw, tile_m * BM, first + tile_n * BN, R, end, 0, steps,
                          BM, BN, SWAP, True, W_BLOCKS)  # fmt: skip
        total = tl.trans(acc) if SWAP else acc
        rows = tile_m * BM + tl.arange(0, BM)
        scale = tl.full([BM], 1.0, tl.float32)
        if GATED:
            scale = tl.load(factor + rows)
            for s in tl.static_range(BN // 256):
                col = tile_n * BN + s * 256
                y = dequantized(columns(total, s, BN // 256), scale, sw, bias, first + col, end, 256, W_BLOCKS)
                gate, up = tl.split(tl.reshape(y, (BM, 128, 2)))
                h = hidden_of(gate, up, OAI)
                # an expert's rows are followed by those of the next expert
                h = tl.where((col // 2 + tl.arange(0, 128) < N // 2)[None, :], h, 0.0)
                store_quantized(h, q_out, q_scale, stride_q, rows, R, col // 2, N // 2, 128)
        else:
            for s in tl.static_range(BN // 64):
                col = tile_n * BN + s * 64
                y = dequantized(columns(total, s, BN // 64), scale, sw, bias, first + col, end, 64, W_BLOCKS)
                out.store([tile_m * BM, col], y.to(OUT))
    release(PDL)


_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


def launch_grouped(
    a: Fp8Rows, weight: Fp8Weight, bias: Tensor | None, factor: Tensor | None, out: Tensor | Fp8Rows, tiles: Tensor,
    number: Tensor, config: GemmConfig, grid: int, activation: str,
) -> None:  # fmt: skip
    """Run `grouped_kernel`: a of R rows, weight `[E, N, K]`, out `[R, N]` or FP8 of `N / 2` columns, factors `[R]`."""
    c, (_, n, k) = config, weight.values.shape
    gated = not isinstance(out, Tensor)
    wide = PAIRS if gated else c.features

    def blocks(tensor: Tensor, rows: int, cols: int) -> TensorDescriptor:
        return TensorDescriptor.from_tensor(tensor, [rows, cols])

    scale = weight.scale.view(-1, weight.scale.shape[-1]) if weight.scale.dim() == 3 else weight.scale.view(-1)
    grouped_kernel[(grid,)](
        blocks(a.values, c.tokens, BLOCK), blocks(weight.values.view(-1, k), wide, BLOCK), a.scale, a.scale.stride(0),
        scale, scale.stride(0), factor, bias, blocks(out, c.tokens, 64) if isinstance(out, Tensor) else None,
        None if isinstance(out, Tensor) else out.values, None if isinstance(out, Tensor) else out.scale,
        0 if isinstance(out, Tensor) else out.scale.stride(0), tiles, number, len(a.values), n, k, GATED=gated,
        OAI=activation == "swiglu_oai", BM=c.tokens, BN=wide, SWAP=c.swap, W_BLOCKS=2 if scale.dim() == 2 else 0,
        FIELDS=tiles.shape[1], OUT=_DTYPES[out.dtype] if isinstance(out, Tensor) else tl.bfloat16, num_warps=c.warps,
        num_stages=c.stages, **pdl_options(),
    )  # fmt: skip
