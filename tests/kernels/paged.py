"""Iterations over a poisoned pool, and attention by its definition in float64: the oracle of the back ends."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LAYERS, LAYER = 3, 1
SPARE_ROWS = 2
"""rows of q after the last request's: padding of a token bucket"""


class Requests(NamedTuple):
    num_decodes: int
    query_len: np.ndarray
    kv_len: np.ndarray
    page_table: np.ndarray
    until: np.ndarray | None = None


class Iteration(NamedTuple):
    q: Tensor
    kv: Tensor
    """NaN everywhere except in the requests' own tokens and in the dummy page"""
    requests: Requests

    @property
    def num_tokens(self) -> int:
        return int(self.requests.query_len.sum())


def iteration(
    decodes: list[int], chunks: list[tuple[int, int]], heads: int, kv_heads: int, d: int, page: int,
    dtype: torch.dtype = torch.float32, device: str = "cpu", seed: int = 0,
) -> Iteration:  # fmt: skip
    """decodes: visible positions of each. chunks: (positions before the chunk, its queries)."""
    rng = np.random.default_rng(seed)
    torch.manual_seed(seed)
    lengths = np.array([*decodes, *(c + n for c, n in chunks)], np.int32)
    queries = np.array([1] * len(decodes) + [n for _, n in chunks], np.int32)
    own = -(-lengths // page)
    reserved = own + 1  # one page more for a later chunk
    ids = rng.permutation(int(reserved.sum())) + 1
    kv = torch.full((len(ids) + 1, LAYERS, 2, page, kv_heads, d), float("nan"), dtype=dtype)
    kv[0] = 1e4  # the dummy page: finite and wrong
    table = np.zeros((len(lengths), int(reserved.max())), np.int32)
    taken = 0
    for i, n in enumerate(lengths):
        table[i, : reserved[i]] = ids[taken : taken + reserved[i]]
        taken += reserved[i]
        for j in range(own[i]):
            used = min(page, n - j * page)
            kv[table[i, j], LAYER, :, :used] = torch.randn(2, used, kv_heads, d).to(dtype)
    q = torch.randn(int(queries.sum()) + SPARE_ROWS, heads, d).to(dtype)
    return Iteration(q.to(device), kv.to(device), Requests(len(decodes), queries, lengths, table))


def expected(
    it: Iteration, *, window: int | None = None, scale: float | None = None, softcap: float = 0.0,
    sinks: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """`[T, Hq * D]` float64."""
    scale = it.q.shape[2] ** -0.5 if scale is None else scale
    out, first = [], 0
    page = it.kv.shape[3]
    for queries, length, pages in zip(it.requests.query_len, it.requests.kv_len, it.requests.page_table, strict=True):
        own = torch.from_numpy(pages[: -(-length // page)].astype(np.int64)).to(it.kv.device)
        k, v = (it.kv[own, LAYER, i].flatten(0, 1)[:length].double() for i in (0, 1))
        q = it.q[first : first + queries].double()
        first += queries
        for row in range(int(queries)):
            seen = int(length - queries) + row + 1
            for head in range(q.shape[1]):
                mine = head * k.shape[1] // q.shape[1]
                first_seen = max(0, seen - window) if window else 0
                scores = k[first_seen:seen, mine] @ q[row, head] * scale
                if softcap:
                    scores = softcap * (scores / softcap).tanh()
                if sinks is not None:
                    scores = torch.cat((scores, sinks[head : head + 1].double()))
                weights = scores.softmax(0)[: seen - first_seen]
                out.append(weights @ v[first_seen:seen, mine])
    return torch.stack(out).view(it.num_tokens, -1)


def empty_out(it: Iteration) -> Tensor:
    return torch.full((len(it.q), it.q.shape[1] * it.q.shape[2]), float("nan"), dtype=it.q.dtype, device=it.q.device)


def assert_attention(out: Tensor, it: Iteration, tolerance: float, **parts: Any) -> None:
    """The requests' rows are right and the others untouched. parts: see `expected`."""
    want = expected(it, **parts)
    got = out[: it.num_tokens].double()
    assert float((got - want).norm() / want.norm()) < tolerance
    assert bool(out[it.num_tokens :].isnan().all())
