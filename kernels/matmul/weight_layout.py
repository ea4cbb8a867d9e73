"""Weight layouts of the kernels. A loader applies them once; kernels and reference implementations rely on them.

- Norm weights are folded into the following matrix, so a norm is one scale per row (`rms_scale`).
- q and k rows are reordered so that the two halves of a rotary pair are neighbors: rotation then needs only adjacent
  columns. Dot products of q and k do not change under a common permutation.
- A LayerNorm subtracts its input's mean: instead the rows of the following matrix have zero mean (`fold_norm`).
- Gate and up rows alternate, so that one output tile holds both and SwiGLU is an epilogue.
"""

from __future__ import annotations

import torch
from torch import Tensor


def interleave_rotary(weight: Tensor, head_dim: int, rotary_dim: int | None = None) -> Tensor:
    """Reorder rows `[heads * head_dim, ...]` from (i, i + rotary_dim/2) pairs to neighbors (2i, 2i + 1).

    rotary_dim: number of a head's first rows that are rotated; None: all. The others keep their place."""
    tail = weight.shape[1:]
    heads = weight.view(-1, head_dim, *tail)
    turned, still = heads.split((rotary_dim or head_dim, head_dim - (rotary_dim or head_dim)), dim=1)
    pairs = turned.unflatten(1, (2, -1)).transpose(1, 2).flatten(1, 2)
    return torch.cat((pairs, still), dim=1).reshape(-1, *tail)


def interleave_gate_up(gate: Tensor, up: Tensor) -> Tensor:
    """Join two `[..., inter, hidden]` into `[..., 2 * inter, hidden]`: row 2i is gate i, row 2i + 1 is up i."""
    return torch.stack((gate, up), dim=-2).flatten(-3, -2)


def fold_norm(weight: Tensor, norm_weight: Tensor | None, *, centred: bool = False) -> Tensor:
    """Return `weight [..., out, in]` times the norm weight `[in]` of its input, rounded once to the weight's dtype.

    centred: subtract the mean of each row, so that the result does not depend on the mean of the input."""
    rows = weight.float() if norm_weight is None else weight.float() * norm_weight.float()
    if centred:
        rows = rows - rows.mean(-1, keepdim=True)
    return rows.to(weight.dtype)


MXFP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def unpack_mxfp4(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """Dequantize `blocks [..., groups, 16]` uint8 and `scales [..., groups]` uint8 to `[..., groups * 32]`.

    Two values per byte, low half first; a group's exponent is its scale minus 127."""
    values = torch.tensor(MXFP4_VALUES, dtype=torch.float32, device=blocks.device)
    table = torch.cat((values, -values))
    halves = torch.stack((blocks & 15, blocks >> 4), dim=-1).flatten(-2)
    return torch.ldexp(table[halves.int()], scales[..., None].int() - 127).flatten(-2).to(dtype)


def rotary_table(inv_freq: Tensor, max_positions: int, scale: float = 1.0, pairs: int | None = None) -> Tensor:
    """Return cos and sin of every position: `[max_positions, head_dim/2, 2]` float32 (cos, sin), times `scale`.

    pairs: number per head, if more than the frequencies `[rotary_dim/2]`; the others do not rotate."""
    angles = torch.arange(max_positions, dtype=torch.float32, device=inv_freq.device)[:, None] * inv_freq.float()
    table = torch.stack((angles.cos(), angles.sin()), dim=-1) * scale
    still = torch.zeros(max_positions, (pairs or len(inv_freq)) - len(inv_freq), 2, device=table.device)
    still[..., 0] = 1.0
    return torch.cat((table, still), dim=1)
