"""Reference implementation of layers that keep a recurrent state: convolution, gated delta rule, Mamba-2, gated norm.

Tokens of an iteration are packed: R requests, T tokens, request r's in rows `starts[r]` to `starts[r + 1]`. States are
float32 and go in and out by value. `StateWork` says at which tokens a state is wanted besides the end. A scan works in
blocks that begin at absolute multiples of their size, so a token's bits do not depend on where its prompt was cut, if
at such multiples, nor on checkpoints or other requests.

H heads, Hk key heads, Hv value heads (each key head serves Hv / Hk in a row), Dk and Dv their widths, G groups, C
channels. Sums are float32. The delta rule is that of Gated DeltaNet (arXiv 2412.06464), its scan the WY form of arXiv
2406.06484; Mamba-2 and its scan are arXiv 2405.21060.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from weft.kernels.reference.layer import ACTIVATIONS, Means

BLOCK = 64  # Tokens of a scan's block.


class Turn(NamedTuple):
    """The i-th block of each request that has one; a scan computes one turn after another."""

    blocks: Tensor  # [M] int64
    rows: Tensor  # [M] int64 requests.
    ends: Tensor  # [K] int64 checkpoints inside these blocks.
    end_blocks: Tensor  # [K] int64 into M.
    end_tokens: Tensor  # [K] int64 tokens of the block before the checkpoint, at least 1.

    def targets(self, requests: int) -> tuple[tuple[Tensor, Tensor | slice, Tensor | None], ...]:
        """Return which of the returned states follow from which of the M blocks, up to how many tokens (None: all)."""
        return (self.rows, slice(None), None), (self.ends + requests, self.end_blocks, self.end_tokens)


class StateWork(NamedTuple):
    """Requests, blocks and checkpoints of one iteration, planned on the host once for all layers."""

    starts: Tensor  # [R + 1] int64
    row: Tensor  # [T] int64 request of each token.
    end_rows: Tensor  # [R + E] int64 requests of the states that are returned: all ends, then E checkpoints.
    end_tokens: Tensor  # [R + E] int64 their tokens.
    tokens: Tensor  # [N, block] int64 tokens of each block; T is padding.
    unpad: Tensor  # [T] int64 into N * block.
    turns: tuple[Turn, ...]


def plan_states(
    query_len: NDArray[np.integer], first: NDArray[np.integer], checkpoint_rows: NDArray[np.integer] | None = None,
    checkpoint_tokens: NDArray[np.integer] | None = None, *, block: int = BLOCK,
) -> StateWork:  # fmt: skip
    """Plan an iteration of `query_len [R]` tokens (at least 1) from positions `first [R]` on.

    A checkpoint is the state of `checkpoint_rows [E]` after `checkpoint_tokens [E]` of its tokens, at least 1. It costs
    more inside a block than at its end."""
    query_len, first = np.asarray(query_len, np.int64), np.asarray(first, np.int64)
    none = np.zeros(0, np.int64)
    rows = none if checkpoint_rows is None else np.asarray(checkpoint_rows, np.int64)
    ends = none if checkpoint_tokens is None else np.asarray(checkpoint_tokens, np.int64)
    starts = np.concatenate((np.zeros(1, np.int64), np.cumsum(query_len)))
    row = np.repeat(np.arange(len(query_len)), query_len)
    before = first % block  # tokens of the first block that were computed earlier
    blocks = -(-(before + query_len) // block)
    first_block = np.cumsum(blocks) - blocks
    place = np.arange(starts[-1]) - starts[row] + before[row]
    token_block, offset = first_block[row] + place // block, place % block
    offset -= np.where(place < block, before[row], 0)
    tokens = np.full((int(blocks.sum()), block), starts[-1], np.int64)
    tokens[token_block, offset] = np.arange(starts[-1])
    last = starts[rows] + ends - 1
    turns = []
    for turn in range(int(blocks.max(initial=0))):
        own = np.flatnonzero(blocks > turn)
        inside = np.flatnonzero(token_block[last] - first_block[rows] == turn)
        of = (first_block[own] + turn, own, inside, np.searchsorted(own, rows[inside]), offset[last[inside]] + 1)
        turns.append(Turn(*map(torch.from_numpy, of)))
    end_rows, end_tokens = np.concatenate((np.arange(len(first)), rows)), np.concatenate((query_len, ends))
    ints = (starts, row, end_rows, end_tokens, tokens, token_block * block + offset)
    a, b, c, d, e, f = map(torch.from_numpy, ints)
    return StateWork(a, b, c, d, e, f, tuple(turns))


def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, state: Tensor, work: StateWork, *, activation: str | None = "silu"
) -> tuple[Tensor, Tensor]:
    """Convolve each channel of `x [T, C]` with its own `weight [C, K]` over the last K tokens of its request.

    state `[R, C, K - 1]`: the tokens before. Returns `[T, C]` and the states `[R + E, C, K - 1]`, both in x's dtype. A
    request with one token is the step of decoding, with the same bits."""
    before, (requests, channels) = weight.shape[1] - 1, state.shape[:2]
    tap = torch.arange(before)
    at = torch.arange(len(x)) + (work.row + 1) * before
    line = x.new_empty(len(x) + requests * before, channels)
    line[at] = x
    line[(work.starts[:-1] + torch.arange(requests) * before)[:, None] + tap] = state.transpose(1, 2).to(x.dtype)
    y = torch.zeros(x.shape, dtype=torch.float32) if bias is None else bias.float().expand(x.shape)
    for i in range(before + 1):
        y = y + line[at - before + i].float() * weight[:, i].float()
    if activation is not None:
        y = ACTIVATIONS[activation](y)
    ends = work.starts[work.end_rows] + work.end_tokens + work.end_rows * before
    return y.to(x.dtype), line[ends[:, None] + tap].transpose(1, 2).contiguous()


def l2_norm(x: Tensor, eps: float = 1e-6) -> Tensor:
    """Return each row of `x [..., D]` divided by its length, in float32."""
    h = x.float()
    return h * torch.rsqrt(h.square().sum(-1, keepdim=True) + eps)


def delta_gates(a: Tensor, b: Tensor, a_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Return the log of the decay and the share that a token overwrites, `[T, Hv]` float32. a and b: `[T, Hv]`."""
    return -a_log.float().exp() * F.softplus(a.float() + dt_bias.float()), torch.sigmoid(b.float())


