"""A kernel that decides which samples of an iteration with drafts count, and keeps each request's newest token.

It is apart from `resident`, whose code identifies the kernels that plans were measured with: no plan runs drafts.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _remember_verified_kernel(
    tokens, bad, first, expected, slots, count, last_token, reached_out, BLOCK: tl.constexpr
):  # fmt: skip
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    live = at < tl.load(count)
    begin = tl.load(first + at, mask=live, other=0)
    reached = live
    for back in range(1, tl.max(tl.where(live, at - begin, 0), 0) + 1):
        earlier = live & (at - back >= begin)
        token = tl.load(tokens + at - back, mask=earlier, other=0)
        draft = tl.load(expected + at - back, mask=earlier, other=0)
        failed = tl.load(bad + at - back, mask=earlier, other=0)
        reached = reached & ((token == draft) & (failed == 0) | (earlier == 0))
    token = tl.load(tokens + at, mask=live, other=0)
    draft = tl.load(expected + at, mask=live, other=0)
    failed = tl.load(bad + at, mask=live, other=0)
    newest = reached & ((token != draft) | (failed != 0))
    slot = tl.load(slots + at, mask=live, other=0)
    tl.store(last_token + slot, token, mask=newest)
    tl.store(reached_out + at, reached.to(tl.int32), mask=live)


def remember_verified(
    tokens: Tensor, bad: Tensor, first: Tensor, expected: Tensor, slots: Tensor, count: Tensor, last_token: Tensor, *,
    reached: Tensor,
) -> None:  # fmt: skip
    """Set `last_token[slots[i]]` to the newest of a request's sampled tokens, of the first `count [1]` rows.

    A row's sample counts if each earlier one of its request, from row `first` on, equals the draft `expected` after it
    and is not `bad`. The newest is the last that counts. expected is -1 where no draft follows. first, expected, slots
    `[S]` int32; bad `[S]` int; `reached [S]` int32 gets 1 for samples that count."""
    _remember_verified_kernel[(triton.cdiv(tokens.shape[0], BLOCK),)](
        tokens, bad, first, expected, slots, count, last_token, reached, BLOCK=BLOCK
    )
