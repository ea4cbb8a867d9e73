"""The scheduler's machine with drafts: right and wrong ones, launched ahead or not. KV of rejected ones is spoilt."""

from __future__ import annotations

from typing import ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from list_device import VOCAB, next_token
from scripted_drafts import ScriptedDrafter
from test_scheduler_machine import SchedulerMachine, WindowMachine

from weft.engine.scheduling.verification import Verification


class Drafting(SchedulerMachine):
    """A part of a machine. `seen` adds up over all tried orders."""

    seen: ClassVar[dict[str, int]]

    def __init__(self) -> None:
        super().__init__()
        slots = self.scheduler.slots
        self.right = [1, 99]
        self.drafter = ScriptedDrafter(
            slots, lambda _, text: next_token(text, self.window), lambda token: (token + 1) % VOCAB, 2, self._right
        )
        self.scheduler.verification = Verification(slots, self.scheduler.pool, self.drafter)

    def _right(self) -> int:
        self.right = [*self.right[1:], self.right[0]]
        return self.right[0]

    @rule(active=st.booleans(), most=st.integers(0, 4), right=st.lists(st.integers(0, 4), min_size=1, max_size=4))
    def script(self, active: bool, most: int, right: list[int]) -> None:
        self.drafter.active, self.drafter.most, self.right = active, most, right

    @rule(times=st.integers(1, 5))
    def iterate(self, times: int) -> None:
        for _ in range(times):
            self.schedule()
            self.device_works()
            self.commit()

    @invariant()
    def drafts_are_counted(self) -> None:
        s = self.scheduler.slots
        running = s.running()
        assert (s.drafts[running] <= s.in_flight[running]).all()
        drafted = [batch for batch in self.launched if batch.drafted]
        assert len(drafted) + sum(result.batch.drafted for result in self.computed) <= 1 or not self.drafter.active

    def teardown(self) -> None:
        super().teardown()
        self.seen["drafted"] += self.drafter.drafted
        self.seen["accepted"] += self.drafter.accepted
        self.seen["preempted"] += self.scheduler.preemptions

    @classmethod
    def check_drafts(cls) -> None:
        assert min(cls.seen["accepted"], cls.seen["drafted"] - cls.seen["accepted"], cls.seen["preempted"]) > 30


class DraftMachine(Drafting):
    seen: ClassVar[dict[str, int]] = dict.fromkeys(("drafted", "accepted", "preempted"), 0)


class WindowDraftMachine(Drafting, WindowMachine):
    seen: ClassVar[dict[str, int]] = dict.fromkeys(("drafted", "accepted", "preempted"), 0)


DRAFT_SETTINGS = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class TestDraftMachine(DraftMachine.TestCase):  # type: ignore[misc]
    settings = DRAFT_SETTINGS

    def runTest(self) -> None:
        super().runTest()
        DraftMachine.check_drafts()


@pytest.mark.nightly
class TestWindowDraftMachine(WindowDraftMachine.TestCase):  # type: ignore[misc]
    settings = DRAFT_SETTINGS

    def runTest(self) -> None:
        super().runTest()
        WindowDraftMachine.check_drafts()
