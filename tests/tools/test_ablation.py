"""`weft bench ranks` on a CPU, with real processes and gloo: omissions are reported, and impossible options are
one-line errors."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.options import OneLineParser
from weft.engine.config import PRESETS
from weft.engine.demo import MODEL_PATH
from weft.engine.errors import ConfigError, OutOfMemory
from weft.engine.model.directory import read_spec
from weft.engine.runner.device.collectives import Steps
from weft.server.daemon import cli
from weft.tools.papers import ablation, cpu_bench
from weft.tools.papers.ablation import Ablation, Row, figures, nano_batches
from weft.tools.papers.ways import WAYS


def flags_of(text: str) -> set[str]:
    return set(re.findall(r"--[a-z-]+", text))


def flags() -> set[str]:
    """The command's flags."""
    parser = OneLineParser("weft bench ranks", None)
    ablation._flags(parser)
    return flags_of(parser.format_help())


@pytest.mark.slow
def test_ways_are_compared_on_ranks_of_a_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "ranks.json"
    command = (
        "bench ranks --model demo --device cpu --tensor-parallel-size 2 --tokens 64 --workload 32:16 --seconds 0.01"
    )
    assert cli.main([*command.split(), "--rounds", "1", "--json", str(out)]) == 0
    reported, progress = capsys.readouterr()
    rows = json.loads(out.read_text())["rows"]
    assert [row["way"] for row in rows] == [WAYS[name].label for name in ("none", "vendor", "one", "two")]
    assert all(row["tokens"] == 64 and row["layer_us"] > 0 and row["tokens_per_joule"] is None for row in rows)
    assert rows[0]["sums_us"] == 0
    for row in rows:  # reported as soon as it is measured
        assert f"64 tokens, {row['way']}: {row['layer_us']:,.1f} us a layer, 0 W, 0 MHz" in progress
    for name in ("sent-one", "sent-two", "nano", "sent-nano"):
        assert f"left out: {WAYS[name].label}: on a CPU" in reported
    assert not torch.distributed.is_initialized()  # another bench in this process would have no gloo
    trace = ["--ways", "sent-one,nano", "--trace", str(tmp_path / "trace")]  # none of them can be left out here
    assert cli.main([*command.split(), "--rounds", "1", *trace]) == 0
    assert not (tmp_path / "trace").exists()


def test_figures_are_those_of_all_ranks_and_layers() -> None:
    spec = read_spec(PRESETS / "llama-3-70b").shard(0, 4)
    row = figures(Row("two", 2048, Timing(1.5, 700.0, 1450.0)), spec, 1.2)
    assert row["tokens_per_second"] == pytest.approx(2048 / (80 * 1.5e-3))
    assert row["tokens_per_second_per_gpu"] == pytest.approx(row["tokens_per_second"] / 4)
    assert row["sums_us"] == pytest.approx(300)
    assert row["watts_of_all"] == 2800
    assert row["tokens_per_joule"] == pytest.approx(row["tokens_per_second"] / 2800)


def test_a_variant_is_an_engine_setting_or_a_baseline_that_leaves_the_stream_unchanged() -> None:
    pytest.importorskip("triton")
    from weft.tools.papers.sums_of_bench import SumsOfBench

    requested: list[Any] = []

    class Own:
        rank, ranks = 0, 2
        allocate = all_gather = abort_waits = inside = None

        def use(self, steps: dict[int, Steps], *, push_nano_batches: bool) -> None:
            requested.append((steps, push_nano_batches))

        def push(self, *_: Any, **__: Any) -> bool:
            requested.append("push")
            return True

        def reduce(self, *_: Any, **__: Any) -> torch.Tensor:
            requested.append("reduce")
            return torch.zeros(2, 4)

    own: Any = Own()
    sums = SumsOfBench(own)
    a, sumsq = torch.ones(4, 8), torch.full((3, 4), 7.0)
    product: dict[str, Any] = {"num_sms": 4, "space": None, "num_tokens": None}
    total: dict[str, Any] = {"live": a, "add": True, "num_sms": 4}
    for name, want in (
        ("one", (1, 0)),
        ("two", (2, 0)),
        ("sent-one", (1, 1)),
        ("sent-two", (1, 2)),
        ("nano", (2, 0)),
        ("sent-nano", (2, 2)),
    ):
        requested.clear()
        sums.use(name)
        assert sums.push(a, a, None, **product)
        sums.reduce(a, a, sumsq, **total)
        assert requested == [({0: Steps(*want)}, name.endswith("nano")), "push", "reduce"]
    requested.clear()
    sums.use("none:/a/folder")
    assert not sums.push(a, a, None, **product)
    assert torch.equal(sums.reduce(a, a, sumsq, **total), sumsq[:2])
    assert not requested


