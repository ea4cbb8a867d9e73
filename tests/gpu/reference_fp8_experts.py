"""Reference implementation of `fp8_experts` in plain torch.

Roundings are those of the kernels: sums as in `fp8.scaled_matmul`, an expert's hidden part quantized from float32, its
result rounded once to the stream's dtype, a token's experts added in float32 in the order of its choices.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.formats.fp8 import Fp8Rows, Fp8Weight, quantize_rows, scaled_matmul
from weft.kernels.reference.experts import Routing
from weft.kernels.reference.layer import gated, rms_scale, row_sumsq


def _expert(weight: Fp8Weight, index: int) -> Fp8Weight:
    return Fp8Weight(weight.values[index], weight.scale[index])


def _rows(a: Fp8Rows, index: Tensor | slice) -> Fp8Rows:
    # torch cannot index e4m3 on the CPU
    values = a.values.view(torch.uint8)[index].view(a.values.dtype)
    return Fp8Rows(values, a.scale[:, index])


def experts_gate_up(
    x: Fp8Rows,
    sumsq: Tensor,
    routing: Routing,
    weight: Fp8Weight,
    eps: float,
    *,
    activation: str = "silu",
    bias: Tensor | None = None,
) -> Fp8Rows:
    """Norm and the experts' gate-up matrices `[E, 2 I, H]` (rows alternate) -> `[T * K, I]`, sorted by expert.

    sumsq `[T]`: of the rows of what was quantised, before a norm's weight; bias `[E, 2 I]`.
    """
    tokens = routing.order // routing.experts.shape[1]
    factor = rms_scale(sumsq, x.values.shape[1], eps)[tokens]
    h = torch.empty(len(tokens), weight.values.shape[1] // 2, device=sumsq.device)
    at = 0
    for expert, count in enumerate(routing.counts):
        if count:
            own = slice(at, at + count)
            y = scaled_matmul(_rows(x, tokens[own]), _expert(weight, expert)) * factor[own, None]
            if bias is not None:
                y += bias[expert].float()
            h[own] = gated(activation, y[:, 0::2], y[:, 1::2])
            at += count
    return quantize_rows(h)


def experts_residual(
    h: Fp8Rows,
    routing: Routing,
    weight: Fp8Weight,
    x: Tensor,
    *,
    bias: Tensor | None = None,
    next_norm: Tensor | None = None,
) -> tuple[Tensor, Tensor, Fp8Rows]:
    """x plus the weighted sum of the experts' outputs: matrices `[E, H, I]` applied to h `[T * K, I]`, rounded once,
    its sum of squares `[T]`, and it, times `next_norm [H]`, as the next GEMM's operand."""
    y = torch.empty(len(h.values), weight.values.shape[1], device=x.device)
    at = 0
    for expert, count in enumerate(routing.counts):
        if count:
            own = slice(at, at + count)
            made = scaled_matmul(_rows(h, own), _expert(weight, expert))
            if bias is not None:
                made += bias[expert].float()
            y[own] = made.to(x.dtype).float()
            at += count
    placed = torch.empty_like(y)
    placed[routing.order] = y
    total = torch.zeros_like(x, dtype=torch.float32)
    for k, weights in enumerate(routing.weights.unbind(1)):
        total += placed.view(*routing.experts.shape, -1)[:, k] * weights[:, None]
    out = (x.float() + total).to(x.dtype)
    return out, row_sumsq(out), quantize_rows(out, next_norm)


def gate_shared(h: Fp8Rows, x: Tensor, sumsq: Tensor, gate: Tensor, eps: float) -> Fp8Rows:
    """h, the hidden part of a shared expert, times the sigmoid of the normed x times `gate [1, H]`: in its scales."""
    switch = torch.sigmoid((x.float() @ gate.float().t())[:, 0] * rms_scale(sumsq, x.shape[1], eps))
    return Fp8Rows(h.values, h.scale * switch)
