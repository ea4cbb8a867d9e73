"""Paged attention over K and V in e4m3, decode and prefill (reference: `reference/layer.py: paged_attention`).

Arithmetic is float16, which represents every e4m3 number exactly. K's scale is part of the score scale; V's scale is
applied with the division by the sum, per head. Queries are converted to float16 when they are read: their heads are
RMS-normed or small enough for float16 (up to 65,504).

Work lists, pages and scratch are those of `decode_attention` and `prefill_attention`. On Hopper, `fp8_decode_warps`
decodes on all SMs, and `fp8_decode` on some. For prefill there, `fp8_unpack` converts the pages that the chunks read to
16 bits once per layer, for the 16-bit kernel. The plain Triton kernels here serve all other cases.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from weft.kernels.attention.decode_attention import plain_decode_kernel
from weft.kernels.attention.decode_workspace import DecodeWorkspace
from weft.kernels.attention.output import Out, check_inputs, output_args
from weft.kernels.attention.prefill_attention import plain_prefill_kernel
from weft.kernels.attention.scores import log2_scale
from weft.kernels.attention.work_lists import TILE_ROWS
from weft.kernels.common.block_sizes import group_block, head_block
from weft.kernels.common.dependent_launch import pdl_options
from weft.kernels.common.gpu import gpu
from weft.kernels.formats.fp8 import E4M3, KvScales

_DTYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def _check(q: Tensor, kv: Tensor, items: Tensor, page_table: Tensor, scales: KvScales) -> None:
    if kv.dtype != E4M3:
        raise TypeError(f"pages must be e4m3, not {kv.dtype}")
    check_inputs(q, kv, items, page_table)
    if scales.scale.shape != (kv.shape[1], 2, kv.shape[4]) or not scales.scale.is_contiguous():
        raise ValueError("scales must be [layers, 2, Hkv], contiguous")


def decode_attention(
    q: Tensor, kv: Tensor, scales: KvScales, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *,
    out: Out, num_sms: int, space: DecodeWorkspace, scale: float | None = None, windowed: bool = False,
    softcap: float = 0.0, sinks: Tensor | None = None, portable: bool = False,
) -> Out:  # fmt: skip
    """Like `decode_attention.decode_attention`, for kv `[pages, layers, 2, page_size, Hkv, D]` in e4m3."""
    _check(q, kv, items, page_table, scales)
    if not portable:
        from weft.kernels.attention import fp8_decode, fp8_decode_warps

        if fp8_decode.supports(q, kv):
            here = gpu(q.device if q.is_cuda else None)
            whole_gpu = here is not None and num_sms >= here.sms  # `fp8_decode_warps` cannot be confined to some SMs
            launch = fp8_decode_warps.launch_decode if whole_gpu else fp8_decode.launch_decode
            return launch(
                q, kv, scales, layer, page_table, items, num_items, out=out, num_sms=num_sms, space=space, scale=scale,
                windowed=windowed, softcap=softcap, sinks=sinks,
            )  # fmt: skip
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    group = q.shape[1] // num_kv_heads
    plain_decode_kernel[(4 * num_sms,)](
        q, None, kv.view(torch.uint8), scales.scale, *output_args(out, len(q), head_dim), page_table,
        page_table.stride(0), items, num_items, space.partial, space.arrived, layer, layers,
        log2_scale(scale, head_dim), sinks,
        HKV=num_kv_heads, G=group, GP=group_block(group), D=head_dim, DP=head_block(head_dim), PAGE=page_size, BN=64,
        TMA=False, STAGES=2, DTYPE=_DTYPES[q.dtype], WINDOWED=windowed, SOFTCAP=softcap, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return out


def prefill_attention(
    q: Tensor, kv: Tensor, scales: KvScales, layer: int, page_table: Tensor, items: Tensor, num_items: Tensor, *,
    out: Out, num_sms: int, scale: float | None = None, window: int | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None, until: Tensor | None = None,
) -> Out:  # fmt: skip
    """Like `prefill_attention.prefill_attention`, for kv `[pages, layers, 2, page_size, Hkv, D]` in e4m3."""
    _check(q, kv, items, page_table, scales)
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    width = head_block(head_dim)
    plain_prefill_kernel[(num_sms,)](
        q, kv.view(torch.uint8), scales.scale, *output_args(out, len(q), head_dim), page_table, page_table.stride(0),
        items, num_items, layer, layers, log2_scale(scale, head_dim), sinks, until,
        HKV=num_kv_heads, G=q.shape[1] // num_kv_heads, D=head_dim, DP=width, PAGE=page_size, BM=TILE_ROWS,
        BN=64 if width <= 128 else 32, STAGES=2, DTYPE=_DTYPES[q.dtype], WINDOW=window or 0, SOFTCAP=softcap,
        num_warps=8, **pdl_options(),
    )  # fmt: skip
    return out
