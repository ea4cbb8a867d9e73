"""The router of an expert layer: a float32 GEMM and the choice of experts (reference: `reference/experts.py: route`).

Two launches. `_logits_kernel` splits K at fixed places and writes a partial sum for each split, so that few tokens keep
many SMs busy and a token's sum does not depend on the batch. `_choose_kernel` adds the partial sums in order, chooses,
and counts for every `TILE` tokens how many take each expert and each token's rank among them. From that
`experts._scatter_kernel` computes every row's place without a sort.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release
from weft.kernels.matmul.gemm_tiles import live_tokens, row_scale

TILE = 32  # Tokens per program, which are also counted together.
PIECE = 256  # Columns of K that one program adds.
KINDS = {"softmax": 0, "top_softmax": 1, "sigmoid": 2}
SOFTMAX, TOP_SOFTMAX, SIGMOID = (tl.constexpr(kind) for kind in KINDS.values())
NEVER = tl.constexpr(-1e30)  # Score of an expert that must not be chosen; chosen ones are -inf.


class Choice(NamedTuple):
    """The experts that compute each token of an iteration."""

    experts: Tensor  # [T, K] int32
    weights: Tensor  # [T, K] float32
    rank: Tensor  # [T, K] int32: earlier tokens of the same tile that take this expert.
    counts: Tensor  # [tiles, E] int32: tokens of each tile that take each expert.
    logits: Tensor  # [pieces, T, E] float32: scratch.

    def of_tokens(self, begin: int, end: int) -> Choice:
        """Return the choice of tokens `[begin, end)`; `begin` is a multiple of `TILE`."""
        own = slice(begin, end)
        tiles = slice(begin // TILE, -(-end // TILE))
        return Choice(
            self.experts[own], self.weights[own], self.rank[own], self.counts[tiles], self.logits[:, own]
        )  # fmt: skip


def choice_buffers(tokens: int, hidden: int, count: int, top: int, device: torch.device | str) -> Choice:
    """Allocate buffers for `tokens` tokens."""

    def buffer(*shape: int, dtype: torch.dtype = torch.int32) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=device)

    return Choice(
        buffer(tokens, top), buffer(tokens, top, dtype=torch.float32), buffer(tokens, top),
        buffer(-(-tokens // TILE), count), buffer(-(-hidden // PIECE), tokens, count, dtype=torch.float32),
    )  # fmt: skip


@triton.jit
def _split_float32(w):
    """Split float32 into a sum of two numbers that tensor cores represent (10 fraction bits); error 2^-22."""
    high = (w.to(tl.int32, bitcast=True) & -8192).to(tl.float32, bitcast=True)
    return high, w - high


@triton.jit(do_not_specialize=["T"])
def _logits_kernel(
    x, weight, out, count, T, stride_out, H, E: tl.constexpr, EP: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr,
    PIECE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Compute `out[piece]`, the split's part of `x @ weight.T`. x has 16 bits: times two such numbers it is exact."""
    begin(PDL)
    release(PDL)
    live = live_tokens(count, T)
    row0 = tl.program_id(0) * BT
    if row0 >= live:
        return
    rows = row0 + tl.arange(0, BT)
    expert = tl.arange(0, EP)
    acc = tl.zeros([BT, EP], tl.float32)
    for step in tl.range(0, PIECE, BK):
        k = tl.program_id(1) * PIECE + step + tl.arange(0, BK)
        a = tl.load(
            x + rows.to(tl.int64)[:, None] * H + k[None, :], mask=(rows < live)[:, None] & (k < H)[None, :], other=0.0
        ).to(tl.float32)
        w = tl.load(weight + expert[None, :] * H + k[:, None], mask=(expert < E)[None, :] & (k < H)[:, None], other=0.0)
        high, low = _split_float32(w)
        acc = tl.dot(a, high, acc, input_precision="tf32")
        acc = tl.dot(a, low, acc, input_precision="tf32")
    at = out + tl.program_id(1) * stride_out + rows[:, None] * E + expert[None, :]
    tl.store(at, acc, mask=(rows < live)[:, None] & (expert < E)[None, :])


