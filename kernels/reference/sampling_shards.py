"""Reference implementation of sampling with logits sharded by token id: ranks exchange a few numbers per row.

Rank r has the ids after those of rank r - 1, so the order of ranks is that of ids. All ranks receive the same numbers
and choose the same tokens; no rank ever has all logits of a row. The choice matches `sampling`: ties go to the lower
id, and a draw walks through the ids in order. Sums are added in another order, so a draw within rounding of a border
between two tokens may pick the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]  # Gathers `[...]` of this rank into `[ranks, ...]`, in rank order.
CANDIDATES = 64
"""Candidates per rank in the first search for a top-p cut; four times as many in each further one."""


class Shard(NamedTuple):
    """The range of the vocabulary that a rank's logits cover."""

    first: int  # Id of the first column.
    rank: int
    gather: Gather
    sizes: tuple[int, ...] = ()  # Columns of each rank; empty: not known yet, and then exchanged.

    def with_sizes(self, logits: Tensor) -> Shard:
        """Return the shard with known sizes. logits: any of this rank's."""
        if self.sizes:
            return self
        own = torch.tensor([logits.shape[-1]], device=logits.device)
        return self._replace(sizes=tuple(self.gather(own)[:, 0].tolist()))


class SamplingSummary(NamedTuple):
    """A summary of the rows' parameters for callers that have it without reading the device. Indices are int64."""

    rows: Tensor  # Rows that are drawn; the others take the best token.
    cut: Tensor  # Drawn rows with a top-k or top-p.
    top_k: int  # The largest top-k of these; 0 if there is none.
    counted: bool  # Whether all of these have a top-k.

    @classmethod
    def of(cls, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> SamplingSummary:
        rows = torch.nonzero(temperature > 0)[:, 0]
        k, p = top_k[rows], top_p[rows]
        cut = torch.nonzero((k > 0) | (p < 1.0))[:, 0]
        k = k[cut]
        return cls(rows, cut, int(k.max()) if len(cut) else 0, bool((k > 0).all()))


class Best(NamedTuple):
    """The best tokens over all ranks."""

    value: Tensor  # [S] float32; NaN if any logit is.
    token: Tensor  # [S] int64; the lowest id with this value.


def best_of(logits: Tensor, shard: Shard) -> Best:
    """Return the best token of each row of `logits [S, n]` float32."""
    at = logits.argmax(-1)
    mine = torch.stack((logits.gather(-1, at[:, None])[:, 0].double(), (at + shard.first).double()), -1)
    values, tokens = shard.gather(mine).unbind(-1)
    rank = values.argmax(0)  # the first of equal values, or NaN
    return Best(values.amax(0).float(), tokens.gather(0, rank[None])[0].long())


def sample(
    logits: Tensor, shard: Shard, *, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor,
    summary: SamplingSummary | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Sample as `sampling.sample` and check as `sampling.nonfinite`: tokens `[S]` int64, nonfinite rows `[S]` bool.

    logits `[S, n]` float32 of this rank, n at least 1; the other arguments are the same on all ranks. With a summary
    and known shard sizes, only a top-p without top-k waits for the device."""
    summary = summary or SamplingSummary.of(temperature, top_k, top_p)
    best = best_of(logits, shard)
    nonfinite = ~best.value.isfinite()
    rows, cut = summary.rows, summary.cut
    if not len(rows):
        return best.token, nonfinite
    warmth, fine = temperature[rows, None], ~nonfinite[rows, None]
    # Nonfinite rows may return any token.
    weights = torch.where(fine, (logits[rows] / warmth - best.value[rows, None] / warmth).exp(), 1.0)
    k, p = top_k[rows], top_p[rows]
    if len(cut):
        bar, last = _cutoff(weights[cut], shard.with_sizes(logits), k[cut], p[cut], summary)
        ids = shard.first + torch.arange(weights.shape[1], device=weights.device)
        part = weights[cut]
        kept = (part > bar[:, None]) | ((part == bar[:, None]) & (ids <= last[:, None]))
        weights[cut] = part * kept
    weights = weights * (weights >= min_p[rows, None])  # the best token's weight is 1
    tokens = best.token.clone()
    tokens[rows] = _draw(weights.double(), shard, uniform[rows])
    return tokens, nonfinite


def _cutoff(
    weights: Tensor, shard: Shard, top_k: Tensor, top_p: Tensor, summary: SamplingSummary
) -> tuple[Tensor, Tensor]:
    """Return weight `[S]` and id `[S]` of the last token that top-k and top-p keep in each row of `weights [S, n]`.

    Tokens of all ranks are ordered best first, ties by id. Every rank shows its best: as many as top-k requires; for
    top-p alone a few, then more, until the cut lies above everything hidden. So ranks exchange about as much as is
    kept."""
    ordered, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    whole = shard.gather(weights.double().sum(-1)).sum(0)
    sizes, counted = shard.sizes, top_k > 0
    shown = max(summary.top_k, 0 if summary.counted else CANDIDATES)
    while True:
        shown = min(shown, max(sizes))
        mine = torch.full((*weights.shape[:1], shown, 2), -1.0, dtype=torch.float64, device=weights.device)
        mine[:, : ordered.shape[1], 0] = ordered[:, :shown].double()
        mine[:, : ordered.shape[1], 1] = (order[:, :shown] + shard.first).double()
        all_values, all_ids = shard.gather(mine).transpose(0, 1).flatten(1, 2).unbind(-1)
        values, places = torch.sort(all_values, dim=-1, descending=True, stable=True)
        rank = torch.arange(values.shape[1], device=values.device)
        kept = (values >= 0) & (rank < torch.where(counted, top_k, values.shape[1])[:, None])
        mass = torch.where(kept, values, 0.0)
        total = torch.where(counted, mass.sum(-1), whole)
        before = mass.cumsum(-1) - mass
        kept &= (before < top_p.double()[:, None] * total[:, None]) | (rank == 0)
        at = kept.sum(-1) - 1
        # Hidden tokens of a rank come after the last one it has shown.
        hidden = [r for r, size in enumerate(sizes) if size > shown]
        if not hidden or summary.counted:
            break
        where = torch.empty_like(places).scatter_(-1, places, rank.expand_as(places))
        horizon = torch.stack([where[:, r * shown + shown - 1] for r in hidden]).amin(0)
        if bool((counted | (at <= horizon)).all()):
            break
        shown *= 4
    at = at[:, None]
    return values.gather(-1, at)[:, 0].to(weights.dtype), all_ids.gather(-1, places.gather(-1, at))[:, 0].long()


def _draw(weights: Tensor, shard: Shard, uniform: Tensor) -> Tensor:
    """Draw one token `[S]` int64 per row: inverse of the cumulative sum of all ranks' `weights [S, n]` float64."""
    masses = shard.gather(weights.sum(-1))
    until = masses.cumsum(0)
    target = uniform.double() * until[-1]
    over = (until > target) & (masses > 0)
    # If rounding leaves no rank above the target, take the last token with any weight.
    owner = torch.where(over.any(0), _first(over, 0), _last(masses > 0, 0))
    # Every rank computes its answer as if it were the owner.
    own = weights.cumsum(-1)
    above = (own > (target - (until[shard.rank] - masses[shard.rank]))[:, None]) & (weights > 0)
    at = torch.where(above.any(-1), _first(above, -1), _last(weights > 0, -1))
    return shard.gather(at + shard.first).gather(0, owner[None])[0]


def _first(marks: Tensor, dim: int) -> Tensor:
    """Return the index of the first mark along `dim`; 0 if there is none."""
    return marks.to(torch.uint8).argmax(dim)


def _last(marks: Tensor, dim: int) -> Tensor:
    return marks.shape[dim] - 1 - _first(marks.flip(dim), dim)


def _row_sums(x: Tensor) -> Tensor:
    """Return row sums of `x [n, V]` as `[n]` float64 in an order that depends on V alone (torch's: on n too)."""
    x = x.to(torch.float64, copy=True)
    while (width := x.shape[-1]) > 1:
        half = -(-width // 2)
        x[:, : width - half] += x[:, half:]
        x = x[:, :half]
    return x[:, 0]


def logprobs_of(logits: Tensor, shard: Shard, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Like `sampling.logprobs_of`, for this rank's `logits [n, V / ranks]` float32. `tokens [n]` may be of any rank."""
    rows, size = logits.shape
    own = tokens - shard.first
    mine = (own >= 0) & (own < size)
    value = torch.where(mine, logits.gather(-1, own.clamp(0, size - 1)[:, None])[:, 0], -torch.inf)
    peak = logits.amax(-1)
    mass = _row_sums((logits - peak[:, None]).exp())
    values, at = logits.topk(min(top, size), -1)
    shown = torch.full((rows, 3 + 2 * top), -torch.inf, dtype=torch.float64, device=logits.device)
    shown[:, :3] = torch.stack((peak.double(), mass, value.double()), -1)
    shown[:, 3 : 3 + values.shape[1]] = values.double()
    shown[:, 3 + top : 3 + top + values.shape[1]] = (at + shard.first).double()
    everything = shard.gather(shown)
    peaks, masses = everything[..., 0], everything[..., 1]
    peak = peaks.amax(0)
    norm = peak + _row_sums((masses * (peaks - peak).exp()).T).log()
    value = everything[..., 2].amax(0)
    better = shard.gather((logits > value.float()[:, None]).sum(-1)).sum(0)
    values, places = torch.sort(
        everything[..., 3 : 3 + top].transpose(0, 1).flatten(1), dim=-1, descending=True, stable=True
    )
    ids = everything[..., 3 + top :].transpose(0, 1).flatten(1).gather(-1, places)
    known = min(top, sum(shard.with_sizes(logits).sizes))
    best = torch.cat((value[:, None], values[:, :known]), 1) - norm[:, None]
    return better + 1, torch.cat((tokens[:, None], ids[:, :known].long()), 1), best.float()
