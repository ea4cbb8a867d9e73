"""The `torch` attention backend: `reference/layer.py: paged_attention`, with padded groups planned on the host.

It serves on the CPU. On a GPU it is for comparison only: it copies the K and V that it reads, which takes memory
besides the pool, and it waits for its transfers. Layers with the same window share a plan, which begins with the first
page that any of a request's queries sees, so pages before the window are not read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.attention.backend import AttentionRequests, AttentionShape, HostAttention
from weft.kernels.reference.latent import latent_attention
from weft.kernels.reference.layer import AttentionGroup, AttentionWork, paged_attention

INVARIANT_TILE = 128
"""With batch invariance: prompt positions that are computed together, cut at multiples of this."""
GROUP_COST = 1 << 17  # Elements of gathered K that take as long as another group of decodes does.
GROUP_ELEMENTS = 1 << 27  # Limit on a group's gathered K, and on its mask; more requests go into several groups.


def _similar(lengths: NDArray[np.int32]) -> Iterator[NDArray[np.intp]]:
    """Split rows into groups whose lengths differ by less than a factor of two: padding wastes less than half."""
    bucket = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int32)
    for b in np.unique(bucket):
        yield np.flatnonzero(bucket == b)


def _cheapest(pages: NDArray[np.int32], group_pages: float) -> Iterator[NDArray[np.intp]]:
    """Split decodes of these numbers of pages into the groups that cost least. A group costs `group_pages` and its
    rows, padded to the longest."""
    order = np.argsort(pages, kind="stable")
    lengths, counts = np.unique(pages, return_counts=True)
    ends = np.concatenate(([0], np.cumsum(counts)))
    best, begin = np.zeros(len(ends)), np.zeros(len(ends), np.intp)
    for j in range(1, len(ends)):
        costs = best[:j] + (ends[j] - ends[:j]) * lengths[j - 1]
        begin[j] = costs.argmin()
        best[j] = costs[begin[j]] + group_pages
    j = len(lengths)
    while j:
        yield order[ends[begin[j]] : ends[j]]
        j = begin[j]


class WindowStep(NamedTuple):
    """Work of the layers with one window. Both fields are empty if there is nothing to do; the scratch is shared."""

    decode: AttentionWork
    prefill: AttentionWork


TorchStep = Mapping[int | None, WindowStep]  # Steps by window.


class TorchAttention(HostAttention[TorchStep]):
    """See `backend.HostAttention`. Owns the scratch of the gathered pages.

    batch_invariant: results do not depend on the other requests of the iteration. Each decode is a separate group.
    Prompts are computed in tiles of `INVARIANT_TILE` positions, whose shape and rows follow from the position alone,
    independent of chunk limits; no group contains two requests. This is slower: more and smaller GEMMs. Queries of
    one decode are separate groups, too.

    decodes: whether to plan them; else only chunks."""

    captured = False

    def __init__(self, shape: AttentionShape, *, batch_invariant: bool = False, decodes: bool = True) -> None:
        self._invariant, self._decodes = batch_invariant, decodes
        self._shape = shape
        self._page_size, self._group_size, self._device = shape.page_size, shape.group, shape.device
        self._dtype = shape.dtype
        self._page_elements = shape.page_size * shape.num_kv_heads * shape.head_dim
        self._scratch = torch.zeros(2, 0, dtype=shape.pool_dtype, device=shape.device)

    def prepare(self, requests: AttentionRequests) -> TorchStep:
        planned = {window: self._plan(requests, window) for window in set(self._shape.windows)}
        needed = max((len(g.pages) for d, p in planned.values() for g in d + p), default=0) * self._page_elements
        if needed > self._scratch.shape[1]:
            self._scratch = torch.zeros(2, needed, dtype=self._scratch.dtype, device=self._device)
        return {
            window: WindowStep(AttentionWork(decode, self._scratch), AttentionWork(prefill, self._scratch))
            for window, (decode, prefill) in planned.items()
        }

    def _plan(
        self, requests: AttentionRequests, window: int | None
    ) -> tuple[tuple[AttentionGroup, ...], tuple[AttentionGroup, ...]]:
        seen = requests.kv_len - requests.query_len + 1 - (window or 0)
        first = np.maximum(seen, 0) // self._page_size if window else np.zeros_like(requests.kv_len)
        num_pages = -(-requests.kv_len // self._page_size) - first
        d = requests.num_decodes
        if self._invariant:
            starts = np.cumsum(requests.query_len[:d]) - requests.query_len[:d]
            rows = enumerate(starts.tolist() if self._decodes else [])
            alone = tuple(group for row, at in rows for group in self._queries(requests, row, at, window))
            return alone, tuple(self._tiles(requests, window))

        def groups(split: Iterable[NDArray[np.intp]], start: int) -> tuple[AttentionGroup, ...]:
            return tuple(
                self._group(requests, part, num_pages, first, window)
                for rows in split
                for part in self._parts(requests, rows + start, num_pages)
            )

        decodes = _cheapest(num_pages[:d], GROUP_COST / self._page_elements) if self._decodes else ()
        return groups(decodes, 0), groups(_similar(requests.query_len[d:]), d)

    def decode(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        step: TorchStep,
        *,
        out: Tensor,
        num_sms: int | None = None,  # noqa: ARG002 - torch has no such option
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
    ) -> Tensor:
        """kv_scale: see `reference.layer.paged_attention`."""
        return self._attend(q, kv, layer, step[self._shape.window(layer)].decode, out, sinks, kv_scale)

    def prefill(
        self,
        q: Tensor,
        kv: Tensor,
        layer: int,
        step: TorchStep,
        *,
        out: Tensor,
        num_sms: int | None = None,  # noqa: ARG002
        sinks: Tensor | None = None,
        kv_scale: Tensor | None = None,
    ) -> Tensor:
        return self._attend(q, kv, layer, step[self._shape.window(layer)].prefill, out, sinks, kv_scale)

    def _attend(
        self, q: Tensor, kv: Tensor, layer: int, work: AttentionWork, out: Tensor, sinks: Tensor | None,
        kv_scale: Tensor | None,
    ) -> Tensor:  # fmt: skip
        shape = self._shape
        if shape.latent:
            assert shape.scale is not None
            return latent_attention(q, kv, layer, work, out=out, scale=shape.scale, rank=shape.latent)
        return paged_attention(
            q, kv, layer, work, out=out, scale=shape.scale, softcap=shape.softcap,
            sinks=sinks if shape.sinks else None, kv_scale=kv_scale,
        )  # fmt: skip

    def _parts(
        self, requests: AttentionRequests, rows: NDArray[np.intp], num_pages: NDArray[np.int32]
    ) -> list[NDArray[np.intp]]:
        """Split one group's rows into as many groups as `GROUP_ELEMENTS` requires."""
        pages = int(num_pages[rows].max())
        masked = int(requests.query_len[rows].max()) * self._group_size * self._page_size
        groups = -(-len(rows) * pages * max(self._page_elements, masked) // GROUP_ELEMENTS)
        return np.array_split(rows, min(len(rows), groups))

    def _group(
        self, requests: AttentionRequests, rows: NDArray[np.intp], num_pages: NDArray[np.int32],
        first: NDArray[np.int32], window: int | None,
    ) -> AttentionGroup:  # fmt: skip
        query_len, own_pages, begin = requests.query_len[rows], num_pages[rows], first[rows]
        # positions count from the first page that is read
        kv_len = requests.kv_len[rows] - begin * self._page_size
        starts = (np.cumsum(requests.query_len) - requests.query_len)[rows]
        queries, width = int(query_len.max()), int(own_pages.max())
        column = np.arange(queries)
        real = column < query_len[:, None]  # [G, Q]
        # Padding repeats the request's first token: its result is discarded.
        offset = np.where(real, column, 0)
        tokens, until = starts[:, None] + offset, None
        if requests.until is not None:
            until = requests.until[tokens] - (begin * self._page_size)[:, None]
        return self._padded(
            requests.page_table[rows], begin, kv_len, own_pages, width, tokens,
            (kv_len - query_len)[:, None] + offset, real, window, until,
        )  # fmt: skip

    def _queries(
        self, requests: AttentionRequests, row: int, token: int, window: int | None
    ) -> Iterator[AttentionGroup]:
        """Yield a group for each query of a decode, from `token` on, as if each were in an iteration of its own."""
        size, last = self._page_size, int(requests.kv_len[row])
        for end in range(last - int(requests.query_len[row]) + 1, last + 1):
            first = max(0, end - window) // size if window else 0
            own = -(-end // size) - first
            yield self._padded(
                requests.page_table[row : row + 1], np.array([first]), np.array([end - first * size]), np.array([own]),
                own, np.array([[token]]), np.array([[end - 1 - first * size]]), np.array([[True]]), window,
            )  # fmt: skip
            token += 1

    def _tiles(self, requests: AttentionRequests, window: int | None) -> Iterator[AttentionGroup]:
        """Yield a group for each request and tile of positions that this iteration computes."""
        size, starts = self._page_size, np.cumsum(requests.query_len) - requests.query_len
        for row in range(requests.num_decodes, len(requests.query_len)):
            end = int(requests.kv_len[row])
            begin = end - int(requests.query_len[row])
            for tile in range(begin // INVARIANT_TILE * INVARIANT_TILE, end, INVARIANT_TILE):
                positions = np.arange(tile, tile + INVARIANT_TILE)
                real = (positions >= begin) & (positions < end)
                position = np.where(real, positions, max(tile, begin))[None]
                first = max(0, tile + 1 - window) // size if window else 0
                width = -(-(tile + INVARIANT_TILE) // size) - first
                own = min(width, -(-end // size) - first)
                yield self._padded(
                    requests.page_table[row : row + 1], np.array([first]), np.array([end - first * size]),
                    np.array([own]), width, starts[row] + position - begin, position - first * size, real[None], window,
                )  # fmt: skip

    def _padded(
        self, page_table: NDArray[np.int32], begin: NDArray[np.int32], kv_len: NDArray[np.int32],
        own_pages: NDArray[np.int32], width: int, tokens: NDArray[np.int32], positions: NDArray[np.int32],
        real: NDArray[np.bool_], window: int | None,
        until: NDArray[np.int32] | None = None,
    ) -> AttentionGroup:  # fmt: skip
        """Return the group of G requests that read `width` pages from page `begin [G]` on; positions count from there.

        page_table `[G, P]`; kv_len and own_pages `[G]`; tokens, positions, real and until `[G, Q]`."""
        position = positions[:, :, None]
        key = np.arange(width * self._page_size)
        visible = key <= (position if until is None else until[:, :, None])
        if window:
            visible &= key > position - window
        mask = np.where(visible, np.float32(0), np.float32(-np.inf))  # [G, Q, keys]
        mask = np.repeat(mask[:, None], self._group_size, axis=1)
        # Skip pages reserved for later chunks.
        place = np.arange(width)
        table = np.take_along_axis(page_table, np.minimum(begin[:, None] + place, page_table.shape[1] - 1), 1)
        pages = np.where(place < own_pages[:, None], table, 0)
        # The dummy page past a request's own pages stays finite, so only the request's last page has a stale tail.
        stale = np.flatnonzero((key >= kv_len[:, None]) & (key < (own_pages * self._page_size)[:, None]))

        def index(array: NDArray[np.integer]) -> Tensor:
            return torch.from_numpy(array.astype(np.int64)).to(self._device)

        return AttentionGroup(
            tokens=index(tokens),
            unpad=None if real.all() else index(np.flatnonzero(real)),
            rows=index(tokens[real]),
            pages=index(pages.reshape(-1)),
            mask=torch.from_numpy(mask.reshape(len(tokens), 1, -1, len(key))).to(self._device, self._dtype),
            stale=index(stale),
        )
