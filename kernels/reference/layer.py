"""Reference implementation of a layer's kernels, in the fewest plain torch operations (see also `sampling`).

It serves on the CPU and is the oracle for GPU kernels. `embed` and the projections take the same leading arguments as
their launchers; arguments that only a launch needs (outputs, scratch, SMs, a configuration) follow there by name.
`lm_head` is two launches on a GPU, `embedding.final_norm` and `gemm.matmul`; attention uses a different work list.

Shapes use T tokens, R requests, H hidden, Hq query heads, Hkv KV heads, D head_dim, V vocabulary. The residual stream
`x [T, H]` comes with `sumsq [T] float32`, the sum of squares of each row. Norm weights are folded into matrices
(`weight_layout.fold_norm`), so the RMS norm before a matrix is one scale per row. So is a LayerNorm: the rows of its
matrix have zero mean, and the squares are those of a row minus its mean (`centred`).

A `Matrix` may be in FP8 (`fp8_matrix`), or in 4 or 8 bits (`packed_matrix`); the norm before it is then not folded in.
The KV pool is `[pages, layers, 2,
page_size, Hkv, D]`: a page is one extent that holds all layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.formats import matrix as formats
from weft.kernels.formats.fp8 import quantize_kv
from weft.kernels.formats.matrix import Matrix
from weft.kernels.formats.packed_matrix import PackedMatrix
from weft.kernels.reference.adapters import Delta, add_values

OAI_LIMIT, OAI_ALPHA = 7.0, 1.702


def _relu2(x: Tensor) -> Tensor:
    return F.relu(x).square()


ACTIVATIONS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "relu2": _relu2,
}


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """Return activation(gate) * up; `swiglu_oai` is gpt-oss's variant: clamped, and with `up + 1`."""
    if activation == "swiglu_oai":
        gate, up = gate.clamp(max=OAI_LIMIT), up.clamp(-OAI_LIMIT, OAI_LIMIT)
        return (up + 1) * gate * torch.sigmoid(OAI_ALPHA * gate)
    return ACTIVATIONS[activation](gate).mul_(up)


def rms_scale(sumsq: Tensor, width: int, eps: float) -> Tensor:
    """Return `[T]` float32: 1 / rms of each row."""
    return torch.rsqrt(sumsq / width + eps)


def row_sumsq(x: Tensor, centred: bool = False) -> Tensor:
    """Return `[T]` float32: sums of squares of the rows of `x [T, H]`, minus their mean if centred."""
    # float() of a float32 tensor is the tensor itself
    h = x.float()
    return (h - h.mean(-1, keepdim=True) if centred else h).square().sum(-1)


def normed(x: Tensor, sumsq: Tensor | None, eps: float) -> Tensor:
    if sumsq is None:
        return x
    return (x.float() * rms_scale(sumsq, x.shape[-1], eps)[:, None]).to(x.dtype)


def normed_linear(x: Tensor, sumsq: Tensor | None, matrix: Matrix, bias: Tensor | None, eps: float) -> Tensor:
    """Apply the norm (if `sumsq` is given) and the matrix, in the dtype of x."""
    if isinstance(matrix, Tensor):
        return F.linear(normed(x, sumsq, eps), matrix, bias)
    scale = None if sumsq is None else rms_scale(sumsq, x.shape[-1], eps)
    return formats.linear(x, scale, matrix, bias).to(x.dtype)


def linear(x: Tensor, matrix: Matrix, bias: Tensor | None = None) -> Tensor:
    """Return `[T, out]` in the dtype of x `[T, K]`, without a norm or epilogue."""
    return normed_linear(x, None, matrix, bias, 0.0)