@pytest.mark.parametrize("ranks", [2, 4])
def test_the_pipeline_of_two_nano_batches_is_possible(ranks: int) -> None:
    spec = read_spec(PRESETS / "llama-3-70b").shard(0, ranks)
    for tokens in (256, 2048):
        period = nano_batches(spec, tokens, 132)
        period.check(spec, 132)
    sms = {(op.operation, op.begin): op.sms for op in period.operations}
    assert sms["gate_up", 0] == sms["down", 1024] == 132, "nothing is to be done beside them"
    assert sms["gate_up", 1024] == sms["down", 0] == sms["o", 0] == 116, "a sum of the other half"
    assert sms["qkv", 0] == sms["o", 1024] == sms["prefill", 0] == 100, "attention of the other half"
    with pytest.raises(ConfigError, match="128 tokens are too few"):
        nano_batches(spec, 128, 132)


def test_collectives_impossible_with_few_tokens_are_possible_with_more(tmp_path: Path) -> None:
    class Bench:
        num_sms, seconds, memory = 132, 1.0, 0

        def sums(self, way: str) -> None:
            if way.startswith("vendor"):
                raise ConfigError("there is no such library")

        def period(self, *_: Any) -> Timing:
            return Timing(1.0, 0.0, 0.0)

    bench: Any = Bench()
    ways = Ablation(bench, read_spec(PRESETS / "llama-3-70b").shard(0, 2), tmp_path)
    found = [
        [row.way for row in ways.run(("none", "vendor", "nano", "sent-nano"), Load(tokens, tokens // 2, 1024, 512), 2)]
        for tokens in (128, 512)
    ]
    assert found == [["none"], ["none", "nano", "sent-nano"]]
    assert list(ways.left_out) == [("vendor", 0), ("nano", 128), ("sent-nano", 128)]


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (["--tensor-parallel-size", "1"], "2 to 8"),
        (["--tensor-parallel-size", "16"], "2 to 8"),
        (["--ways", "one,three"], "there is no three"),
        (["--tensor-parallel-size", "3"], "4 attention heads cannot be split over 3 ranks"),
        (["--tokens", "0"], "--tokens must be 1 to 65536"),
        (["--tokens", "64", "65537"], "--tokens must be 1 to 65536"),
        (["--seconds", "nan"], "--seconds must be more than 0"),
        (["--tuning-seconds", "-1"], "--tuning-seconds 0 or more"),
        (["--workload", "9999999999:9"], "two numbers of tokens from 1 to 134217728"),
        (
            ["--device", "cuda", "--tensor-parallel-size", "4"],
            "--tensor-parallel-size 4 needs one GPU per rank, and this machine has ",
        ),
    ],
)
def test_an_impossible_option_is_a_one_line_error(
    options: list[str], what: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert cli.main(["bench", "ranks", "--model", "demo", "--device", "cpu", *options]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert what in line
    assert flags_of(line) <= flags()


@pytest.mark.parametrize("memory", [1000, 10**8])
def test_a_setup_that_does_not_fit_the_machine_is_reported_with_the_commands_options(
    memory: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_bench, "memory_bytes", lambda _: memory)
    host: Any = SimpleNamespace(rank=0, ranks=2)
    spec = read_spec(MODEL_PATH).shard(0, 2)
    with pytest.raises(OutOfMemory, match="GiB on 2 ranks, and the machine has") as raised:
        cpu_bench.CpuBench(spec, host, max_tokens=64, max_context=10**6, seconds=0.01)
    assert flags_of(str(raised.value)) <= flags()
