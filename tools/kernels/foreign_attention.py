"""Attention of hybrid batches by other packages, as baselines: flash-attn over pages, torch over dense K and V."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from weft.tools.kernels.hybrid_batches import Hybrid

FLASH_PAGE = 256
"""The smallest page of flash-attn 2."""
NAMES = ("flash-attn", "flash-attn streams", "sdpa")
LEFT_OUT = {
    "cudnn": "torch gives it neither pages nor a causal mask that ends with the keys; it plans each shape for long",
    "flashinfer": "not built here; 'batched' is its way (decodes as tiles of the prefill kernel) with our kernel",
    "hfuse": "warps of both halves in one program are 'pod together', with blocks that are small enough for both",
    "cta-parallel": "a static split of programs is what 'streams' runs: each kernel takes an SM's shared memory whole",
}
"""Packages that are not measured, with the reason."""


class Unavailable(Exception):
    """The package cannot run here. The message gives the reason."""


def call(name: str, batch: Hybrid, q: Tensor, pool: Tensor, table: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    """Return a batch's attention in a layer of `pool [pages, layers, 2, page, Hkv, D]`, whose memory is reinterpreted.

    q `[T, Hq, D]`: decodes first. Returns outputs of decodes `[d, 1, Hq, D]` and of the chunk `[1, chunk, Hq, D]`;
    "sdpa" has different shapes and numbers. Keep the result as long as a graph that captured it. Raises `Unavailable`.
    """
    if name == "sdpa":
        return _sdpa(batch, q, pool)
    return _flash(batch, q, pool, table, concurrent=name.endswith("streams"))


def _flash(
    batch: Hybrid, q: Tensor, pool: Tensor, table: Tensor, *, concurrent: bool
) -> Callable[[int], tuple[Tensor, Tensor]]:
    if importlib.util.find_spec("flash_attn") is None:
        raise Unavailable("the package flash-attn is not installed")
    attend: Any = importlib.import_module("flash_attn").flash_attn_with_kvcache
    pages, layers, _, page, heads, dim = pool.shape
    wide = pool.view(pages * page // FLASH_PAGE, layers, 2, FLASH_PAGE, heads, dim)
    d, chunk = batch.decodes, batch.chunk
    ids = table % len(wide)
    lengths = torch.full((d,), batch.length, dtype=torch.int32, device=q.device)
    behind = torch.full((1,), batch.context + chunk, dtype=torch.int32, device=q.device)
    decode_table = ids[:d, : -(-batch.length // FLASH_PAGE)].contiguous()
    chunk_table = ids[d : d + 1, : -(-(batch.context + chunk) // FLASH_PAGE)].contiguous()
    side = torch.cuda.Stream() if concurrent else None

    def decode(layer: int) -> Tensor:
        attended: Tensor = attend(
            q[:d, None], wide[:, layer, 0], wide[:, layer, 1], cache_seqlens=lengths, block_table=decode_table,
            causal=True,
        )  # fmt: skip
        return attended

    def prefill(layer: int) -> Tensor:  # with a cache, so that it may split the keys
        attended: Tensor = attend(
            q[None, d : d + chunk], wide[:, layer, 0], wide[:, layer, 1], cache_seqlens=behind,
            block_table=chunk_table, causal=True,
        )  # fmt: skip
        return attended

    def both(layer: int) -> tuple[Tensor, Tensor]:
        if side is None:
            return decode(layer), prefill(layer)
        here = torch.cuda.current_stream()
        side.wait_stream(here)
        with torch.cuda.stream(side):
            decodes = decode(layer)
        chunk = prefill(layer)
        here.wait_stream(side)
        return decodes, chunk

    return both


def _sdpa(batch: Hybrid, q: Tensor, pool: Tensor) -> Callable[[int], tuple[Tensor, Tensor]]:
    heads, dim, d, chunk = pool.shape[4], pool.shape[5], batch.decodes, batch.chunk
    rows = pool.view(-1, heads, dim)
    keys, wanted = batch.context + chunk, d * batch.length
    shift = 1 << 16  # rows between layers, so that no layer finds the previous one in a cache
    if 2 * (max(wanted, keys) + pool.shape[1] * shift) > len(rows):
        raise Unavailable(f"{batch.key}: its dense K and V do not fit")
    half = len(rows) // 2
    begins = torch.tensor([0, chunk], dtype=torch.int32, device=q.device)
    ends = torch.tensor([0, keys], dtype=torch.int32, device=q.device)

    def both(layer: int) -> tuple[Tensor, Tensor]:
        k, v = (rows[at + layer * shift :][:wanted].view(d, batch.length, heads, dim) for at in (0, half))
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            decodes = F.scaled_dot_product_attention(
                q[:d, None].transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), enable_gqa=True
            )
        # varlen, because its causal mask ends with the keys
        k, v = (rows[at + layer * shift :][:keys] for at in (0, half))
        attended = torch.ops.aten._flash_attention_forward(
            q[d : d + chunk], k, v, begins, ends, chunk, keys, 0.0, True, False
        )  # fmt: skip
        return decodes, attended[0]

    return both
