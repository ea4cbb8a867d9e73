"""What a model of a CPU engine drafts, noted while it serves."""

from __future__ import annotations

import pytest
from harness import Harness
from torch import Tensor

from weft.engine.runner.cpu.cpu_runner import CpuRunner
from weft.engine.runner.iteration.batch import Batch


def noted_drafts(harness: Harness, monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, list[int]]]:
    """Return a list to which each draft from now on adds its request's handle, the tokens known before, and the drafted
    tokens."""
    seen: list[tuple[int, int, list[int]]] = []
    runner, slots = harness.engine.runner, harness.engine.scheduler.slots
    assert isinstance(runner, CpuRunner)
    assert runner._drafter is not None
    draft = runner._drafter.draft

    def noted(batch: Batch, token_ids: Tensor) -> None:
        draft(batch, token_ids)
        at = 0
        for row, length in enumerate(batch.query_len[: batch.num_decodes].tolist()):
            if length > 1:
                handle = int(slots.handle[batch.slots[row]])
                seen.append((handle, int(batch.positions[at]) + 1, token_ids[at + 1 : at + length].tolist()))
            at += length

    monkeypatch.setattr(runner._drafter, "draft", noted)
    return seen
