"""Reference implementation of multi-head latent attention (DeepSeek-V2, arXiv 2405.04434), in its absorbed form.

A token keeps one row in its page, for all heads: a latent of C numbers, then a rotated key of R. Keys and values of a
head are products of the latent. Instead of making them, a query is multiplied with its head's key matrix, and what it
attends to with its value matrix: attention itself reads only the rows, whose first C numbers are the values too.

T tokens, H heads; N and V are the widths of a head's keys without the rotated part, and of its values. The pool is
`[pages, layers, 1, page_size, 1, C + R]`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.reference.layer import AttentionWork, head_norm, rotate


def latent_queries(
    q: Tensor, row: Tensor, norm: Tensor, keys: Tensor, rotary: Tensor, slot_mapping: Tensor, kv: Tensor, layer: int,
    eps: float,
) -> Tensor:  # fmt: skip
    """Write the rows of tokens to their pages, and return the queries `[T, H, C + R]`.

    q `[T, H, N + R]`; row `[T, C + R]` before the norm `[C]` of its latent; keys `[H, N, C]`; rotary `[T, R/2, 2]`
    float32; slot_mapping `[T]` int: page * page_size + offset."""
    rank, plain = len(norm), keys.shape[1]
    latent, key = head_norm(row[:, :rank], norm, eps), rotate(row[:, None, rank:], rotary)[:, 0]
    page_size = kv.shape[3]
    kv[slot_mapping // page_size, layer, 0, slot_mapping % page_size, 0] = torch.cat((latent, key), -1).to(kv.dtype)
    absorbed = torch.matmul(q[..., :plain].transpose(0, 1), keys).transpose(0, 1)
    return torch.cat((absorbed, rotate(q[..., plain:], rotary)), -1)


def latent_values(attended: Tensor, values: Tensor) -> Tensor:
    """Return the values `[T, H * V]` of what each head attends to: attended `[T, H * C]`, values `[H, V, C]`."""
    per_head = attended.unflatten(-1, (len(values), -1)).transpose(0, 1)
    return torch.matmul(per_head, values.transpose(1, 2)).transpose(0, 1).flatten(1)


def latent_attention(
    q: Tensor, kv: Tensor, layer: int, work: AttentionWork, *, out: Tensor, scale: float, rank: int
) -> Tensor:
    """Causal attention of q `[T, H, C + R]` over each request's rows; `rank` is C. Writes the requests' rows of `out`,
    `[T, H * C]`, and returns it. Page content past a request's last token never reaches a result."""
    layers, page_size, width = kv.shape[1], kv.shape[3], kv.shape[5]
    flat, heads = kv.view(-1, page_size * width), out.view(len(out), q.shape[1], rank)
    for group in work.groups:
        size, queries = group.tokens.shape
        gathered = work.scratch[0, : len(group.pages) * flat.shape[1]].view(len(group.pages), -1)
        torch.index_select(flat, 0, group.pages * layers + layer, out=gathered)
        rows = gathered.view(-1, width).to(q.dtype)
        rows.index_fill_(0, group.stale, 0.0)
        rows = rows.view(size, 1, -1, width)
        # All heads share one row: they become queries of one head.
        own = q[group.tokens.view(-1)].view(size, queries, -1, width).transpose(1, 2).reshape(size, 1, -1, width)
        found = F.scaled_dot_product_attention(own, rows, rows[..., :rank], attn_mask=group.mask, scale=scale)
        found = found.view(size, -1, queries, rank).transpose(1, 2).reshape(size * queries, -1, rank)
        heads[group.rows] = found if group.unpad is None else found[group.unpad]
    return out
