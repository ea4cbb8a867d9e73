"""Reference implementation of sampling: from logits to one token per row, and log-probabilities. No loop over rows."""

from __future__ import annotations

import torch
from torch import Tensor

MASK_ROWS = 64  # Rows of masks unpacked at once: bounds memory with a large vocabulary.


def apply_penalties(
    logits: Tensor, prompt_seen: Tensor, counts: Tensor, presence: Tensor, frequency: Tensor, repetition: Tensor
) -> Tensor:
    """Apply a repetition penalty over prompt and output, then presence and frequency penalties over the output.

    logits `[S, V]` float32; prompt_seen `[S, V]` bool; counts `[S, V]` int: how often each token was sampled; penalties
    `[S]`.
    """
    seen = prompt_seen | (counts > 0)
    factor = torch.where(seen, repetition[:, None], 1.0)
    logits = torch.where(logits > 0, logits / factor, logits * factor)
    return logits - frequency[:, None] * counts - presence[:, None] * (counts > 0)


def allow_only(logits: Tensor, rows: Tensor, masks: Tensor, first: int = 0) -> None:
    """Set tokens that a row's mask does not allow to -inf, in place on `logits [S, V]`.

    rows `[m]` int64; masks `[m, W]` int32, bit i of word w: token 32 w + i is allowed; tokens beyond 32 W are not.
    first: the token of the first column."""
    width = logits.shape[1]
    masks, first = masks[:, first // 32 : -(-(first + width) // 32)].contiguous(), first % 32
    shifts = torch.arange(8, dtype=torch.uint8, device=logits.device)
    for part, words in zip(rows.split(MASK_ROWS), masks.split(MASK_ROWS), strict=True):
        bits = (words.view(torch.uint8)[:, :, None] >> shifts) & 1  # a word's bytes are in little-endian order
        allowed = torch.zeros(len(part), width, dtype=torch.bool, device=logits.device)
        known = bits.reshape(len(part), -1)[:, first : first + width]
        allowed[:, : known.shape[1]] = known.bool()
        logits[part] = logits[part].masked_fill_(~allowed, -torch.inf)


def nonfinite(logits: Tensor) -> Tensor:
    """Return `[S]` bool: rows of `logits [S, V]` with NaN or +inf, or nothing above -inf (which masks produce)."""
    return ~logits.amax(-1).isfinite()


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, uniform: Tensor) -> Tensor:
    """Sample one token for each row of `logits [S, V]` float32: `[S]` int64.

    temperature 0 takes the best. Otherwise top-k (0: off), then top-p, then min-p cut the distribution, and `uniform`
    picks from the remainder by the inverse of its cumulative distribution in token order."""
    greedy = logits.argmax(-1)
    scaled = logits / torch.where(temperature > 0, temperature, 1.0)[:, None]
    probs = scaled.softmax(-1)
    if bool((top_k > 0).any() or (top_p < 1.0).any()):
        # The smallest set of best tokens whose mass reaches top_p, among the top_k best.
        ordered, order = torch.sort(probs, dim=-1, descending=True, stable=True)
        rank = torch.arange(probs.shape[-1], device=probs.device)
        keep = (rank < torch.where(top_k > 0, top_k, probs.shape[-1])[:, None]) | (rank == 0)
        ordered = ordered * keep
        before = ordered.cumsum(-1) - ordered
        keep &= (before < top_p[:, None] * ordered.sum(-1, keepdim=True)) | (rank == 0)
        probs = probs * torch.zeros_like(keep).scatter_(-1, order, keep)
    if bool((min_p > 0).any()):
        probs = probs * (probs >= min_p[:, None] * probs.amax(-1, keepdim=True))
    cdf = probs.cumsum(-1)
    # Strictly above: a token of probability zero adds nothing to the sum and is never the first to exceed it.
    drawn = (cdf > uniform[:, None] * cdf[:, -1:]).to(torch.uint8).argmax(-1)
    return torch.where(temperature > 0, drawn, greedy)


def logprobs_of(logits: Tensor, tokens: Tensor, top: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probabilities of `tokens [n]` and of the `top` best, from `logits [n, V]` float32.

    Returns ranks `[n]` (1-based), ids `[n, 1 + top]` and values `[n, 1 + top]`: first the token, then the best in
    order. The token's value is the identical float wherever it appears."""
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(-1, tokens[:, None])
    ranks = (logprobs > own).sum(-1) + 1
    values, ids = logprobs.topk(min(top, logits.shape[-1]), -1)
    return ranks, torch.cat((tokens[:, None], ids), -1), torch.cat((own, values), -1)
