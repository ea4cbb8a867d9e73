"""The projections of a layer as in `projections`, on `mid_hopper` where a measured table or its rule selects it.

Signatures and results are those of `projections`, which also runs cases without an epilogue in `mid_hopper`: biases,
head norms, norms after a GEMM, activations other than SiLU.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor

from weft.kernels.common.gpu import gpu
from weft.kernels.matmul import mid_rule, mid_table, projections
from weft.kernels.matmul.adapter_depth import More
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_launch import Workspace, check_operands, choose
from weft.kernels.matmul.mid_config import MidConfig


class Unsplit(NamedTuple):
    """Tiles of a GEMM whose sums over K are in the order of K, for each kernel."""

    mid: MidConfig | None  # None: no tiles of `mid_hopper` are known to be faster.
    gemm: GemmConfig


Config = GemmConfig | MidConfig | Unsplit


def unsplit(tokens: int, features: int, depth: int, num_sms: int) -> Unsplit:
    """Return the measured tiles, or those by rule, of a GEMM that must not be split."""
    here, mid = gpu(), None
    if here is not None and (here.capability, here.sms) == mid_table.MACHINE and num_sms == here.sms:
        mid = mid_table.lookup(tokens, features, depth)
        if mid is None or mid.split > 1:
            mid = mid_rule.by_rule(tokens, features, depth, num_sms)
    return Unsplit(mid, choose(tokens, features, depth, num_sms)._replace(split=1))


def _fits(config: MidConfig, tokens: int, weight: Tensor, space: Workspace | None) -> bool:
    """Return whether the workspace is large enough for the splits."""
    split = config.splits_of(weight.shape[1])
    if split == 1:
        return True
    tiles = config.units(tokens, *weight.shape) // split
    return (
        space is not None
        and space.arrived.numel() >= config.rows // 64 * tiles
        and space.partial.numel() >= tiles * split * config.rows * config.width
    )


def chosen(
    config: Config | None, tokens: int, weight: Tensor, num_sms: int, space: Workspace | None, *, plain: bool,
) -> MidConfig | None:  # fmt: skip
    """Return how `mid_hopper` divides a GEMM, or None if it does not compute it. plain: it has the epilogue.

    config: the caller's, or None for the table's, else the rule's, which are for whole GPUs."""
    if not plain or isinstance(config, GemmConfig):
        return None
    here = gpu(weight.device) if weight.device.type == "cuda" else gpu()
    if here is None or here.capability[0] != 9:
        return None
    if isinstance(config, Unsplit):
        return config.mid
    if config is None and (here.capability, here.sms) == mid_table.MACHINE and num_sms == here.sms:
        features, depth = weight.shape
        config = mid_table.lookup(tokens, features, depth) or mid_rule.by_rule(tokens, features, depth, num_sms)
    return config if config is not None and _fits(config, tokens, weight, space) else None


def _other(config: Config | None) -> GemmConfig | None:
    if isinstance(config, Unsplit):
        return config.gemm
    return config if isinstance(config, GemmConfig) else None


def _launch(
    kind: str, config: MidConfig, a: Tensor, weight: Tensor, out: Tensor, num_sms: int, space: Workspace | None,
    num_tokens: Tensor | None, x: Tensor | None = None, more: More | None = None, **fields: Any,
) -> None:  # fmt: skip
    from weft.kernels.matmul import mid_hopper

    check_operands(a, weight)
    mid_hopper.launch_gemm(kind, config, a, weight, out, num_tokens, space, x, more, num_sms=num_sms, **fields)


