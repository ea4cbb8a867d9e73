"""`KvLayout`: what a page of KV looks like. Whoever allocates, moves, hashes, stores or counts pages asks it.

A page is one contiguous extent that holds all layers of `page_size` tokens, so that it moves between tiers with one
copy; attention reaches a layer inside a page by stride.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from weft.engine.model.spec import ModelSpec
from weft.kernels.formats.packed_page import PackedPage


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`[page][layer][plane][token][kv_head][head_dim]` of `dtype`. Grouped-query attention has two planes, K and V.

    Layers of several shapes (`mixed`) lie one behind the other in the page, each in the same order.
    """

    num_layers: int
    planes: int
    page_size: int
    """tokens"""
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    mixed: tuple[tuple[int, int], ...] = ()
    """(Hkv, D) of each layer, where they differ: then `num_kv_heads` and `head_dim` are the largest"""
    maker: str = ""
    """whose values these are, if not those of weft's own layers: part of what identifies a page"""

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int, dtype: torch.dtype, widths: Sequence[int] = ()) -> Self:
        """widths: head sizes that attention takes, the smallest first: a head lies in the next of them."""
        heads = tuple((n, next((w for w in widths if w >= width), width)) for n, width in spec.kv_heads)
        mixed = heads if len(set(heads)) > 1 else ()
        maker = "" if spec.native else "transformers"
        return cls(spec.num_layers, 2, page_size, spec.num_kv_heads, max(w for _, w in heads), dtype, mixed, maker)

    @property
    def page_shape(self) -> tuple[int, ...]:
        """`[layers, planes, page_size, Hkv, D]`, of mixed layers `[values]`"""
        if self.mixed:
            return (self._mixed_places[1],)
        return (self.num_layers, self.planes, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def _mixed_places(self) -> tuple[list[int], int]:
        """Where each layer begins in a page, and how many values a page has.

        A layer begins at a multiple of its own size, and so does every page: seen from a layer the pool is made of
        layers of its own size, of which it is one.
        """
        sizes = [self.planes * self.page_size * heads * width for heads, width in self.mixed]
        begins, end = [], 0
        for size in sizes:
            begins.append(-(-end // size) * size)
            end = begins[-1] + size
        return begins, -(-end // math.lcm(*sizes)) * math.lcm(*sizes)

    def heads(self, layer: int) -> tuple[int, int]:
        """(Hkv, D) of a layer."""
        return self.mixed[layer] if self.mixed else (self.num_kv_heads, self.head_dim)

    def layer(self, pool: Tensor, layer: int) -> tuple[Tensor, int]:
        """The pool as `[pages, layers, planes, page_size, Hkv, D]` of this layer's size, and its index in there."""
        if not self.mixed:
            return pool, layer
        heads, width = self.mixed[layer]
        size = self.planes * self.page_size * heads * width
        view = pool.view(len(pool), -1, self.planes, self.page_size, heads, width)
        return view, self._mixed_places[0][layer] // size

    @property
    def token_values(self) -> int:
        """Numbers that one token keeps, over all layers."""
        return math.prod(self.page_shape) // self.page_size

    @property
    def token_bytes(self) -> int:
        return self.token_values * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    @property
    def packed(self) -> PackedPage | None:
        """The form of these pages in 12 bits a scalar; None where they have none."""
        # Layers of several sizes lie at multiples of theirs: the smallest row divides them all.
        width = min(heads * head for heads, head in self.mixed or ((self.num_kv_heads, self.head_dim),))
        form = PackedPage(math.prod(self.page_shape), self.page_size, width)
        return form if self.dtype == torch.bfloat16 and form.possible else None

    @property
    def id(self) -> str:
        """Part of what identifies a page: pages of another layout are nobody's."""
        made = f"|{self.maker} {self.mixed}" if self.maker else ""
        return f"{self.dtype}|{'x'.join(map(str, self.page_shape))}{made}"

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
