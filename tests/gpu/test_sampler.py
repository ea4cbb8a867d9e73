"""Sampling on the GPU gives the tokens of its reference, except where rounding decides between neighbours."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")
from weft.kernels.reference import sampling
from weft.kernels.sampling import sampler


def draw(logits: Tensor, t: Tensor, k: Tensor, p: Tensor, m: Tensor, u: Tensor) -> Tensor:
    return sampler.sample(
        logits,
        t,
        k,
        p,
        m,
        u,
        out=torch.full((len(logits),), -1, dtype=torch.int32, device=logits.device),
        scratch=sampler.sample_scratch(len(logits), logits.device),
    ).long()


def parameters(rows: int, device: str) -> tuple[Tensor, ...]:
    """Rows that switch every filter on and off."""
    at = torch.arange(rows)
    t = torch.tensor([0.0, 1.0, 0.6, 1.7])[at % 4]
    k = torch.tensor([0, 1, 5, 50, 10**6])[at // 4 % 5]
    p = torch.tensor([1.0, 0.9, 0.3, 0.01])[at // 2 % 4]
    m = torch.tensor([0.0, 0.05])[at // 3 % 2]
    return tuple(x.to(device) for x in (t, k.int(), p, m, torch.rand(rows)))


@pytest.mark.parametrize(("rows", "vocabulary"), [(40, 300)])
def test_sampled_tokens(rows: int, vocabulary: int, device: str) -> None:
    logits = torch.randn(rows, vocabulary, device=device) * 3
    parts = parameters(rows, device)
    assert (draw(logits, *parts) == sampling.sample(logits, *parts)).float().mean() > 0.97


@pytest.mark.parametrize("spread", [0.5, 3.0])
@pytest.mark.usefixtures("large")
def test_sampled_tokens_of_a_large_vocabulary(spread: float, device: str) -> None:
    logits = torch.randn(240, 128256, device=device) * spread
    parts = parameters(240, device)
    got, want = draw(logits, *parts), sampling.sample(logits, *parts)
    assert (got == want).float().mean() > 0.95
    greedy = parts[0] == 0
    assert torch.equal(got[greedy], want[greedy])


def test_ties_stay_in_the_order_of_ids(device: str) -> None:
    logits = torch.zeros(64, 100, device=device)
    logits[:, 50] = 1.0
    one = torch.ones(64, device=device)
    k = torch.full((64,), 4, dtype=torch.int32, device=device)
    u = torch.linspace(0, 0.999, 64, device=device)
    got = draw(logits, one, k, one, one * 0, u)
    assert sorted(set(got.tolist())) == [0, 1, 2, 50]
    assert torch.equal(got, sampling.sample(logits, one, k, one, one * 0, u))


@pytest.mark.usefixtures("large")
def test_more_ties_than_one_block_resolves(device: str) -> None:
    logits = torch.zeros(16, 50000, device=device)
    logits[:, 40000] = 2.0
    one = torch.ones(16, device=device)
    k = torch.full((16,), 30000, dtype=torch.int32, device=device)
    u = torch.linspace(0, 0.999, 16, device=device)
    for p in (1.0, 0.5):
        got, want = draw(logits, one, k, one * p, one * 0, u), sampling.sample(logits, one, k, one * p, one * 0, u)
        assert int((got - want).abs().max()) <= 3  # sums of 30000 equal terms differ by rounding


def test_masked_tokens_are_never_drawn(device: str) -> None:
    rows = 32 if device == "cuda" else 12
    logits = torch.full((rows, 200), float("-inf"), device=device)
    logits[:, 17] = -3.0
    logits[:, 150] = -3.0
    one = torch.ones(rows, device=device)
    u = torch.linspace(0, 0.999, rows, device=device)
    for p in (1.0, 0.9, 0.2):
        got = draw(logits, one, torch.zeros(rows, dtype=torch.int32, device=device), one * p, one * 0, u)
        assert set(got.tolist()) <= {17, 150}


def test_penalties_and_counts(device: str) -> None:
    rows, vocabulary = 6, 130
    logits = torch.randn(rows, vocabulary, device=device)
    slots = torch.tensor([3, 0, 5, 1, 7, 2], dtype=torch.int32, device=device)
    seen = torch.rand(8, vocabulary, device=device) < 0.3
    counts = torch.randint(0, 3, (8, vocabulary), dtype=torch.int32, device=device)
    f = torch.tensor([0.0, 0.5, 0.0, -0.2, 0.0, 0.1], device=device)
    p = torch.tensor([0.0, 0.0, 0.7, 0.3, 0.0, 0.1], device=device)
    r = torch.tensor([1.0, 1.0, 1.0, 1.3, 0.8, 1.1], device=device)
    rows_of = slots.long()
    want = sampling.apply_penalties(logits, seen[rows_of], counts[rows_of], p, f, r)
    sampler.apply_penalties(logits, slots, seen, counts, p, f, r)
    torch.testing.assert_close(logits, want)
    before = counts.clone()
    zero = torch.zeros(rows, device=device)
    out = torch.empty(rows, dtype=torch.int64, device=device)
    sampler.sample(logits, zero, zero.int(), zero + 1, zero, zero, out=out, counts=counts, slots=slots,
                   scratch=sampler.sample_scratch(rows, device))  # fmt: skip
    assert torch.equal(out, logits.argmax(-1))
    before[rows_of, out] += 1
    assert torch.equal(counts, before)


@pytest.mark.parametrize("vocabulary", [300, 4500])  # within a block, and beyond it
def test_rows_without_numbers_are_marked_and_change_no_other(vocabulary: int, device: str) -> None:
    rows = 40 if device == "cuda" else 22
    logits = torch.randn(rows, vocabulary, device=device) * 3
    logits[:, 7] = -torch.inf  # masked everywhere
    parts = parameters(rows, device)
    want = draw(logits, *parts)
    spoilt = logits.clone()
    values = (float("nan"), float("inf"), -float("inf"))
    for i, row in enumerate(range(1, rows, 4)):
        spoilt[row, vocabulary - 1 - 13 * i if i % 3 < 2 else slice(None)] = values[i % 3]
    spoilt[20] = float("nan")
    bad = torch.full((rows,), 5, dtype=torch.int64, device=device)
    out = torch.full((rows,), -1, dtype=torch.int64, device=device)
    sampler.sample(spoilt, *parts, out=out, bad=bad)
    marked = sampling.nonfinite(spoilt)
    assert int(marked.sum()) == len(range(1, rows, 4)) + 1
    assert torch.equal(bad, marked.long())
    assert torch.equal(out[~marked], want[~marked])
    assert bool(((out >= 0) & (out < vocabulary)).all()), "the next iteration reads it"