def qkv_project(
    x: Tensor, sumsq: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, rotary: Tensor,
    positions: Tensor, slot_mapping: Tensor, kv: Tensor, layer: int, num_heads: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, *, out: Tensor, raw: Tensor | None = None, num_sms: int,
    space: Workspace | None = None, num_tokens: Tensor | None = None, config: Config | None = None,
    more: More | None = None,
) -> Tensor:  # fmt: skip
    """Like `projections.qkv_project`."""
    head_dim = kv.shape[5]
    plain = (
        bias is None and q_norm is None and k_norm is None and sumsq is not None and out.dtype == kv.dtype == x.dtype
        and head_dim in projections.FUSED_HEADS and kv.is_contiguous() and out.is_contiguous()
    )  # fmt: skip
    mid = chosen(config, x.shape[0], weight, num_sms, space, plain=plain)
    if mid is None or sumsq is None:
        return projections.qkv_project(
            x, sumsq, weight, bias, eps, rotary, positions, slot_mapping, kv, layer, num_heads, q_norm, k_norm, out=out,
            raw=raw, num_sms=num_sms, space=space, num_tokens=num_tokens, config=_other(config), more=more,
        )  # fmt: skip
    _launch(
        "qkv", mid, x, weight, out, num_sms, space, num_tokens, more=more, rotary=rotary, positions=positions,
        slots=slot_mapping,
        kv=kv, layer=layer, layers=kv.shape[1], HQ=num_heads, HKV=kv.shape[4], D=head_dim, PAGE=kv.shape[3],
        **projections.norm_fields(sumsq, eps),
    )  # fmt: skip
    return out


def residual_project(
    a: Tensor, weight: Tensor, x: Tensor, *, out: Tensor, sumsq: Tensor, post_norm: Tensor | None = None,
    bias: Tensor | None = None, eps: float = 0.0, centred: bool = False, raw: Tensor | None = None, num_sms: int,
    space: Workspace | None = None, num_tokens: Tensor | None = None, config: Config | None = None,
    more: More | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Like `projections.residual_project`."""
    plain = post_norm is None and bias is None and not centred and x.dtype == out.dtype == a.dtype and x.is_contiguous()
    mid = chosen(config, a.shape[0], weight, num_sms, space, plain=plain and out.is_contiguous())
    if mid is None:
        return projections.residual_project(
            a, weight, x, out=out, sumsq=sumsq, post_norm=post_norm, bias=bias, eps=eps, centred=centred, raw=raw,
            num_sms=num_sms, space=space, num_tokens=num_tokens, config=_other(config), more=more,
        )  # fmt: skip
    parts = -(-weight.shape[0] // mid.width)
    if sumsq.shape[0] < parts or sumsq.stride(1) != 1:
        raise ValueError(f"sumsq needs {parts} contiguous rows")
    _launch(
        "residual", mid, a, weight, out, num_sms, space, num_tokens, x, more, sumsq=sumsq, stride_sumsq=sumsq.stride(0)
    )
    return out, sumsq[:parts]


def gate_up_project(
    x: Tensor, sumsq: Tensor | None, weight: Tensor, eps: float, *, activation: str = "silu",
    bias: Tensor | None = None, out: Tensor, num_sms: int, space: Workspace | None = None,
    num_tokens: Tensor | None = None, config: Config | None = None,
    more: More | None = None,
) -> Tensor:  # fmt: skip
    """Like `projections.gate_up_project`."""
    plain = activation == "silu" and bias is None and sumsq is not None and out.dtype == x.dtype
    mid = chosen(config, x.shape[0], weight, num_sms, space, plain=plain and out.is_contiguous())
    if mid is None or sumsq is None:
        return projections.gate_up_project(
            x, sumsq, weight, eps, activation=activation, bias=bias, out=out, num_sms=num_sms, space=space,
            num_tokens=num_tokens, config=_other(config), more=more,
        )  # fmt: skip
    _launch(
        "gate_up", mid, x, weight, out, num_sms, space, num_tokens, more=more, **projections.norm_fields(sumsq, eps)
    )
    return out


def linear_project(
    x: Tensor, sumsq: Tensor | None, weight: Tensor, eps: float, *, activation: str = "", bias: Tensor | None = None,
    out: Tensor, num_sms: int, space: Workspace | None = None, num_tokens: Tensor | None = None,
    config: Config | None = None,
    more: More | None = None,
) -> Tensor:  # fmt: skip
    """Like `projections.linear_project`."""
    plain = not activation and bias is None and sumsq is None and out.dtype == x.dtype and out.is_contiguous()
    mid = chosen(config, x.shape[0], weight, num_sms, space, plain=plain)
    if mid is None:
        return projections.linear_project(
            x, sumsq, weight, eps, activation=activation, bias=bias, out=out, num_sms=num_sms, space=space,
            num_tokens=num_tokens, config=_other(config), more=more,
        )  # fmt: skip
    _launch("plain", mid, x, weight, out, num_sms, space, num_tokens, more=more)
    return out
