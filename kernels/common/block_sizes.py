"""How kernels round head sizes and query groups up to block sizes."""

from __future__ import annotations


def group_block(group: int) -> int:
    """Return the MMA columns for a group of `group` query heads: a power of two, at least 8."""
    return max(8, 1 << (group - 1).bit_length())


def head_block(head_dim: int) -> int:
    """Return the padded head size that kernels work on: the next power of two, at least 16."""
    return max(16, 1 << (head_dim - 1).bit_length())