def embed(
    token_ids: Tensor, table: Tensor | PackedMatrix, *, dtype: torch.dtype | None = None, scale: float = 1.0,
    position_table: Tensor | None = None, positions: Tensor | None = None, centred: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Look up rows of `table [V, H]` for `token_ids [T]` int: returns `x [T, H]` and `sumsq [T]`.

    dtype: of x, if the table is packed. scale is rounded to the dtype of x. position_table `[P, H]`: learned position
    embeddings; the row of each token's position `[T]` is added."""
    if isinstance(table, PackedMatrix):
        x = table.rows(token_ids).to(dtype)
    else:
        x = F.embedding(token_ids, table)
    if scale != 1.0:
        x = x * torch.tensor(scale, dtype=x.dtype)
    if position_table is not None and positions is not None:
        x = x + position_table[positions]
    return x, row_sumsq(x, centred)


def rotate(x: Tensor, cos_sin: Tensor) -> Tensor:
    """Rotate neighbor pairs of `x [T, heads, D]` by `cos_sin [T, D/2, 2]`, in float32."""
    pairs = x.float().unflatten(-1, (-1, 2))
    a, b = pairs.unbind(-1)
    cos, sin = cos_sin[:, None].unbind(-1)
    return torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2).to(x.dtype)


Means = Callable[[Tensor], Tensor]


def head_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over each head of `x [T, heads, D]`, weight `[D]` (Qwen 3)."""
    h = x.float()
    return (h * torch.rsqrt(h.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def _all_heads_norm(q: Tensor, k: Tensor, weights: tuple[Tensor, Tensor], eps: float, means: Means | None) -> Tensor:
    """RMS norm over all heads of q `[T, Hq, D]` and all of k, weights `[heads * D]` (OLMo 2); returns one tensor."""
    flat = [t.float().flatten(-2) for t in (q, k)]
    squares = torch.stack([t.square().mean(-1) for t in flat], -1)
    if means is not None:
        squares = means(squares)
    flat = [
        t * torch.rsqrt(square[:, None] + eps) * weight.float()
        for t, square, weight in zip(flat, squares.unbind(-1), weights, strict=True)
    ]
    return torch.cat(flat, -1).view(len(q), -1, q.shape[-1]).to(q.dtype)


def qkv_project(
    x: Tensor, sumsq: Tensor | None, weight: Matrix, bias: Tensor | None, eps: float, rotary: Tensor,
    positions: Tensor | slice, slot_mapping: Tensor, kv: Tensor, layer: int, num_heads: int,
    q_norm: Tensor | None = None, k_norm: Tensor | None = None, means: Means | None = None,
    kv_inverse: Tensor | None = None, delta: Delta | None = None,
) -> Tensor:  # fmt: skip
    """Apply norm (if `sumsq` is given), QKV matrix, bias, q/k norm and rotary embedding; write K and V to the pages.

    weight `[(Hq + 2 Hkv) D, H]` packed by `weight_layout`; rotary `[positions, D/2, 2]` float32; positions `[T]` int,
    or `slice(None)` if rotary already has one row per token; slot_mapping `[T]` int: page * page_size + offset of each
    token (padding points into page 0). means: if one norm spans heads of all ranks, converts the mean squares `[T, 2]`
    of this rank's q and k to those of all ranks. kv_inverse `[2, Hkv]` float32: factor of K and V for FP8 pages
    (`fp8.KvScales`). delta: what adapters add, here and in the other projections. Returns q `[T, Hq, D]`."""
    num_kv_heads, head_dim = kv.shape[-2], kv.shape[-1]
    qkv = normed_linear(x, sumsq, weight, bias, eps)
    if delta is not None:
        qkv = add_values(qkv, delta.values(normed(x, sumsq, eps)))
    qkv = qkv.view(x.shape[0], -1, head_dim)
    qk, v = qkv.split((num_heads + num_kv_heads, num_kv_heads), dim=1)
    if q_norm is not None and k_norm is not None:
        q, k = qk.split((num_heads, num_kv_heads), dim=1)
        if q_norm.numel() == head_dim and means is None:
            qk = torch.cat((head_norm(q, q_norm, eps), head_norm(k, k_norm, eps)), dim=1)
        else:
            qk = _all_heads_norm(q, k, (q_norm, k_norm), eps, means)
    q, k = rotate(qk, rotary[positions]).split((num_heads, num_kv_heads), dim=1)
    page_size = kv.shape[3]
    page, offset = slot_mapping // page_size, slot_mapping % page_size
    if kv_inverse is None:
        k, v = k.to(kv.dtype), v.to(kv.dtype)
    else:
        k, v = (quantize_kv(t, inverse) for t, inverse in zip((k, v), kv_inverse, strict=True))
    kv[page, layer, 0, offset] = k
    kv[page, layer, 1, offset] = v
    return q


def residual_project(
    a: Tensor, weight: Matrix, x: Tensor, *, post_norm: Tensor | None = None, bias: Tensor | None = None,
    eps: float = 0.0, centred: bool = False, delta: Delta | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return `x + a @ weight.T`, rounded once, and its sum of squares. a `[T, K]`, weight `[H, K]`, x `[T, H]`.

    post_norm `[H]`: an RMS norm of the addend, including its bias `[H]`."""
    added = [] if delta is None else delta.values(a)
    if post_norm is not None:
        h = add_values(normed_linear(a, None, weight, bias, eps), added).float()
        h = h * rms_scale(h.square().sum(-1), h.shape[-1], eps)[:, None] * post_norm.float()
        y = (x.float() + h).to(x.dtype)
    elif not isinstance(weight, Tensor):
        y = (x.float() + add_values(formats.linear(a, None, weight, bias), added)).to(x.dtype)
    else:
        x = x if bias is None else x + bias
        if x.dtype == torch.float32:
            y = add_values(torch.addmm(x, a, weight.t()), added)
        else:
            y = (x.float() + add_values(F.linear(a, weight), added)).to(x.dtype)
    return y, row_sumsq(y, centred)


