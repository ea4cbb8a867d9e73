"""Attention scores in the log2 domain, and the changes a model makes to them before and after the softmax."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import math

import triton
import triton.language as tl

LOG2E = math.log2(math.e)


def log2_scale(scale: float | None, head_dim: int) -> float:
    """Return the factor from q times k to a score in the log2 domain. scale: the model's; None: head_dim ** -0.5."""
    return (scale if scale is not None else head_dim**-0.5) * LOG2E


@triton.jit
def soft_cap(s, SOFTCAP: tl.constexpr):
    """Return `cap * tanh(score / cap)` of scores in the log2 domain."""
    if SOFTCAP > 0:
        CAP: tl.constexpr = SOFTCAP * 1.4426950408889634
        s = CAP - 2 * CAP / (1.0 + tl.exp2(s * (2.0 / SOFTCAP)))
    return s


@triton.jit
def with_sink(norm, m, sinks, head, mask):
    """Add `exp(sink)` to the softmax denominators `norm`. m: maximum per row, in the log2 domain. sinks `[Hq]`."""
    if sinks is not None:
        logit = tl.load(sinks + head, mask=mask, other=0.0).to(tl.float32)
        norm += tl.exp2(logit * 1.4426950408889634 - m)
    return norm
