"""MLP activations in GEMM epilogues (reference: `reference/layer.py: ACTIVATIONS, gated`)."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def activate(y, ACT: tl.constexpr):
    """Apply `ACT` to float32 `y`; "" is the identity."""
    if ACT == "silu":
        y = y / (1.0 + tl.exp(-y))
    if ACT == "gelu":
        y = 0.5 * y * (1.0 + tl.erf(y * 0.7071067811865476))
    if ACT == "gelu_tanh":
        y = y / (1.0 + tl.exp(-1.5957691216057308 * (y + 0.044715 * y * y * y)))  # 2 sqrt(2 / pi)
    if ACT == "relu":
        y = tl.maximum(y, 0.0)
    if ACT == "relu2":
        y = tl.maximum(y, 0.0)
        y = y * y
    return y


@triton.jit
def gate_with(gate, up, ACT: tl.constexpr):
    """Return ACT(gate) * up, float32."""
    if ACT == "silu":
        return gate * up / (1.0 + tl.exp(-gate))  # as `mid_epilogues`, to the bit
    else:
        return activate(gate, ACT) * up


@triton.jit
def soft_cap(y, SOFTCAP: tl.constexpr):
    """Return `cap * tanh(y / cap)`; 0 is the identity."""
    if SOFTCAP > 0:
        y = SOFTCAP - 2 * SOFTCAP / (1.0 + tl.exp(y * (2.0 / SOFTCAP)))
    return y