def time_steps(dt: Tensor, dt_bias: Tensor, limit: tuple[float, float] = (0.0, float("inf"))) -> Tensor:
    """Return Mamba-2's time steps `[T, H]` float32 of the projection `dt [T, H]`.

    `transformers` applies `limit` in the scan but not in the step of decoding."""
    return F.softplus(dt.float() + dt_bias.float()).clamp(*limit)


def _per_value_head(x: Tensor, heads: int) -> Tensor:
    """Repeat axis 1 of `x`, key heads or groups, for each of `heads`."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], 1)


def delta_rule_step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
    """Compute one token of each request: q and k `[R, Hk, Dk]` normalized by `l2_norm`, v `[R, Hv, Dv]`, g and beta
    `[R, Hv]` of `delta_gates`, state `[R, Hv, Dk, Dv]`. Returns `[R, Hv, Dv]` float32 and the state."""
    q, k = (_per_value_head(t.float(), v.shape[1]) for t in (q, k))
    state = state.float() * g.exp()[..., None, None]
    delta = (v.float() - (state * k[..., None]).sum(-2)) * beta[..., None]
    state = state + k[..., None] * delta[..., None, :]
    return (state * (q * q.shape[-1] ** -0.5)[..., None]).sum(-2), state


def _blocks(x: Tensor, work: StateWork) -> Tensor:
    """Return `x [T, heads, ...]` as `[N, heads, block, ...]` float32; padding is zero."""
    x = x.float()
    return torch.cat((x, x.new_zeros(1, *x.shape[1:])))[work.tokens].transpose(1, 2)


def _decays(g: Tensor) -> tuple[Tensor, Tensor]:
    """Return sums `[N, H, block]` of the logarithms `g` up to each token, and the decay `[N, H, block, block]` from
    column to row, 0 above the diagonal."""
    total = g.cumsum(-1)
    above = torch.ones(g.shape[-1], g.shape[-1], dtype=torch.bool).triu(1)
    return total, (total[..., :, None] - total[..., None, :]).masked_fill(above, float("-inf")).exp()


def _until(total: Tensor, tokens: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the decay of a block's first state, `[M, H, 1, 1]`, and of each token, `[M, H, block, 1]`, up to the end
    of its first `tokens [M]`; later tokens count 0. None: all."""
    if tokens is None:
        last = total[..., -1:]
        return last.exp()[..., None], (last - total).exp()[..., None]
    last = total.gather(-1, (tokens - 1)[:, None, None].expand(-1, total.shape[1], 1))
    later = torch.arange(total.shape[-1]) >= tokens[:, None, None]
    return last.exp()[..., None], (last - total).masked_fill(later, float("-inf")).exp()[..., None]


