"""Scratch of decode attention, for both of its kernels."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class DecodeWorkspace(NamedTuple):
    """Scratch of requests that are split: one per stream that runs decode attention."""

    partial: Tensor
    """[slots, Hkv, D padded + 2, group padded] float32: sums, then row maximum and row sum"""
    arrived: Tensor
    """[rows * Hkv] int32, zero between launches"""
    tickets: Tensor
    """[2] int32, zero between launches: tasks drawn, and programs that have drawn their last"""


def group_block(group: int) -> int:
    """Columns of the MMA for a group of query heads."""
    return max(8, 1 << (group - 1).bit_length())


def head_block(head_dim: int) -> int:
    """Numbers of a head as the kernels hold it: filled up to a power of two."""
    return max(16, 1 << (head_dim - 1).bit_length())


def decode_workspace(
    slots: int, rows: int, num_kv_heads: int, group: int, head_dim: int, device: torch.device | str
) -> DecodeWorkspace:
    shape = (slots, num_kv_heads, head_block(head_dim) + 2, group_block(group))
    return DecodeWorkspace(
        torch.empty(shape, dtype=torch.float32, device=device),
        torch.zeros(rows * num_kv_heads, dtype=torch.int32, device=device),
        torch.zeros(2, dtype=torch.int32, device=device),
    )
