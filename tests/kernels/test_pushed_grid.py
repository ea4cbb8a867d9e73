"""How many programs add up the partial sums that GEMMs have sent."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from weft.kernels.collectives import push_gemm as pushed
from weft.kernels.collectives.peer import WAVES, Peers


@pytest.mark.parametrize(
    ("steps", "overlap", "waves"),
    [(1, True, WAVES), (1, False, WAVES), (2, True, WAVES), (2, False, pushed.PROGRAMS_PER_SM)],
)
def test_a_sum_on_its_own_lane_has_no_more_programs_than_its_sms_hold(
    steps: int, overlap: bool, waves: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    grids: list[tuple[int, ...]] = []

    class Kernel:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(pushed, "_reduce_pushed_kernel", Kernel())
    monkeypatch.setattr(pushed, "meet_kernel", Kernel())
    word = torch.zeros(1, dtype=torch.int32)
    peers = Peers(torch.zeros(4, dtype=torch.int64), 0, 4, word)
    sent = pushed.Pushed(pushed.Inbox(0, 2048, 0, 4096), steps, 64, 256)
    pushed.reduce_pushed(
        peers, word, sent, meet=0, x=0, sumsq=0, stride_sumsq=2048, live=word, ticket=word, tokens=2048, hidden=8192,
        dtype=torch.bfloat16, add=True, overlap=overlap, num_sms=20,
    )  # fmt: skip
    assert grids[0] == (20 * waves,)