def add_reduced(
    total: Tensor, x: Tensor, *, post_norm: Tensor | None = None, eps: float = 0.0, centred: bool = False
) -> tuple[Tensor, Tensor]:
    """Return x `[T, H]` plus the sum of all ranks' partial sums `[T, H]` float32, rounded once, and its sum of squares.

    post_norm as in `residual_project`."""
    if post_norm is not None:
        total = total * rms_scale(total.square().sum(-1), total.shape[-1], eps)[:, None] * post_norm.float()
    y = (x.float() + total).to(x.dtype)
    return y, row_sumsq(y, centred)


def gate_up_project(
    x: Tensor, sumsq: Tensor | None, weight: Matrix, eps: float, *, activation: str = "silu",
    bias: Tensor | None = None, gate: Tensor | None = None, delta: Delta | None = None,
) -> Tensor:  # fmt: skip
    """Apply norm, gate-up matrix `[2 I, H]` (rows alternate; packed: gate before up), bias and activation: `[T, I]`.

    gate `[1, H]`: of a shared expert (Qwen 2 MoE); the result is multiplied by the sigmoid of x times gate."""
    added = [] if delta is None else delta.values(normed(x, sumsq, eps))
    if isinstance(weight, Tensor):
        h = normed(x, sumsq, eps)
        # Two GEMMs of strided weights, so that the following operations read contiguous rows.
        g = add_values(F.linear(h, weight[0::2], None if bias is None else bias[0::2]), added, slice(0, None, 2))
        u = add_values(F.linear(h, weight[1::2], None if bias is None else bias[1::2]), added, slice(1, None, 2))
        y = gated(activation, g, u)
    elif isinstance(weight, PackedMatrix):
        g, u = normed_linear(x, sumsq, weight, bias, eps).chunk(2, 1)
        g, u = (add_values(own, added, slice(place, None, 2)) for place, own in enumerate((g, u)))
        y = gated(activation, g, u)
    else:
        both = add_values(normed_linear(x, sumsq, weight, bias, eps), added)
        y = gated(activation, both[:, 0::2], both[:, 1::2])
    return y if gate is None else y * torch.sigmoid(F.linear(normed(x, sumsq, eps), gate))


def up_project(
    x: Tensor, sumsq: Tensor | None, weight: Matrix, eps: float, *, activation: str, bias: Tensor | None = None,
    delta: Delta | None = None,
) -> Tensor:  # fmt: skip
    """Apply norm, matrix `[I, H]` of an MLP without a gate, bias and activation: `[T, I]`."""
    y = normed_linear(x, sumsq, weight, bias, eps)
    if delta is not None:
        y = add_values(y, delta.values(normed(x, sumsq, eps)))
    return ACTIVATIONS[activation](y)


def final_norm(
    x: Tensor, sumsq: Tensor, norm_weight: Tensor, eps: float, *, norm_bias: Tensor | None = None,
    centred: bool = False,
) -> Tensor:  # fmt: skip
    """Return the model's hidden states `[S, H]` in the dtype of x `[S, H]`, as the vocabulary projection reads them."""
    if centred:
        x, dtype = x.float() - x.float().mean(-1, keepdim=True), x.dtype
        h = x * rms_scale(sumsq, x.shape[-1], eps)[:, None] * norm_weight.float()
        return (h if norm_bias is None else h + norm_bias.float()).to(dtype)
    return (normed(x, sumsq, eps).float() * norm_weight.float()).to(x.dtype)


def lm_head(
    x: Tensor, sumsq: Tensor, norm_weight: Tensor, weight: Matrix, eps: float, *, norm_bias: Tensor | None = None,
    centred: bool = False, bias: Tensor | None = None, scale: float = 1.0, softcap: float = 0.0,
) -> Tensor:  # fmt: skip
    """Apply final norm and vocabulary projection to the rows that need logits: x `[S, H]` -> `[S, V]` float32.

    Logits are multiplied by `scale`, then soft-capped if `softcap` is not 0."""
    h = final_norm(x, sumsq, norm_weight, eps, norm_bias=norm_bias, centred=centred)
    logits = F.linear(h, weight, bias) if isinstance(weight, Tensor) else formats.linear(h, None, weight, bias)
    logits = logits.float()
    if scale != 1.0:
        logits = logits * scale
    return softcap * torch.tanh(logits / softcap) if softcap else logits


class AttentionGroup(NamedTuple):
    """Requests with similar padded shapes, computed by one padded attention call.

    G requests, Q queries each at most, P pages each at most."""

    tokens: Tensor  # [G, Q] int64: rows of q; padding repeats a row of the same request.
    unpad: Tensor | None  # [tokens] int64 into G * Q: position of each real row (None: Q is 1, nothing is padded).
    rows: Tensor  # [tokens] int64: rows of the output, in the order of `unpad`.
    pages: Tensor  # [G * P] int64; padding is page 0.
    mask: Tensor
    """[G, 1, heads_per_kv * Q, P * page_size] in q's dtype: 0 where a query may attend, -inf elsewhere."""
    stale: Tensor
    """[...] int64 into G * P * page_size: positions past a request's last token, with stale content."""


class AttentionWork(NamedTuple):
    """The attention of one iteration, planned on the host once for all layers."""

    groups: tuple[AttentionGroup, ...]
    scratch: Tensor
    """[2, elements] in the pool's dtype: K and V of the largest group.

    Reused by every layer and iteration: page faults in a new buffer of this size cost more than the copy into it."""


MAX_DIAGONAL_HEADS = 4  # KV heads up to which `_decode` wastes less than the strided access of one head at a time.


