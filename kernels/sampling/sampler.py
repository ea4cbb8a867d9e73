"""Sampling on the GPU without a host sync (reference: `reference/sampling.py: apply_penalties, sample`).

One program per row. Top-k and top-p need no sort: bounds close in on the value of the last kept token until few
candidates are left, and these are ranked exactly. Ties with it stay in id order, as in a stable sort. The draw inverts
the cumulative distribution in token order.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from weft.kernels.common.dependent_launch import begin, pdl_options, release

CANDIDATES = 2048  # Candidates that a row ranks exactly.


@triton.jit
def _penalize_kernel(
    logits, stride, slots, prompt_seen, counts, presence, frequency, repetition, V, BLOCK: tl.constexpr
):
    row = tl.program_id(0)
    f = tl.load(frequency + row)
    p = tl.load(presence + row)
    r = tl.load(repetition + row)
    if (f != 0.0) | (p != 0.0) | (r != 1.0):
        slot = tl.load(slots + row).to(tl.int64)
        at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = at < V
        target = logits + row.to(tl.int64) * stride + at
        x = tl.load(target, mask=mask, other=0.0)
        n = tl.load(counts + slot * V + at, mask=mask, other=0).to(tl.float32)
        seen = (tl.load(prompt_seen + slot * V + at, mask=mask, other=0) != 0) | (n > 0)
        x = tl.where(seen, tl.where(x > 0, x / r, x * r), x)
        tl.store(target, x - f * n - tl.where(n > 0, p, 0.0), mask=mask)


def apply_penalties(
    logits: Tensor, slots: Tensor, prompt_seen: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor,
    repetition: Tensor,
) -> Tensor:  # fmt: skip
    """Apply penalties in place to `logits [S, V]` float32; rows with neutral penalties are not touched.

    slots `[S]` int: row of the resident `prompt_seen [slots, V]` uint8 or bool and `counts [slots, V]` int; penalties
    `[S]`.
    """
    rows, vocabulary = logits.shape
    seen = prompt_seen.view(torch.uint8) if prompt_seen.dtype == torch.bool else prompt_seen
    _penalize_kernel[(rows, triton.cdiv(vocabulary, 4096))](
        logits,
        logits.stride(0),
        slots,
        seen,
        counts,
        presence,
        frequency,
        repetition,
        vocabulary,
        BLOCK=4096,
        num_warps=8,
    )
    return logits


@triton.jit
def _key(x):
    """Map float32 to uint32 in the same order."""
    bits = x.to(tl.uint32, bitcast=True)
    # Not `~bits`: the interpreter of Triton 3.7 cannot invert unsigned numbers.
    return tl.where(bits >> 31 == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)


@triton.jit
def _weight(x, best, inverse):
    """Return the unnormalized probability of a logit; 0 for -inf and NaN."""
    return tl.where(x > float("-inf"), tl.exp((x - best) * inverse), 0.0)


@triton.jit
def _tally(x, w, bar, count, mass, BY_MASS: tl.constexpr):
    """Add the tokens at or above `bar` to lane-wise counts and masses."""
    over = x >= bar
    if BY_MASS:
        mass += tl.where(over, w, 0.0)
    return count + over.to(tl.int32), mass


@triton.jit
def _narrow(lo, hi, inside_lo, inside_hi, bar, count, mass, goal, BY_MASS: tl.constexpr):
    """Move an end of [lo, hi) to `bar`; `inside_*` counts the tokens at or above each end."""
    total = tl.sum(count, axis=0)
    enough = (tl.sum(mass, axis=0) if BY_MASS else total) >= goal
    up = enough & (bar > lo)
    down = (enough == 0) & (bar < hi)
    lo, inside_lo = tl.where(up, bar, lo), tl.where(up, total, inside_lo)
    hi, inside_hi = tl.where(down, bar, hi), tl.where(down, total, inside_hi)
    return lo, hi, inside_lo, inside_hi


@triton.jit
def _cut(row, scratch, V, best, inverse, floor, goal, BY_MASS: tl.constexpr, WIDE: tl.constexpr, CAP: tl.constexpr):
    """Return the key of the last kept token, how many of that key are kept, whether some are cut, and the kept mass.

    By count: keep the `goal` best. By mass: keep the fewest best whose mass reaches `goal`. All are at or above the
    value `floor`. Seven bounds at once close in on the value until at most `CAP` candidates remain, which are ranked
    exactly."""
    lo = floor
    hi = best + tl.abs(best) * 1e-3 + 1e-3
    inside_lo = V
    inside_hi = 0
    doubtful = V
    lane = tl.arange(0, WIDE)
    NARROW: tl.constexpr = WIDE // 2
    middle = lo + (hi - lo) * 0.5
    while (doubtful > CAP) & (middle > lo) & (middle < hi):
        span = (hi - lo) * 0.125
        b1, b2, b3, b4 = lo + span, lo + 2 * span, lo + 3 * span, middle
        b5, b6, b7 = lo + 5 * span, lo + 6 * span, lo + 7 * span
        none = tl.zeros([NARROW], tl.int32)
        c1, c2, c3, c4, c5, c6, c7 = none, none, none, none, none, none, none
        zero = tl.zeros([NARROW], tl.float32)
        m1, m2, m3, m4, m5, m6, m7 = zero, zero, zero, zero, zero, zero, zero
        for start in tl.range(0, V, NARROW, num_stages=6):
            at = start + tl.arange(0, NARROW)
            x = tl.load(row + at, mask=at < V, other=float("-inf"))
            w = _weight(x, best, inverse) if BY_MASS else x
            c1, m1 = _tally(x, w, b1, c1, m1, BY_MASS)
            c2, m2 = _tally(x, w, b2, c2, m2, BY_MASS)
            c3, m3 = _tally(x, w, b3, c3, m3, BY_MASS)
            c4, m4 = _tally(x, w, b4, c4, m4, BY_MASS)
            c5, m5 = _tally(x, w, b5, c5, m5, BY_MASS)
            c6, m6 = _tally(x, w, b6, c6, m6, BY_MASS)
            c7, m7 = _tally(x, w, b7, c7, m7, BY_MASS)
        lo, hi, inside_lo, inside_hi = _narrow(lo, hi, inside_lo, inside_hi, b4, c4, m4, goal, BY_MASS)
        lo, hi, inside_lo, inside_hi = _narrow(lo, hi, inside_lo, inside_hi, b2, c2, m2, goal, BY_MASS)
        lo, hi, inside_lo, inside_hi = _narrow(lo, hi, inside_lo, inside_hi, b6, c6, m6, goal, BY_MASS)
        lo, hi, inside_lo, inside_hi = _narrow(lo, hi, inside_lo, inside_hi, b1, c1, m1, goal, BY_MASS)
        lo, hi, inside_lo, inside_hi = _narrow(lo, hi, inside_lo, inside_hi, b3, c3, m3, goal, BY_MASS)
        lo, hi, inside_lo, inside_hi = _narrow(lo, hi, inside_lo, inside_hi, b5, c5, m5, goal, BY_MASS)
        lo, hi, inside_lo, inside_hi = _narrow(lo, hi, inside_lo, inside_hi, b7, c7, m7, goal, BY_MASS)
        middle = lo + (hi - lo) * 0.5
        doubtful = inside_lo - inside_hi
    # certain tokens, and candidates in id order
    sure_count = 0
    sure_mass = 0.0
    found = 0
    for start in tl.range(0, V, WIDE, num_stages=4):
        at = start + lane
        x = tl.load(row + at, mask=at < V, other=float("-inf"))
        sure_mass += tl.sum(tl.where(x >= hi, _weight(x, best, inverse), 0.0), axis=0)
        sure_count += tl.sum((x >= hi).to(tl.int32), axis=0)
        mine = (x >= lo) & (x < hi)
        place = found + tl.cumsum(mine.to(tl.int32), axis=0) - 1
        tl.store(scratch + place, x, mask=mine & (place < CAP))
        found += tl.sum(mine.to(tl.int32), axis=0)
    tl.debug_barrier()  # other threads read these stores
    slot = tl.arange(0, CAP)
    x = tl.load(scratch + slot, mask=slot < found, other=float("-inf"))
    tl.debug_barrier()  # and a second cut must not overwrite them earlier
    w = _weight(x, best, inverse)
    key = tl.where(slot < found, _key(x), 0)
    low = _key(lo)
    high = _key(hi)
    if found <= CAP:
        for _ in range(32):
            mid = low + (high - low) // 2
            if BY_MASS:
                enough = sure_mass + tl.sum(tl.where(key >= mid, w, 0.0), axis=0) >= goal
            else:
                enough = sure_count + tl.sum((key >= mid).to(tl.int32), axis=0) >= goal
            low = tl.where(enough, mid, low)
            high = tl.where(enough, high, mid)
        sure_mass += tl.sum(tl.where(key > low, w, 0.0), axis=0)
        sure_count += tl.sum((key > low).to(tl.int32), axis=0)
        found = tl.sum((key == low).to(tl.int32), axis=0)
    # else: more ties than fit, all of the value `lo`
    each = _weight(_unkey(low), best, inverse)
    if BY_MASS:
        wanted = tl.minimum(tl.ceil((goal - sure_mass) / tl.maximum(each, 1e-38)), 1e9).to(tl.int32)
    else:
        wanted = goal - sure_count
    stay = tl.minimum(tl.maximum(wanted, 1), found)
    return low, stay, found, sure_mass + stay * each


@triton.jit
def _unkey(key):
    bits = tl.where(key >> 31 == 1, key & 0x7FFFFFFF, key ^ 0xFFFFFFFF)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _kept(x, at, V, best, inverse, min_p, cut, limited, ties_left):
    """Return the weights of one block, zero for cut tokens, and how many ties it holds (if needed)."""
    key = _key(x)
    stays = (key >= cut) & (at < V)
    ties = 0
    if limited:
        tie = (key == cut) & (at < V)
        ties = tl.sum(tie.to(tl.int32), axis=0)
        stays = stays & ((key > cut) | (tl.cumsum(tie.to(tl.int32), axis=0) <= ties_left))
    w = _weight(x, best, inverse)
    return tl.where(stays & (w >= min_p), w, 0.0), ties


@triton.jit
def _sample_kernel(
    logits, stride, temperature, top_k, top_p, min_p, uniform, out, bad, scratch, counts, slots, V,
    HAS_BAD: tl.constexpr, HAS_COUNTS: tl.constexpr, WIDE: tl.constexpr, BLOCKS: tl.constexpr, CAP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    begin(PDL)
    release(PDL)
    index = tl.program_id(0)
    row = logits + index.to(tl.int64) * stride
    mine = scratch + index.to(tl.int64) * CAP
    t = tl.load(temperature + index)
    lane = tl.arange(0, WIDE)
    best_of = tl.full([WIDE], float("-inf"), tl.float32)
    least_of = tl.full([WIDE], float("inf"), tl.float32)
    where = tl.zeros([WIDE], tl.int32)
    for start in tl.range(0, V, WIDE, num_stages=4):
        at = start + lane
        x = tl.load(row + at, mask=at < V, other=float("-inf"))
        where = tl.where(x > best_of, at, where)
        best_of = tl.maximum(best_of, x, propagate_nan=tl.PropagateNan.ALL)
        least_of = tl.minimum(least_of, tl.where(x > float("-inf"), x, float("inf")))
    best = tl.max(best_of, axis=0)
    token = tl.min(tl.where(best_of == best, where, V - 1), axis=0)
    if HAS_BAD:
        # A lane that met NaN or +inf is not below inf. Such a row draws an arbitrary token that is not used.
        spoilt = tl.max(tl.where(best_of < float("inf"), 0, 1), axis=0)
        tl.store(bad + index, tl.where(best > float("-inf"), spoilt, 1))
    if t > 0.0:
        inverse = 1.0 / t
        k = tl.load(top_k + index)
        p = tl.load(top_p + index)
        min_weight = tl.load(min_p + index)
        floor = tl.min(least_of, axis=0)
        cut = tl.zeros([], tl.uint32)
        ties = V
        all_ties = V
        mass = 0.0
        if (k > 0) & (k < V):
            cut, ties, all_ties, mass = _cut(row, mine, V, best, inverse, floor, k, False, WIDE, CAP)
            floor = _unkey(cut)
        if p < 1.0:
            if mass == 0.0:
                total = tl.zeros([WIDE], tl.float32)
                for start in tl.range(0, V, WIDE, num_stages=4):
                    at = start + lane
                    total += _weight(tl.load(row + at, mask=at < V, other=float("-inf")), best, inverse)
                mass = tl.sum(total, axis=0)
            # below exp(-30) of the best there is no mass worth considering
            floor = tl.maximum(floor, best - 30.0 * t)
            new_cut, new_ties, new_all, _ = _cut(row, mine, V, best, inverse, floor, p * mass, True, WIDE, CAP)
            ties = tl.where(new_cut == cut, tl.minimum(ties, new_ties), new_ties)
            all_ties = new_all
            cut = new_cut
        limited = ties < all_ties
        block = tl.arange(0, BLOCKS)
        masses = tl.zeros([BLOCKS], tl.float32)
        tied = tl.zeros([BLOCKS], tl.int32)
        seen = 0
        for i in tl.range(0, tl.cdiv(V, WIDE), num_stages=4):
            at = i * WIDE + lane
            x = tl.load(row + at, mask=at < V, other=float("-inf"))
            w, n = _kept(x, at, V, best, inverse, min_weight, cut, limited, ties - seen)
            masses = tl.where(block == i, tl.sum(w, axis=0), masses)
            tied = tl.where(block == i, seen, tied)
            seen += n
        cdf = tl.cumsum(masses, axis=0)
        goal = tl.load(uniform + index) * tl.max(cdf, axis=0)
        # the block, then the token in it; if rounding leaves the goal out of reach, the last kept one
        last = tl.max(tl.where(masses > 0.0, block, 0), axis=0)
        chosen = tl.min(tl.where((cdf > goal) & (masses > 0.0), block, BLOCKS), axis=0)
        chosen = tl.minimum(chosen, last)
        below = tl.sum(tl.where(block == chosen, cdf - masses, 0.0), axis=0)
        before = tl.sum(tl.where(block == chosen, tied, 0), axis=0)
        at = chosen * WIDE + lane
        x = tl.load(row + at, mask=at < V, other=float("-inf"))
        w, _ = _kept(x, at, V, best, inverse, min_weight, cut, limited, ties - before)
        drawn = tl.min(tl.where((below + tl.cumsum(w, axis=0) > goal) & (w > 0.0), at, V), axis=0)
        token = tl.where(drawn == V, tl.max(tl.where(w > 0.0, at, 0), axis=0), drawn)
    tl.store(out + index, token)
    if HAS_COUNTS:
        slot = tl.load(slots + index).to(tl.int64)
        target = counts + slot * V + token
        tl.store(target, tl.load(target) + 1)


def sample_scratch(rows: int, device: torch.device | str) -> Tensor:
    """Return scratch for the candidates of rows with top-k or top-p: `[rows, CANDIDATES]` float32, one per stream."""
    return torch.empty(rows, CANDIDATES, dtype=torch.float32, device=device)


def sample(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor, *, out: Tensor,
    bad: Tensor | None = None, scratch: Tensor | None = None, counts: Tensor | None = None, slots: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Sample one token for each row of `logits [S, V]` float32 into `out [S]` int.

    All parameters are `[S]`, float32 except top_k int32. temperature 0 takes the best. `bad [S]` int gets 1 for rows
    that are `sampling.nonfinite`, else 0; the token of such a row is an arbitrary id. `scratch` comes from
    `sample_scratch`; without it one is allocated here (under capture from the graph's memory pool). The token is
    counted in `counts [slots, V]` int32 at the rows' `slots [S]`."""
    rows, vocabulary = logits.shape
    if logits.dtype != torch.float32 or logits.stride(1) != 1:
        raise ValueError("logits must be float32 with contiguous rows")
    if scratch is None:
        scratch = sample_scratch(rows, logits.device)
    if scratch.shape[0] < rows:
        raise ValueError(f"scratch holds {scratch.shape[0]} rows, not {rows}")
    _sample_kernel[(rows,)](
        logits, logits.stride(0), temperature, top_k, top_p, min_p, uniform, out, bad, scratch, counts, slots,
        vocabulary, HAS_BAD=bad is not None, HAS_COUNTS=counts is not None, WIDE=4096,
        BLOCKS=triton.next_power_of_2(triton.cdiv(vocabulary, 4096)),
        CAP=CANDIDATES, num_warps=16, **pdl_options(),
    )  # fmt: skip
    return out
