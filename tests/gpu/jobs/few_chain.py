"""Layers of an 8B for one request, chained as an engine's graph has them: what a way to multiply is worth.

    python tests/gpu/jobs/few_chain.py --ways few,plain,table

A line a way and count of tokens: microseconds of a layer in FP8. "few" is `fp8_few_hopper`, with a number
behind it so many steps of the weight are asked for in L2 behind those in shared memory, "plain" the plain Triton
kernel by rule, "table" what the shipped table says. "no-attention" behind it leaves attention and its pass out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from weft.kernels import bench_calls, fp8_config, fp8_few_hopper, fp8_projections, gemm_launch
from weft.kernels.bench_fp8 import decode_of_eight, eight_bits
from weft.kernels.fp8_rows import quantize_rows
from weft.kernels.gemm_config import GemmConfig
from weft.kernels.gpu import gpu
from weft.kernels.measure import burst
from weft.kernels.tuned import Shape


def config_of(way: str, shape: Shape, tokens: int, num_sms: int) -> GemmConfig | None:
    if way == "table":
        return None
    if way.startswith("few"):
        _, ahead, stages, *_ = (*way.split(":"), "", "")
        fp8_few_hopper.AHEAD = int(ahead or 0)
        fp8_config.FEW_STAGES[128] = int(stages or 5)
        return fp8_config.few(shape.kind, shape.features, shape.depth, num_sms)
    return fp8_projections.by_rule(shape.kind, tokens, shape.features, shape.depth, num_sms, plain=True)


def chain(way: str, tokens: int, layers: int, num_sms: int, device: str, *, attention: bool, only: str = "") -> list[
    Callable[[], object]
]:  # fmt: skip
    """The calls of `layers` layers for so many requests, 1,280 tokens behind each. only: a kind of product."""
    space, calls = gemm_launch.workspace(device, 1 << 24), []
    attend = decode_of_eight(tokens, 1280, page=64, layers=layers)[0]
    result = torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16)
    operand = fp8_projections.rows_buffer(tokens, 4096, device)
    for layer in range(layers):
        for shape in eight_bits(bench_calls.LLAMA_8B):
            if only and bench_calls.LLAMA_8B[int(only)].features != shape.features:
                continue
            if only and bench_calls.LLAMA_8B[int(only)].depth != shape.depth:
                continue
            config = config_of(way, shape, tokens, num_sms)
            weight = bench_calls.weights(shape, 1)[0]
            calls.append(bench_calls.product(shape, tokens, weight, space, num_sms, config))
            if shape.kind == "qkv" and attention:
                calls.append(attend[layer])
                calls.append(lambda: quantize_rows(result, out=operand))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ways", default="few,plain,table")
    parser.add_argument("--tokens", default="1,4,16")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    here = gpu()
    assert here is not None
    for tokens in map(int, given.tokens.split(",")):
        for way in given.ways.split(","):
            row = []
            for attention in (True, False):
                calls = chain(way, tokens, given.layers, here.sms, bench_calls.DEVICE, attention=attention)
                row.append(burst(calls, repeats=25) * len(calls) / given.layers * 1e3)
                del calls
            for index in range(len(bench_calls.LLAMA_8B)):
                calls = chain(way, tokens, given.layers, here.sms, bench_calls.DEVICE, attention=False, only=str(index))
                row.append(burst(calls, repeats=25) * 1e3)
                del calls
            whole, bare, *each = row
            names = ", ".join(f"{s.kind} {us:.1f}" for s, us in zip(bench_calls.LLAMA_8B, each, strict=True))
            print(f"{tokens} tokens, {way}: {whole:.1f} us a layer, {bare:.1f} without attention; {names}", flush=True)


if __name__ == "__main__":
    main()