@triton.jit
def _in_groups(choice, expert, E: tl.constexpr, BT: tl.constexpr, EP: tl.constexpr, GROUPS: tl.constexpr,
               TOP_GROUPS: tl.constexpr):  # fmt: skip
    """Return `NEVER` outside the best groups; a group's score is the sum of its two best."""
    group = expert // (E // GROUPS)
    GP: tl.constexpr = triton.next_power_of_2(GROUPS)
    column = tl.arange(0, GP)
    value = tl.full([BT, GP], float("-inf"), tl.float32)
    for g in tl.static_range(GROUPS):
        mine = tl.where((group == g)[None, :], choice, float("-inf"))
        best = tl.max(mine, axis=1)
        at = tl.argmax(mine, axis=1)
        second = tl.max(tl.where(expert[None, :] == at[:, None], float("-inf"), mine), axis=1)
        value = tl.where((column == g)[None, :], (best + second)[:, None], value)
    keep = tl.zeros([BT, EP], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        at = tl.argmax(value, axis=1)
        keep = tl.where(group[None, :] == at[:, None], 1, keep)
        value = tl.where(column[None, :] == at[:, None], float("-inf"), value)
    return tl.where((keep == 1) | (choice == float("-inf")), choice, NEVER)


@triton.jit(do_not_specialize=["T", "stride_sumsq"])
def _choose_kernel(
    logits, stride_logits, sumsq, stride_sumsq, bias, choice_bias, experts, weights, rank, counts, num_tokens, T, H,
    eps, scaling, E: tl.constexpr, EP: tl.constexpr, K: tl.constexpr, KP: tl.constexpr, BT: tl.constexpr,
    PIECES: tl.constexpr,
    PARTS: tl.constexpr, KIND: tl.constexpr, NORMALISE: tl.constexpr, GROUPS: tl.constexpr, TOP_GROUPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    live = live_tokens(num_tokens, T)
    rows = tl.program_id(0) * BT + tl.arange(0, BT)
    real = rows < live
    expert = tl.arange(0, EP)
    some = real[:, None] & (expert < E)[None, :]
    total = tl.zeros([BT, EP], tl.float32)
    for piece in tl.range(0, PIECES):
        total += tl.load(logits + piece * stride_logits + rows[:, None] * E + expert[None, :], mask=some, other=0.0)
    if sumsq is not None:
        total *= row_scale(sumsq, rows, live, stride_sumsq, H, eps, PARTS)[:, None]
    if bias is not None:
        total += tl.load(bias + expert, mask=expert < E, other=0.0)[None, :]
    # NaN must not choose the same expert twice; the residual stream it came from reports it.
    total = tl.where(total == total, total, NEVER)
    total = tl.where((expert < E)[None, :], total, float("-inf"))
    if KIND == SOFTMAX:
        powers = tl.exp(total - tl.max(total, axis=1)[:, None])
        scores = powers / tl.sum(powers, axis=1)[:, None]
    elif KIND == SIGMOID:
        scores = 1.0 / (1.0 + tl.exp(-total))
    else:
        scores = total
    choice = scores
    if choice_bias is not None:
        choice += tl.load(choice_bias + expert, mask=expert < E, other=0.0)[None, :]
    choice = tl.where(choice == choice, choice, NEVER)
    choice = tl.where((expert < E)[None, :], choice, float("-inf"))
    if GROUPS > 1:
        choice = _in_groups(choice, expert, E, BT, EP, GROUPS, TOP_GROUPS)

    column = tl.arange(0, KP)
    picks = tl.zeros([BT, KP], tl.int32)
    for k in tl.static_range(K):
        at = tl.argmax(choice, axis=1).to(tl.int32)
        picks = tl.where((column == k)[None, :], at[:, None], picks)
        choice = tl.where(expert[None, :] == at[:, None], float("-inf"), choice)
    taken = tl.gather(scores, picks, axis=1)
    if KIND == TOP_SOFTMAX:
        best = tl.max(tl.where((column < K)[None, :], taken, float("-inf")), axis=1)
        taken = tl.exp(taken - best[:, None])
    taken = tl.where((column < K)[None, :], taken, 0.0)
    if KIND == TOP_SOFTMAX:
        taken /= tl.sum(taken, axis=1)[:, None]
    elif NORMALISE:
        taken /= (tl.sum(taken, axis=1) + (1e-20 if KIND == SIGMOID else 0.0))[:, None]
    ones = ((choice == float("-inf")) & some).to(tl.int32)
    before = tl.cumsum(ones, axis=0) - ones
    at = rows[:, None] * K + column[None, :]
    mask = real[:, None] & (column < K)[None, :]
    tl.store(experts + at, picks, mask=mask)
    tl.store(weights + at, taken * scaling, mask=mask)
    tl.store(rank + at, tl.gather(before, picks, axis=1), mask=mask)
    tl.store(counts + tl.program_id(0) * E + expert, tl.sum(ones, axis=0), mask=expert < E)


def route(
    x: Tensor, sumsq: Tensor | None, weight: Tensor, eps: float, *, kind: str, top: int, normalise: bool,
    scaling: float = 1.0, bias: Tensor | None = None, choice_bias: Tensor | None = None, groups: int = 1,
    top_groups: int = 1, out: Choice, num_tokens: Tensor | None = None,
) -> Choice:  # fmt: skip
    """See the reference. x `[T, H]` of 16 bits, sumsq `[sums, T]` float32, weight `[E, H]` float32.

    num_tokens `[1]` int32 in device memory: rows from there on choose nothing and are not counted."""
    tokens, hidden = x.shape
    count = weight.shape[0]
    padded = max(16, triton.next_power_of_2(count))
    tiles, pieces = -(-tokens // TILE), -(-hidden // PIECE)
    early = pdl_options()
    _logits_kernel[(tiles, pieces)](
        x, weight, out.logits, num_tokens, tokens, out.logits.stride(0), hidden, E=count, EP=padded, BT=TILE,
        BK=64 if padded <= 128 else 32, PIECE=PIECE, num_warps=4, num_stages=3, **early,
    )  # fmt: skip
    _choose_kernel[(tiles,)](
        out.logits, out.logits.stride(0), sumsq, 0 if sumsq is None else sumsq.stride(0), bias, choice_bias,
        out.experts, out.weights, out.rank, out.counts, num_tokens, tokens, hidden, eps, scaling, E=count, EP=padded,
        K=top, KP=max(4, triton.next_power_of_2(top)), BT=TILE, PIECES=pieces,
        PARTS=1 if sumsq is None else sumsq.shape[0], KIND=KINDS[kind],
        NORMALISE=normalise, GROUPS=groups, TOP_GROUPS=top_groups, num_warps=max(4, min(16, padded // 16)), **early,
    )  # fmt: skip
    return out
