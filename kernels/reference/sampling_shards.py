"""The torch twin of sampling where each rank has the logits of some token ids: a few numbers a row are exchanged.

Rank r has the ids behind those of rank r - 1, so the order of ranks is that of ids. Every rank is given the same
numbers and comes to the same tokens; nobody ever has all logits of a row. What comes out is what `sampling` would
choose: ties go to the lower id there and here, and a draw walks through the ids in order. Sums are in another order, so
a draw that falls within rounding of a border between two tokens may pick the other one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

Gather = Callable[[Tensor], Tensor]
"""`[...]` of this rank -> `[ranks, ...]`, in rank order"""
CANDIDATES = 64
"""of each rank, shown at first, where a top-p cut is looked for; then four times as many, until it is found"""


class Shard(NamedTuple):
    """Whose logits these are."""

    first: int
    """id of the first column"""
    rank: int
    gather: Gather
    sizes: tuple[int, ...] = ()
    """columns of each rank; empty: not known, then it is asked"""

    def with_sizes(self, logits: Tensor) -> Shard:
        """logits: any of this rank's."""
        if self.sizes:
            return self
        own = torch.tensor([logits.shape[-1]], device=logits.device)
        return self._replace(sizes=tuple(self.gather(own)[:, 0].tolist()))


class Asked(NamedTuple):
    """What the parameters of rows come to, for who knows them without asking the device. Places are int64."""

    rows: Tensor
    """which are drawn: the others take the best"""
    cut: Tensor
    """which of these have a top-k or top-p"""
    top_k: int
    """the largest of these; 0 where none has one"""
    counted: bool
    """all of these have one"""

    @classmethod
    def of(cls, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Asked:
        rows = torch.nonzero(temperature > 0)[:, 0]
        k, p = top_k[rows], top_p[rows]
        cut = torch.nonzero((k > 0) | (p < 1.0))[:, 0]
        k = k[cut]
        return cls(rows, cut, int(k.max()) if len(cut) else 0, bool((k > 0).all()))


class Best(NamedTuple):
    """Over all ranks."""

    value: Tensor
    """[S] float32; NaN where any logit is"""
    token: Tensor
    """[S] int64; the lowest id with this value"""


def best_of(logits: Tensor, shard: Shard) -> Best:
    """The best of each row of `logits [S, n]` float32."""
    at = logits.argmax(-1)
    mine = torch.stack((logits.gather(-1, at[:, None])[:, 0].double(), (at + shard.first).double()), -1)
    values, tokens = shard.gather(mine).unbind(-1)
    rank = values.argmax(0)  # the first one of equal ones, and whatever is NaN
    return Best(values.amax(0).float(), tokens.gather(0, rank[None])[0].long())


def sample(
    logits: Tensor,
    shard: Shard,
    *,
    temperature: Tensor,
    top_k: Tensor,
    top_p: Tensor,
    min_p: Tensor,
    uniform: Tensor,
    asked: Asked | None = None,
) -> tuple[Tensor, Tensor]:
    """As `sampling.sample`, and as `sampling.nonfinite`: tokens `[S]` int64, rows without numbers `[S]` bool.

    logits `[S, n]` float32 of this rank, n at least 1; the other arguments are the same on all ranks. With `asked`, and
    a shard that knows its sizes, nothing waits for a device but a top-p that is alone.
    """
    asked = asked or Asked.of(temperature, top_k, top_p)
    best = best_of(logits, shard)
    nonfinite = ~best.value.isfinite()
    rows, cut = asked.rows, asked.cut
    if not len(rows):
        return best.token, nonfinite
    warmth, fine = temperature[rows, None], ~nonfinite[rows, None]
    # Of rows that are no numbers any token will do.
    weights = torch.where(fine, (logits[rows] / warmth - best.value[rows, None] / warmth).exp(), 1.0)
    k, p = top_k[rows], top_p[rows]
    if len(cut):
        bar, last = _bar(weights[cut], shard.with_sizes(logits), k[cut], p[cut], asked)
        ids = shard.first + torch.arange(weights.shape[1], device=weights.device)
        part = weights[cut]
        kept = (part > bar[:, None]) | ((part == bar[:, None]) & (ids <= last[:, None]))
        weights[cut] = part * kept
    weights = weights * (weights >= min_p[rows, None])  # the best one's is 1
    tokens = best.token.clone()
    tokens[rows] = _draw(weights.double(), shard, uniform[rows])
    return tokens, nonfinite


def _bar(weights: Tensor, shard: Shard, top_k: Tensor, top_p: Tensor, asked: Asked) -> tuple[Tensor, Tensor]:
    """Where top-k and top-p cut: the last one kept of each row of `weights [S, n]` when all ranks' are sorted (the best
    first, of equal ones the lower id): its weight `[S]` and id `[S]`.

    Every rank shows its best: as many as top-k asks for; for top-p alone a few, then more, until the cut lies above
    what somebody has not shown. So what is exchanged is about what is kept.
    """
    ordered, order = torch.sort(weights, dim=-1, descending=True, stable=True)
    whole = shard.gather(weights.double().sum(-1)).sum(0)
    sizes, counted = shard.sizes, top_k > 0
    shown = max(asked.top_k, 0 if asked.counted else CANDIDATES)
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
        # What a rank has not shown comes behind the last that it has.
        hidden = [r for r, size in enumerate(sizes) if size > shown]
        if not hidden or asked.counted:
            break
        where = torch.empty_like(places).scatter_(-1, places, rank.expand_as(places))
        horizon = torch.stack([where[:, r * shown + shown - 1] for r in hidden]).amin(0)
        if bool((counted | (at <= horizon)).all()):
            break
        shown *= 4
    at = at[:, None]
    return values.gather(-1, at)[:, 0].to(weights.dtype), all_ids.gather(-1, places.gather(-1, at))[:, 0].long()


def _draw(weights: Tensor, shard: Shard, uniform: Tensor) -> Tensor:
    """One token `[S]` int64 of each row: the inverse of the cumulative sum of all ranks' `weights [S, n]` float64."""
    masses = shard.gather(weights.sum(-1))
    until = masses.cumsum(0)
    target = uniform.double() * until[-1]
    over = (until > target) & (masses > 0)
    # Rounding may leave nobody above the target: then it is the last token with any weight.
    owner = torch.where(over.any(0), _first(over, 0), _last(masses > 0, 0))
    # Every rank answers as if it were the owner.
    own = weights.cumsum(-1)
    above = (own > (target - (until[shard.rank] - masses[shard.rank]))[:, None]) & (weights > 0)
    at = torch.where(above.any(-1), _first(above, -1), _last(weights > 0, -1))
    return shard.gather(at + shard.first).gather(0, owner[None])[0]


def _first(marks: Tensor, dim: int) -> Tensor:
    """Where the first one stands along `dim`; 0 where there is none."""
    return marks.to(torch.uint8).argmax(dim)


def _last(marks: Tensor, dim: int) -> Tensor:
    return marks.shape[dim] - 1 - _first(marks.flip(dim), dim)


def _row_sums(x: Tensor) -> Tensor:
    """Of `x [n, V]`, `[n]` float64, in an order that V alone decides: torch's own sums follow n, too."""
    x = x.to(torch.float64, copy=True)
    while (width := x.shape[-1]) > 1:
        half = -(-width // 2)
        x[:, : width - half] += x[:, half:]
        x = x[:, :half]
    return x[:, 0]


def logprobs_of(logits: Tensor, shard: Shard, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """As `sampling.logprobs_of`, of this rank's `logits [n, V / ranks]` float32. `tokens [n]` may be anybody's."""
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
