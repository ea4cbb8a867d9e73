"""`KvLayout`: the layout of a page of KV, for all code that allocates, moves, hashes, stores or counts pages.

A page is contiguous and holds all layers of `page_size` tokens, so that it moves between tiers with one copy.
Attention reaches a layer inside a page by stride.
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

EMPTY_PAGE_BYTES = 1 << 16  # Bytes of a page, at least, if no layer keeps K and V.


@dataclass(frozen=True, slots=True)
class KvLayout:
    """`[page][layer][plane][token][kv_head][head_dim]` of `dtype`. Grouped-query attention has two planes, K and V,
    latent attention one.
    Layers of different shapes (`mixed`) follow each other in the page, each in this order. Layers without K and V have
    no part of it. If no layer has any, a page is `EMPTY_PAGE_BYTES` that no layer reads, for recurrent states."""

    num_layers: int
    planes: int
    page_size: int  # tokens per page
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    mixed: tuple[tuple[int, int], ...] = ()
    """(Hkv, D) of each layer if they differ; `num_kv_heads` and `head_dim` are then the largest."""
    maker: str = ""
    """The library that computes the values, if not weft's own layers. Part of a page's identity."""
    states: str = ""
    """`StateLayout.id` of the recurrent states in other pages of the pool. Part of a page's identity."""
    drafts: tuple[int, int, int] = (0, 0, 0)
    """(layers, Hkv, D) of the model that drafts; after the layers, in room of whole layers."""
    draft_planes: int = 2

    @classmethod
    def of(cls, spec: ModelSpec, page_size: int, dtype: torch.dtype, widths: Sequence[int] = ()) -> Self:
        """`widths` are the head sizes that attention supports, ascending: heads are padded to the next one."""
        heads = tuple((n, next((w for w in widths if w >= width), width)) for n, width in spec.kv_heads)
        mixed = heads if len(set(heads)) > 1 else ()
        maker = "" if spec.native else "transformers"
        if not heads:
            return cls(1, 1, page_size, 1, -(-EMPTY_PAGE_BYTES // (page_size * dtype.itemsize)), dtype, (), maker)
        return cls(
            len(heads), spec.kv_planes, page_size, spec.num_kv_heads, max(w for _, w in heads), dtype, mixed, maker
        )

    @property
    def page_shape(self) -> tuple[int, ...]:
        """`[layers, planes, page_size, Hkv, D]`; for mixed layers `[values]`."""
        if self.mixed:
            return (self._mixed_offsets[1],)
        return (self.num_layers + self._draft_room, self.planes, self.page_size, self.num_kv_heads, self.head_dim)

    @property
    def _layer_values(self) -> int:
        return self.planes * self.page_size * self.num_kv_heads * self.head_dim

    @property
    def _draft_values(self) -> int:
        return self.draft_planes * self.page_size * self.drafts[1] * self.drafts[2]

    @property
    def first_draft_layer(self) -> int:
        """Index of the drafter's first layer in `draft_view`."""
        return -(-self.num_layers * self._layer_values // self._draft_values)

    @property
    def _draft_room(self) -> int:
        """Layers of the usual size that the drafter's take. A page is a multiple of either size."""
        if not self.drafts[0]:
            return 0
        size = math.lcm(self._layer_values, self._draft_values)
        end = (self.first_draft_layer + self.drafts[0]) * self._draft_values
        return -(-end // size) * size // self._layer_values - self.num_layers

    def draft_view(self, pool: Tensor) -> Tensor:
        """View the pool as `[pages, layers, planes, page_size, Hkv, D]` of the drafter's size."""
        return pool.view(len(pool), -1, self.draft_planes, self.page_size, *self.drafts[1:])

    @property
    def _mixed_offsets(self) -> tuple[list[int], int]:
        """Offset of each layer in a page, and the values per page. Layers and pages start at multiples of the layer's
        size, so that the pool can be viewed as an array of layers of that size."""
        sizes = [self.planes * self.page_size * heads * width for heads, width in self.mixed]
        begins, end = [], 0
        for size in sizes:
            begins.append(-(-end // size) * size)
            end = begins[-1] + size
        return begins, -(-end // math.lcm(*sizes)) * math.lcm(*sizes)

    def heads(self, layer: int) -> tuple[int, int]:
        """Return (Hkv, D) of a layer."""
        return self.mixed[layer] if self.mixed else (self.num_kv_heads, self.head_dim)

    def layer(self, pool: Tensor, layer: int) -> tuple[Tensor, int]:
        """View the pool as `[pages, layers, planes, page_size, Hkv, D]` of this layer's size; return it and the layer's
        index."""
        if not self.mixed:
            return pool, layer
        heads, width = self.mixed[layer]
        size = self.planes * self.page_size * heads * width
        view = pool.view(len(pool), -1, self.planes, self.page_size, heads, width)
        return view, self._mixed_offsets[0][layer] // size

    @property
    def token_values(self) -> int:
        """Values per token, over all layers."""
        return math.prod(self.page_shape) // self.page_size

    @property
    def token_bytes(self) -> int:
        return self.token_values * self.dtype.itemsize

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.token_bytes

    @property
    def packed(self) -> PackedPage | None:
        """The packed form of these pages, 12 bits per scalar; None if they cannot be packed."""
        # Mixed layers start at multiples of their sizes, so the smallest row divides them all.
        width = min(heads * head for heads, head in self.mixed or ((self.num_kv_heads, self.head_dim),))
        form = PackedPage(math.prod(self.page_shape), self.page_size, width)
        return form if self.dtype == torch.bfloat16 and form.possible else None

    @property
    def id(self) -> str:
        """Part of a page's identity: pages of another layout never match."""
        made = f"|{self.maker} {self.mixed}" if self.maker else ""
        states = f"|{self.states}" if self.states else ""
        drafts = f"|drafts {self.drafts} {self.draft_planes}" if self.drafts[0] else ""
        return f"{self.dtype}|{'x'.join(map(str, self.page_shape))}{made}{states}{drafts}"

    def shape(self, num_pages: int) -> tuple[int, ...]:
        """Return the shape of a pool, `[pages, layers, planes, page_size, Hkv, D]`."""
        return (num_pages, *self.page_shape)

    def view(self, memory: Tensor) -> Tensor:
        """View `memory` (uint8, a multiple of `page_bytes` long) as a pool."""
        return memory.view(self.dtype).view(self.shape(memory.numel() // self.page_bytes))

    def pages_in(self, size: float) -> int:
        """Return the number of pages that fit in `size` bytes."""
        return math.floor(size / self.page_bytes)


def page_rows(kv: Tensor) -> Tensor:
    """View a pool as `[pages, page_bytes]` uint8, the unit of copies."""
    return kv.view(kv.shape[0], -1).view(torch.uint8)
