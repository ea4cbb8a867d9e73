"""Times layers of an 8B for small batches with each decode-attention kernel.

    python benchmarks/jobs/small_batch_attention.py --bits 8,16 --tokens 1,4,16,64 --contexts 1280,8192

Prints one line per format, request count, context and kernel: microseconds of a layer (8 layers in a captured graph
with dependent launch; GEMMs by the shipped table), what attention adds to it, and attention alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from small_batch_gemms import chain

from weft.kernels.attention import fp8_attention
from weft.kernels.attention.decode_attention import decode_attention
from weft.kernels.common.gpu import gpu
from weft.kernels.matmul.fp8_projections import rows_buffer
from weft.kernels.tuning import calls as bench_calls
from weft.kernels.tuning.measure import burst
from weft.tools.kernels.bench_fp8 import fp8_decode_calls
from weft.tools.kernels.calls import decode_calls


def kernels(bits: int) -> dict[str, Callable[..., object]]:
    engine: Callable[..., object] = fp8_attention.decode_attention if bits == 8 else decode_attention
    return {"Hopper's": engine, "plain Triton": partial(engine, portable=True)}


def attention(bits: int, tokens: int, context: int, layers: int, kernel: Any) -> list[Callable[[], object]]:
    if bits == 16:
        return decode_calls(tokens, context, page=64, layers=layers, kernel=kernel)[0]
    out = rows_buffer(tokens, 4096, bench_calls.DEVICE)
    return fp8_decode_calls(tokens, context, page=64, layers=layers, out=out, kernel=kernel)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bits", default="8,16")
    parser.add_argument("--tokens", default="1,4,16,32,64,128")
    parser.add_argument("--contexts", default="512,1280,8192")
    parser.add_argument("--layers", type=int, default=8)
    given = parser.parse_args()
    here = gpu()
    assert here is not None
    layers = given.layers
    for bits in map(int, given.bits.split(",")):
        for tokens in map(int, given.tokens.split(",")):
            products = chain("table", bits, tokens, layers, here.sms, bench_calls.DEVICE, attention=0)
            bare = burst(products, repeats=25) * len(products) / layers * 1e3
            print(f"{bits} bits, {tokens} requests: {bare:.1f} us a layer without attention", flush=True)
            for context in map(int, given.contexts.split(",")):
                if tokens * context > 1 << 18:
                    continue
                for name, kernel in kernels(bits).items():
                    attend = attention(bits, tokens, context, layers, kernel)
                    calls = list(products)
                    for layer in reversed(range(layers)):
                        calls.insert(layer * (len(products) // layers) + 1, attend[layer])
                    whole = burst(calls, repeats=25) * len(calls) / layers * 1e3
                    alone = burst(attend, repeats=25) * 1e3
                    print(
                        f"{bits} bits, {tokens} x {context}, {name}: {whole:.1f} us a layer, attention adds "
                        f"{whole - bare:.1f}, alone {alone:.1f}", flush=True,
                    )  # fmt: skip
                    del attend, calls
            del products
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
