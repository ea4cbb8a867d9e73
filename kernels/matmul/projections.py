"""The projections of a layer with fused epilogues (reference: `reference/layer.py: qkv_project` and others).

Norm weights are folded into the matrices (`weight_layout.fold_norm`), so the RMS norm before a GEMM is one scale per
row, applied to the accumulator. The scale comes from partial sums of squares `sumsq [sums, T] float32`, one per
feature tile of the previous GEMM, which are added in order, so the result does not depend on timing. Without `sumsq`
there is no norm before the GEMM.

Work that needs whole rows or other tiles is a row pass after the GEMM (`rows`, `heads`): a LayerNorm's sums, a norm
after the GEMM, heads of other sizes than 64 and 128, a norm over all heads. If it reads the GEMM's result, the caller
provides a buffer, `raw`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.kernels.matmul import heads as head_rows
from weft.kernels.matmul import rows
from weft.kernels.matmul.adapter_depth import More
from weft.kernels.matmul.gemm import run_gemm
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_launch import Workspace, check_operands, launch_of


def _parts(sumsq: Tensor) -> Tensor:
    """Return `[T]` or `[sums, T]` as `[sums, T]`."""
    return sumsq if sumsq.dim() == 2 else sumsq[None]


def norm_fields(sumsq: Tensor | None, eps: float) -> dict[str, Any]:
    """Return the kernel arguments of the preceding norm."""
    if sumsq is None:
        return {"PARTS": 0}
    sumsq = _parts(sumsq)
    return {"sumsq": sumsq, "stride_sumsq": sumsq.stride(0), "eps": eps, "PARTS": sumsq.shape[0]}


FUSED_HEADS = (64, 128)  # Head sizes with norm, rotation and page writes in the epilogue of the QKV GEMM.


def fuses_heads(head_dim: int, q_norm: Tensor | None, *, normed: bool = True) -> bool:
    """Return whether a QKV projection needs no `raw`. normed: a norm precedes it."""
    return normed and head_dim in FUSED_HEADS and (q_norm is None or q_norm.numel() == head_dim)


def qkv_project(
    x: Tensor, sumsq: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, rotary: Tensor,
    positions: Tensor, slot_mapping: Tensor, kv: Tensor, layer: int, num_heads: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, *, out: Tensor, raw: Tensor | None = None, num_sms: int,
    space: Workspace | None = None, num_tokens: Tensor | None = None, config: GemmConfig | None = None,
    more: More | None = None,
) -> Tensor:  # fmt: skip
    """Apply norm, QKV matrix, bias, q/k norm and rotary embedding; q goes to `out [T, Hq, D]`, K and V to pages of
    `kv`.

    sumsq `[sums, T]` float32; rotary `[positions, D/2, 2]` float32; positions and slot_mapping `[T]` int32 or int64;
    padding tokens' slots are in page 0. q_norm `[D]` or, over all heads, `[Hq * D]`; k_norm likewise. raw `[T, (Hq + 2
    Hkv) D]` is needed unless `fuses_heads`."""
    check_operands(x, weight)
    if not (kv.is_contiguous() and out.is_contiguous() and rotary.is_contiguous()):
        raise ValueError("kv, out and rotary must be contiguous")
    m, k = x.shape
    n = weight.shape[0]
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    if not fuses_heads(head_dim, q_norm, normed=sumsq is not None):
        if raw is None:
            raise ValueError(f"heads of {head_dim}, or their norm, need a `raw` buffer")
        linear_project(
            x, sumsq, weight, eps, bias=bias, out=raw, num_sms=num_sms, space=space, num_tokens=num_tokens,
            config=config, more=more,
        )  # fmt: skip
        return head_rows.place_heads(
            raw, eps, rotary, positions, slot_mapping, kv, layer, num_heads, q_norm, k_norm, out=out,
            num_tokens=num_tokens,
        )  # fmt: skip
    assert sumsq is not None
    sumsq = _parts(sumsq)
    launch = launch_of(m, n, k, config, num_sms)
    if q_norm is not None and launch.config.features < head_dim:  # the norm of a head needs all of it in one tile
        launch = launch_of(m, n, k, launch.config.widened(head_dim), num_sms)
    if launch.config.special and q_norm is not None and head_dim != 128:  # its tiles do not hold whole heads
        launch = launch._replace(config=launch.config._replace(special=False))
    run_gemm(
        "qkv", launch, x, weight, out, num_tokens, space, more=more, sumsq=sumsq, stride_sumsq=sumsq.stride(0), eps=eps,
        bias=bias,
        rotary=rotary, positions=positions, slots=slot_mapping, kv=kv, layer=layer, layers=layers, q_norm=q_norm,
        k_norm=k_norm, PARTS=sumsq.shape[0], HQ=num_heads, HKV=num_kv_heads, D=head_dim, PAGE=page_size,
    )  # fmt: skip
    return out


def residual_project(
    a: Tensor, weight: Tensor, x: Tensor, *, out: Tensor, sumsq: Tensor, post_norm: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 0.0, centred: bool = False, raw: Tensor | None = None, num_sms: int,
    space: Workspace | None = None, num_tokens: Tensor | None = None, config: GemmConfig | None = None,
    more: More | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write `x + a @ weight.T` to `out` (may be `x` itself), with partial sums of squares.

    sumsq `[max_sums, T]` float32 is scratch; returns out and the view `[sums, T]` of it that was written. bias `[H]`.
    post_norm `[H]`: the addend, including a bias, goes through an RMS norm first; needs `raw [T, H]`, and `out` is `x`.
    centred: the squares are those of a row minus its mean."""
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    options: dict[str, Any] = {"num_sms": num_sms, "space": space, "num_tokens": num_tokens, "config": config}
    options["more"] = more
    if post_norm is not None:
        if raw is None or out.data_ptr() != x.data_ptr():
            raise ValueError("a norm after the GEMM needs a `raw` buffer and out=x")
        linear_project(a, None, weight, eps, bias=bias, out=raw, **options)
        rows.add_normed(x, raw, post_norm, eps, sumsq=sumsq)
        return out, rows.row_sumsq(x, out=sumsq[:1], centred=True) if centred else sumsq[:1]
    check_operands(a, weight)
    m, k = a.shape
    n = weight.shape[0]
    launch = launch_of(m, n, k, config, num_sms)
    parts = -(-n // launch.config.features)
    if sumsq.shape[0] < parts or sumsq.stride(1) != 1:
        raise ValueError(f"sumsq needs {parts} contiguous rows")
    run_gemm(
        "residual",
        launch,
        a,
        weight,
        out,
        num_tokens,
        space,
        x,
        more,
        bias=bias,
        sumsq=sumsq,
        stride_sumsq=sumsq.stride(0),
    )
    return out, rows.row_sumsq(out, out=sumsq[:1], centred=True) if centred else sumsq[:parts]


def gate_up_project(
    x: Tensor, sumsq: Tensor | None, weight: Tensor, eps: float, *, activation: str = "silu",
    bias: Tensor | None = None, out: Tensor, num_sms: int, space: Workspace | None = None,
    num_tokens: Tensor | None = None, config: GemmConfig | None = None, more: More | None = None,
) -> Tensor:  # fmt: skip
    """Apply norm, gate-up matrix `[2 I, H]` (rows alternate), bias and gated activation: `out [T, I]`.

    sumsq `[sums, T]` float32. activation: one of `reference.layer.ACTIVATIONS`."""
    check_operands(x, weight)
    launch = launch_of(x.shape[0], weight.shape[0], x.shape[1], config, num_sms)
    run_gemm(
        "gate_up",
        launch,
        x,
        weight,
        out,
        num_tokens,
        space,
        more=more,
        bias=bias,
        ACT=activation,
        **norm_fields(sumsq, eps),
    )
    return out


def linear_project(
    x: Tensor, sumsq: Tensor | None, weight: Tensor, eps: float, *, activation: str = "", bias: Tensor | None = None,
    out: Tensor, num_sms: int, space: Workspace | None = None, num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
    more: More | None = None,
) -> Tensor:  # fmt: skip
    """Apply norm, matrix `[N, H]`, bias and activation: `out [T, N]`. activation: "" is none.

    Used for the first GEMM of an MLP without a gate (`reference.layer.up_project`) and before a row pass."""
    check_operands(x, weight)
    launch = launch_of(x.shape[0], weight.shape[0], x.shape[1], config, num_sms)
    run_gemm(
        "linear",
        launch,
        x,
        weight,
        out,
        num_tokens,
        space,
        more=more,
        bias=bias,
        ACT=activation,
        **norm_fields(sumsq, eps),
    )
    return out


def sumsq_buffer(hidden: int, num_tokens: int, device: torch.device | str) -> Tensor:
    """Allocate scratch `[sums, T]` float32 large enough for any configuration."""
    return torch.empty(-(-hidden // 64), num_tokens, dtype=torch.float32, device=device)
