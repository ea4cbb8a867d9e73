"""Times layers of an 8B for small batches, chained as in an engine's graph, by the kernel of their GEMMs.

    python benchmarks/jobs/small_batch_gemms.py --ways few,plain --bits 8

Prints one line per way and token count: microseconds of a layer with attention and, in FP8, a separate quantization;
with attention that writes the quantized operand, as engines run it; without attention; and of each GEMM alone. "few" is
`fp8_few_hopper` (FP8 only), "plain" the plain Triton kernel by rule, "table" the choice of the shipped table.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

from weft.kernels.common.gpu import gpu
from weft.kernels.matmul import fp8_projections, gemm_launch, tuned
from weft.kernels.matmul.fp8_few_config import few_config
from weft.kernels.matmul.fp8_rows import quantize_rows
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.tuned import Shape
from weft.kernels.tuning import calls as bench_calls
from weft.kernels.tuning.measure import burst
from weft.tools.kernels.bench_fp8 import fp8_decode_calls, fp8_shapes
from weft.tools.kernels.calls import LLAMA_8B, decode_calls


def config_of(way: str, shape: Shape, tokens: int, num_sms: int) -> GemmConfig | None:
    sizes = tokens, shape.features, shape.depth
    if way == "few":
        return few_config(shape.kind, shape.features, shape.depth, num_sms)
    if way == "table":
        return tuned.lookup(*sizes, bits=shape.bits) or config_of("plain", shape, tokens, num_sms)
    if shape.bits == 16:
        return gemm_launch.choose(*sizes, num_sms)
    return fp8_projections.by_rule(shape.kind, *sizes, num_sms, plain=True)


def chain(
    way: str, bits: int, tokens: int, layers: int, num_sms: int, device: str, *, attention: int, only: int | None = None
) -> list[Callable[[], object]]:  # fmt: skip
    """The calls of `layers` layers for `tokens` requests with 1,280 tokens of context each.

    attention: 2 writes 16 bits, which a separate pass quantizes in FP8; 1 writes the quantized operand; 0 leaves
    attention out. only: the index of a single GEMM.
    """
    shapes = LLAMA_8B if bits == 16 else fp8_shapes(LLAMA_8B)
    space, calls = gemm_launch.workspace(device, 1 << 24), []
    result = torch.randn(tokens, 4096, device=device, dtype=torch.bfloat16)
    operand = fp8_projections.rows_buffer(tokens, 4096, device)
    if bits == 16:
        attend = decode_calls(tokens, 1280, page=64, layers=layers)[0]
    else:
        attend = fp8_decode_calls(tokens, 1280, page=64, layers=layers, out=operand if attention == 1 else result)[0]
    for layer in range(layers):
        for index, shape in enumerate(shapes):
            if only not in (None, index):
                continue
            config = config_of(way, shape, tokens, num_sms)
            weight = bench_calls.weights(shape, 1)[0]
            calls.append(bench_calls.gemm_call(shape, tokens, weight, space, num_sms, config))
            if shape.kind == "qkv" and attention:
                calls.append(attend[layer])
            if shape.kind == "qkv" and attention > 1 and bits == 8:
                calls.append(lambda: quantize_rows(result, out=operand))
    return calls


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--ways", default="few,plain")
    parser.add_argument("--tokens", default="1,4,16")
    parser.add_argument("--bits", default="8")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    here = gpu()
    assert here is not None
    cases = [
        (bits, tokens, way)
        for bits in map(int, given.bits.split(","))
        for tokens in map(int, given.tokens.split(","))
        for way in given.ways.split(",")
    ]
    for bits, tokens, way in cases:
        fixed = way, bits, tokens, given.layers, here.sms, bench_calls.DEVICE
        row = []
        for attention in (2, 1, 0):
            calls = chain(*fixed, attention=attention)
            row.append(burst(calls, repeats=25) * len(calls) / given.layers * 1e3)
            del calls
        for index in range(len(LLAMA_8B)):
            calls = chain(*fixed, attention=0, only=index)
            row.append(burst(calls, repeats=25) * 1e3)
            del calls
        whole, leaving, bare, *each = row
        names = ", ".join(f"{s.kind} {us:.1f}" for s, us in zip(LLAMA_8B, each, strict=True))
        print(
            f"{bits} bits, {tokens} tokens, {way}: {whole:.1f} us a layer, {leaving:.1f} without the pass, {bare:.1f} "
            f"without attention; {names}", flush=True,
        )  # fmt: skip


if __name__ == "__main__":
    main()
