"""A huge value of a numeric option is one line that names the option, not a command that hangs or fills the memory."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.autosearch.plan_model import main as plan_model
from weft.autosearch.workload import read_lengths, workload_pair
from weft.deploy.fleet import settings as fleet
from weft.deploy.fleet.options import add_fleet_flags
from weft.engine.errors import ConfigError
from weft.loadgen import settings as load
from weft.loadgen.errors import LoadError
from weft.loadgen.lengths import read_pairs
from weft.loadgen.options import add_load_flags
from weft.loadgen.workload import build
from weft.server.config import ServeConfig

COMMON = [
    "--rate 1e30", "--rate 99999999", "--rate-end 99999999", "--users 99999999", "--duration 99999999s --rate 9",
    "--duration 9999999999h", "--requests 99999999", "--think 9999999999h", "--burstiness 1e-300", "--burstiness 1e300",
    "--context 999999999999 --turns 2", "--turns 999999999999", "--seed 99999999999999999999999",
    "--input 999999999999", "--input uniform:1:999999999999", "--input lognormal:1e300:1", "--output lognormal:1:1e300",
    "--token-ids 0:99999999999", "--prefix-groups 99999999999", "--warmup 9999999999h", "--max-failures 99999999",
]  # fmt: skip
FLEET = [
    *COMMON, "--engines 99999999", "--engines 1,99999999", "--engines 9" + "9" * 400, "--max-engines 99999999",
    "--rates 1,99999999", "--cores 1e300", "--fail 99999999:1s:1s", "--fail 0:1s:9999999999h",
    "--max-num-seqs 99999999", "--max-num-seqs auto:99999999 --slo itl:p99:50ms", "--num-pages 99999999",
    "--max-num-batched-tokens 99999999999", "--max-model-len 99999999999", "--max-queued-requests 99999999999",
    "--max-queued-tokens 99999999999",
    "--keys 99999999", "--keys " + ",".join(["1"] * 1001), "--engines " + ",".join(["1"] * 1001),
]  # fmt: skip
LOAD = [
    *COMMON, "--processes 99999999", "--timeout 9999999999h", "--max-context 99999999999", "--drain 9999999999h",
    "sweep --slo ttft:p99:1s --growth 1e300", "sweep --slo ttft:p99:1s --precision 1e300",
    "sweep --slo ttft:p99:1s --max-runs 99999999", "--slo ttft:p99:9999999999h",
]  # fmt: skip

UNBOUNDED = {"seed", "drain_timeout", "kv_cache_gib", "max_model_len"}
"""Options of `weft serve` that cost nothing, or that the engine compares with the memory and with the model."""


def read_fleet(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_fleet_flags(parser)
    settings = fleet.read(parser.parse_args(words))
    for rate in settings.rates:
        settings.workload(rate)


def read_load(words: list[str]) -> None:
    parser = argparse.ArgumentParser()
    add_load_flags(parser)
    settings = load.read(parser.parse_args(words))
    build(settings.arrival, settings.content, settings.maker, None)


@pytest.mark.parametrize(
    ("read", "words"), [*((read_fleet, words) for words in FLEET), *((read_load, words) for words in LOAD)]
)
def test_a_simulation_and_a_load_are_bounded(read: Callable[[list[str]], None], words: str) -> None:
    with pytest.raises(LoadError) as found:
        read(words.split())
    option = next(word for word in words.split() if word.startswith("--"))
    text = str(found.value)
    assert "\n" not in text
    assert option.removesuffix("-end").removesuffix("s") in text or "most is" in text or "sweep" in words


@pytest.mark.parametrize("pairs", ["[[1, 99999999999]]", "[[1, 99999999999999999999999]]", "[[1e400, 1]]"])
def test_lengths_in_a_file_are_bounded(tmp_path: Path, pairs: str) -> None:
    file = tmp_path / "lengths.json"
    file.write_text(pairs)
    with pytest.raises(LoadError, match="--lengths"):
        read_pairs(file)
    assert json.loads(pairs)


def test_workloads_of_a_search_are_bounded() -> None:
    for workload in ("1:1:99999999999", "lognormal:1:1:1:1:99999999999", "999999999999:1:2"):
        with pytest.raises(ConfigError, match="workload"):
            read_lengths(workload, None, 0)
    with pytest.raises(ConfigError, match="--workload"):
        workload_pair("1:999999999999")


@pytest.mark.parametrize("words", ["--gpus 99999999", "--tokens 99999999"])
def test_the_formulas_of_a_plan_are_bounded(words: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert plan_model(["--model", "demo", *words.split()]) == 2
    assert "at most" in capsys.readouterr().err


@pytest.mark.parametrize(
    "option",
    [
        name
        for name, field in ServeConfig.model_fields.items()
        if field.annotation in (int, float, int | None, float | None)
    ],
)
def test_numbers_of_a_daemon_are_bounded(option: str) -> None:
    if option not in UNBOUNDED:
        with pytest.raises(ValueError, match=option):
            ServeConfig.model_validate({option: 10**18})
