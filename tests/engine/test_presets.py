"""Presets have the shapes of their names; `weft inspect` describes a model and why it is not served."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from pydantic import ValidationError

from weft.engine.config import PRESETS, EngineConfig
from weft.engine.demo import MODEL_PATH
from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.directory import read_spec
from weft.engine.runner.start import inspect_command

BILLIONS = {
    "llama-2-7b": 6.74, "llama-2-13b": 13.02, "llama-2-70b": 68.98, "llama-3-8b": 8.03, "llama-3-70b": 70.55,
    "llama-3.1-8b": 8.03,
    "yi-6b": 6.06, "deepseek-67b": 67.42, "qwen2-72b": 72.71, "qwen2.5-7b": 7.62, "qwen3-4b": 4.02, "qwen3-8b": 8.19,
    "qwen3-30b-a3b": 30.53, "mistral-7b": 7.24, "mixtral-8x7b": 46.70, "opt-1.3b": 1.32, "opt-2.7b": 2.65,
    "gpt-oss-20b": 20.91, "gemma-3-4b": 3.88, "phi-4": 14.66, "gpt-oss-120b": 116.79, "gemma-3-27b": 27.01,
    "glm-4-9b": 9.40, "glm-4.5-air": 106.85, "olmo-2-7b": 7.30, "granite-3.3-8b": 8.17, "smollm3-3b": 3.08,
    "gpt-2": 0.124, "qwen2.5-72b": 72.71, "qwen3.5-35b-a3b": 34.66, "qwen3-next-80b-a3b": 79.67, "nemotron-h-8b": 8.10,
    "lfm2-1.2b": 1.17, "deepseek-v2-lite": 15.71,
}  # fmt: skip
ACTIVE = {
    "qwen3-30b-a3b": 3.35, "mixtral-8x7b": 12.88, "gpt-oss-20b": 4.19, "gpt-oss-120b": 5.71, "glm-4.5-air": 13.42,
    "qwen3.5-35b-a3b": 3.45, "qwen3-next-80b-a3b": 3.87, "deepseek-v2-lite": 2.66,
}  # fmt: skip


def test_every_preset_has_the_parameters_of_its_model() -> None:
    """Ignores biases, which are not counted."""
    specs = {path.parent.name: read_spec(path.parent) for path in PRESETS.glob("*/config.json")}
    assert specs.keys() == BILLIONS.keys()
    for name, spec in specs.items():
        assert spec.num_parameters / 1e9 == pytest.approx(BILLIONS[name], abs=0.006), name
        assert spec.active_parameters / 1e9 == pytest.approx(ACTIVE.get(name, BILLIONS[name]), abs=0.006), name


def test_a_preset_stands_for_a_model_with_made_up_weights() -> None:
    config = EngineConfig(model_preset="opt-1.3b", load_format="dummy")
    assert read_spec(config.model_path).architecture == "OPTForCausalLM"
    assert config.model_name == "opt-1.3b"


def test_made_up_weights_need_no_tokenizer_of_their_own(tiny_model: Callable[[str], Path]) -> None:
    preset = EngineConfig(model_preset="gpt-2", load_format="dummy")
    bare = EngineConfig(model=str(tiny_model("yi")), load_format="dummy")
    for config in (preset, bare):
        assert config.uses_demo_tokenizer
        assert config.tokenizer_path == MODEL_PATH
    for config in (EngineConfig(model=str(tiny_model("yi"))), EngineConfig(load_format="dummy")):
        assert not config.uses_demo_tokenizer
        assert config.tokenizer_path == config.model_path


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"model_preset": "opt-1.3b"}, "load_format dummy"),
        ({"model_preset": "gpt-7", "load_format": "dummy"}, "choose one of deepseek-67b"),
        ({"model_preset": "phi-4", "load_format": "dummy", "model": "/x"}, "not both"),
    ],
)
def test_an_ambiguous_preset_is_refused(options: dict[str, str], word: str) -> None:
    with pytest.raises(ValidationError, match=word):
        EngineConfig(**options)  # type: ignore[arg-type]


def _inspect(*line: str) -> int:
    parser = argparse.ArgumentParser()
    inspect_command.add_inspect_flags(parser)
    return inspect_command.run(parser.parse_args(line))


def test_inspect_names_the_parts(tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    assert _inspect(str(tiny_model("gpt-oss"))) == 0
    output = capsys.readouterr().out
    for words in ("GptOssForCausalLM", "sinks", "2 of 4 a token", "2 layers see 24, 1 layers see all", "yarn x 4"):
        assert words in output
    assert "serves it in float32" in output
    assert _inspect(str(tiny_model("mistral")), "--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["devices"]["cpu"]["kv_bytes_per_token"] == reported["kv_values_per_token"] * 4
    assert "given back" in reported["parts"]["windows"]


def test_inspect_describes_a_rank(tiny_model: Callable[[str], Path], capsys: pytest.CaptureFixture[str]) -> None:
    reported = []
    for ranks in ("1", "2"):
        assert _inspect(str(tiny_model("qwen3")), "--json", "--tensor-parallel-size", ranks) == 0
        reported.append(json.loads(capsys.readouterr().out))
    assert reported[0]["ranks"] == reported[1]["ranks"] == [1, 2, 4]
    one, two = (t["devices"]["cpu"] for t in reported)
    assert two["kv_bytes_per_token"] * 2 == one["kv_bytes_per_token"]
    assert two["weight_bytes"] < 0.6 * one["weight_bytes"]
    assert _inspect(str(tiny_model("qwen3")), "--tensor-parallel-size", "2") == 0
    assert "on each of 2 ranks" in capsys.readouterr().out
    with pytest.raises(ModelError, match="4 attention heads cannot be split over 3 ranks"):
        _inspect(str(tiny_model("qwen3")), "--tensor-parallel-size", "3")


def test_inspect_reports_why_a_model_is_not_served(capsys: pytest.CaptureFixture[str]) -> None:
    assert _inspect("--model-preset", "llama-2-70b", "--max-model-len", "128") == 0
    output = capsys.readouterr().out
    assert "does not serve it: the weights need" in output
    assert "163,840 values a token, 320.0 KiB in bfloat16" in output
    with pytest.raises(ConfigError, match="choose one of"):
        _inspect("--model-preset", "help")
    with pytest.raises(ConfigError, match="not both"):
        _inspect("demo", "--model-preset", "phi-4")
