"""Reports of a long start: the timed phases, the displayed lines, and when."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.progress import GIB, LOADING, Phases, ProgressBar, ProgressLines


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_phases_are_timed_from_their_first_report_to_the_next_phase() -> None:
    clock = Clock()
    reported: list[tuple[str, int, int]] = []
    phases = Phases(lambda *report: reported.append(report), clock)
    for phase, done, seconds in (("load", 0, 2.0), ("load", 1, 0.5), ("compile", 0, 4.0)):
        phases(phase, done, 2)
        clock.now += seconds
    phases.end()
    clock.now += 10  # not attributed to a phase
    phases("capture", 0, 1)
    clock.now += 1
    phases.end()
    assert phases.seconds == {"load": 2.5, "compile": 4.0, "capture": 1.0}
    assert reported == [("load", 0, 2), ("load", 1, 2), ("compile", 0, 2), ("capture", 0, 1)]


def test_a_repeated_phase_is_added_up() -> None:
    clock = Clock()
    phases = Phases(clock=clock)
    for phase in ("a", "b", "a"):
        phases(phase, 0, 1)
        clock.now += 1
    phases.end()
    assert phases.seconds == {"a": 2.0, "b": 1.0}


def test_lines_appear_every_two_seconds(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = ProgressLines(clock)
    for done in range(10):
        lines("compiling kernels", done, 10)
        clock.now += 0.75
    assert capsys.readouterr().err.splitlines() == [
        "weft: compiling kernels, 3 of 10, about 5 s left",
        "weft: compiling kernels, 6 of 10, about 3 s left",
        "weft: compiling kernels, 9 of 10, about 1 s left",
    ]


def test_bytes_are_reported_in_gib_and_with_their_rate(capsys: pytest.CaptureFixture[str]) -> None:
    clock = Clock()
    lines = ProgressLines(clock)
    for done in range(0, 17, 4):
        lines(LOADING, done * GIB, 16 * GIB)
        clock.now += 1
    assert capsys.readouterr().err.splitlines() == [
        "weft: loading weights, 8.0 of 16.0 GiB at 4.0 GiB/s, about 2 s left",
        "weft: loading weights, 16.0 of 16.0 GiB at 4.0 GiB/s",
    ]


@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_the_engine_reports_every_byte(tiny_model: Callable[[str], Path], load_format: str) -> None:
    reported: list[tuple[str, int, int]] = []
    config = EngineConfig(model=str(tiny_model("yi")), dtype="float32", num_pages=8, load_format=load_format)
    engine = Engine(config, lambda *report: reported.append(report))
    size = engine.spec.num_parameters * 4
    assert {phase for phase, _, _ in reported} == {LOADING}
    assert {total for _, _, total in reported} == {size}
    done = [done for _, done, _ in reported]
    assert done[0] == 0
    assert done == sorted(done)
    assert done[-1] == size
    assert 0 < engine.start_seconds[LOADING] <= engine.load_seconds
    engine.close()


def test_a_bar_leaves_nothing_behind_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressBar() as bar:
        bar(LOADING, 0, 2)
        bar(LOADING, 2, 2)
        bar("capturing graphs", 0, 5)
    assert capsys.readouterr() == ("", "")
