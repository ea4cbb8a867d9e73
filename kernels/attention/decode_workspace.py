"""Scratch memory of decode attention, for both kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from weft.kernels.common.block_sizes import group_block, head_block


class DecodeWorkspace(NamedTuple):
    """Scratch of split requests: one per stream that runs decode attention."""

    partial: Tensor  # [slots, Hkv, padded D + 2, padded group] float32: sums, then row maximum and row sum.
    arrived: Tensor  # [rows * Hkv] int32, zero between launches.
    tickets: Tensor
    """[2] int32, zero between launches: tasks drawn, and programs that have drawn their last task."""


def decode_workspace(
    slots: int, rows: int, num_kv_heads: int, group: int, head_dim: int, device: torch.device | str
) -> DecodeWorkspace:
    shape = (slots, num_kv_heads, head_block(head_dim) + 2, group_block(group))
    return DecodeWorkspace(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.zeros(rows * num_kv_heads, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )
