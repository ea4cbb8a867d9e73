"""`KvLayout`: what a page of KV looks like. Whoever allocates, moves, hashes, stores or counts pages asks it.

A page is one contiguous extent that holds all layers of `page_size` tokens, so that it moves between tiers with one
copy; attention reaches a layer inside a page by stride.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`[page][layer][plane][token][kv_head][head_dim]` of `dtype`. Grouped-query attention has two planes, K and V."""

    num_layers: int
    planes: int
    page_size: int
    """tokens"""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int, dtype: torch.dtype) -> Self:
        return cls(spec.num_layers, 2, page_size, spec.num_kv_heads, spec.head_dim, dtype)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """`[layers, planes, page_size, Hkv, D]`"""
        return (self.num_layers, self.planes, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def token_values(self) -> int:
        """Numbers that one token keeps, over all layers."""
        return self.num_layers * self.planes * self.num_kv_heads * self.head_dim

    @property
    def token_bytes(self) -> int:
        return self.token_values * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    @property
    def id(self) -> str:
        """Part of what identifies a page: pages of another layout are nobody's."""
        return f"{self.dtype}|{'x'.join(map(str, self.page_shape))}"

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Of a pool: `[pages, layers, planes, page_size, Hkv, D]`."""
        return (num_pages, *self.page_shape)

    def view(self, memory: Tensor) -> Tensor:
        """A pool over `memory` uint8, whose length is a multiple of `page_bytes`."""
        return memory.view(self.dtype).view(self.shape(memory.numel() // self.page_bytes))

    def pages_in(self, size: float) -> int:
        """Whole pages that fit so many bytes."""
        return math.floor(size / self.page_bytes)


def page_rows(kv: Tensor) -> Tensor:
    """A pool as `[pages, page_bytes]` uint8: what a copy moves."""
    return kv.view(kv.shape[0], -1).view(torch.uint8)
