"""How many drafts of a model are verified: as many as pay, counting the drafter's own passes."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from weft.engine.config.speculation import DraftOptions, parse_config
from weft.engine.scheduling.model_drafter import ModelDrafter
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.slots import Phase, SlotTable
from weft.engine.wire.sampling import SamplingParams

LENGTH = 1500
BUBBLE = 0.0004
"""seconds that the device waits for the host if iterations are launched one at a time"""
Seconds = Callable[[int, int], float]


class World:
    """Requests, each with the chance that a draft of it is right, and a clock of its own. `seconds` is the time of an
    iteration, given its rows and its deepest draft."""

    def __init__(self, chances: Sequence[float], seconds: Seconds, depth: int = 4, **options: Any) -> None:
        self.now, self.lengths = 0.0, list[list[int]]()
        self._chances, self._seconds = np.array(chances), seconds
        self._rng = np.random.default_rng(len(chances))
        self.left = np.full(len(chances), LENGTH)
        self.slots = SlotTable(len(chances), LENGTH + 8, 64)
        for i in range(len(chances)):
            request = Request(
                handle=i, token_ids=np.ones(1, np.int32), prompt_len=1, params=SamplingParams(),
                max_total_tokens=LENGTH, priority=0, order=i, arrival=0.0, salt="", stop_ids=(), seed=0,
            )  # fmt: skip
            self.slots.phase[self.slots.assign(request, np.zeros(0, np.int32), 0)] = Phase.DECODE
        # Every request is one position before its newest token.
        self.slots.known[:], self.slots.scheduled[:] = 1, 0
        made = DraftOptions("eagle3", depth, **{"measured": True, **options})
        self.drafter = ModelDrafter(self.slots, made, clock=lambda: self.now)

    def step(self, number: int | None = None) -> None:
        """Run an iteration of the first `number` requests."""
        slots = np.arange(len(self._chances) if number is None else number, dtype=np.int32)
        self.slots.phase[:] = Phase.PREFILL
        self.slots.phase[slots] = Phase.DECODE
        lengths, accepted = np.zeros((2, len(slots)), np.int32)
        if synchronous := self.drafter.active:
            lengths = self.drafter.propose(slots, np.full(len(slots), 50, np.int32), 10_000).length
            right = self._rng.random((len(slots), 64)) < self._chances[slots, None]
            accepted = np.minimum(right.cumprod(1).sum(1), lengths).astype(np.int32)
        rows = len(slots) + int(lengths.sum())
        self.now += self._seconds(rows, int(lengths.max(initial=0))) + (BUBBLE if synchronous else 0.0)
        batch: Any = SimpleNamespace(num_chunks=0, num_decodes=len(slots), num_tokens=rows)
        result: Any = SimpleNamespace(batch=batch)
        self.drafter.ended(result, self.now)
        if lengths.any():
            used = lengths > 0
            self.drafter.verified(slots[used], lengths[used], accepted[used])
        self.left[slots] -= 1 + accepted
        self.lengths.append(lengths.tolist())
        self.drafter.committed(True)

    @property
    def drafted(self) -> list[list[int]]:
        """The drafts of iterations that had any."""
        return [lengths for lengths in self.lengths if any(lengths)]

    def rate(self, steps: int = 600) -> float:
        """Return tokens a second of all requests."""
        begin, now = self.left.sum(), self.now
        for _ in range(steps):
            self.step()
        assert self.drafter.stats().draft_tokens["model"] == sum(map(sum, self.lengths))
        return float((begin - self.left.sum()) / (self.now - now))


def flat(rows: int, deepest: int) -> float:
    """A device bound by memory: rows are nearly free, and so is a small drafter."""
    return 0.0043 + 2e-5 * rows + 2e-4 * deepest


def steep(rows: int, deepest: int) -> float:
    """A device bound by arithmetic: a row costs as much as a token is worth."""
    return 0.001 + 0.004 * rows + 2e-4 * deepest


def slow_drafter(rows: int, deepest: int) -> float:
    """Rows are nearly free; a pass of the drafter takes as long as one of the model."""
    return 0.004 + 1e-6 * rows + 0.004 * deepest


def plain(requests: int, seconds: Seconds) -> float:
    return requests / seconds(requests, 0)


@pytest.mark.parametrize(("requests", "gain"), [(1, 2.0), (6, 1.8)])
def test_good_drafts_are_verified_as_deep_as_they_may(requests: int, gain: float) -> None:
    world = World([0.8] * requests, flat)
    assert world.rate() > gain * plain(requests, flat)
    assert max(world.lengths[-1]) == 4


@pytest.mark.parametrize(
    ("chances", "seconds"),
    [([0.05], flat), ([0.7] * 8, steep), ([0.6], slow_drafter), ([0.9] * 3, slow_drafter), ([0.0] * 16, flat)],
)
def test_drafts_that_do_not_pay_cost_at_most_a_fiftieth(chances: list[float], seconds: Seconds) -> None:
    world = World(chances, seconds)
    world.rate(200)
    assert world.rate(1200) > 0.98 * plain(len(chances), seconds)


def test_each_request_has_as_many_drafts_as_its_own_are_right() -> None:
    world = World([0.95] * 3 + [0.02] * 3, lambda rows, deepest: 0.004 + 3e-4 * rows + 1e-4 * deepest)
    world.rate(1200)
    mean = np.mean(world.drafted[-100:], 0)
    assert mean[:3].min() > 2
    assert mean[3:].max() < 0.8


def test_the_depth_ends_where_the_drafters_passes_cost_more_than_they_bring() -> None:
    """Drafts are right with a chance of 0.7: a first one is worth 0.7 tokens, a fourth one 0.24."""
    world = World([0.7], lambda rows, deepest: 0.004 + 1e-6 * rows + 0.0012 * deepest)
    world.rate(1200)
    deepest = [max(lengths) for lengths in world.drafted[-100:]]
    assert 1 <= np.median(deepest) <= 3


def test_a_full_batch_has_no_drafts_and_a_small_one_has_them_again() -> None:
    world = World([0.7] * 32, lambda rows, deepest: 0.004 + 1e-4 * max(0, rows - 30) * 4 + 1e-4 * deepest)
    for _ in range(200):
        world.step(2)
    assert max(world.lengths[-1]) > 0
    for _ in range(400):
        world.step()
    assert sum(map(sum, world.lengths[-100:])) < 100 * 2
    for _ in range(400):
        world.step(2)
    assert np.mean([max(lengths) for lengths in world.lengths[-100:]]) > 1


def test_drafts_that_become_right_are_verified_again() -> None:
    world = World([0.0], flat)
    world.rate(400)
    world._chances[:] = 0.9
    assert world.rate(1500) > 1.4 * plain(1, flat)


def test_models_draft_by_measurement_unless_the_number_is_fixed() -> None:
    head = {"method": "eagle3", "model": "head"}
    assert parse_config(json.dumps(head)).measured
    assert not parse_config(json.dumps({**head, "enable_adaptive_verification": False})).measured


def test_a_fixed_number_is_not_measured() -> None:
    world = World([0.0] * 3, steep, measured=False, by_requests=((3, 9, 2),))
    world.rate(20)
    assert world.lengths == [[2] * 3] * 20
