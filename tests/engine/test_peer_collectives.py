"""The state that a GPU rank keeps of a graph's sums. No kernel is launched; their arguments are recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from test_plan import SPEC

from weft.engine.model.spec import Shard
from weft.engine.runner.cuda import peer_collectives
from weft.engine.runner.cuda.peer_collectives import PeerCollectives, PeerLayout
from weft.engine.runner.device.collectives import Graph, Steps
from weft.kernels.collectives.push_gemm import Inbox, Pushed, width_of

TOKENS, HIDDEN = 256, 128


class Own:
    """The memory of one rank."""

    def __init__(self, size: int, ranks: int) -> None:
        self.memory = torch.zeros(size, dtype=torch.uint8)
        self.addresses = torch.zeros(ranks, dtype=torch.int64)
        self.bases = (0,) * ranks


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The arguments of GEMMs that send, and of sums after them."""
    found: list[dict[str, Any]] = []

    def push_project(_: Any, __: Any, inbox: Inbox, *___: Any, steps: int, **____: Any) -> Pushed:
        found.append({"inbox": inbox, "steps": steps})
        return Pushed(inbox, steps, 64, 64)

    def reduce_pushed(_: Any, __: Any, pushed: Pushed, **options: Any) -> None:
        found.append({"pushed": pushed} | options)

    monkeypatch.setattr(peer_collectives, "push_project", push_project)
    monkeypatch.setattr(peer_collectives, "reduce_pushed", reduce_pushed)
    monkeypatch.setattr(peer_collectives.kernels, "advance", lambda number: number.add_(1))
    return found


def collectives_of(ranks: int = 2) -> PeerCollectives:
    spec = replace(SPEC, hidden_size=HIDDEN, num_layers=2, shard_of=Shard(0, ranks))
    sizes = PeerLayout(spec, TOKENS, 8, torch.float16)
    return PeerCollectives(Own(sizes.total, ranks), 0, ranks, sizes)


def test_sends_of_nano_batches_of_a_sum_do_not_overlap(launched: list[dict[str, Any]]) -> None:
    c = collectives_of()
    c.use(
        {0: Steps(1, 1), 128: Steps(1, 2)}, push_nano_batches=True
    )  # this few tokens take another path than that many
    cuts = (0, 64), (64, TOKENS)
    weight = torch.empty(HIDDEN, 64, dtype=torch.float16)
    with c.inside(Graph.MODEL):
        for begin, end in cuts:
            a = torch.empty(end - begin, 64, dtype=torch.float16)
            assert c.push(a, weight, None, turn=1, begin=begin, among=TOKENS, num_sms=4, space=None, num_tokens=None)
    taken: set[int] = set()
    for (begin, end), reported in zip(cuts, launched, strict=True):
        inbox, row = reported["inbox"], width_of(HIDDEN, c.ranks, reported["steps"]) * 2
        for rank in range(c.ranks):
            first = inbox.partial + rank * inbox.rows * row
            own = set(range(first, first + (end - begin) * row))
            assert not own & taken
            taken |= own
