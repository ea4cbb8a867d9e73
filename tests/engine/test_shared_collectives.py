"""Collectives over shared memory: sums in rank order, the same bits everywhere, and waiting ranks detect an exit."""

from __future__ import annotations

import pytest
import torch
from test_sampling_shards import on_ranks

from weft.engine.errors import RankLost
from weft.engine.ranks import links as links_module
from weft.engine.ranks.links import Descriptors, Links
from weft.engine.ranks.shared_collectives import SharedCollectives
from weft.engine.runner.device.collectives import Collectives


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_sums_are_in_rank_order_and_equal_to_the_bit(
    monkeypatch: pytest.MonkeyPatch, ranks: int, dtype: torch.dtype
) -> None:
    monkeypatch.setattr("weft.engine.ranks.shared_collectives.EXCHANGE_BYTES", 64)  # in several pieces
    generator = torch.Generator().manual_seed(0)
    parts = (torch.randn(ranks, 7, 13, generator=generator) * 10 ** torch.arange(ranks).view(-1, 1, 1)).to(dtype)
    want = parts[0].float()
    for part in parts[1:]:
        want = want + part.float()
    for total in on_ranks(ranks, lambda c: c.all_reduce(parts[c.rank])):
        assert torch.equal(total, want)
    for every in on_ranks(ranks, lambda c: c.all_gather(parts[c.rank])):
        assert torch.equal(every, parts)


def test_many_exchanges_of_all_sizes_stay_in_step() -> None:
    def work(c: Collectives) -> int:
        for i in range(300):
            mine = torch.full((i % 7, 3), float(c.rank + i))
            assert torch.equal(c.all_gather(mine), torch.stack([mine - c.rank + r for r in range(c.ranks)]))
            assert c.all_gather(torch.tensor([c.rank == 1])).tolist() == [[r == 1] for r in range(c.ranks)]
        return 300

    assert on_ranks(3, work) == [300] * 3


def test_waiting_for_a_rank_that_exited_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_module, "LOOK_SECONDS", 0.01)
    shared = Descriptors.make(2)
    mine = Links(0, shared)
    looked = []

    def check() -> None:
        looked.append(1)
        if len(looked) == 3:
            raise RankLost("rank 1: ended")

    mine.check = check
    with pytest.raises(RankLost, match="rank 1: ended"):
        SharedCollectives(mine).all_reduce(torch.ones(2))
    shared.close()


def test_descriptors_round_trip_as_text() -> None:
    shared = Descriptors.make(3)
    assert Descriptors.load(shared.dump()) == shared
    assert len(set(shared.fds)) == 1 + 6 + 2
    shared.close()
