"""GEMMs with prepared operands, ready to be timed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from weft.kernels.experts import experts
from weft.kernels.experts.router import choice_buffers, route
from weft.kernels.formats import fp8
from weft.kernels.formats.fp8 import Fp8Weight
from weft.kernels.matmul import fp8_projections, gemm, gemm_launch, projections
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.tuned import Shape

DEVICE = "cuda"
DTYPE = torch.bfloat16
HEAD_DIM = 128


def rule(shape: Shape, tokens: int, num_sms: int) -> GemmConfig:
    """Return the configuration of an untuned GEMM."""
    if shape.experts:
        return experts.choose(tokens, shape.features, shape.depth, shape.experts, shape.top)
    if shape.bits == 8:
        return fp8_projections.choose(shape.kind, tokens, shape.features, shape.depth, num_sms)
    return gemm_launch.choose(tokens, shape.features, shape.depth, num_sms)


def gemm_call(
    shape: Shape, tokens: int, weight: Tensor | Fp8Weight, space: gemm_launch.Workspace, num_sms: int,
    config: GemmConfig | None, head_dim: int = HEAD_DIM, kv_heads: int = 8,
) -> Callable[[], object]:  # fmt: skip
    """Return a call of this shape's fused GEMM with prepared operands."""
    n, k = shape.features, shape.depth
    if isinstance(weight, Fp8Weight):
        return fp8_gemm_call(shape, tokens, weight, space, num_sms, config, head_dim, kv_heads)
    if shape.experts:
        return expert_layer_call(shape, tokens, weight, num_sms, config)
    a = torch.randn(tokens, k, device=weight.device, dtype=DTYPE)
    sumsq = a.float().square().view(tokens, 16, -1).sum(-1).t().contiguous()
    options: dict[str, Any] = {"num_sms": num_sms, "space": space, "config": config}
    if shape.kind == "qkv":
        heads = n // head_dim - 2 * kv_heads
        kv = torch.zeros(tokens // 64 + 2, 2, 2, 64, kv_heads, head_dim, device=weight.device, dtype=DTYPE)
        rotary = torch.randn(4096, head_dim // 2, 2, device=weight.device)
        positions = torch.arange(tokens, device=weight.device, dtype=torch.int32)
        slots = torch.arange(tokens, device=weight.device, dtype=torch.int32) + 64
        out = torch.empty(tokens, heads, head_dim, device=weight.device, dtype=DTYPE)
        fused = projections.fuses_heads(head_dim, None)
        raw = None if fused else torch.empty(tokens, n, device=weight.device, dtype=DTYPE)
        return lambda: projections.qkv_project(
            a, sumsq, weight, None, 1e-5, rotary, positions, slots, kv, 1, heads, out=out, raw=raw, **options
        )
    if shape.kind == "residual":
        x = torch.randn(tokens, n, device=weight.device, dtype=DTYPE)
        out, parts = torch.empty_like(x), projections.sumsq_buffer(n, tokens, weight.device)
        return lambda: projections.residual_project(a, weight, x, out=out, sumsq=parts, **options)
    if shape.kind == "gate_up":
        out = torch.empty(tokens, n // 2, device=weight.device, dtype=DTYPE)
        return lambda: projections.gate_up_project(a, sumsq, weight, 1e-5, out=out, **options)
    if shape.kind == "up":
        out = torch.empty(tokens, n, device=weight.device, dtype=DTYPE)
        return lambda: projections.linear_project(a, sumsq, weight, 1e-5, activation="gelu_tanh", out=out, **options)
    out = torch.empty(tokens, n, device=weight.device, dtype=torch.float32 if shape.kind == "logits" else DTYPE)
    return lambda: gemm.matmul(a, weight, out, **options)


def fp8_gemm_call(
    shape: Shape, tokens: int, weight: Fp8Weight, space: gemm_launch.Workspace, num_sms: int, config: GemmConfig | None,
    head_dim: int, kv_heads: int,
) -> Callable[[], object]:  # fmt: skip
    """Like `gemm_call`, for e4m3 operands with a scale per activation block; pages in 16 bits."""
    n, k, device = shape.features, shape.depth, weight.values.device
    # the residual stream's span in an iteration of this many tokens
    hidden = n if shape.kind == "residual" else k
    span = fp8.BLOCK if weight.blocked else fp8_projections.residual_span(tokens, hidden, hidden, num_sms)
    a = fp8_projections.rows_buffer(tokens, k, device, span=fp8.BLOCK if shape.kind == "residual" else span)
    if device.type != "meta":
        made = fp8.quantize_rows(torch.randn(tokens, k, device=device), span=a.span)
        a.values.copy_(made.values)
        a.scale.copy_(made.scale)
    sumsq = torch.full((16, tokens), k / 16, device=device)
    options: dict[str, Any] = {"num_sms": num_sms, "space": space, "config": config}
    if shape.kind == "qkv" and head_dim in projections.FUSED_HEADS:
        kv = torch.zeros(tokens // 64 + 2, 2, 2, 64, kv_heads, head_dim, device=device, dtype=DTYPE)
        rotary = torch.randn(4096, head_dim // 2, 2, device=device)
        positions = torch.arange(tokens, device=device, dtype=torch.int32)
        out = torch.empty(tokens, n // head_dim - 2 * kv_heads, head_dim, device=device, dtype=DTYPE)
        return lambda: fp8_projections.qkv_project(
            a, sumsq, weight, None, 1e-5, rotary, positions, positions + 64, kv, 1, out.shape[1], out=out, **options
        )
    if shape.kind == "residual":
        x = torch.randn(tokens, n, device=device, dtype=DTYPE)
        parts = projections.sumsq_buffer(n, tokens, device)
        left = fp8_projections.rows_buffer(tokens, n, device, span=span)
        norm = torch.ones(n, device=device)
        return lambda: fp8_projections.residual_project(
            a, weight, x, out=x, sumsq=parts, quantized=left, next_norm=norm, **options
        )
    if shape.kind == "gate_up":
        left = fp8_projections.rows_buffer(tokens, n // 2, device)
        return lambda: fp8_projections.gate_up_project(a, sumsq, weight, 1e-5, quantized=left, **options)
    out = torch.empty(tokens, n, device=device, dtype=DTYPE)  # a separate pass over the rows follows
    return lambda: fp8_projections.linear_project(a, sumsq, weight, 1e-5, out=out, **options)


def expert_layer_call(
    shape: Shape, tokens: int, weight: Tensor, num_sms: int, config: GemmConfig | None, skew: float = 1.0
) -> Callable[[], object]:
    """Return a call of both GEMMs of an expert layer after a random router. weight: all of `shape.elements`.

    skew: factor of the router's rows of the first eighth of the experts."""
    count, top, n, k = shape.experts, shape.top, shape.features, shape.depth
    device, dtype = weight.device, weight.dtype
    gate_up, down = (part.view(count, *sizes) for part, sizes in zip(
        weight.split((count * n * k, count * n * k // 2)), ((n, k), (k, n // 2)), strict=True))  # fmt: skip
    x = torch.randn(tokens, k, device=device, dtype=dtype)
    sumsq = x.float().square().sum(-1)[None]
    out, sums = torch.empty_like(x), projections.sumsq_buffer(k, tokens, device)
    matrix = torch.randn(count, k, device=device) * 0.02
    matrix[: max(1, count // 8)] *= skew
    choice = choice_buffers(tokens, k, count, top, device)
    route(x, sumsq, matrix, 1e-5, kind="softmax", top=top, normalise=True, out=choice)
    options: dict[str, Any] = {
        "space": experts.expert_space(tokens, k, n // 2, count, top, dtype, device), "num_sms": num_sms,
        "config": config,
    }  # fmt: skip

    def call() -> None:
        experts.experts_gate_up(x, sumsq, choice, gate_up, 1e-5, **options)
        experts.experts_residual(choice, down, x, out=out, sumsq=sums, **options)

    return call


def weights(shape: Shape, copies: int, device: str = DEVICE) -> list[Any]:
    """Return tensors, or `Fp8Weight` for e4m3."""
    if shape.bits == 8:
        made = []
        for _ in range(copies):
            values = torch.empty(shape.features, shape.depth, device=device, dtype=fp8.E4M3)
            if values.device.type != "meta":
                values.copy_(torch.randn(shape.features, shape.depth, device=device, dtype=DTYPE))
            made.append(Fp8Weight(values, torch.full((shape.features,), 0.02, device=device)))
        return made
    if shape.experts:
        return [torch.empty(shape.elements, device=device, dtype=DTYPE).normal_(0, 0.02) for _ in range(copies)]
    return [torch.randn(shape.features, shape.depth, device=device, dtype=DTYPE) * 0.02 for _ in range(copies)]


def copies_for(shape: Shape) -> int:
    """Return how many weights together exceed the L2 several times."""
    size = shape.bits // 8 * shape.elements
    return 1 if size > 1e9 else max(2, min(12, int(400e6 / size)))
