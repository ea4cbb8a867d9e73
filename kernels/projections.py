"""The matrix products of a layer with what surrounds them as epilogues (twins: `reference.qkv_project` and its
siblings).

Norm weights are folded into the matrices (`pack.fold_norm`), so the RMS norm before a product is one scale per row,
applied to the accumulator. The scale comes from partial sums of squares `sumsq [parts, T] float32`: each feature tile
of the product before wrote one part; adding them in order keeps the result independent of timing.
"""

from __future__ import annotations

import torch
from torch import Tensor

from weft.kernels.gemm import product
from weft.kernels.gemm_config import GemmConfig
from weft.kernels.gemm_launch import Workspace, check_operands, launch_of


def _parts(sumsq: Tensor) -> Tensor:
    """`[T]` or `[parts, T]` -> `[parts, T]`."""
    return sumsq if sumsq.dim() == 2 else sumsq[None]


def qkv_project(
    x: Tensor,
    sumsq: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rotary: Tensor,
    positions: Tensor,
    slot_mapping: Tensor,
    kv: Tensor,
    layer: int,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
    *,
    out: Tensor,
    num_sms: int,
    space: Workspace | None = None,
    num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """Norm, QKV matrix, bias, q/k norm, rotary embedding; q goes to `out [T, Hq, D]`, K and V into the pages of `kv`.

    sumsq `[parts, T]` float32; rotary `[positions, D/2, 2]` float32; positions and slot_mapping `[T]` int32 or int64;
    the slots of padding tokens lie in page 0.
    """
    check_operands(x, weight)
    if not (kv.is_contiguous() and out.is_contiguous() and rotary.is_contiguous()):
        raise ValueError("kv, out and rotary must be contiguous")
    m, k = x.shape
    n = weight.shape[0]
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    sumsq = _parts(sumsq)
    launch = launch_of(m, n, k, config, num_sms)
    if q_norm is not None and launch.config.features < head_dim:  # the norm of a head needs all of it in one tile
        launch = launch_of(m, n, k, launch.config.widened(head_dim), num_sms)
    if launch.config.special and q_norm is not None and head_dim != 128:  # its tiles hold no whole head
        launch = launch._replace(config=launch.config._replace(special=False))
    product(
        "qkv", launch, x, weight, out, num_tokens, space, sumsq=sumsq, stride_sumsq=sumsq.stride(0), eps=eps, bias=bias,
        rotary=rotary, positions=positions, slots=slot_mapping, kv=kv, layer=layer, layers=layers, q_norm=q_norm,
        k_norm=k_norm, PARTS=sumsq.shape[0], HQ=num_heads, HKV=num_kv_heads, D=head_dim, PAGE=page_size,
    )  # fmt: skip
    return out


def residual_project(
    a: Tensor,
    weight: Tensor,
    x: Tensor,
    *,
    out: Tensor,
    sumsq: Tensor,
    num_sms: int,
    space: Workspace | None = None,
    num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> tuple[Tensor, Tensor]:
    """`x + a @ weight.T` into `out` (may be `x` itself) and its partial sums of squares.

    sumsq `[max_parts, T]` float32 is scratch; returns out and the view `[parts, T]` of it that was written.
    """
    check_operands(a, weight)
    m, k = a.shape
    n = weight.shape[0]
    launch = launch_of(m, n, k, config, num_sms)
    parts = -(-n // launch.config.features)
    if not x.is_contiguous():
        raise ValueError("x must be contiguous")
    if sumsq.shape[0] < parts or sumsq.stride(1) != 1:
        raise ValueError(f"sumsq needs {parts} contiguous rows")
    product("residual", launch, a, weight, out, num_tokens, space, x, sumsq=sumsq, stride_sumsq=sumsq.stride(0))
    return out, sumsq[:parts]


def gate_up_project(
    x: Tensor,
    sumsq: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor,
    num_sms: int,
    space: Workspace | None = None,
    num_tokens: Tensor | None = None,
    config: GemmConfig | None = None,
) -> Tensor:
    """Norm, gate-up matrix `[2 I, H]` (rows alternate), SwiGLU -> `out [T, I]`. sumsq `[parts, T]` float32."""
    check_operands(x, weight)
    sumsq = _parts(sumsq)
    launch = launch_of(x.shape[0], weight.shape[0], x.shape[1], config, num_sms)
    product(
        "gate_up", launch, x, weight, out, num_tokens, space, sumsq=sumsq, stride_sumsq=sumsq.stride(0), eps=eps,
        PARTS=sumsq.shape[0],
    )  # fmt: skip
    return out


def sumsq_buffer(hidden: int, num_tokens: int, device: torch.device | str) -> Tensor:
    """Scratch `[parts, T]` float32 large enough for any configuration."""
    return torch.empty(-(-hidden // 64), num_tokens, dtype=torch.float32, device=device)
