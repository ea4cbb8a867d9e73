"""Each kernel beside its ceiling and beside cuBLAS or SDPA, sustained: `weft bench kernels`."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels import gemm, projections
from weft.kernels.decode_attention import decode_attention, decode_workspace
from weft.kernels.gemm_config import GemmConfig
from weft.kernels.measure import Meter, Sustained, burst, sustained
from weft.kernels.prefill_attention import prefill_attention
from weft.kernels.sampler import sample, sample_scratch
from weft.kernels.tuned import Shape
from weft.kernels.work_lists import plan_decode, plan_prefill

DEVICE = "cuda"
DTYPE = torch.bfloat16
HEAD_DIM = 128


def layer_shapes(hidden: int, inter: int, heads: int, kv_heads: int, head_dim: int = HEAD_DIM) -> list[Shape]:
    return [
        Shape("qkv", (heads + 2 * kv_heads) * head_dim, hidden),
        Shape("residual", hidden, heads * head_dim),
        Shape("gate_up", 2 * inter, hidden),
        Shape("residual", hidden, inter),
    ]


LLAMA_8B = layer_shapes(4096, 14336, 32, 8)
LLAMA_1B = layer_shapes(2048, 8192, 32, 8, 64)


def product(
    shape: Shape, tokens: int, weight: Tensor, space: gemm.Workspace, num_sms: int, config: GemmConfig | None,
    head_dim: int = HEAD_DIM, kv_heads: int = 8,
) -> Callable[[], object]:  # fmt: skip
    """A call of the fused product of this shape, its operands made once."""
    n, k = shape.features, shape.depth
    a = torch.randn(tokens, k, device=DEVICE, dtype=DTYPE)
    sumsq = a.float().square().view(tokens, 16, -1).sum(-1).t().contiguous()
    options: dict[str, Any] = {"num_sms": num_sms, "space": space, "config": config}
    if shape.kind == "qkv":
        heads = n // head_dim - 2 * kv_heads
        kv = torch.zeros(tokens // 64 + 2, 2, 2, 64, kv_heads, head_dim, device=DEVICE, dtype=DTYPE)
        rotary = torch.randn(4096, head_dim // 2, 2, device=DEVICE)
        positions = torch.arange(tokens, device=DEVICE, dtype=torch.int32)
        slots = torch.arange(tokens, device=DEVICE, dtype=torch.int32) + 64
        out = torch.empty(tokens, heads, head_dim, device=DEVICE, dtype=DTYPE)
        return lambda: projections.qkv_project(
            a, sumsq, weight, None, 1e-5, rotary, positions, slots, kv, 1, heads, out=out, **options
        )
    if shape.kind == "residual":
        x = torch.randn(tokens, n, device=DEVICE, dtype=DTYPE)
        out, parts = torch.empty_like(x), projections.sumsq_buffer(n, tokens, DEVICE)
        return lambda: projections.residual_project(a, weight, x, out=out, sumsq=parts, **options)
    if shape.kind == "gate_up":
        out = torch.empty(tokens, n // 2, device=DEVICE, dtype=DTYPE)
        return lambda: projections.gate_up_project(a, sumsq, weight, 1e-5, out=out, **options)
    out = torch.empty(tokens, n, device=DEVICE, dtype=torch.float32 if shape.kind == "logits" else DTYPE)
    return lambda: gemm.matmul(a, weight, out, **options)


def weights(shape: Shape, copies: int) -> list[Tensor]:
    return [torch.randn(shape.features, shape.depth, device=DEVICE, dtype=DTYPE) * 0.02 for _ in range(copies)]


def cublas(tokens: int, weight: Tensor) -> Callable[[], object]:
    a = torch.randn(tokens, weight.shape[1], device=DEVICE, dtype=DTYPE)
    out = torch.empty(tokens, weight.shape[0], device=DEVICE, dtype=DTYPE)
    return lambda: torch.mm(a, weight.t(), out=out)


def copies_for(shape: Shape) -> int:
    """Weights that together exceed the L2 several times."""
    return max(2, min(12, int(400e6 / (shape.features * shape.depth * 2))))


def decode_calls(
    batch: int, context: int, page: int, layers: int = 8, heads: int = 32, kv_heads: int = 8, head_dim: int = HEAD_DIM,
    lengths: np.ndarray | None = None, num_sms: int = 132, **options: Any,
) -> tuple[list[Callable[[], object]], float]:  # fmt: skip
    """Decode attention of every layer of one pool, pages at random places; and the bytes one call must read."""
    lengths = np.full(batch, context) if lengths is None else lengths
    per = -(-int(lengths.max()) // page)
    kv = torch.empty(batch * per + 1, layers, 2, page, kv_heads, head_dim, device=DEVICE, dtype=DTYPE)
    for piece in kv.view(-1).chunk(16):
        piece.normal_()
    table = (torch.randperm(batch * per, device=DEVICE, dtype=torch.int32) + 1).view(batch, per)
    q = torch.randn(batch, heads, head_dim, device=DEVICE, dtype=DTYPE)
    items = plan_decode(lengths, num_kv_heads=kv_heads, num_programs=num_sms * options.get("per_sm", 4), max_slots=1024)
    work = torch.from_numpy(items).to(DEVICE)
    count = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    space = decode_workspace(1024, batch, kv_heads, heads // kv_heads, head_dim, DEVICE)
    out = torch.empty(batch, heads * head_dim, device=DEVICE, dtype=DTYPE)

    def call(layer: int) -> Callable[[], object]:
        return lambda: decode_attention(
            q, kv, layer, table, work, count, out=out, num_sms=num_sms, space=space, **options
        )

    return [call(layer) for layer in range(layers)], float(lengths.sum()) * kv_heads * head_dim * 4


def prefill_calls(
    batch: int, queries: int, page: int, context: int = 0, heads: int = 32, kv_heads: int = 8,
    head_dim: int = HEAD_DIM, num_sms: int = 132, portable: bool = False, layers: int = 4,
) -> tuple[list[Callable[[], object]], float]:  # fmt: skip
    """Prefill attention of `batch` chunks, and the floating-point operations of one call (causal: half a square)."""
    per = -(-(queries + context) // page)
    kv = torch.randn(batch * per + 1, layers, 2, page, kv_heads, head_dim, device=DEVICE, dtype=DTYPE)
    table = (torch.randperm(batch * per, device=DEVICE, dtype=torch.int32) + 1).view(batch, per)
    q = torch.randn(batch * queries, heads, head_dim, device=DEVICE, dtype=DTYPE)
    rows = np.arange(batch)
    items = plan_prefill(
        rows * queries, np.full(batch, queries), np.full(batch, context), rows, group=heads // kv_heads
    )
    work = torch.from_numpy(items).to(DEVICE)
    count = torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    out = torch.empty(batch * queries, heads * head_dim, device=DEVICE, dtype=DTYPE)

    def call(layer: int) -> Callable[[], object]:
        return lambda: prefill_attention(q, kv, layer, table, work, count, out=out, num_sms=num_sms, portable=portable)

    flops = 4.0 * batch * heads * head_dim * queries * (context + queries / 2)
    return [call(layer) for layer in range(layers)], flops


def sdpa_calls(batch: int, queries: int, heads: int = 32, head_dim: int = HEAD_DIM) -> list[Callable[[], object]]:
    """The same prefill through cuDNN, on dense K and V already repeated for every query head."""
    q, k, v = (torch.randn(batch, heads, queries, head_dim, device=DEVICE, dtype=DTYPE) for _ in range(3))

    def call() -> None:
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.CUDNN_ATTENTION):
            F.scaled_dot_product_attention(q, k, v, is_causal=True)

    return [call] * 4


def layer_calls(
    shapes: list[Shape], tokens: int, layers: int, num_sms: int, fused: bool, head_dim: int = HEAD_DIM
) -> tuple[list[Callable[[], object]], float, float]:
    """The matrix products of `layers` layers one after the other; operations and weight bytes of one layer."""
    space = gemm.workspace(DEVICE, 1 << 24)
    calls = []
    for _ in range(layers):
        for shape in shapes:
            weight = weights(shape, 1)[0]
            calls.append(
                product(shape, tokens, weight, space, num_sms, None, head_dim) if fused else cublas(tokens, weight)
            )
    size = float(sum(s.features * s.depth for s in shapes))
    return calls, 2 * tokens * size, 2 * size


def step_calls(
    batch: int, context: int, layers: int, num_sms: int, attention: bool = True
) -> tuple[list[Callable[[], object]], float]:
    """A whole decode step of the 8B shape but for embedding and sampling; and the bytes it must read."""
    space = gemm.workspace(DEVICE, 1 << 24)
    attend, kv_bytes = decode_calls(batch, context, 64, layers=layers, num_sms=num_sms)
    calls, total = [], 0.0
    for layer in range(layers):
        for shape in LLAMA_8B:
            total += shape.features * shape.depth * 2
            calls.append(product(shape, batch, weights(shape, 1)[0], space, num_sms, None))
            if shape.kind == "qkv" and attention:
                calls.append(attend[layer])
                total += kv_bytes
    head = Shape("logits", 128256, 4096)
    calls.append(product(head, batch, weights(head, 1)[0], space, num_sms, None))
    return calls, total + head.features * head.depth * 2


def run_all(calls: list[Callable[[], object]]) -> None:
    for call in calls:
        call()


def sample_call(rows: int, vocabulary: int, temperature: float, top_k: int, top_p: float) -> Callable[[], object]:
    logits = torch.randn(rows, vocabulary, device=DEVICE) * 2
    t, p, m, u = (torch.full((rows,), v, device=DEVICE) for v in (temperature, top_p, 0.0, 0.5))
    k = torch.full((rows,), top_k, device=DEVICE, dtype=torch.int32)
    out = torch.empty(rows, device=DEVICE, dtype=torch.int64)
    scratch = sample_scratch(rows, DEVICE)
    return lambda: sample(logits, t, k, p, m, u, out=out, scratch=scratch)


def copy_bandwidth() -> float:
    """TB/s of a scaled copy, read and written bytes counted."""
    a, b = (torch.empty(1 << 28, device=DEVICE).normal_() for _ in range(2))
    return 2 * 4 * a.numel() / burst([lambda: torch.mul(a, 1.5, out=b)] * 20) / 1e9


def report(seconds: float, only: set[str]) -> list[dict[str, object]]:
    """Prints and returns one row per kernel and shape."""
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
            calls, _, size = layer_calls(LLAMA_8B, tokens, 8, sms, False)
            b = sustained(calls, meter, seconds / 2)
            row(
                "cuBLAS layer, bare",
                f"8B M={tokens}",
                b._replace(ms=b.ms * 4),
                size / (b.ms * 4) / 1e9,
                "TB/s",
                bandwidth,
            )
            calls, _, size = layer_calls(LLAMA_8B, tokens, 8, sms, True)
            f = sustained(calls, meter, seconds / 2)
            row(
                "weft layer, epilogues",
                f"8B M={tokens}",
                f._replace(ms=f.ms * 4),
                size / (f.ms * 4) / 1e9,
                "TB/s",
                bandwidth,
            )
            del calls
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
    meter.close()
    return rows


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="weft bench kernels", description=__doc__)
    parser.add_argument("--only", default="gemm,small,decode,prefill,step,sampler", help="comma-separated parts")
    parser.add_argument("--seconds", type=float, default=2.5, help="of every sustained measurement")
    parser.add_argument("--json", help="write the rows here")
    parser.add_argument("--tune", metavar="FILE", help="measure tile configurations instead and write their table")
    parser.add_argument("--tokens", default="16,32,64,128,256,512,1024,2048,4096", help="token counts to tune for")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    parser.add_argument("--budget", type=float, default=480, help="seconds that tuning may take")
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    print(f"{torch.cuda.get_device_name()} torch {torch.__version__}")
    if options.tune:
        from weft.kernels.tuning import tune

        tune({"8B": (LLAMA_8B, 128), "1B": (LLAMA_1B, 64)}, [int(t) for t in options.tokens.split(",")], options.tune,
             options.jobs, options.budget)  # fmt: skip
        return 0
    rows = report(options.seconds, set(options.only.split(",")))
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
