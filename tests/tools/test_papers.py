"""`weft bench batching`: the table and figures of Mind the Memory Gap."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_curves import curve, point, times

from weft.autosearch.advisor import curve as curves
from weft.autosearch.advisor.curve import ReplicaPoint
from weft.autosearch.advisor.optimal_batch import solve
from weft.server.daemon.cli import main
from weft.tools.papers import paper
from weft.tools.papers.paper import write
from weft.tools.papers.paper_table import objectives


def test_table_iv_and_the_figures_of_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    other = [point(2**i, dram_share=0.5, warps_share=0.1, sm_share=0.6) for i in range(9)]
    made = curve(model="opt-1.3b")
    strict = solve(made, objectives(made)["strict"]).best
    assert strict is not None
    assert strict.point.bound == 64  # twice the time of 32, 16.4 ms, is kept up to 114
    two = ReplicaPoint(replicas=2, bound=64, batch=128.0, itl=times(0.03), output_per_s=2.0)
    write([msgspec.structs.replace(made, replicas=(two,)), curve(other, model="opt-2.7b")], tmp_path)
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"figure_{n}.png" for n in (2, 3, 4, 8, 10, 11)} | {"table_4.md", "table_4.json"}
    table = json.loads((tmp_path / "table_4.json").read_text())
    assert [row["config"] for row in table if row["model"] == "opt-1.3b"] == [
        "MAX", "strict", "strict, 2 replicas", "relaxed",
    ]  # fmt: skip
    assert "| opt-2.7b | strict | 64 |" in capsys.readouterr().out


def test_ctrl_c_lets_the_current_model_finish_and_starts_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The process of a model exits at the first Ctrl-C and leaves its points."""
    pytest.importorskip("matplotlib")
    out, points = tmp_path / "out", tmp_path / "points.json"
    curves.save(curve(model="opt-1.3b"), points)
    child = f"""
import os, signal, sys, time
def end(*_): os.replace({str(points)!r}, {str(out / "opt-1.3b.json")!r}); sys.exit(0)
signal.signal(signal.SIGINT, end)
os.kill(os.getppid(), signal.SIGINT)
while True: time.sleep(1)
"""
    begun: list[list[str]] = []
    run = paper._run

    def stand_in(line: list[str]) -> tuple[int, bool]:
        begun.append(line)
        return run([sys.executable, "-c", child])

    monkeypatch.setattr(paper, "_run", stand_in)
    assert main(["bench", "batching", "--out", str(out), "--models", "opt-1.3b", "opt-2.7b", "--device", "cpu"]) == 0
    assert len(begun) == 1
    assert "| opt-1.3b | MAX |" in capsys.readouterr().out


def test_runs_of_longer_prompts_can_be_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("matplotlib")
    orders: list[dict[str, Any]] = []

    def stand_in(line: list[str]) -> tuple[int, bool]:
        orders.append(json.loads(line[-1]))
        curves.save(curve(model="opt-1.3b"), Path(orders[-1]["file"]))
        return 0, False

    monkeypatch.setattr(paper, "_run", stand_in)
    requested = [
        "bench",
        "batching",
        "--out",
        str(tmp_path),
        "--models",
        "opt-1.3b",
        "--device",
        "cpu",
        "--replicas",
        "0",
    ]
    assert main(requested) == 0
    assert main([*requested, "--no-lengths"]) == 0
    assert [order["lengthen"] for order in orders] == [True, False]
    assert [order["replicas"] for order in orders] == [0, 0]


def test_an_unknown_model_is_a_one_line_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "batching", "--out", str(tmp_path), "--models", "opt-9b"]) == 2
    assert "unknown model preset 'opt-9b'" in capsys.readouterr().err


def test_an_unwritable_folder_is_reported_before_any_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paper, "_run", lambda *_: pytest.fail("it measures"))
    monkeypatch.setattr(paper.os, "access", lambda *_: False)  # root may write anywhere
    requested = ["bench", "batching", "--out", str(tmp_path), "--models", "opt-1.3b", "--device", "cpu"]
    assert main(requested) == 2
    assert f"cannot write in {tmp_path}" in capsys.readouterr().err
