"""Sustained timings on a graph that only waits."""

from __future__ import annotations

import time

import pytest
import torch

from weft.kernels import measure
from weft.kernels.measure import Meter, sustained


class WaitingGraph:
    def replay(self) -> None:
        time.sleep(0.01)


class NoMeter(Meter):
    def __init__(self) -> None:
        self.samples = [(0.0, 1500.0, 690.0)]


@pytest.mark.parametrize("seconds", [0.001, 0.2])  # a replay lasts longer, and many fit
def test_a_call_is_timed_however_short_the_measurement(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    monkeypatch.setattr(measure, "capture", lambda _: (WaitingGraph(), 2))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    timing = sustained([], NoMeter(), seconds)
    assert 5 <= timing.ms < 8
    assert (timing.watts, timing.mhz) == (690.0, 1500.0)
