"""`weft advise` as a command: its output files, its errors, and the demo model on a CPU."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
from pathlib import Path
from typing import Any

import msgspec
import pytest
from made_curves import MACHINE, curve

from weft.autosearch.advisor import command
from weft.autosearch.advisor import curve as curves
from weft.autosearch.advisor.concurrent_engines import ConcurrentEngines, EndedEarly
from weft.autosearch.advisor.engine_bench import EngineBench
from weft.engine import demo
from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.server.config import ServeConfig
from weft.server.daemon.cli import main
from weft.server.options import load


def test_recorded_curves_need_no_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    recorded, page, picture = tmp_path / "curve.json", tmp_path / "a.html", tmp_path / "a.png"
    curves.save(curve(model="<m>"), recorded)
    out = tmp_path / "weft.yaml"
    line = ["advise", "--curves", str(recorded), "--slo", "itl:p99:50ms", "--html", str(page), "--png", str(picture)]
    assert main([*line, "--out", str(out)]) == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "Run 64 requests at once" in output
    assert "replicas: 1. The device waits for the CPU 0.4% of the time" in output
    served = load(ServeConfig, {}, out)
    assert (served.max_num_seqs, served.model) == (64, "<m>")
    html = page.read_text()
    assert "<svg" in html
    assert "&lt;m&gt;" in html
    assert "<m>" not in html
    assert not re.search(r"(src|href)=[\"']?http", html)
    assert picture.read_bytes().startswith(b"\x89PNG")
    model = Path(demo.__file__).parent / "model"
    assert main(["advise", str(model), *line[1:], "--out", str(out)]) == 0  # the engine's own path
    assert load(ServeConfig, {}, out).model == str(model)


def test_a_latency_limit_that_no_slot_limit_meets_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    curves.save(curve(), tmp_path / "curve.json")
    line = ["advise", "--curves", str(tmp_path / "curve.json"), "--slo", "itl:p99:1ms", "--html", str(tmp_path / "a")]
    assert main(line) == 1
    assert "The engine may use 95% of itl:p99:1ms" in " ".join(capsys.readouterr().out.split())


def test_points_that_can_no_longer_be_stored_are_reported_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep = command.saver(tmp_path / "gone" / "points.json")
    keep(curve())
    keep(curve())
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("the measurements are not saved")
    command.saver(None)(curve())
    command.saver(tmp_path / "points.json")(curve())
    assert curves.load(tmp_path / "points.json") == curve()


@pytest.mark.parametrize(
    ("given", "pages", "gib"), [({}, 8193, None), ({"num_pages": 500}, 500, None), ({"kv_cache_gib": 0.5}, None, 0.5)]
)
def test_a_cpu_uses_the_measured_kv_pool(
    given: dict[str, Any], pages: int | None, gib: float | None, tmp_path: Path
) -> None:
    recorded, out = tmp_path / "curve.json", tmp_path / "weft.yaml"
    machine = msgspec.structs.replace(MACHINE, device="cpu", pages=(pages or 8193) - 1)
    curves.save(msgspec.structs.replace(curve(), model="demo", machine=machine, options=given), recorded)
    assert main(["advise", "--curves", str(recorded), "--out", str(out)]) == 0
    served = load(ServeConfig, {}, out)
    assert (served.num_pages, served.kv_cache_gib) == (pages, gib)


def test_a_gpu_uses_all_pages_that_fit(tmp_path: Path) -> None:
    recorded, out = tmp_path / "curve.json", tmp_path / "weft.yaml"
    curves.save(curve(model="demo"), recorded)
    assert main(["advise", "--curves", str(recorded), "--out", str(out)]) == 0
    assert load(ServeConfig, {}, out).num_pages is None


def test_when_nothing_fits_it_reports_so_and_writes_no_configuration(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded, out = tmp_path / "curve.json", tmp_path / "weft.yaml"
    curves.save(curve(), recorded)
    assert main(["advise", "--curves", str(recorded), "--slo", "itl:p99:1ms", "--out", str(out)]) == 1
    reported = capsys.readouterr().out
    assert "No slot limit fits" in reported
    assert "The slot limit meets" not in reported
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([], "name a file to write"),
        (["--out", "x", "--slo", "e2e:p99:5s"], "weft advise measures itl and ttft"),
        (["--out", "x", "--slo", "itl"], "is not MEASURE:STATISTIC:LIMIT"),
        (["--out", "x", "--max-num-seqs", "auto", "--slo", "itl:p99:5ms"], "a number, not auto"),
        (["--out", "x", "--curves", "/nowhere/c.json"], "cannot read"),
        (["--out", "x", "--budget-seconds", "0"], "more than 0"),
        (["--out", "x", "--budget-seconds", "nan"], "more than 0"),
        (["--out", "x", "--point-seconds", "inf"], "more than 0"),
        (["--out", "x", "--rate-seconds", "nan"], "--rate-seconds must be 0 or more"),
        (["--out", "x", "--epsilon", "2"], "--epsilon 2 must be at least 0 and less than 1"),
        (["--out", "x", "--epsilon", "nan"], "--epsilon nan must be"),
        (["--out", "x", "--measure-replicas", "0"], "--measure-replicas must be 1 or more"),
        (["--out", "x", "--workload", "many"], "--workload many: give prompt and output tokens as P:D"),
        (["--out", "x", "--workload", "many:few"], "--workload 'many:few:1' is neither"),
    ],
)
def test_bad_input_is_a_one_line_error(line: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", *line]) == 2
    output = capsys.readouterr().err
    assert message in output
    assert output.count("\n") == 1


def test_the_demo_model_on_a_cpu(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    points, out = tmp_path / "points.json", tmp_path / "weft.yaml"
    line = ["advise", "--device", "cpu", "--workload", "6:8", "--max-num-seqs", "4", "--page-size", "8"]
    line += ["--rate-seconds", "0.05"]
    line += ["--num-pages", "64", "--point-seconds", "0.02", "--points", str(points), "--out", str(out)]
    assert main([*line, "--slo", "itl:p99:60s"]) == 0
    found = curves.load(points)
    assert {1, 2, 4} <= {p.bound for p in found.points}
    for p in found.points:
        assert 0 < p.batch <= p.bound + 1e-9
        assert p.output_per_s > 0
        assert 0 < p.kv_pages <= 2 * p.bound
        assert p.itl.mean is not None
    assert load(ServeConfig, {}, out).page_size == 8
    before = points.read_bytes()
    assert main([*line, "--slo", "itl:p99:60s"]) == 0  # everything is known
    assert json.loads(points.read_bytes()) == json.loads(before)

    def no_engine_starts(*_: object) -> None:
        raise WeftError("one of them ended")

    monkeypatch.setattr(command, "ConcurrentEngines", no_engine_starts)
    out.unlink()
    capsys.readouterr()
    assert main([*line, "--measure-replicas", "2"]) == 0
    assert "weft advise: cannot measure concurrent engines: one of them ended\n" in capsys.readouterr().err
    assert load(ServeConfig, {}, out).replicas == 1
    line[line.index("6:8")] = "5:8"
    assert main(line) == 2
    assert "was measured with workload '6:8'" in capsys.readouterr().err


def test_joules_without_a_counter_are_refused_before_any_measurement(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(EngineBench, "machine", lambda _: msgspec.structs.replace(MACHINE, joules="", no_joules="none"))
    monkeypatch.setattr(EngineBench, "measure", lambda *_: pytest.fail("it was measured"))
    line = ["advise", "--device", "cpu", "--workload", "6:8", "--num-pages", "64", "--out", str(tmp_path / "weft.yaml")]
    assert main([*line, "--objective", "energy"]) == 2
    assert "weft advise: --objective energy: no joules were counted: none\n" in capsys.readouterr().err


def test_parallel_engines_end_when_the_command_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[subprocess.Popen[str]] = []
    start = subprocess.Popen

    def noted(*arguments: Any, **options: Any) -> subprocess.Popen[str]:
        begun.append(start(*arguments, **options))
        assert os.getsid(begun[-1].pid) == begun[-1].pid  # Ctrl-C does not reach it
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", noted)
    with pytest.raises(EndedEarly, match="ended before the engines were measured"):
        ConcurrentEngines(EngineConfig(device="cpu"), 2, 4, 64, [(6, 8)], 0.05, stop_requested=lambda: True)
    assert [child.returncode for child in begun] == [-signal.SIGKILL] * 2
