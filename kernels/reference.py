"""The torch twins of a layer's kernels: what they compute, in the fewest plain operations (`sampling` has the others).

They serve on the CPU and are the oracle on a GPU. `embed` and the projections take what their launchers take first;
what only a launch needs (outputs, scratch, SMs, a configuration) follows there by name. `lm_head` is two launches on a
GPU, `embedding.final_norm` and `gemm.matmul`, and attention has a work list of its own kind.

Shapes use T tokens, R requests, H hidden, Hq query heads, Hkv KV heads, D head_dim, V vocabulary. The residual stream
`x [T, H]` travels with `sumsq [T] float32`, the sum of squares of each row: with norm weights folded into matrices
(`pack.fold_norm`), the RMS norm before a matrix is one scale per row.

The KV pool is `[pages, layers, 2, page_size, Hkv, D]`: a page is one extent that holds all layers.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_scale(sumsq: Tensor, width: int, eps: float) -> Tensor:
    """`[T]` float32: 1 / rms of each row."""
    return torch.rsqrt(sumsq / width + eps)


def _sumsq(x: Tensor) -> Tensor:
    # float() of a float32 tensor is the tensor itself
    return x.float().square().sum(-1)


def _normed(x: Tensor, sumsq: Tensor, eps: float) -> Tensor:
    return (x.float() * rms_scale(sumsq, x.shape[-1], eps)[:, None]).to(x.dtype)


def embed(token_ids: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Rows of `table [V, H]` for `token_ids [T]` int -> `x [T, H]`, `sumsq [T]`."""
    x = F.embedding(token_ids, table)
    return x, _sumsq(x)


def _rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate neighbour pairs of `x [T, heads, D]` by `cos_sin [T, D/2, 2]`, in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    cos, sin = cos_sin[:, None].unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


def _head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over each head of `x [T, heads, D]` (Qwen 3)."""
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def qkv_project(
    x: Tensor,
    sumsq: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    eps: float,
    rotary: Tensor,
    positions: Tensor | slice,
    slot_mapping: Tensor,
    kv: Tensor,
    layer: int,
    num_heads: int,
    q_norm: Tensor | None = None,
    k_norm: Tensor | None = None,
) -> Tensor:
    """Norm, QKV matrix, bias, q/k norm, rotary embedding; K and V go into the pages.

    weight `[(Hq + 2 Hkv) D, H]` packed by `pack`; rotary `[positions, D/2, 2]` float32; positions `[T]` int, or
    `slice(None)` when the caller picked the tokens' rows of rotary already; slot_mapping `[T]` int: page * page_size +
    offset of each token (padding points into page 0).
    Returns q `[T, Hq, D]`.
    """
    num_kv_heads, head_dim = kv.shape[-2], kv.shape[-1]
    qkv = F.linear(_normed(x, sumsq, eps), weight, bias).view(x.shape[0], -1, head_dim)
    qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = qk.split((num_heads, num_kv_heads), dim=1)
        qk = torch.cat((_head_norm(q, q_norm, eps), _head_norm(k, k_norm, eps)), dim=1)
    q, k = _rotate(qk, rotary[positions]).split((num_heads, num_kv_heads), dim=1)
    page_size = kv.shape[3]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    kv[page, layer, 0, offset] = k.to(kv.dtype)
    kv[page, layer, 1, offset] = v.to(kv.dtype)
    return q


def residual_project(a: Tensor, weight: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """`x + a @ weight.T`, rounded once, and its sum of squares. a `[T, K]`, weight `[H, K]`, x `[T, H]`."""
    y = torch.addmm(x, a, weight.t()) if x.dtype == torch.float32 else (x.float() + F.linear(a, weight)).to(x.dtype)
    return y, _sumsq(y)


def gate_up_project(x: Tensor, sumsq: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Norm, gate-up matrix `[2 I, H]` (rows alternate), SwiGLU -> `[T, I]`."""
    h = _normed(x, sumsq, eps)
    # Two products of strided weights, so that what follows reads contiguous rows.
    return F.silu(F.linear(h, weight[0::2])).mul_(F.linear(h, weight[1::2]))