def _decode(q: Tensor, k: Tensor, v: Tensor, group: AttentionGroup, scale: float) -> Tensor:
    """Attention of one query per request: q `[G, Hq, D]`, k and v `[G, keys, Hkv * D]` -> `[G, Hq, D]`.

    All heads share one GEMM of contiguous operands: the query of head h is zero outside its KV head's columns."""
    size, num_heads, head_dim = q.shape
    num_kv_heads = k.shape[2] // head_dim
    own = torch.eye(num_kv_heads, dtype=q.dtype, device=q.device).repeat_interleave(
        num_heads // num_kv_heads, 0
    )  # [Hq, Hkv]
    wide = (q[:, :, None] * own[:, :, None]).view(size, num_heads, -1)
    mask = group.mask[:, 0, :1].expand(-1, num_heads, -1)
    scores = torch.baddbmm(mask, wide, k.transpose(1, 2), alpha=scale)
    o = torch.bmm(scores.softmax(-1), v).view(size, num_heads, num_kv_heads, head_dim)
    return (o * own[:, :, None]).sum(2)


def _scored(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float, sinks: Tensor | None
) -> Tensor:
    """Attention with soft-capped scores, or with a sink in the softmax.

    q `[G, Hkv, heads_per_kv * Q, D]`; sinks `[Hq]`: a logit per head that takes weight but has no value."""
    scores = torch.matmul(q, k.transpose(2, 3)).float() * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask
    if sinks is not None:
        size, num_kv_heads, rows, _ = q.shape
        column = sinks.float().view(num_kv_heads, -1, 1).expand(-1, -1, rows * num_kv_heads // len(sinks))
        scores = torch.cat((scores, column.reshape(1, num_kv_heads, rows, 1).expand(size, -1, -1, 1)), dim=-1)
    return torch.matmul(scores.softmax(-1)[..., : k.shape[2]].to(v.dtype), v)


def paged_attention(
    q: Tensor, kv: Tensor, layer: int, work: AttentionWork, *, out: Tensor, scale: float | None = None,
    softcap: float = 0.0, sinks: Tensor | None = None, kv_scale: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Causal attention of q `[T, Hq, D]` over each request's pages; this layer's K and V are already written.

    scale: of the scores; None: head_dim ** -0.5. softcap and sinks: see `_scored`. kv_scale `[2, Hkv]` float32: of FP8
    pages, which are converted to q's dtype exactly before the multiplication; None: 1. Writes the requests' rows of
    `out [T, Hq * D]` and returns it. Page content past a request's last token (NaN included) never reaches a result.
    """
    num_heads, head_dim = q.shape[1:]
    scale = head_dim**-0.5 if scale is None else scale
    plain = not softcap and sinks is None
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
        k, v = (t.to(q.dtype) for t in gathered.view(2, -1, num_kv_heads * head_dim).unbind(0))
        k.index_fill_(0, group.stale, 0.0)
        v.index_fill_(0, group.stale, 0.0)
        if kv_scale is not None:
            for t, own in zip((k, v), kv_scale.to(q.dtype), strict=True):
                t.view(-1, num_kv_heads, head_dim).mul_(own[:, None])
        if plain and queries == 1 and num_kv_heads <= MAX_DIAGONAL_HEADS:
            heads[group.rows] = _decode(
                q[group.rows], k.view(size, -1, k.shape[1]), v.view(size, -1, v.shape[1]), group, scale
            )
            continue
        k = k.view(size, -1, num_kv_heads, head_dim).transpose(1, 2)
        v = v.view(size, -1, num_kv_heads, head_dim).transpose(1, 2)
        # Query heads of one KV head become queries of that head: [G, Hkv, heads_per_kv * Q, D]
        gq = q[group.tokens.view(-1)].view(size, queries, num_kv_heads, -1, head_dim)
        gq = gq.permute(0, 2, 3, 1, 4).reshape(size, num_kv_heads, -1, head_dim)
        if plain:
            o = F.scaled_dot_product_attention(gq, k, v, attn_mask=group.mask, scale=scale)
        else:
            o = _scored(gq, k, v, group.mask, scale, softcap, sinks)
        o = o.view(size, num_kv_heads, -1, queries, head_dim).permute(0, 3, 1, 2, 4)
        o = o.reshape(size * queries, num_heads, head_dim)
        heads[group.rows] = o if group.unpad is None else o[group.unpad]
    return out
