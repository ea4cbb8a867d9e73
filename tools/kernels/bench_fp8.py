"""The FP8 rows of `weft bench kernels`: GEMMs compared with `torch._scaled_mm`, attention over e4m3 pages, experts."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from weft.kernels.attention import fp8_attention
from weft.kernels.attention.decode_workspace import decode_workspace
from weft.kernels.attention.fp8_unpack import Unpacked, counting_table, unpack_pages
from weft.kernels.attention.output import Output
from weft.kernels.attention.prefill_attention import prefill_attention
from weft.kernels.attention.work_lists import decode_items, prefill_items
from weft.kernels.experts import fp8_experts
from weft.kernels.experts.router import choice_buffers, route
from weft.kernels.formats import fp8
from weft.kernels.formats.fp8 import Fp8Rows, Fp8Weight
from weft.kernels.matmul import fp8_projections, gemm_launch
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.tuned import Shape
from weft.kernels.tuning.calls import DEVICE, DTYPE, HEAD_DIM, expert_layer_call, gemm_call, weights
from weft.kernels.tuning.measure import Meter, Sustained, burst, sustained
from weft.tools.kernels.calls import LLAMA_8B, decode_calls
from weft.tools.kernels.fp8_operands import quantize_tokens, row_values

PARTS = ("fp8-gemm", "fp8-sums", "fp8-decode", "fp8-prefill", "fp8-experts")
EXPERTS = {
    "Qwen3-30B-A3B": Shape("experts", 2 * 768, 2048, 128, 8),
    "Mixtral-8x7B": Shape("experts", 2 * 14336, 4096, 8, 2),
}

Row = Callable[[str, str, Sustained, float, str, float], None]
"""Arguments: kernel, shape, time, figure, its unit and the figure it is compared with."""


def fp8_shapes(shapes: list[Shape]) -> list[Shape]:
    return [shape._replace(bits=8) for shape in shapes]


def scaled_mm(tokens: int, weight: Fp8Weight, *, fast: bool) -> Callable[[], object]:
    """Return torch's plain GEMM of the same operands, scales per token and channel. fast: its fast accumulation."""
    x = quantize_tokens(torch.randn(tokens, weight.values.shape[1], device=DEVICE))
    rows, columns = x.scale[0][:, None].contiguous(), weight.scale[None].contiguous()
    return lambda: torch._scaled_mm(
        x.values, weight.values.t(), rows, columns, out_dtype=DTYPE, use_fast_accum=fast
    )  # fmt: skip


def layer_calls(tokens: int, layers: int, num_sms: int, way: str) -> tuple[list[Callable[[], object]], float]:
    """Return the GEMMs of `layers` layers of an 8B, in sequence, and one layer's operations.

    way: "ours" with their epilogues, "scaled_mm" with its fast accumulation, "scaled_mm exact" without.
    """
    space = gemm_launch.workspace(DEVICE, 1 << 24)
    calls = []
    for _ in range(layers):
        for shape in fp8_shapes(LLAMA_8B):
            weight = weights(shape, 1)[0]
            if way == "ours":
                calls.append(gemm_call(shape, tokens, weight, space, num_sms, None))
            else:
                calls.append(scaled_mm(tokens, weight, fast=way == "scaled_mm"))
    return calls, 2.0 * tokens * sum(shape.features * shape.depth for shape in LLAMA_8B)


class Sums(NamedTuple):
    """Relative errors, by norm, of one GEMM of 16-bit numbers."""

    ours: float
    """Error of the sums against exact sums of the quantized numbers; scales per token and channel."""
    ours_paired: float
    """Like `ours`, but sums leave the tensor cores every 256 of K instead of 128."""
    scaled_mm: float
    """The same numbers and scales in torch, without fast accumulation."""
    scaled_mm_fast: float
    tokens: float
    """Error of the GEMM, including rounding of the operands: `ours` with a scale per token."""
    blocks: float
    """As an engine computes it: a power of two for each 128 columns of a token."""


