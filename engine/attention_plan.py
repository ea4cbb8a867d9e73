"""Plans the attention of one iteration on the host: which requests share a padded call, and its masks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

from weft.engine.batch import I32, Batch
from weft.kernels.reference import AttentionGroup, AttentionWork


def _similar(lengths: I32) -> Iterator[np.ndarray]:
    """Split rows into groups whose lengths differ by less than a factor of two: padding wastes less than half."""
    bucket = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int32)
    for b in np.unique(bucket):
        yield np.flatnonzero(bucket == b)


class AttentionPlanner:
    """Groups each batch's requests for `kernels.reference.paged_attention`; owns the scratch of the gathered pages."""

    def __init__(self, kv: Tensor, num_heads: int) -> None:
        self._page_size, num_kv_heads, head_dim = kv.shape[3:]
        self._heads_per_kv = num_heads // num_kv_heads
        self._page_elements = self._page_size * num_kv_heads * head_dim
        self._scratch = torch.zeros(2, 0, dtype=kv.dtype)

    def plan(self, batch: Batch) -> AttentionWork:
        num_pages = -(-batch.kv_len // self._page_size)
        d = batch.num_decodes
        rows = [*_similar(num_pages[:d])] if d else []
        if d < batch.num_requests:
            rows += [r + d for r in _similar(batch.query_len[d:])]
        groups = tuple(self._group(batch, r, num_pages) for r in rows)
        needed = max(len(g.pages) for g in groups) * self._page_elements
        if needed > self._scratch.shape[1]:
            self._scratch = torch.zeros(2, needed, dtype=self._scratch.dtype)
        return AttentionWork(groups, self._scratch)

    def _group(self, batch: Batch, rows: np.ndarray, num_pages: np.ndarray) -> AttentionGroup:
        query_len, kv_len, own_pages = batch.query_len[rows], batch.kv_len[rows], num_pages[rows]
        starts = (np.cumsum(batch.query_len) - batch.query_len)[rows]
        queries, width = int(query_len.max()), int(own_pages.max())
        column = np.arange(queries)
        real = column < query_len[:, None]  # [G, Q]
        # Padding repeats the request's first token: it attends to something and its result is thrown away.
        offset = np.where(real, column, 0)
        tokens = starts[:, None] + offset
        position = (kv_len - query_len)[:, None] + offset
        key = np.arange(width * self._page_size)
        mask = np.where(key <= position[:, :, None], np.float32(0), np.float32(-np.inf))  # [G, Q, keys]
        mask = np.repeat(mask[:, None], self._heads_per_kv, axis=1)
        # Pages reserved for later chunks are left out.
        pages = np.where(np.arange(width) < own_pages[:, None], batch.page_table[rows, :width], 0).astype(np.int64)
        # Beyond a request's own pages lies the dummy page, which stays finite: only its own last page has a stale tail.
        stale = np.flatnonzero((key >= kv_len[:, None]) & (key < (own_pages * self._page_size)[:, None]))
        return AttentionGroup(
            tokens=torch.from_numpy(tokens.astype(np.int64)),
            unpad=None if real.all() else torch.from_numpy(np.flatnonzero(real)),
            rows=torch.from_numpy(tokens[real].astype(np.int64)),
            pages=torch.from_numpy(pages.reshape(-1)),
            mask=torch.from_numpy(mask.reshape(len(rows), 1, -1, len(key))).to(self._scratch.dtype),
            stale=torch.from_numpy(stale),
        )