def delta_rule_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, state: Tensor, work: StateWork
) -> tuple[Tensor, Tensor]:
    """Compute all tokens: q and k `[T, Hk, Dk]`, v `[T, Hv, Dv]`, g and beta `[T, Hv]` as in `delta_rule_step`, state
    `[R, Hv, Dk, Dv]`. Returns `[T, Hv, Dv]` float32 and the states `[R + E, Hv, Dk, Dv]`."""
    heads, requests = v.shape[1], len(state)
    q, k, v, g, beta = (_blocks(t, work) for t in (q * q.shape[-1] ** -0.5, k, v, g, beta))
    total, decay = _decays(g)
    within = _per_value_head(q @ k.transpose(-1, -2), heads) * decay
    system = _per_value_head(k @ k.transpose(-1, -2), heads) * decay * beta[..., None]
    q, k = _per_value_head(q, heads), _per_value_head(k, heads)
    since = total.exp()[..., None]
    both = torch.cat((v, k * since), -1) * beta[..., None]
    values, reads = torch.linalg.solve_triangular(system, both, upper=False, unitriangular=True).split(
        (v.shape[-1], k.shape[-1]), -1
    )
    q = q * since
    out = torch.empty_like(v)
    states = state.new_empty(len(work.end_rows), *state.shape[1:], dtype=torch.float32)
    states[:requests] = state
    for turn in work.turns:
        before = states[turn.rows]
        new = values[turn.blocks] - reads[turn.blocks] @ before
        out[turn.blocks] = q[turn.blocks] @ before + within[turn.blocks] @ new
        for target, some, tokens in turn.targets(requests):
            blocks = turn.blocks[some]
            first, each = _until(total[blocks], tokens)
            states[target] = before[some] * first + (k[blocks] * each).transpose(-1, -2) @ new[some]
    return out.transpose(1, 2).flatten(0, 1)[work.unpad], states


def ssd_step(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute one token of each request by Mamba-2: x `[R, H, P]`, dt `[R, H]` of `time_steps`, a `[H]` negative, b and
    c `[R, G, N]`, d `[H]`, state `[R, H, P, N]`. Returns `[R, H, P]` float32 and the state."""
    x, (b, c) = x.float(), (_per_value_head(t.float(), x.shape[1]) for t in (b, c))
    state = state.float() * (a.float() * dt).exp()[..., None, None] + (x * dt[..., None])[..., None] * b[..., None, :]
    y = (state * c[..., None, :]).sum(-1)
    return y if d is None else y + x * d.float()[:, None], state


def ssd_scan(
    x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor | None, state: Tensor, work: StateWork
) -> tuple[Tensor, Tensor]:
    """Compute all tokens by Mamba-2: x `[T, H, P]`, dt `[T, H]`, b and c `[T, G, N]`, a and d as in `ssd_step`, state
    `[R, H, P, N]`. Returns `[T, H, P]` float32 and the states `[R + E, H, P, N]`."""
    heads, requests = x.shape[1], len(state)
    skip = None if d is None else x.float() * d.float()[:, None]
    x, b, c, dt = (_blocks(t, work) for t in (x, b, c, dt))
    total, decay = _decays(a.float()[:, None] * dt)
    x = x * dt[..., None]
    out = (_per_value_head(c @ b.transpose(-1, -2), heads) * decay) @ x
    b, c = _per_value_head(b, heads), _per_value_head(c, heads) * total.exp()[..., None]
    states = state.new_empty(len(work.end_rows), *state.shape[1:], dtype=torch.float32)
    states[:requests] = state
    for turn in work.turns:
        before = states[turn.rows]
        out[turn.blocks] += c[turn.blocks] @ before.transpose(-1, -2)
        for target, some, tokens in turn.targets(requests):
            blocks = turn.blocks[some]
            first, each = _until(total[blocks], tokens)
            states[target] = before[some] * first + (x[blocks] * each).transpose(-1, -2) @ b[blocks]
    y = out.transpose(1, 2).flatten(0, 1)[work.unpad]
    return y if skip is None else y + skip, states


def gated_norm(
    x: Tensor, z: Tensor, weight: Tensor, eps: float, *, groups: int, norm_first: bool,
    dtype: torch.dtype | None = None, means: Means | None = None,
) -> Tensor:  # fmt: skip
    """Return the RMS norm of each group of `x [T, W]` with the gate silu(z), `[T, W]` in `dtype` (None: z's).

    weight `[W]`, or `[W / groups]` for all groups. norm_first: the norm is of x (delta rule: a group is a head); if
    not, of x times the gate (Mamba-2). means: if a group spans several ranks, converts the mean squares `[T,
    groups, 1]` of a rank's part to those of all."""
    gate, h = F.silu(z.float()), x.float()
    if not norm_first:
        h = h * gate
    h = h.unflatten(-1, (groups, -1))
    squares = h.square().mean(-1, keepdim=True)
    h = h * torch.rsqrt((squares if means is None else means(squares)) + eps)
    h = (h * weight.float().view(-1, h.shape[-1])).flatten(-2)
    return (h * gate if norm_first else h).to(dtype or z.dtype)
