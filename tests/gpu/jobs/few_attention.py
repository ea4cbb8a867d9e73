"""Layers of a model for a few requests, with each kernel for their attention.

    python tests/gpu/jobs/few_attention.py --bits 8,16 --tokens 1,4,16 --contexts 1280,8192,32768

A line a format, count of requests, context and kernel: microseconds of a layer of an 8B (8 of them, captured, with
dependent launch; products by the shipped table), what attention adds to it, and its attention alone.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))  # which a safe path leaves out
from few_chain import chain

from weft.kernels import bench_calls, fp8_attention
from weft.kernels.bench_fp8 import decode_of_eight
from weft.kernels.decode_attention import decode_attention
from weft.kernels.fp8_projections import rows_buffer
from weft.kernels.gpu import gpu
from weft.kernels.measure import burst


def kernels(bits: int) -> dict[str, Callable[..., object]]:
    engine: Callable[..., object] = fp8_attention.decode_attention if bits == 8 else decode_attention
    plain = partial(engine, portable=True)
    found = {"as Hopper's": engine, "plain Triton": plain}
    if bits == 16:
        for block, stages, warps, per_sm in (
            (64, 1, 4, 4), (64, 3, 4, 4), (64, 2, 2, 4), (64, 2, 8, 4), (64, 2, 4, 2), (32, 2, 4, 4), (32, 3, 2, 4),
        ):  # fmt: skip
            found[f"plain, blocks of {block}, {stages} stages, {warps} warps, {per_sm} an SM"] = partial(
                plain, block=block, stages=stages, warps=warps, per_sm=per_sm
            )
    return found


def attention(bits: int, tokens: int, context: int, layers: int, kernel: Any) -> list[Callable[[], object]]:
    if bits == 16:
        return bench_calls.decode_calls(tokens, context, page=64, layers=layers, kernel=kernel)[0]
    out = rows_buffer(tokens, 4096, bench_calls.DEVICE)
    return decode_of_eight(tokens, context, page=64, layers=layers, out=out, kernel=kernel)[0]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--bits", default="8,16")
    parser.add_argument("--tokens", default="1,4,16")
    parser.add_argument("--contexts", default="1280,8192,32768")
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