def sums_of(shape: Shape, tokens: int, num_sms: int) -> Sums:
    """Return the errors for operands with outlier channels and scales spread as in trained models."""
    n, k = shape.features, shape.depth

    def spread(width: int, by: float) -> Tensor:
        return torch.exp(torch.randn(width, device=DEVICE) * by)

    x = torch.randn(tokens, k, device=DEVICE) * spread(k, 0.5)
    x[:, torch.randperm(k, device=DEVICE)[: max(2, k // 512)]] *= 30
    w = torch.randn(n, k, device=DEVICE) * 0.02 * spread(n, 0.35)[:, None] * spread(k, 0.35)
    x, w = x.to(DTYPE), w.to(DTYPE)
    weight, by_token, by_block = fp8.quantize_weight(w), quantize_tokens(x), fp8.quantize_rows(x)
    rows, columns = by_token.scale[0][:, None].contiguous(), weight.scale[None].contiguous()

    def exact(a: Tensor, b: Tensor) -> Tensor:
        return a.double() @ b.double().t()

    def ours(a: Fp8Rows) -> Tensor:
        out = torch.empty(tokens, n, device=DEVICE, dtype=DTYPE)
        fp8_projections.linear_project(a, None, weight, out=out, num_sms=num_sms, way="promoted")
        return out

    def error(got: Tensor, want: Tensor) -> float:
        return float((got.double() - want).norm() / want.norm())

    paired = Fp8Rows(by_token.values, by_token.scale.expand(k // fp8.BLOCK, -1).contiguous(), 2 * fp8.BLOCK)
    whole, numbers = exact(x, w), exact(row_values(by_token), fp8.weight_values(weight))
    theirs, theirs_fast = (
        torch._scaled_mm(by_token.values, weight.values.t(), rows, columns, out_dtype=DTYPE, use_fast_accum=fast)
        for fast in (False, True)
    )
    return Sums(
        error(ours(by_token), numbers), error(ours(paired), numbers), error(theirs, numbers),
        error(theirs_fast, numbers), error(ours(by_token), whole), error(ours(by_block), whole),
    )  # fmt: skip


def fp8_decode_calls(
    batch: int, context: int, page: int = 64, layers: int = 8, heads: int = 32, kv_heads: int = 8, num_sms: int = 132,
    out: Output | None = None, kernel: Callable[..., object] = fp8_attention.decode_attention,
) -> tuple[list[Callable[[], object]], float]:  # fmt: skip
    """Like `calls.decode_calls`, for e4m3 pages. out: for example an operand that attention writes."""
    lengths, per = np.full(batch, context), -(-context // page)
    kv = _pool(batch * per + 1, layers, page, kv_heads)
    scales = fp8.unit_kv_scales(layers, kv_heads, DEVICE)
    table = (torch.randperm(batch * per, device=DEVICE, dtype=torch.int32) + 1).view(batch, per)
    q = torch.randn(batch, heads, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    items = decode_items(lengths, num_kv_heads=kv_heads, num_programs=4 * num_sms, max_slots=1024)
    work, count = torch.from_numpy(items).to(DEVICE), torch.tensor([len(items)], dtype=torch.int32, device=DEVICE)
    space = decode_workspace(1024, batch, kv_heads, heads // kv_heads, HEAD_DIM, DEVICE)
    target = torch.empty(batch, heads * HEAD_DIM, device=DEVICE, dtype=DTYPE) if out is None else out

    def call(layer: int) -> object:
        return kernel(q, kv, scales, layer, table, work, count, out=target, num_sms=num_sms, space=space)

    return [partial(call, layer) for layer in range(layers)], float(lengths.sum()) * kv_heads * HEAD_DIM * 2


def fp8_prefill_calls(
    batch: int, queries: int, context: int, page: int = 64, layers: int = 4, heads: int = 32, kv_heads: int = 8,
    num_sms: int = 132,
) -> tuple[list[Callable[[], object]], list[Callable[[], object]], float]:  # fmt: skip
    """Return calls for `batch` chunks over e4m3 pages (conversion to 16 bits, attention) and one layer's operations."""
    per = -(-(queries + context) // page)
    kv = _pool(batch * per + 1, layers, page, kv_heads)
    scales = fp8.unit_kv_scales(layers, kv_heads, DEVICE)
    q = torch.randn(batch * queries, heads, HEAD_DIM, device=DEVICE, dtype=DTYPE)
    rows = np.arange(batch)
    items = prefill_items(
        rows * queries, np.full(batch, queries), np.full(batch, context), rows * per, group=heads // kv_heads
    )
    what = Unpacked(
        torch.randperm(batch * per, device=DEVICE, dtype=torch.int32) + 1,
        torch.tensor([batch * per], dtype=torch.int32, device=DEVICE),
        torch.from_numpy(items).to(DEVICE), torch.tensor([len(items)], dtype=torch.int32, device=DEVICE),
        torch.zeros(batch * per, 1, 2, page, kv_heads, HEAD_DIM, device=DEVICE, dtype=DTYPE),
        counting_table(batch * per, per, torch.device(DEVICE)),
    )  # fmt: skip
    out = torch.empty(batch * queries, heads * HEAD_DIM, device=DEVICE, dtype=DTYPE)

    def unpack(layer: int) -> object:
        return unpack_pages(kv, scales, layer, what, num_sms=num_sms)

    def attend(layer: int) -> object:  # uses the pages unpacked last
        del layer
        return prefill_attention(q, what.kv, 0, what.table, what.items, what.num_items, out=out, num_sms=num_sms)

    flops = 4.0 * batch * heads * HEAD_DIM * queries * (context + queries / 2)
    every = range(layers)
    return [partial(unpack, i) for i in every], [partial(attend, i) for i in every], flops


def _pool(pages: int, layers: int, page: int, kv_heads: int) -> Tensor:
    """Return pages of random numbers in e4m3."""
    kv = torch.empty(pages, layers, 2, page, kv_heads, HEAD_DIM, device=DEVICE, dtype=fp8.E4M3)
    for piece in kv.view(-1).chunk(16):
        piece.copy_(torch.randn(piece.shape, device=DEVICE, dtype=DTYPE))
    return kv


def fp8_expert_layer_call(
    shape: Shape, tokens: int, num_sms: int, config: GemmConfig | None = None
) -> Callable[[], object]:  # fmt: skip
    """Like `calls.expert_layer_call`, in FP8 with scales per channel."""
    count, top, n, k = shape.experts, shape.top, shape.features, shape.depth

    def matrices(out: int, inner: int) -> Fp8Weight:
        values = torch.empty(count, out, inner, device=DEVICE, dtype=fp8.E4M3)
        for one in values:
            one.copy_(torch.randn(out, inner, device=DEVICE, dtype=DTYPE))
        return Fp8Weight(values, torch.full((count, out), 0.02, device=DEVICE))

    gate_up, down = matrices(n, k), matrices(k, n // 2)
    x = torch.randn(tokens, k, device=DEVICE, dtype=DTYPE)
    operand, sumsq = fp8.quantize_rows(x), x.float().square().sum(-1)[None]
    out, sums = torch.empty_like(x), torch.empty(-(-k // 64), tokens, device=DEVICE)
    left, norm = fp8_projections.rows_buffer(tokens, k, DEVICE), torch.ones(k, device=DEVICE)
    choice = choice_buffers(tokens, k, count, top, torch.device(DEVICE))
    matrix = torch.randn(count, k, device=DEVICE) * 0.02
    route(x, sumsq, matrix, 1e-5, kind="softmax", top=top, normalise=True, out=choice)
    options: dict[str, Any] = {
        "space": fp8_experts.expert_space(tokens, k, n // 2, count, top, DTYPE, DEVICE), "num_sms": num_sms,
        "config": config,
    }  # fmt: skip

    def call() -> None:
        fp8_experts.experts_gate_up(operand, sumsq, choice, gate_up, 1e-5, **options)
        fp8_experts.experts_residual(
            choice, down, x, out=out, sumsq=sums, quantized=left, next_norm=norm, **options
        )  # fmt: skip

    return call


def report(
    only: set[str], row: Row, seconds: float, meter: Meter, num_sms: int, bandwidth: float
) -> list[dict[str, object]]:
    """Pass each measurement to `row`. Returns the rows of the errors, which have other columns.

    bandwidth: TB/s that memory-bound kernels are compared with.
    """
    if "fp8-gemm" in only:
        for tokens in (2048, 512, 64, 16):
            peak = 0.0
            for way in ("scaled_mm exact", "scaled_mm", "ours"):
                calls, flops = layer_calls(tokens, 2 if tokens > 64 else 8, num_sms, way)
                s = sustained(calls, meter, seconds)
                figure = flops / (s.ms * 4) / 1e9
                peak = max(peak, figure) if way != "ours" else peak
                name = "weft FP8 layer, epilogues" if way == "ours" else f"{way} layer, bare"
                row(name, f"8B M={tokens}", s._replace(ms=s.ms * 4), figure, "TFLOP/s", peak)
                if way == "ours":
                    for shape, call in zip(LLAMA_8B, calls, strict=False):
                        ms = burst([call] * 8)
                        figure = 2.0 * tokens * shape.features * shape.depth / ms / 1e9
                        row(f"  {shape.kind}, a burst", f"{shape.depth} M={tokens}", Sustained(ms, 0, 0), figure,
                            "TFLOP/s", peak)  # fmt: skip
                del calls
    errors: list[dict[str, object]] = []
    if "fp8-sums" in only:
        print(f"{'errors, by norm':26} {'shape':24} " + " ".join(f"{name:>14}" for name in Sums._fields))
        for shape in LLAMA_8B:
            found = sums_of(shape, 256, num_sms)
            errors.append({"kernel": "FP8 sums", "shape": f"{shape.features} x {shape.depth}", **found._asdict()})
            print(f"{'FP8 sums':26} {shape.features:>6} x {shape.depth:<15} "
                  + " ".join(f"{value:14.6f}" for value in found), flush=True)  # fmt: skip
    if "fp8-decode" in only:
        for batch, context in ((512, 1280), (64, 8192), (1, 1280)):
            for name, make in (("bf16", partial(decode_calls, page=64)), ("FP8", fp8_decode_calls)):
                calls, size = make(batch, context, num_sms=num_sms)
                s = sustained(calls, meter, seconds)
                row(f"decode attention, {name}", f"{batch} x {context}", s, size / s.ms / 1e9, "TB/s", bandwidth)
                del calls
    if "fp8-prefill" in only:
        for batch, queries, context in ((2, 680, 344), (1, 2048, 8192), (1, 256, 8192)):
            unpack, attend, flops = fp8_prefill_calls(batch, queries, context, num_sms=num_sms)
            where = f"{batch} x {context}+{queries}"
            first, second = (Sustained(burst(calls), 0, 0) for calls in (unpack, attend))
            size = batch * (queries + context) * 8 * HEAD_DIM * 2 * 3.0  # one byte read, two written
            row("pages into 16 bits", where, first, size / first.ms / 1e9, "TB/s", bandwidth)
            both = first.ms + second.ms
            row("prefill behind them", where, second, flops / second.ms / 1e9, "TFLOP/s", flops / both / 1e9)
            del unpack, attend
    if "fp8-experts" in only:
        for name, shape in EXPERTS.items():
            for tokens in (2048, 256, 16):
                flops = 3.0 * tokens * shape.top * shape.features * shape.depth
                wide = expert_layer_call(shape, tokens, weights(shape, 1)[0], num_sms, None)
                s = sustained([wide], meter, seconds)
                base = flops / s.ms / 1e9
                row("experts, bf16", f"{name} M={tokens}", s, base, "TFLOP/s", base)
                del wide
                s = sustained([fp8_expert_layer_call(shape, tokens, num_sms)], meter, seconds)
                row("experts, FP8", f"{name} M={tokens}", s, flops / s.ms / 1e9, "TFLOP/s", base)
    return errors
