"""Sustained timings on a graph whose replay time is set by a fake clock."""

from __future__ import annotations

import pytest
import torch

from weft.kernels.tuning import measure
from weft.kernels.tuning.measure import Meter, sustained


class Clock:
    """Also the graph: each replay advances it."""

    def __init__(self, replay_s: float) -> None:
        self.now, self.replay_s, self.replays = 100.0, replay_s, 0

    def monotonic(self) -> float:
        return self.now

    def replay(self) -> None:
        self.now += self.replay_s
        self.replays += 1


class NoMeter(Meter):
    def __init__(self) -> None:
        self.samples = [(0.0, 1500.0, 690.0)]


@pytest.mark.parametrize("replay_s", [0.25, 0.7, 3.0, 2**-10])  # longer than half a measurement, than all of it, short
def test_a_call_of_any_duration_is_timed(monkeypatch: pytest.MonkeyPatch, replay_s: float) -> None:
    clock = Clock(replay_s)
    monkeypatch.setattr(measure, "capture", lambda _: (clock, 2))
    monkeypatch.setattr(measure, "time", clock)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timing = sustained([], NoMeter(), 0.5)
    assert timing.ms == pytest.approx(replay_s * 1e3 / 2)  # two calls a replay
    assert (timing.watts, timing.mhz) == (690.0, 1500.0)
    assert clock.replays == max(4, round(0.5 / replay_s))
