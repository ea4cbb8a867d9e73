"""Layers of an 8B for one request, chained as an engine's graph has them: what asking for weights ahead is worth.

    python tests/gpu/jobs/few_chain.py --bits 8 --by bulk --ahead 0,2,4,8

A line a number of steps that each product asks the L2 for while the kernel before it runs. `--by` says how: "line"
as the kernels do, one prefetch for each 128 bytes of a row; "sector", one for each 32; "bulk", one instruction of the
copy engine for all of a row's bytes, which Hopper has. One way a process: kernels are compiled with it.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import torch
import triton
import triton.language as tl

from weft.kernels import bench_calls, fp8_projections, fp8_triton, gemm_launch, gemm_tiles
from weft.kernels.bench_fp8 import decode_of_eight, eight_bits
from weft.kernels.fp8_rows import quantize_rows
from weft.kernels.gpu import gpu
from weft.kernels.measure import burst


@triton.jit
def _touch(at, EVERY: tl.constexpr, BYTES: tl.constexpr, BULK: tl.constexpr):
    """Ask the L2 for `BYTES` behind each of the addresses `at [rows]`."""
    if BULK:
        tl.inline_asm_elementwise(
            "cp.async.bulk.prefetch.L2.global [$1], $2; mov.u32 $0, 0;", "=r,l,r", [at, BYTES], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip
    else:
        bytes_of = at.to(tl.pointer_type(tl.uint8), bitcast=True)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l",
            [bytes_of[:, None] + tl.arange(0, BYTES // EVERY)[None, :] * EVERY], dtype=tl.int32, is_pure=False, pack=1,
        )  # fmt: skip


EVERY: tl.constexpr = tl.constexpr(128)
BULK: tl.constexpr = tl.constexpr(False)


@triton.jit
def _prefetch(weights, row, col, N, K, BN: tl.constexpr, WIDTH: tl.constexpr):
    rows = tl.minimum(row + tl.arange(0, BN), N - 1).to(tl.int64)
    _touch(weights + rows * K + tl.minimum(col, K - WIDTH), EVERY, WIDTH * 2, BULK)


@triton.jit
def _ahead(weights, N, K, unit, tile_n, share, BN: tl.constexpr, SPLIT: tl.constexpr, AHEAD: tl.constexpr):
    rows = tl.minimum(tile_n * BN + tl.arange(0, BN), N - 1).to(tl.int64)
    _touch(weights + rows * K + tl.minimum(unit % SPLIT * share * 128, K - AHEAD * 128), EVERY, AHEAD * 128, BULK)


def chain(bits: int, ahead: int, layers: int, num_sms: int, device: str) -> list[Callable[[], object]]:
    """The calls of `layers` layers for one token, 1,280 tokens behind it; ahead: steps of 128 bytes of each row."""
    shapes = bench_calls.LLAMA_8B if bits == 16 else eight_bits(bench_calls.LLAMA_8B)
    space, calls = gemm_launch.workspace(device, 1 << 24), []
    attend = (bench_calls.decode_calls if bits == 16 else decode_of_eight)(1, 1280, page=64, layers=layers)[0]
    result = torch.randn(1, 4096, device=device, dtype=torch.bfloat16)
    operand = fp8_projections.rows_buffer(1, 4096, device)
    for layer in range(layers):
        for shape in shapes:
            config = bench_calls.rule(shape, 1, num_sms)
            config = config._replace(ahead=ahead * 128 // (config.depth * bits // 8))
            calls.append(bench_calls.product(shape, 1, bench_calls.weights(shape, 1)[0], space, num_sms, config))
            if shape.kind == "qkv":
                calls.append(attend[layer])
                if bits == 8:
                    calls.append(functools.partial(quantize_rows, result, out=operand))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bits", type=int, choices=(8, 16), default=8)
    parser.add_argument("--by", choices=("line", "sector", "bulk"), default="line")
    parser.add_argument("--ahead", default="0,2,4,8,16", help="steps, one number after the other")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    if given.by != "line":
        globals()["BULK"] = tl.constexpr(given.by == "bulk")
        globals()["EVERY"] = tl.constexpr(32)
        gemm_tiles.prefetch = _prefetch
        fp8_triton._ahead = _ahead
    here = gpu()
    assert here is not None
    for ahead in map(int, given.ahead.split(",")):
        calls = chain(given.bits, ahead, given.layers, here.sms, bench_calls.DEVICE)
        us = burst(calls, repeats=25) * len(calls) / given.layers * 1e3
        print(f"{given.bits} bits, by {given.by}, {ahead} steps ahead: {us:.1f} us a layer", flush=True)
        del calls


if __name__ == "__main__":
    main()
