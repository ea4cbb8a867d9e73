"""The kernels of LoRA adapters against their torch reference."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from weft.kernels.matmul import adapter_work, adapters
from weft.kernels.reference import layer as reference
from weft.kernels.reference.adapters import Delta, LowRank


def _slots(
    count: int, depth: int, widths: tuple[int, ...], rank: int, dtype: torch.dtype, device: str
) -> adapters.Slots:
    a = torch.randn(count, len(widths) * rank * depth) / depth**0.5
    b = torch.randn(count, sum(widths) * rank) / rank**0.5
    shift = torch.randn(count, len(widths) * rank)
    return adapters.Slots(a.to(device, dtype), b.to(device, dtype), widths, rank, shift.to(device, dtype))


def _low_ranks(slots: adapters.Slots, slot: int, rank: int, depth: int, step: int) -> list[LowRank]:
    """The matrices of a slot as the reference has them."""
    parts, found, start, at = len(slots.widths), [], 0, 0
    a = slots.a[slot].view(parts, slots.rank, depth).float()
    assert slots.shift is not None
    shift = slots.shift[slot].view(parts, slots.rank).float()
    for part, width in enumerate(slots.widths):
        b = slots.b[slot][start * slots.rank :][: width * slots.rank].view(width, slots.rank).float()
        found.append(LowRank(a[part, :rank], b[:, :rank], part if step > 1 else at, step, shift[part, :rank]))
        start, at = start + width, at + width
    return found


def _delta(x: Tensor, slots: adapters.Slots, slot_of: Tensor, ranks: list[int], step: int = 1) -> Tensor:
    added = torch.zeros(len(x), sum(slots.widths), device=x.device)
    groups = [
        ((slot_of == s).nonzero()[:, 0].to(x.device), _low_ranks(slots, s, ranks[s], x.shape[1], step))
        for s in range(len(ranks))
    ]
    for rows, values in Delta(groups, sum(slots.widths)).values(x):
        added[rows] += values
    return added


def _work(slot_of: Tensor, ranks: list[int], tokens: int, device: str) -> adapters.Work:
    rows, items, counts = adapter_work.sort_rows(slot_of.numpy().astype(np.int32), np.array(ranks, np.int32), tokens)
    order = torch.zeros(tokens, dtype=torch.int32)
    order[: len(rows)] = torch.from_numpy(rows)
    assert len(items) <= adapter_work.max_items(tokens, len(ranks))
    made = order, torch.from_numpy(items), torch.tensor(counts, dtype=torch.int32)
    return adapters.Work(*(part.to(device) for part in made))


RANKS = [16, 3, 32, 8]
LARGE = pytest.param(300, 290, marks=pytest.mark.nightly)


def _mix(live: int) -> Tensor:
    """Rows of slots 0, 1 and 3, and rows without an adapter."""
    return torch.tensor([-1, 0, 3, 1])[torch.randint(4, (live,))]


@pytest.mark.parametrize(("tokens", "live"), [(1, 1), (16, 13), LARGE])
def test_deltas_of_a_projection_equal_the_reference(device: str, tokens: int, live: int) -> None:
    depth, widths, dtype = 1056 if tokens > 1 else 96, (80, 48, 48), torch.float16
    slots = _slots(4, depth, widths, 32, dtype, device)
    slot_of = _mix(live) if live > 1 else torch.tensor([1])
    x = torch.randn(tokens, depth).to(device, dtype)
    sumsq = torch.rand(3, tokens, device=device) * depth
    y = torch.randn(tokens, sum(widths)).to(device, dtype)
    before = y.clone()
    work = _work(slot_of, RANKS, tokens, device)
    shrunk = torch.full((adapters.shrunk_size(tokens, [(depth, 3)], 32),), torch.nan, device=device)
    adapters.shrink(x, slots, work, sumsq=sumsq, eps=1e-5, out=shrunk)
    adapters.expand(shrunk, slots, work, y, depth)
    normed = x.float() * reference.rms_scale(sumsq.sum(0), depth, 1e-5)[:, None]
    expected = before.float()
    expected[:live] += _delta(normed[:live], slots, slot_of, RANKS)
    torch.testing.assert_close(y.float(), expected, atol=2e-2, rtol=1e-2)
    without = (slot_of < 0).nonzero()[:, 0].to(device)
    assert torch.equal(y[without], before[without])
    assert torch.equal(y[live:], before[live:])


@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize(("tokens", "live"), [(16, 13), LARGE])
def test_activations_include_the_deltas(device: str, tokens: int, live: int, parts: int) -> None:
    depth, inner, dtype = 128, 100, torch.float16
    slots = _slots(4, depth, (inner,) * parts, 16, dtype, device)
    slot_of, ranks = _mix(live), [16, 3, 1, 8]
    x = torch.randn(tokens, depth).to(device, dtype)
    raw = torch.randn(tokens, inner * parts).to(device, dtype)
    work = _work(slot_of, ranks, tokens, device)
    shrunk = torch.full((adapters.shrunk_size(tokens, [(depth, parts)], 16),), torch.nan, device=device)
    adapters.shrink(x, slots, work, out=shrunk)
    out = torch.full((tokens, inner), 7.0).to(device, dtype)
    adapters.expand_activated(shrunk, slots, work, raw, activation="silu", out=out, depth=depth)
    both = raw[:live].float() + _delta(x[:live], slots, slot_of, ranks, step=parts)
    if parts == 2:
        expected = reference.gated("silu", both[:, 0::2], both[:, 1::2].clone())
    else:
        expected = reference.ACTIVATIONS["silu"](both)
    torch.testing.assert_close(out[:live].float(), expected, atol=2e-2, rtol=1e-2)
    assert (out[live:] == 7).all()


def test_no_adapter_is_no_work(device: str) -> None:
    slots = _slots(2, 64, (32,), 16, torch.float16, device)
    y = torch.randn(16, 32).to(device, torch.float16)
    before = y.clone()
    work = _work(torch.full((16,), -1), [16, 16], 16, device)
    shrunk = torch.full((16 * 16,), torch.nan, device=device)
    adapters.shrink(torch.randn(16, 64).to(device, torch.float16), slots, work, out=shrunk)
    adapters.expand(shrunk, slots, work, y, 64)
    assert torch.equal(y, before)
    assert shrunk.isnan().all()
