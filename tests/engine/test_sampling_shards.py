"""Sampling with the vocabulary sharded over ranks gives the tokens and log-probabilities of one rank."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from weft.engine.ranks.links import Descriptors, Links
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.engine.runner.device.collectives import Collectives
from weft.engine.runner.device.sampling import Sampling
from weft.kernels.reference import sampling, sampling_shards

VOCABULARY = 301
"""does not divide by any number of ranks"""


def on_ranks(ranks: int, work: Callable[[Collectives], Any]) -> list[Any]:
    """The result of `work` on each rank, in a thread each."""
    shared = Descriptors.make(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        jobs = [pool.submit(work, SharedCollectives(Links(rank, shared))) for rank in range(ranks)]
        found = [job.result(240) for job in jobs]
    shared.close()
    return found


def shard(logits: Tensor, collectives: Collectives) -> tuple[Tensor, sampling_shards.Shard]:
    own = [r * logits.shape[1] // collectives.ranks for r in (collectives.rank, collectives.rank + 1)]
    return logits[:, own[0] : own[1]].clone(), sampling_shards.Shard(own[0], collectives.rank, collectives.all_gather)


def rows(generator: torch.Generator, spread: float, *, ties: bool) -> tuple[Tensor, dict[str, Tensor]]:
    n = 64
    logits = torch.randn(n, VOCABULARY, generator=generator) * spread
    if ties:
        logits = (logits * 2).round() / 2
    draw = {name: torch.rand(n, generator=generator) for name in ("k", "p", "m", "t", "uniform")}
    # all combinations of off and on
    on = [(torch.arange(n) >> bit) % 2 == 1 for bit in range(4)]
    return logits, {
        "temperature": torch.where(on[3], draw["t"] * 1.5 + 0.2, torch.where(on[0] | on[1] | on[2], 1.0, 0.0)),
        "top_k": torch.where(on[0], 1 + (draw["k"] * 90).int(), 0),
        "top_p": torch.where(on[1], draw["p"] * 0.999 + 0.001, 1.0),
        "min_p": torch.where(on[2], draw["m"] * 0.3, 0.0),
        "uniform": draw["uniform"],
    }


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize(("spread", "ties"), [(3.0, False), (0.05, False), (3.0, True), (0.0, True)])
def test_tokens_are_those_of_one_rank(ranks: int, spread: float, ties: bool) -> None:
    """Steep and flat distributions (a top-p cut beyond the ranks' first candidates), with and without ties."""
    logits, requested = rows(torch.Generator().manual_seed(1), spread, ties=ties)
    want = sampling.sample(logits, **requested)

    def work(collectives: Collectives) -> tuple[Tensor, Tensor]:
        part, own = shard(logits, collectives)
        return sampling_shards.sample(part, own, **requested)

    for tokens, nonfinite in on_ranks(ranks, work):
        assert tokens.tolist() == want.tolist()
        assert not nonfinite.any()


def test_a_draw_at_the_ends_of_the_distribution_has_a_token() -> None:
    logits = torch.zeros(2, 8)
    logits[:, 4:] = -torch.inf
    requested = {"temperature": torch.ones(2), "top_k": torch.zeros(2), "top_p": torch.ones(2), "min_p": torch.zeros(2)}
    uniform = torch.tensor([0.0, 1.0])
    for tokens, _ in on_ranks(2, lambda c: sampling_shards.sample(*shard(logits, c), **requested, uniform=uniform)):
        assert tokens.tolist() == [0, 3]


def test_non_finite_rows_are_reported_by_every_rank() -> None:
    logits, requested = rows(torch.Generator().manual_seed(2), 1.0, ties=False)
    logits[3, 200], logits[17, 5], logits[40] = float("nan"), float("inf"), -torch.inf
    for tokens, nonfinite in on_ranks(2, lambda c: sampling_shards.sample(*shard(logits, c), **requested)):
        assert torch.nonzero(nonfinite)[:, 0].tolist() == [3, 17, 40]
        assert ((tokens >= 0) & (tokens < VOCABULARY)).all()


@pytest.mark.parametrize("top", [0, 1, 20, VOCABULARY])
def test_log_probabilities_are_those_of_one_rank(top: int) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(9, VOCABULARY, generator=generator) * 4
    tokens = torch.randint(VOCABULARY, (9,), generator=generator)
    want = sampling.logprobs_of(logits, tokens, top)
    for found in on_ranks(2, lambda c: sampling_shards.logprobs_of(*shard(logits, c), tokens, top)):
        assert torch.equal(found[0], want[0])
        assert torch.equal(found[1], want[1])
        torch.testing.assert_close(found[2], want[2])
        own = (found[1][:, 1:] == tokens[:, None]).nonzero()
        assert all(found[2][row, 1 + at] == found[2][row, 0] for row, at in own.tolist())


class FloatSums(TorchDispatchMode):
    """Records torch's own sums of floating-point numbers: on a GPU their order follows the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if "sum" in func.name() and out.is_floating_point():
            self.seen.append(func.name())
        return out


def test_log_probabilities_are_added_in_an_order_independent_of_the_number_of_rows() -> None:
    """With `--batch-invariant` they are guaranteed to the bit."""
    logits = torch.randn(64, VOCABULARY, generator=torch.Generator().manual_seed(3)) * 4

    def work(collectives: Collectives) -> list[str]:
        with FloatSums() as sums:
            sampling_shards.logprobs_of(*shard(logits, collectives), torch.arange(64), 2)
        return sums.seen

    assert on_ranks(2, work) == [[], []]
    with FloatSums() as sums:
        logits.sum(-1)
    assert sums.seen == ["aten::sum.dim_IntList"]


def test_a_row_is_added_up_whole() -> None:
    for width in (1, 2, 3, VOCABULARY):
        values = torch.arange(2 * width).view(2, width)
        assert sampling_shards._row_sums(values.float()).tolist() == values.sum(-1).tolist()


@pytest.mark.parametrize("first", [0, 1, 31, 32, 75, 290])
def test_a_mask_is_cut_like_the_vocabulary(first: int) -> None:
    words = np.random.default_rng(4).integers(-(2**31), 2**31, (3, -(-VOCABULARY // 32))).astype(np.int32)
    whole = torch.zeros(4, VOCABULARY)
    at = torch.tensor([0, 2, 3])
    sampling.allow_only(whole, at, torch.from_numpy(words))
    part = torch.zeros(4, min(50, VOCABULARY - first))
    sampling.allow_only(part, at, torch.from_numpy(words), first)
    assert torch.equal(part, whole[:, first : first + part.shape[1]])


def test_one_rank_exchanges_nothing() -> None:
    assert Sampling(torch.device("cpu"), 2, range(10))._shard is None


class Waits(TorchDispatchMode):
    """Records operations that make the host wait for a device."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default):
            self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("alone", [False, True])
def test_the_host_waits_only_for_a_top_p_without_top_k(alone: bool) -> None:
    logits, requested = rows(torch.Generator().manual_seed(1), 3.0, ties=True)
    if not alone:
        requested["top_p"] = torch.where(requested["top_k"] > 0, requested["top_p"], 1.0)
    facts = sampling_shards.SamplingSummary.of(requested["temperature"], requested["top_k"], requested["top_p"])
    want = sampling.sample(logits, **requested)

    def work(collectives: Collectives) -> tuple[Tensor, list[str]]:
        part, own = shard(logits, collectives)
        own = own.with_sizes(part)
        with Waits() as waits:
            return sampling_shards.sample(part, own, **requested, summary=facts)[0], waits.seen

    for tokens, seen in on_ranks(2, work):
        assert torch.equal(tokens, want)
        assert bool(seen) == alone


def test_the_hosts_flags_of_rows_match_their_parameters() -> None:
    _, requested = rows(torch.Generator().manual_seed(2), 1.0, ties=False)
    columns = {name: requested[name].numpy() for name in ("temperature", "top_k", "top_p", "min_p")}
    inputs: Any = SimpleNamespace(columns=columns)
    found = Sampling(torch.device("cpu"), 4, range(10))._summary(inputs)
    want = sampling_shards.SamplingSummary.of(requested["temperature"], requested["top_k"], requested["top_p"])
    assert torch.equal(found.rows, want.rows)
    assert torch.equal(found.cut, want.cut)
    assert found[2:] == want[2:]
