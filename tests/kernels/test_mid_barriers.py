"""The barriers of `mid_hopper` (and of `gemm_hopper`, which defines them) in random orders: all warps finish."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

_spec = importlib.util.spec_from_file_location("barriers", Path(__file__).with_name("barriers.py"))
assert _spec is not None
assert _spec.loader is not None
barriers: Any = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(barriers)

WARPS = 2
"""of a warpgroup in the model: one that arrives, one that may be late"""


class Program:
    """A program of `mid_kernel`: units of `spans` steps each, a residual tile for each where there is `x`."""

    def __init__(self, stages: int, spans: list[int], x: bool, late: int = 0, groups: int = 2) -> None:
        self.stages, self.spans, self.x, self.late, self.groups = stages, spans, x, late, groups
        self.full = [barriers.Barrier(1) for _ in range(stages)]
        self.empty = [barriers.Barrier(groups) for _ in range(stages)]
        self.x_full, self.x_empty = ([barriers.Barrier(1) for _ in range(groups)] for _ in range(2))
        self.sync = [barriers.Rendezvous(WARPS) for _ in range(groups)]
        self.stage_holds: list[tuple[int, int] | None] = [None] * stages
        self.landing: list[Callable[[], None]] = []
        self.produced = False

    def _fill(self, stage: int, what: tuple[int, int]) -> None:
        self.stage_holds[stage] = what
        self.full[stage].land(1)

    def copies(self) -> Any:
        while not self.produced or self.landing:
            if self.landing:
                self.landing.pop(0)()
            yield lambda: bool(self.landing) or self.produced

    def producer(self) -> Any:
        count = 0
        for turn, steps in enumerate(self.spans):
            for step in range(steps):
                stage = count % self.stages
                yield self.empty[stage].past(((count // self.stages) & 1) ^ 1)
                self.full[stage].arrive(1)
                self.landing.append(lambda stage=stage, what=(turn, step): self._fill(stage, what))
                count += 1
                if self.x and step == min(self.stages, steps - 1):
                    for half in range(self.groups):
                        yield self.x_empty[half].past((turn & 1) ^ 1)
                        self.x_full[half].arrive(1)
                        self.landing.append(lambda half=half: self.x_full[half].land(1))
        self.produced = True

    def warp(self, group: int, warp: int) -> Any:
        """`late`: a stage is given back this many steps too early, a deliberate mistake."""
        count = 0
        for turn, steps in enumerate(self.spans):
            for step in range(steps):
                stage = count % self.stages
                yield self.full[stage].past((count // self.stages) & 1)
                assert self.stage_holds[stage] == (turn, step), "a stage was overwritten before it was read"
                if self.late and warp == 0:
                    self.empty[stage].arrive()
                yield lambda: True  # the GEMM of this step runs
                assert self.stage_holds[stage] == (turn, step), "a stage was overwritten while it was read"
                yield self.sync[group].sync()
                if step > 0 and warp == 0 and not self.late:
                    self.empty[(count + self.stages - 1) % self.stages].arrive()
                count += 1
            yield self.sync[group].sync()
            if warp == 0 and not self.late:
                self.empty[(count + self.stages - 1) % self.stages].arrive()
            if self.x:
                yield self.x_full[group].past(turn & 1)
                yield self.sync[group].sync()
                if warp == 0:
                    self.x_empty[group].arrive()

    def run(self, seed: int) -> None:
        warps = [self.warp(group, warp) for group in range(self.groups) for warp in range(WARPS)]
        barriers.run([self.producer(), self.copies(), *warps], seed)


@pytest.mark.parametrize("x", [False, True])
@pytest.mark.parametrize("groups", [2, 3])
@pytest.mark.parametrize("spans", [[1], [1, 1, 1], [2, 7], [3, 3, 3], [12, 5, 1]], ids=str)
def test_producer_and_consumers_finish(spans: list[int], groups: int, x: bool) -> None:
    for stages in (3, 4, 7):
        for seed in range(8):
            Program(stages, spans, x, groups=groups).run(seed)


def test_the_model_detects_a_stage_released_too_early() -> None:
    def broken() -> None:
        for seed in range(40):
            Program(3, [9, 9], x=False, late=1).run(seed)

    with pytest.raises(AssertionError, match=r"overwritten|too many|for ever"):
        broken()
