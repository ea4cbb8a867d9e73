"""Heartbeats: late processes, announced allowances, and pauses of the watchdog itself."""

from __future__ import annotations

import os
from types import SimpleNamespace

import pytest

from weft.engine.wire import heartbeat as heartbeat
from weft.engine.wire.heartbeat import ENGINE, Heartbeats, LastStep, Watch


class Clock:
    """A clock that stands still regardless of the test's duration, except when a test advances it ahead of the
    processes' own."""

    now = 1000.0

    def __init__(self) -> None:
        self.ahead = 0.0

    def __call__(self) -> float:
        return self.now + self.ahead

    def pass_by(self, watch: Watch, seconds: int) -> None:
        """Advance time while the watchdog checks every second."""
        for _ in range(seconds):
            self.ahead += 1
            watch.look()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=lambda: Clock.now))
    return Clock()


def test_a_process_that_has_not_started_is_not_late(clock: Clock) -> None:
    watch = Watch(Heartbeats(2), clock)
    clock.pass_by(watch, 1000)
    assert watch.late(ENGINE, 5) is None
    assert watch.age(ENGINE) == 0


def test_a_process_without_a_heartbeat_beyond_the_limit_is_late(clock: Clock) -> None:
    watch = Watch(heartbeats := Heartbeats(2), clock)
    heartbeats.of(1)()
    clock.pass_by(watch, 4)
    assert watch.late(1, 5) is None
    clock.pass_by(watch, 3)
    assert watch.late(1, 5) == 7
    assert watch.late(1, 60) is None
    assert watch.late(ENGINE, 5) is None  # each has its own row


def test_a_stage_has_its_own_limit_and_is_reported(clock: Clock) -> None:
    watch = Watch(heartbeats := Heartbeats(), clock)
    engine = heartbeats.of(ENGINE)
    engine.stage("loading weights, 3 of 12", 100)
    assert heartbeats.stage(ENGINE) == "loading weights, 3 of 12"
    clock.pass_by(watch, 90)
    assert watch.late(ENGINE, 5) is None
    clock.pass_by(watch, 20)
    assert watch.late(ENGINE, 5) is not None
    engine()
    assert heartbeats.stage(ENGINE) == ""
    assert heartbeats.of(ENGINE).allowed == 0


def test_a_long_name_of_a_stage_is_cut() -> None:
    heartbeats = Heartbeats()
    heartbeats.of(ENGINE).stage("é" * 200, 1)
    assert heartbeats.stage(ENGINE).startswith("é" * 60)


def test_time_that_the_watchdog_slept_does_not_count(clock: Clock) -> None:
    watch = Watch(heartbeats := Heartbeats(), clock)
    heartbeats.of(ENGINE)()
    clock.ahead += 1000  # the machine was suspended: no process checked
    watch.look()
    assert watch.late(ENGINE, 5) is None
    clock.pass_by(watch, 7)
    assert watch.late(ENGINE, 5) is not None


def test_another_process_reads_the_same() -> None:
    ours = Heartbeats(2, step_timeout=7, start_timeout=9)
    theirs = Heartbeats(1, os.dup(ours.fd))  # it does not need the others
    assert (theirs.step_timeout, theirs.start_timeout) == (7, 9)
    step = LastStep(5, 3, 20, 2, 1)
    theirs.of(ENGINE).begin("starting", 5, os.getpid())
    theirs.of(ENGINE).step(step)
    assert ours.last_step(ENGINE) == step
    assert "3 requests, 20 tokens (2 of decodes, 18 of prefills)" in str(ours.last_step(ENGINE))
    assert ours.of(ENGINE).pid == os.getpid()
    ours.of(ENGINE).begin("starting", 5)  # a successor
    assert theirs.last_step(ENGINE) is None
    assert theirs.of(ENGINE).pid == 0


def test_a_rank_has_its_own_stage(clock: Clock) -> None:
    watch = Watch(heartbeats := Heartbeats(2), clock)
    heartbeats.of(ENGINE).begin("starting", 100)
    rank = heartbeats.rank(ENGINE, 7)
    rank.begin("importing", 50, os.getpid())
    assert (heartbeats.stage(ENGINE), heartbeats.stage(ENGINE, 7), heartbeats.stage(1)) == ("starting", "importing", "")
    clock.pass_by(watch, 60)
    assert watch.silent_rank(ENGINE, 5) == (7, 60)
    rank()
    assert (heartbeats.stage(ENGINE), heartbeats.stage(ENGINE, 7)) == ("starting", "")


def test_a_process_about_to_be_killed_is_late_despite_its_heartbeat(clock: Clock) -> None:
    watch = Watch(heartbeats := Heartbeats(), clock)
    heartbeats.of(ENGINE)()
    heartbeats.of(ENGINE).condemn()
    heartbeats.of(ENGINE)()
    assert watch.late(ENGINE, 5) is not None
    heartbeats.of(ENGINE).begin("starting", 5)
    assert watch.late(ENGINE, 5) is None
