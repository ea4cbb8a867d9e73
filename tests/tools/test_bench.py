"""`weft bench offline` on the demo model: which figures it prints, and that parts add up. No timing is asserted."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from weft.autosearch.accelerators import accelerator, of_gpu
from weft.engine.config import PRESETS
from weft.engine.demo import MODEL_PATH
from weft.engine.model.directory import read_spec
from weft.server.daemon.cli import main
from weft.tools.bench import offline

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


def test_flops_are_counted_with_and_without_attention(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = read_spec(PRESETS / "gemma-3-4b")  # five layers of six have a window of 1,024
    layers, full = spec.num_layers, spec.windows.count(None)
    dense, attention = offline.model_flops(spec, [(2000, 49), (3, 1)])
    assert dense == pytest.approx(2 * spec.active_parameters * (2048 + 3))
    every = full * 2048 * 2049 / 2 + (layers - full) * (1024 * 1025 / 2 + 1024 * 1024) + layers * 6
    assert attention == pytest.approx(4 * spec.num_heads * spec.head_dim * every)

    file = tmp_path / "figures.json"
    assert main([*SMALL, "--json", str(file)]) == 0
    figures = json.loads(file.read_text())
    dense, attention = offline.model_flops(read_spec(MODEL_PATH), [(20, 4)] * 6)
    assert figures["model_tflops_2nd"] == pytest.approx(dense / figures["seconds"] / 1e12)
    assert figures["model_tflops_with_attention"] == pytest.approx((dense + attention) / figures["seconds"] / 1e12)
    assert "mfu_2nd" not in figures  # no rated FLOP/s on a CPU

    class Rank:
        spec = read_spec(MODEL_PATH)
        resolved = SimpleNamespace(device=torch.device("cuda"))
        config = SimpleNamespace(tensor_parallel_size=2)

    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "NVIDIA A100-SXM4-80GB")
    shares = offline._use_of_flops(Rank(), [(20, 4)], 0.5)  # type: ignore[arg-type]
    dense, attention = offline.model_flops(Rank.spec, [(20, 4)])
    assert shares["mfu_2nd"] == pytest.approx(dense / 0.5 / (2 * 312e12))
    assert shares["mfu_with_attention"] == pytest.approx((dense + attention) / 0.5 / (2 * 312e12))
    assert of_gpu("NVIDIA H100 80GB HBM3") == accelerator("h100")
    assert of_gpu("NVIDIA L40S") is None


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
