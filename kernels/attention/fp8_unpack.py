"""Converts e4m3 pages to 16-bit pages where a prefill kernel reads those faster."""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.attention.backend import AttentionShape
from weft.kernels.common.block_sizes import head_block
from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.common.gpu import is_hopper, on_gpu
from weft.kernels.formats.fp8 import E4M3, KvScales

TOKENS = 8  # Rows of K or V that a program processes at once.
PER_SM = 4


class Unpacked(NamedTuple):
    """Requests of a nano-batch whose pages are read in 16 bits. Host-filled buffers never move."""

    pages: Tensor  # [max_pages] int32, page ids in the order of `kv`.
    num_pages: Tensor  # [1] int32
    items: Tensor
    """[max_items, TILE_FIELDS] int32 as `prefill_items`; page_row is the first of a request's pages in `kv`."""
    num_items: Tensor  # [1] int32
    kv: Tensor
    """[max_pages, 1, 2, page_size, Hkv, D] of 16 bits; not shared with any step that may run at the same time."""
    table: Tensor  # [max_pages, max_pages of a request] int32: `counting_table`.


def unpacking_is_faster(shape: AttentionShape) -> bool:
    """Return whether 16-bit pages are read faster on this GPU: if a warp-specialized kernel reads them."""
    wide = head_block(shape.head_dim) in (64, 128, 256)
    return shape.pool_dtype == E4M3 and on_gpu(shape.device) and is_hopper() and wide


def counting_table(rows: int, width: int, device: torch.device) -> Tensor:
    """Return `[rows, width]` int32 with row i: i, i + 1 and so on."""
    first = torch.arange(rows, dtype=torch.int32, device=device)
    return first[:, None] + torch.arange(width, dtype=torch.int32, device=device)


@triton.jit(do_not_specialize=["layer"])
def _unpack_kernel(
    kv, kv_scale, out, pages, num_pages, layer, layers,
    HKV: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WIDTH: tl.constexpr, TOKENS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    column = tl.arange(0, WIDTH)
    head = tl.minimum(column // D, HKV - 1)
    real = column < HKV * D
    PIECES: tl.constexpr = 2 * PAGE // TOKENS
    for task in range(tl.program_id(0), tl.load(num_pages) * PIECES, tl.num_programs(0)):
        place = task // PIECES
        token = task % PIECES * TOKENS + tl.arange(0, TOKENS)  # of K, then of V
        page = tl.load(pages + place).to(tl.int64)
        at = (page * layers + layer) * (2 * PAGE) + token
        stored = tl.load(kv + at[:, None] * (HKV * D) + column[None, :], mask=real[None, :], other=0)
        plane = task % PIECES // (PIECES // 2)
        scale = tl.load(kv_scale + layer * (2 * HKV) + plane * HKV + head)
        value = stored.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale[None, :]
        target = place.to(tl.int64) * (2 * PAGE) + token
        tl.store(
            out + target[:, None] * (HKV * D) + column[None, :], value.to(out.dtype.element_ty), mask=real[None, :]
        )


def unpack_pages(kv: Tensor, scales: KvScales, layer: int, what: Unpacked, *, num_sms: int) -> Tensor:
    """Convert one layer of `what.pages` of kv `[pages, layers, 2, page_size, Hkv, D]`, times scales, into `what.kv`.

    Returns `what.kv`."""
    layers, page_size, num_kv_heads, head_dim = kv.shape[1], kv.shape[3], kv.shape[4], kv.shape[5]
    if not (kv.is_contiguous() and what.kv.is_contiguous() and scales.scale.is_contiguous()):
        raise ValueError("pages and scales must be contiguous")
    _unpack_kernel[(PER_SM * num_sms,)](
        kv.view(torch.uint8), scales.scale, what.kv, what.pages, what.num_pages, layer, layers,
        HKV=num_kv_heads, D=head_dim, PAGE=page_size, WIDTH=triton.next_power_of_2(num_kv_heads * head_dim),
        TOKENS=TOKENS, num_warps=4, **pdl_options(),
    )  # fmt: skip
    return what.kv
