"""How weights are laid out for the kernels. A loader calls these once; every kernel and its twin rely on them.

- Norm weights are folded into the matrix that follows them, so a norm is one scale per row (`rms_scale`).
- q and k rows are reordered so that the two halves of a rotary pair are neighbours: rotation then needs only adjacent
  columns. Dot products of q and k do not change under a permutation common to both.
- Gate and up rows alternate, so that one output tile holds both and SwiGLU is an epilogue.
"""

from __future__ import annotations

import torch
from torch import Tensor


def interleave_rotary(weight: Tensor, head_dim: int) -> Tensor:
    """Reorder rows `[heads * head_dim, ...]` from (i, i + head_dim/2) pairs to neighbours (2i, 2i + 1)."""
    tail = weight.shape[1:]
    halves = weight.view(-1, 2, head_dim // 2, *tail)
    return halves.transpose(1, 2).reshape(-1, *tail)


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """`[inter, hidden]` twice -> `[2 * inter, hidden]`: row 2i is gate i, row 2i + 1 is up i."""
    return torch.stack((gate, up), dim=1).reshape(-1, gate.shape[1])


def fold_norm(weight: Tensor, norm_weight: Tensor) -> Tensor:
    """`weight [out, in]` times the norm weight `[in]` of its input, rounded once to the weight's dtype."""
    return (weight.float() * norm_weight.float()).to(weight.dtype)


def rotary_table(inv_freq: Tensor, max_positions: int, scale: float = 1.0) -> Tensor:
    """cos and sin of every position: `[max_positions, head_dim/2, 2]` float32 (cos, sin), times `scale`."""
    angles = torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq.float()
    return torch.stack((angles.cos(), angles.sin()), dim=-1) * scale
