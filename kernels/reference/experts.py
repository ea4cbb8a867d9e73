"""Reference implementation of expert layers: the router and the grouped GEMMs before and after the activation.

Shapes use T tokens, H hidden, E experts, K experts per token, I columns of an expert. No token is ever dropped.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from weft.kernels.formats.fp8_matrix import Matrix
from weft.kernels.reference.adapters import Delta, ExpertDelta, add_values
from weft.kernels.reference.layer import ACTIVATIONS, gated, normed, normed_linear, row_sumsq


class Routing(NamedTuple):
    """The experts that compute each token, and their weights."""

    experts: Tensor  # [T, K] int64
    weights: Tensor  # [T, K] float32
    order: Tensor  # [T * K] int64: (token, choice) pairs `token * K + choice`, sorted by expert.
    counts: list[int]  # [E] pairs of each expert.


def _grouped(scores: Tensor, groups: int, top_groups: int, group_best: int) -> Tensor:
    """Set experts outside the best groups to -inf; a group's score is the sum of its `group_best` best (DeepSeek)."""
    parts = scores.view(len(scores), groups, -1)
    best = parts.topk(group_best, dim=-1).values.sum(-1).topk(top_groups, dim=-1, sorted=False).indices
    keep = torch.zeros_like(parts[..., 0], dtype=torch.bool).scatter_(1, best, True)
    return parts.masked_fill(~keep[..., None], -torch.inf).view(scores.shape)


def route(
    x: Tensor, sumsq: Tensor | None, weight: Tensor, eps: float, *, kind: str, top: int, normalise: bool,
    scaling: float = 1.0, bias: Tensor | None = None, choice_bias: Tensor | None = None, groups: int = 1,
    top_groups: int = 1, group_best: int = 2, weight_eps: float = 0.0, delta: Delta | None = None,
) -> Routing:  # fmt: skip
    """Apply the norm and router matrix `[E, H]` float32, then choose experts, all in float32.

    kind: `softmax` over all experts, then the `top` best; `top_softmax`: the best, then a softmax over them; `sigmoid`
    of each. choice_bias `[E]` affects the choice, not the weights. normalise: a token's weights sum to one, apart from
    `weight_eps`, which is added to the divisor."""
    h = x.float() if sumsq is None else normed(x.float(), sumsq, eps)
    logits = F.linear(h, weight.float(), None if bias is None else bias.float())
    if delta is not None:
        logits = add_values(logits, delta.values(h))
    if kind == "top_softmax":
        values, chosen = logits.topk(top, dim=-1)
        weights = values.softmax(-1)
    else:
        scores = logits.sigmoid() if kind == "sigmoid" else logits.softmax(-1)
        choice = scores if choice_bias is None else scores + choice_bias
        if groups > 1:
            choice = _grouped(choice, groups, top_groups, group_best)
        chosen = choice.topk(top, dim=-1).indices
        weights = scores.gather(1, chosen)
        if normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + (weight_eps or (1e-20 if kind == "sigmoid" else 0.0)))
    if scaling != 1.0:
        weights = weights * scaling
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    return Routing(chosen, weights, order, torch.bincount(flat, minlength=len(weight)).tolist())


def experts_gate_up(
    x: Tensor, sumsq: Tensor | None, routing: Routing, weight: Matrix, eps: float, *, activation: str = "silu",
    bias: Tensor | None = None, has_gate: bool = True, delta: ExpertDelta | None = None,
) -> Tensor:  # fmt: skip
    """Apply norm and the experts' gate-up matrices `[E, 2 I, H]` (rows alternate), or without gates their matrices `[E,
    I, H]`: `[T * K, I]`, by expert."""
    tokens = routing.order // routing.experts.shape[1]
    # an FP8 matrix carries the norm's weight
    sums = None if isinstance(weight, Tensor) or sumsq is None else sumsq[tokens]
    rows = (normed(x, sumsq, eps) if sums is None else x)[tokens]
    read = rows if sums is None or delta is None else normed(x, sumsq, eps)[tokens]
    out = rows.new_empty(len(rows), weight.shape[1] // (1 + has_gate))
    at = 0
    for expert, count in enumerate(routing.counts):
        if count:
            own = slice(at, at + count)
            own_bias = None if bias is None else bias[expert]
            y = normed_linear(rows[own], None if sums is None else sums[own], weight[expert], own_bias, eps)
            if delta is not None:
                y = delta.add(y, read[own], expert, tokens[own])
            out[own] = gated(activation, y[:, 0::2], y[:, 1::2]) if has_gate else ACTIVATIONS[activation](y)
            at += count
    return out


def experts_residual(
    h: Tensor, routing: Routing, weight: Matrix, x: Tensor, *, bias: Tensor | None = None, centred: bool = False,
    delta: ExpertDelta | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return x plus the weighted GEMMs of h `[T * K, I]` with the experts' matrices `[E, H, I]`, and row sums of
    squares.

    A token's experts are added in float32, in the order of its choices."""
    y = torch.empty(len(h), weight.shape[1], dtype=torch.float32, device=h.device)
    scale = routing.weights.flatten()[routing.order]
    tokens = routing.order // routing.experts.shape[1]
    at = 0
    for expert, count in enumerate(routing.counts):
        if count:
            own = slice(at, at + count)
            own_bias = None if bias is None else bias[expert]
            made = normed_linear(h[own], None, weight[expert], own_bias, 0.0)
            if delta is not None:
                made = delta.add(made, h[own], expert, tokens[own])
            y[own] = made.float() * scale[own, None]
            at += count
    placed = torch.empty_like(y)
    placed[routing.order] = y
    out = (x.float() + placed.view(*routing.experts.shape, -1).sum(1)).to(x.dtype)
    return out, row_sumsq(out, centred)