def lm_head(x: Tensor, sumsq: Tensor, norm_weight: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Final norm and vocabulary projection of the rows that need logits: x `[S, H]` -> `[S, V]` float32."""
    h = (_normed(x, sumsq, eps).float() * norm_weight.float()).to(x.dtype)
    return F.linear(h, weight).float()


class AttentionGroup(NamedTuple):
    """Requests whose padded shapes are close: one padded attention call serves them all.

    G requests, Q queries each at most, P pages each at most.
    """

    tokens: Tensor
    """[G, Q] int64: rows of q; padding repeats a row of the same request"""
    unpad: Tensor | None
    """[tokens] int64 into G * Q: where each real row is (None: Q is 1, nothing is padded)"""
    rows: Tensor
    """[tokens] int64: rows of the output, in the order of `unpad`"""
    pages: Tensor
    """[G * P] int64; padding is page 0"""
    mask: Tensor
    """[G, 1, heads_per_kv * Q, P * page_size] in q's dtype: 0 where a query may attend, -inf elsewhere"""
    stale: Tensor
    """[...] int64 into G * P * page_size: positions past a request's last token, whose content is not its own"""


class AttentionWork(NamedTuple):
    """The attention of one iteration, planned on the host once for all layers."""

    groups: tuple[AttentionGroup, ...]
    scratch: Tensor
    """[2, elements] in the pool's dtype: K and V of the largest group. Reused by every layer and iteration, because a
    fresh buffer of this size costs more in page faults than the copy into it."""


MAX_DIAGONAL_HEADS = 4
"""KV heads up to which `_decode` wastes less than the strided access of one head at a time"""


def _decode(q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup) -> Tensor:
    """Attention of one query a request: q `[G, Hq, D]`, k and v `[G, keys, Hkv * D]` -> `[G, Hq, D]`.

    All heads go through one product of contiguous operands: the query of head h is zero outside its KV head's columns.
    """
    size, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2] // head_dim
    own = torch.eye(num_kv_heads, dtype=q.dtype, device=q.device).repeat_interleave(
        num_heads // num_kv_heads, 0
    )  # [Hq, Hkv]
    wide = (q[:, :, None] * own[:, :, None]).view(size, num_heads, -1)
    mask = group.mask[:, 0, :1].expand(-1, num_heads, -1)
    scores = torch.baddbmm(mask, wide, k.transpose(1, 2), alpha=head_dim**-0.5)
    o = torch.bmm(scores.softmax(-1), v).view(size, num_heads, num_kv_heads, head_dim)
    return (o * own[:, :, None]).sum(2)


def paged_attention(q: Tensor, kv: Tensor, layer: int, work: AttentionWork, *, out: Tensor) -> Tensor:
    """Causal attention of q `[T, Hq, D]` over each request's pages; K and V of this layer are already written.

    Writes the requests' rows of `out [T, Hq * D]` and returns it. Whatever lies in a page past the request's last token
    (NaN included) cannot reach a result.
    """
    num_heads, head_dim = q.shape[1:]
    page_size, num_kv_heads = kv.shape[3], kv.shape[4]
    heads = out.view(q.shape)
    flat = kv.view(-1, page_size * num_kv_heads * head_dim)  # one row: K or V of a page and layer
    layers = kv.shape[1]
    for group in work.groups:
        size, queries = group.tokens.shape
        k_rows = (group.pages * layers + layer) * 2
        gathered = work.scratch[:, : len(k_rows) * flat.shape[1]].view(2, len(k_rows), -1)
        torch.index_select(flat, 0, k_rows, out=gathered[0])
        torch.index_select(flat, 0, k_rows + 1, out=gathered[1])
        k, v = gathered.view(2, -1, num_kv_heads * head_dim).unbind(0)
        k.index_fill_(0, group.stale, 0.0)
        v.index_fill_(0, group.stale, 0.0)
        k, v = k.to(q.dtype), v.to(q.dtype)
        if queries == 1 and num_kv_heads <= MAX_DIAGONAL_HEADS:
            heads[group.rows] = _decode(
                q[group.rows], k.view(size, -1, k.shape[1]), v.view(size, -1, v.shape[1]), group
            )
            continue
        k = k.view(size, -1, num_kv_heads, head_dim).transpose(1, 2)
        v = v.view(size, -1, num_kv_heads, head_dim).transpose(1, 2)
        # Query heads of one KV head become queries of that head: [G, Hkv, heads_per_kv * Q, D]
        gq = q[group.tokens.view(-1)].view(size, queries, num_kv_heads, -1, head_dim)
        gq = gq.permute(0, 2, 3, 1, 4).reshape(size, num_kv_heads, -1, head_dim)
        o = F.scaled_dot_product_attention(gq, k, v, attn_mask=group.mask)
        o = o.view(size, num_kv_heads, -1, queries, head_dim).permute(0, 3, 1, 2, 4)
        o = o.reshape(size * queries, num_heads, head_dim)
        heads[group.rows] = o if group.unpad is None else o[group.unpad]
    return out
