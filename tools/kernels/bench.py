"""Compares each kernel with its ceiling and with cuBLAS or SDPA, sustained: `weft bench kernels`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from weft import output_file
from weft.kernels.matmul import tuned
from weft.kernels.tuning.measure import Meter, Sustained, sustained
from weft.tools.kernels import bench_fp8
from weft.tools.kernels.calls import (
    LLAMA_1B,
    LLAMA_8B,
    copy_bandwidth,
    decode_calls,
    layer_calls,
    prefill_calls,
    run_all,
    sample_call,
    sdpa_calls,
    step_calls,
)
from weft.tools.kernels.tune import tune


def report(seconds: float, only: set[str]) -> list[dict[str, object]]:
    """Print and return one row per kernel and shape."""
    meter = Meter()
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    rows: list[dict[str, object]] = []

    def row(kernel: str, shape: str, s: Sustained, value: float, unit: str, ceiling: float) -> None:
        fraction = value / ceiling
        rows.append({"kernel": kernel, "shape": shape, "us": round(s.ms * 1e3, 2), unit: round(value, 3),
                     "of_ceiling": round(fraction, 3), "mhz": round(s.mhz), "watts": round(s.watts),
                     "joules": round(s.joules, 5)})  # fmt: skip
        print(f"{kernel:26} {shape:24} {s.ms * 1e3:10.1f} us {value:8.2f} {unit:8} {fraction:6.3f} {s.mhz:6.0f} MHz "
              f"{s.watts:5.0f} W {s.joules:9.5f} J", flush=True)  # fmt: skip

    bandwidth = copy_bandwidth()
    print(f"scaled copy {bandwidth:.2f} TB/s; fractions are of it (memory) or of cuBLAS / cuDNN in this run (compute)")
    if "gemm" in only:
        for name, shapes, d in (("8B", LLAMA_8B, 128), ("1B", LLAMA_1B, 64)):
            for tokens in (2048, 1024, 512, 256) if name == "8B" else (2048, 1024):
                base, flops, _ = layer_calls(shapes, tokens, 3, sms, False, d)
                b = sustained(base, meter, seconds)
                peak = flops / (b.ms * 4) / 1e9
                row("cuBLAS layer, bare", f"{name} M={tokens}", b._replace(ms=b.ms * 4), peak, "TFLOP/s", peak)
                del base
                f = sustained(layer_calls(shapes, tokens, 3, sms, True, d)[0], meter, seconds)
                row("weft layer, epilogues", f"{name} M={tokens}", f._replace(ms=f.ms * 4), flops / (f.ms * 4) / 1e9,
                    "TFLOP/s", peak)  # fmt: skip
    if "small" in only:
        for tokens in (1, 8, 16, 32, 64, 128):
            for kernel, fused in (("cuBLAS layer, bare", False), ("weft layer, epilogues", True)):
                calls, _, size = layer_calls(LLAMA_8B, tokens, 8, sms, fused)
                each = sustained(calls, meter, seconds / 2)
                del calls
                layer = each._replace(ms=each.ms * 4)
                row(kernel, f"8B M={tokens}", layer, size / layer.ms / 1e9, "TB/s", bandwidth)
    if "decode" in only:
        for batch, context, page in ((512, 1280, 64), (512, 1280, 128), (512, 1280, 16), (64, 8192, 64), (1, 1024, 64),
                                     (1, 32768, 64)):  # fmt: skip
            calls, size = decode_calls(batch, context, page, num_sms=sms)
            s = sustained(calls, meter, seconds)
            row("decode attention", f"{batch} x {context} page {page}", s, size / s.ms / 1e9, "TB/s", bandwidth)
            del calls
    if "prefill" in only:
        s = sustained(sdpa_calls(4, 2048), meter, seconds)
        peak = 4.0 * 4 * 32 * 128 * 2048 * 1024 / s.ms / 1e9
        row("SDPA cuDNN, dense", "4 x 2048", s, peak, "TFLOP/s", peak)
        for batch, queries, page, context, portable in ((4, 2048, 64, 0, False), (4, 2048, 128, 0, False),
                (4, 2048, 16, 0, False), (4, 512, 64, 3584, False), (4, 2048, 64, 0, True)):  # fmt: skip
            calls, flops = prefill_calls(batch, queries, page, context, num_sms=sms, portable=portable)
            s = sustained(calls, meter, seconds)
            name = "prefill attention" + (" (plain Triton)" if portable else "")
            row(name, f"{batch} x {context}+{queries} page {page}", s, flops / s.ms / 1e9, "TFLOP/s", peak)
            del calls
    if "step" in only:
        for batch, context in ((1, 1024), (16, 1024)):
            calls, size = step_calls(batch, context, 32, sms)
            s = sustained([partial(run_all, calls)], meter, seconds)
            row("decode step, 32 layers", f"8B {batch} x {context}", s, size / s.ms / 1e9, "TB/s", bandwidth)
            del calls
    if "sampler" in only:
        for rows_, t, k, p in (
            (1024, 0.0, 0, 1.0),
            (1024, 1.0, 0, 1.0),
            (1024, 0.7, 50, 1.0),
            (1024, 0.7, 0, 0.9),
            (1, 0.7, 0, 0.9),
        ):
            s = sustained([sample_call(rows_, 128256, t, k, p)], meter, seconds / 2)
            row("sampler", f"{rows_} x 128256 t{t} k{k} p{p}", s, rows_ * 128256 * 4 / s.ms / 1e9, "TB/s", bandwidth)
    rows += bench_fp8.report(only, row, seconds, meter, sms, bandwidth)
    meter.close()
    return rows


def main(argv: list[str], parser_class: type[argparse.ArgumentParser], cache: Callable[[], Path]) -> int:
    """cache: returns the folder with start-up measurements; it may raise."""
    parser = parser_class(prog="weft bench kernels", description=(__doc__ or "").split(":")[0] + ".")
    parser.add_argument(
        "--only", default="gemm,small,decode,prefill,step,sampler",
        help=f"comma-separated parts; there are {', '.join(bench_fp8.PARTS)} as well",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=2.5, help="length of every sustained measurement")
    parser.add_argument("--json", type=output_file, help="write the rows here")
    parser.add_argument(
        "--tune", metavar="FILE", type=output_file, help="measure tile configurations instead and write their table"
    )
    parser.add_argument("--tokens", default="16,32,64,128,256,512,1024,2048,4096", help="token counts to tune for")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--budget", type=float, default=480, help="seconds that tuning may take")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(f"{torch.cuda.get_device_name()} torch {torch.__version__}")
    if options.tune:
        tune({"8B": (LLAMA_8B, 128), "1B": (LLAMA_1B, 64)}, [int(t) for t in options.tokens.split(",")], options.tune,
             options.jobs, options.budget)  # fmt: skip
        return 0
    # use tiles from earlier engine starts on this machine, as those engines do
    known = tuned.read_cache(cache(), tuned.machine())
    tuned.use(known)
    print(f"{len(known)} tiles from engine starts on this machine; others from the shipped table or by rule")
    rows = report(options.seconds, set(options.only.split(",")))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0
