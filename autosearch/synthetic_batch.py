"""`batch_of`: a synthetic iteration with a given `Load`, for benches."""

from __future__ import annotations

from typing import Any

import numpy as np

from weft.autosearch.bench_protocol import Load
from weft.engine.runner.iteration.batch import Batch, SamplingInputs


def batch_of(load: Load, page_size: int) -> Batch:
    """Build an iteration: decodes with `context` tokens ±25 %, then full prompts and one partial prompt."""
    rng = np.random.default_rng(0)
    spread = rng.uniform(0.75, 1.25, load.decodes)
    decodes = np.maximum(1, load.context * spread / spread.mean() if load.decodes else spread).astype(np.int32)
    chunks: list[int] = []
    while sum(chunks) < load.prefill_tokens:
        chunks.append(min(max(1, load.prompt), load.prefill_tokens - sum(chunks)))
    query_len = np.array([1] * load.decodes + chunks, np.int32)
    kv_len = np.concatenate((decodes, np.array(chunks, np.int32)))
    pages = -(-kv_len // page_size)
    first = 1 + np.cumsum(pages) - pages
    # the pages of a request are scattered in a pool that has been in use
    shuffled = np.concatenate(([0], 1 + rng.permutation(int(pages.sum())))).astype(np.int32)
    column = np.arange(int(pages.max()))
    at = np.minimum(first[:, None] + column, int(pages.sum()))
    table = np.where(column < pages[:, None], shuffled[at], 0).astype(np.int32)
    positions = np.concatenate([np.arange(k - q, k) for q, k in zip(query_len, kv_len, strict=True)]).astype(np.int32)
    rows = np.repeat(np.arange(len(query_len)), query_len)
    slots = np.arange(len(query_len), dtype=np.int32)
    none: Any = np.zeros(0, np.int32)
    return Batch(
        step=1, num_decodes=load.decodes, slots=slots, epochs=slots, query_len=query_len, kv_len=kv_len,
        token_ids=np.zeros(load.tokens, np.int32), positions=positions,
        slot_mapping=table[rows, positions // page_size].astype(np.int64) * page_size + positions % page_size,
        page_table=table, sampled_rows=none, sampling=SamplingInputs.none(),
        count_resets=(), prompt_logprobs=(),
    )  # fmt: skip
