"""`weft bench offline` on the demo model: which figures it prints, and that parts add up. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from weft.server.daemon.cli import main

SMALL = ["bench", "offline", "--device", "cpu", "--workload", "20:4:6", "--max-num-seqs", "3", "--num-pages", "64"]


def test_figures_go_into_the_file_and_the_start_adds_up(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main([*SMALL, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    assert (figures["requests"], figures["attention_backend"]) == (6, "torch")
    assert figures["requests_in_the_widest_iteration"] == 3
    assert figures["total_tokens_per_second"] == pytest.approx(6 * 24 / figures["seconds"])
    assert sum(figures["share_of_the_time_by_tokens"].values()) == pytest.approx(1)
    assert figures["tokens_per_iteration_by_tokens"]["to 16"] <= 16
    assert figures["ms_per_iteration_by_tokens"].keys() == figures["tokens_per_iteration_by_tokens"].keys()
    start = figures["start_seconds"]
    assert {"loading weights", "first iteration"} <= start.keys()
    assert start.pop("in all") == pytest.approx(sum(start.values()))
    assert "start seconds · loading weights" in capsys.readouterr().out


def test_figures_include_number_formats_and_the_source_of_the_weights(tmp_path: Path) -> None:
    file, reported = tmp_path / "figures.json", []
    small = [
        "--quantization",
        "fp8",
        "--kv-cache-dtype",
        "fp8",
        "--load-format",
        "dummy",
        "--dummy-weights",
        "realistic",
    ]
    for more in ([], small):
        assert main([*SMALL, "--dtype", "float32", *more, "--json", str(file)]) == 0
        figures = json.loads(file.read_text())
        reported.append(tuple(figures[key] for key in ("weights", "weight_format", "kv_cache_dtype")))
    assert reported == [("the checkpoint's", "as dtype", "float32"), ("made up, realistic", "fp8", "float8_e4m3fn")]


def test_further_workloads_run_in_the_same_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "figures.json"
    assert main([*SMALL, "--then", "9:5:1", "--then", "7:2:4", "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    one, some = figures["then 9:5:1"], figures["then 7:2:4"]
    assert (figures["requests_in_the_widest_iteration"], some["requests_in_the_widest_iteration"]) == (3, 3)
    assert one["iterations"] == 5
    assert one["total_tokens_per_second"] == pytest.approx(14 / one["seconds"])
    behind = one["seconds"] - one["first_token_seconds"]
    assert one["output_tokens_per_second_behind_the_first"] == pytest.approx(4 / behind)
    assert "output_tokens_per_second_behind_the_first" not in some
    assert "then 7:2:4 · seconds" in capsys.readouterr().out
    assert main([*SMALL, "--then", "many"]) == 2


def test_a_trace_on_a_cpu_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--trace", str(tmp_path / "trace.json")]) == 2
    assert capsys.readouterr().err == "weft bench offline: --trace records a GPU; this engine runs on the CPU\n"


@pytest.mark.parametrize("count", ["-1", "1001", "many"])
def test_an_impossible_count_of_traced_iterations_is_a_one_line_error(
    count: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main([*SMALL, f"--trace-iterations={count}"])
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert "0 to 1000" in error
    assert error.count("\n") == 1
