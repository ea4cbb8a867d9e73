"""FP8 projections of a layer with fused epilogues: the only dispatch between plain Triton and the two Hopper kernels.

Like `projections`, but an operand is `Fp8Rows` and an epilogue writes the next one: no pass between two GEMMs reads an
activation again to quantize it. The factor of an RMS norm is a row scale in the epilogue of the following GEMM; a
norm's weight is folded into the matrix, or multiplied in before the cast (`next_norm`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from weft.kernels.common.gpu import is_hopper, on_gpu
from weft.kernels.formats.fp8 import BLOCK, E4M3, Fp8Rows, Fp8Weight, KvScales
from weft.kernels.matmul import fp8_triton, tuned
from weft.kernels.matmul.fp8_few_config import few_config, is_few
from weft.kernels.matmul.gemm_config import GemmConfig
from weft.kernels.matmul.gemm_launch import Launch, Workspace
from weft.kernels.matmul.projections import norm_fields

FEW_TOKENS = 128  # Up to this many tokens, the weight is the left operand.


WIDE = GemmConfig(128, 2 * BLOCK, BLOCK, 4, 4, group=16, special=True)
"""The tile of `fp8_hopper` that supports every kind of GEMM."""


def choose(kind: str, num_tokens: int, features: int, depth: int, num_sms: int) -> GemmConfig:
    """Return the configuration of a GEMM: a measured one if the shape is known, else by rule."""
    found = tuned.lookup(num_tokens, features, depth, bits=8)
    # a tile measured for another kind of this shape may be too narrow for a block of 128 gated columns
    if found is None or (kind == "gate_up" and found.features < 256):
        return by_rule(kind, num_tokens, features, depth, num_sms)
    return found


def by_rule(kind: str, num_tokens: int, features: int, depth: int, num_sms: int, *, plain: bool = False) -> GemmConfig:
    """Return the configuration by rule. plain: one of the plain Triton kernel."""
    steps = -(-depth // BLOCK)
    few = few_config(kind, features, depth, num_sms)
    if num_tokens <= few.tokens and is_hopper() and few.special and not plain:
        return few
    if num_tokens <= FEW_TOKENS or plain or not is_hopper():
        tokens = min(64, max(16, 1 << (num_tokens - 1).bit_length()))
        wide, stages, per_sm = (256, 5, 1) if kind == "gate_up" else (128, 6, 1) if tokens == 16 else (128, 4, 2)
        tiles = -(-features // wide) * -(-num_tokens // tokens)
        # The largest split that leaves each program eight steps. With more tokens, partial sums cost what fewer waves
        # save.
        units = num_sms * (per_sm if tokens <= 32 else 1)
        split = max((s for s in (2, 4, 8) if tiles * s <= units and s * 8 <= steps), default=1)
        return GemmConfig(tokens, wide, BLOCK, stages, 8 if tokens * wide >= 8192 else 4, 8, split, True,
                          per_sm, 1, ahead=2)  # fmt: skip
    wide = 256 if kind == "gate_up" or -(-num_tokens // 128) * -(-features // 256) >= 7 * num_sms // 10 else 128
    return GemmConfig(128, wide, BLOCK, 4, 4, group=16, special=True)


def batch_invariant_config(kind: str, *, head_norm: int = 0) -> GemmConfig:
    """Return one configuration for any number of tokens, so that a row's sums and squares do not depend on the batch.

    head_norm: size of heads that the epilogue norms."""
    if is_hopper() and head_norm in (0, 128):  # a tile of `fp8_hopper` supports no norm of other heads
        return WIDE
    return GemmConfig(64, 256 if kind == "gate_up" else 128, BLOCK, 4, 8, swap=True, slices=1)


def launch_of(kind: str, num_tokens: int, features: int, depth: int, config: GemmConfig | None, num_sms: int) -> Launch:
    """Like `gemm_launch.launch_of`."""
    config = config or choose(kind, num_tokens, features, depth, num_sms)
    steps = -(-depth // BLOCK)
    split = config.split
    while split > 1 and -(-steps // split) * (split - 1) >= steps:  # no split may be empty
        split -= 1
    units = -(-num_tokens // config.tokens) * -(-features // config.features) * split
    grid = min(num_sms * config.per_sm, units)
    # every program has one tile: it may release the next kernel before its epilogue
    return Launch((grid,), config, split, {"ONCE": grid == units})


def check_operands(a: Fp8Rows, weight: Fp8Weight) -> None:
    if a.values.dtype != E4M3 or weight.values.dtype != E4M3:
        raise TypeError(f"operands must be e4m3, not {a.values.dtype} and {weight.values.dtype}")
    (m, k), (n, depth) = a.values.shape, weight.values.shape
    if k != depth:
        raise ValueError(f"depths differ: {tuple(a.values.shape)} and {tuple(weight.values.shape)}")
    if k % 16 or not a.values.is_contiguous() or not weight.values.is_contiguous():
        raise ValueError("rows must be contiguous and a multiple of 16 bytes long")
    blocks = -(-k // BLOCK)
    alike = a.scale.shape[1] == 1 or a.scale.stride(1) == 1  # the stride of a single token is arbitrary
    if a.scale.shape[0] not in (1, blocks) or a.scale.shape[1] < m or not alike:
        raise ValueError(f"scales of activations must be [{blocks}, {m}] or [1, {m}], not {tuple(a.scale.shape)}")
    shapes = ((n,), (-(-n // BLOCK), blocks), (n, blocks))
    if tuple(weight.scale.shape) not in shapes or not weight.scale.is_contiguous():
        raise ValueError(f"scales of weights must be [{n}] or per 128 x 128 block, not {tuple(weight.scale.shape)}")


def _launch(
    kind: str, a: Fp8Rows, weight: Fp8Weight, out: Tensor | None, quantized: Fp8Rows | None, num_tokens: Tensor | None,
    space: Workspace | None, config: GemmConfig | None, num_sms: int, way: str, dtype: torch.dtype,
    x: Tensor | None = None, **fields: Any,
) -> Launch:  # fmt: skip
    check_operands(a, weight)
    (m, k), n = a.values.shape, weight.values.shape[0]
    wide = kind == "residual" and quantized is not None and quantized.span > BLOCK
    if wide:
        config = config or choose(kind, m, n, k, num_sms)
        config = config._replace(features=2 * BLOCK) if config.special and not is_few(config) else WIDE
    launch = launch_of(kind, m, n, k, config, num_sms)
    special = launch.config.special and on_gpu(a.values.device)
    few = special and is_few(launch.config)
    if few and (weight.blocked or not few_config(kind, n, k, num_sms).special):  # table rows do not depend on the SMs
        special = few = False
        launch = launch_of(kind, m, n, k, by_rule(kind, m, n, k, num_sms, plain=True), num_sms)
    if wide and (weight.blocked or not special):
        raise ValueError(f"scales of {2 * BLOCK} columns need Hopper and weights with a scale per channel")
    if weight.blocked and special and kind != "gate_up":  # not enough registers for the scales of two blocks
        launch = launch._replace(config=launch.config._replace(features=BLOCK))
    if few:
        from weft.kernels.matmul import fp8_few_hopper

        launch = launch._replace(config=few_config(kind, n, k, num_sms))  # table rows do not depend on the kind
        fp8_few_hopper.launch_gemm(
            kind, a, weight, out, quantized, num_tokens, space, x, num_sms=num_sms, dtype=dtype, **fields
        )
    elif special:
        from weft.kernels.matmul import fp8_hopper

        fp8_hopper.launch_gemm(
            kind, a, weight, out, quantized, num_tokens, x, num_sms=num_sms, dtype=dtype,
            way=_way(kind, way, a, weight), features=launch.config.features, group=launch.config.group,
            **fields,
        )  # fmt: skip
    else:
        fp8_triton.launch_gemm(
            kind, launch, a, weight, out, quantized, num_tokens, space, x, dtype=dtype, **fields
        )  # fmt: skip
    return launch


def _way(kind: str, way: str, a: Fp8Rows, weight: Fp8Weight) -> str:
    """Return how `fp8_hopper` adds steps: `way`, unless the operands require another one."""
    if weight.blocked:
        return "promoted"
    # a residual's stages are too few to hold two and fetch more
    pairs = a.span > BLOCK and kind != "residual" and a.values.shape[1] % (2 * BLOCK) == 0
    return "paired" if pairs and way == "promoted" else way


def residual_span(num_tokens: int, features: int, depth: int, num_sms: int) -> int:
    """Return the columns of a residual GEMM's output that may share a scale (`Fp8Rows.span`) at no cost: 256 if its
    tiles are as wide anyway, else 128."""
    if not is_hopper() or num_tokens <= FEW_TOKENS:
        return BLOCK
    return by_rule("residual", num_tokens, features, depth, num_sms).features


def rows_buffer(num_tokens: int, width: int, device: torch.device | str, *, span: int = BLOCK) -> Fp8Rows:
    """Allocate activations for an epilogue to write."""
    return Fp8Rows(
        torch.empty(num_tokens, width, dtype=E4M3, device=device),
        torch.empty(-(-width // BLOCK), num_tokens, dtype=torch.float32, device=device),
        span,
    )


def qkv_project(
    x: Fp8Rows, sumsq: Tensor, weight: Fp8Weight, bias: Tensor | None, eps: float, rotary: Tensor, positions: Tensor,
    slot_mapping: Tensor, kv: Tensor, layer: int, num_heads: int, q_norm: Tensor | None = None,
    k_norm: Tensor | None = None, kv_scales: KvScales | None = None, *, out: Tensor, num_sms: int,
    space: Workspace | None = None, num_tokens: Tensor | None = None, config: GemmConfig | None = None,
    way: str = "promoted",
) -> Tensor:  # fmt: skip
    """Like `projections.qkv_project` for heads of 64 or 128. q goes to `out [T, Hq, D]` in 16 bits, K and V to pages of
    `kv`, in e4m3 if `kv_scales` are given."""
    if not (kv.is_contiguous() and out.is_contiguous() and rotary.is_contiguous()):
        raise ValueError("kv, out and rotary must be contiguous")
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    if head_dim not in (64, 128) or (q_norm is not None and q_norm.numel() != head_dim):
        raise ValueError(f"the epilogue of an FP8 GEMM does not support heads of {head_dim}, or their norm")
    if (kv_scales is None) == (kv.dtype == E4M3):
        raise ValueError("e4m3 pages need scales, and other pages must have none")
    fields: dict[str, Any] = {} if kv_scales is None else {"kv_inverse": kv_scales.inverse}
    if config is None and q_norm is not None and head_dim != 128:  # `fp8_hopper` has no norm of such heads
        config = by_rule("qkv", FEW_TOKENS, weight.values.shape[0], x.values.shape[1], num_sms)
    _launch(
        "qkv", x, weight, out, None, num_tokens, space, config, num_sms, way, out.dtype, bias=bias, rotary=rotary,
        positions=positions, slots=slot_mapping, kv=kv, layer=layer, layers=layers, q_norm=q_norm, k_norm=k_norm,
        HQ=num_heads, HKV=num_kv_heads, D=head_dim, PAGE=page_size, **norm_fields(sumsq, eps), **fields,
    )  # fmt: skip
    return out


def residual_project(
    a: Fp8Rows, weight: Fp8Weight, x: Tensor, *, out: Tensor, sumsq: Tensor, quantized: Fp8Rows | None = None,
    next_norm: Tensor | None = None, bias: Tensor | None = None, num_sms: int, space: Workspace | None = None,
    num_tokens: Tensor | None = None, config: GemmConfig | None = None, way: str = "promoted",
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Write `x + a @ weight.T` to `out` (may be `x` itself), with partial sums of squares.

    `quantized` gets the same times `next_norm [H]` as the next GEMM's operand, with scales for `quantized.span` columns
    (256 on Hopper only, else raises `ValueError`). sumsq `[max_sums, T]` float32 is scratch; returns out and the view
    `[sums, T]` of it that was written.
    """
    if not (x.is_contiguous() and out.is_contiguous()):
        raise ValueError("x and out must be contiguous")
    launch = _launch(
        "residual", a, weight, out, quantized, num_tokens, space, config, num_sms, way, out.dtype, x, bias=bias,
        sumsq=sumsq, stride_sumsq=sumsq.stride(0), next_norm=next_norm,
    )  # fmt: skip
    return out, sumsq[: -(-weight.values.shape[0] // launch.config.features)]


def gate_up_project(
    x: Fp8Rows, sumsq: Tensor | None, weight: Fp8Weight, eps: float, *, activation: str = "silu",
    bias: Tensor | None = None, quantized: Fp8Rows, num_sms: int, space: Workspace | None = None,
    num_tokens: Tensor | None = None, config: GemmConfig | None = None, way: str = "promoted",
) -> Fp8Rows:  # fmt: skip
    """Like `projections.gate_up_project`; the result is the next GEMM's operand."""
    _launch(
        "gate_up", x, weight, None, quantized, num_tokens, space, config, num_sms, way, torch.bfloat16, bias=bias,
        ACT=activation, **norm_fields(sumsq, eps),
    )  # fmt: skip
    return quantized


def linear_project(
    x: Fp8Rows, sumsq: Tensor | None, weight: Fp8Weight, eps: float = 0.0, *, activation: str = "",
    bias: Tensor | None = None, out: Tensor, num_sms: int, space: Workspace | None = None,
    num_tokens: Tensor | None = None, config: GemmConfig | None = None, way: str = "promoted",
) -> Tensor:  # fmt: skip
    """Apply norm, matrix, bias and activation: `out [T, N]` of 16 bits."""
    _launch(
        "linear", x, weight, out, None, num_tokens, space, config, num_sms, way, out.dtype, bias=bias, ACT=activation,
        **norm_fields(sumsq, eps),
    )  # fmt: skip
    return out
