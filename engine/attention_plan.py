"""Plans the attention of one iteration on the host: which requests share a padded call, and its masks."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from weft.engine.batch import I32, Batch
from weft.kernels.reference import AttentionGroup, AttentionWork


def _similar(lengths: I32) -> Iterator[np.ndarray]:
    """Split rows into groups whose lengths differ by less than a factor of two: padding wastes less than half."""
    bucket = np.ceil(np.log2(np.maximum(lengths, 1))).astype(np.int32)
    for b in np.unique(bucket):
        yield np.flatnonzero(bucket == b)


def plan_attention(batch: Batch, page_size: int, heads_per_kv: int) -> AttentionWork:
    """Group the batch's requests for `kernels.reference.paged_attention`."""
    starts = np.cumsum(batch.query_len) - batch.query_len
    num_pages = -(-batch.kv_len // page_size)
    d = batch.num_decodes
    groups: list[AttentionGroup] = []
    if d:
        groups += [_group(batch, rows, starts, num_pages, page_size, heads_per_kv) for rows in _similar(num_pages[:d])]
    if d < batch.num_requests:
        for rows in _similar(batch.query_len[d:]):
            groups.append(_group(batch, rows + d, starts, num_pages, page_size, heads_per_kv))
    return AttentionWork(tuple(groups))


def _group(
    batch: Batch, rows: np.ndarray, starts: np.ndarray, num_pages: np.ndarray, page_size: int, heads_per_kv: int
) -> AttentionGroup:
    query_len, kv_len = batch.query_len[rows], batch.kv_len[rows]
    queries, width = int(query_len.max()), int(num_pages[rows].max())
    column = np.arange(queries)
    real = column < query_len[:, None]  # [G, Q]
    # Padding repeats the request's first token: it attends to something and its result is thrown away.
    tokens = starts[rows][:, None] + np.where(real, column, 0)
    last = (kv_len - query_len)[:, None] + np.where(real, column, 0)  # [G, Q] position of each query
    key = np.arange(width * page_size)
    mask = key[None, None, :] <= last[:, :, None]  # [G, Q, keys]
    mask = np.broadcast_to(mask[:, None], (len(rows), heads_per_kv, queries, len(key)))
    pages = batch.page_table[rows, :width]
    stale = np.flatnonzero(key[None, :] >= kv_len[:, None])
    padded = not bool(real.all())
    return AttentionGroup(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        unpad=torch.from_numpy(np.flatnonzero(real)) if padded else None,
        rows=torch.from_numpy(tokens[real].astype(np.int64)),
        pages=torch.from_numpy(pages.reshape(-1).astype(np.int64)),
        mask=torch.from_numpy(mask.reshape(len(rows), 1, heads_per_kv * queries, len(key)).copy()),
        stale=torch.from_numpy(stale),
    )
