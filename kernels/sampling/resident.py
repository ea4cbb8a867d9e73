"""Kernels that update per-slot tokens and page tables on the device.

A captured graph reads the token that the previous iteration left, and the host sends only changed page-table entries.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator,no-untyped-call"
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


@triton.jit
def _prepare_kernel(
    token_ids, token_slots, last_token, out, T, update_at, update_page, num_updates, page_table, BLOCK: tl.constexpr
):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    slot = tl.load(token_slots + at, mask=at < T, other=-1)
    given = tl.load(token_ids + at, mask=at < T, other=0)
    left = tl.load(last_token + slot, mask=slot >= 0, other=0).to(tl.int32)
    tl.store(out + at, tl.where(slot >= 0, left, given), mask=at < T)
    count = tl.load(num_updates)
    where = tl.load(update_at + at, mask=at < count, other=0)
    page = tl.load(update_page + at, mask=at < count, other=0)
    tl.store(page_table + where, page, mask=at < count)


def prepare(
    token_ids: Tensor, token_slots: Tensor, last_token: Tensor, page_table: Tensor, update_at: Tensor,
    update_page: Tensor, num_updates: Tensor, *, out: Tensor,
) -> Tensor:  # fmt: skip
    """Write the iteration's token ids to `out [T]` int32, and changed entries to the page tables.

    token_ids `[T]` int32 from the host; token_slots `[T]` int32: the slot whose `last_token` a decode reads, -1 to use
    `token_ids`. `page_table [slots, pages]` int32 gets `update_page[i]` at flat index `update_at[i]` for the first
    `num_updates [1]` entries; both `[U]` int32.
    """
    tokens, updates = out.shape[0], update_at.shape[0]
    _prepare_kernel[(triton.cdiv(max(tokens, updates), BLOCK),)](
        token_ids, token_slots, last_token, out, tokens, update_at, update_page, num_updates, page_table, BLOCK=BLOCK
    )
    return out


@triton.jit
def _remember_kernel(tokens, slots, count, last_token, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = at < tl.load(count)
    slot = tl.load(slots + at, mask=mask, other=0)
    tl.store(last_token + slot, tl.load(tokens + at, mask=mask, other=0), mask=mask)


def remember(tokens: Tensor, slots: Tensor, count: Tensor, last_token: Tensor) -> None:
    """Set `last_token[slots[i]] = tokens[i]` for the first `count [1]` rows; both have the same int dtype."""
    _remember_kernel[(triton.cdiv(tokens.shape[0], BLOCK),)](tokens, slots, count, last_token, BLOCK=BLOCK)
