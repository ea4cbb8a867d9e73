"""Integer-quantised checkpoints: every format has the values of its writer, on any rank."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from integer_files import FORMS, Form, write_integers
from refusal import Refusal
from tiny import save_tiny

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, ModelError
from weft.engine.model.description import describe
from weft.engine.model.directory import read_spec
from weft.engine.model.implementation import choose_spec
from weft.engine.model.quantize import quantize
from weft.engine.model.weights import Weights, load_weights

Made = Callable[[str], Path]
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
SIZES: dict[str, Any] = {"hidden_size": 96, "intermediate_size": 152, "num_attention_heads": 4, "head_dim": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny("llama2", tmp_path_factory.mktemp("integers"), **SIZES)


def assert_same(got: Weights, want: Weights) -> None:
    mine, theirs = got.tensors(), want.tensors()
    assert len(mine) == len(theirs)
    for a, b in zip(mine, theirs, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("form", FORMS)
def test_every_format_has_the_values_of_its_writer(
    model: Path, tmp_path: Path, form: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whole, and as the second of two ranks has it, whose shard begins inside a word and inside a group."""
    there, meant = write_integers(model, tmp_path, FORMS[form])
    spec, plain = read_spec(there), read_spec(meant)
    assert spec.quantization is None
    assert_same(load_weights(spec, there, **CPU), load_weights(plain, meant, **CPU))
    message = capfd.readouterr().err
    assert message.count("\n") == 1
    assert f"in {FORMS[form].bits} bits ({FORMS[form].method}) became" in message
    own, same = (load_weights(s.shard(1, 2), p, **CPU) for s, p in ((spec, there), (plain, meant)))
    assert_same(own, same)
    assert f"{FORMS[form].bits} bits" in dict(describe(spec))["weights on disk"]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_numbers_are_rounded_once(model: Path, tmp_path: Path, dtype: torch.dtype) -> None:
    there, meant = write_integers(model, tmp_path, FORMS["awq"])
    options = {**CPU, "dtype": dtype}
    assert_same(load_weights(read_spec(there), there, **options), load_weights(read_spec(meant), meant, **options))


@pytest.mark.parametrize("form", ["awq", "gptq, act-order"])
def test_dequantising_in_pieces_gives_the_same(
    model: Path, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    there, meant = write_integers(model, tmp_path, FORMS[form])
    monkeypatch.setattr("weft.engine.model.integers.CHUNK", 1000)
    for rank in (0, 1):
        own, same = (load_weights(read_spec(p).shard(rank, 2), p, **CPU) for p in (there, meant))
        assert_same(own, same)


@pytest.mark.parametrize(("family", "keep"), [("mixtral", r"layers\.0\.self_attn"), ("qwen2", "down_proj")])
def test_experts_biases_and_16_bit_tensors(tiny_model: Made, tmp_path: Path, family: str, keep: str) -> None:
    there, meant = write_integers(tiny_model(family), tmp_path, Form("gptq", 4, 16), keep)
    assert_same(load_weights(read_spec(there), there, **CPU), load_weights(read_spec(meant), meant, **CPU))


def test_they_may_become_fp8_while_they_load(model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    there, meant = write_integers(model, tmp_path, FORMS["awq"])
    specs = [choose_spec(EngineConfig(model=str(path), quantization="fp8"))[0] for path in (there, meant)]
    own, same = (load_weights(spec, path, **CPU) for spec, path in zip(specs, (there, meant), strict=True))
    for a, b in zip(own.tensors(), same.tensors(), strict=True):
        assert a.dtype == b.dtype
        assert torch.equal(a.float(), b.float())
    assert "became FP8" in capfd.readouterr().err


def test_quantize_refuses_them_in_a_line(model: Path, tmp_path: Path) -> None:
    there, _ = write_integers(model, tmp_path, FORMS["awq"])
    with pytest.raises((ModelError, ConfigError), match="is quantized already"):
        quantize(there, tmp_path / "out")


def test_missing_and_invalid_tensors_are_named(model: Path, tmp_path: Path) -> None:
    there, _ = write_integers(model, tmp_path, FORMS["gptq, act-order"])
    name = "model.layers.1.mlp.down_proj"
    refusal = Refusal(there, name)
    assert f"no tensor {name}.scales" in refusal(scales=None)
    assert f"no tensor {name}.qzeros" in refusal(qzeros=None)
    assert f"{name}.scales has shape (3, 96)" in refusal(scales=torch.ones(3, 96))
    assert f"{name}.qweight has shape (4, 96)" in refusal(qweight=torch.zeros(4, 96, dtype=torch.int32))
    assert f"{name}.g_idx names groups that do not exist" in refusal(g_idx=torch.full((152,), 5, dtype=torch.int32))
    assert f"{name}.weight" in refusal(scales=torch.full((5, 96), float("nan")))
    assert f"{name}.qweight is float32" in refusal(qweight=torch.zeros(19, 96))
    assert f"no tensor {name}.g_idx, which its act-order needs" in refusal(g_idx=None)


def test_a_contradictory_file_is_refused(model: Path, tmp_path: Path) -> None:
    there, _ = write_integers(model, tmp_path, FORMS["compressed-tensors"])
    name = "model.layers.1.mlp.down_proj"
    refusal = Refusal(there, name)
    assert f"{name}.weight_shape is [96, 150], but the matrix is [96, 152]" in refusal(
        weight_shape=torch.tensor([96, 150])
    )
    assert f"{name}.weight_zero_point exists, but quantization_config says symmetric: true" in refusal(
        weight_zero_point=torch.zeros(12, 5, dtype=torch.int32)
    )


@pytest.mark.parametrize(
    ("config", "named"),
    [
        ({"quant_method": "awq", "bits": 3}, "AWQ of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "version 'gemv'"),
        ({"quant_method": "awq", "bits": 4, "zero_point": False}, "zero_point"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, "'marlin'"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size 0"),
        ({"quant_method": "gptq"}, "GPTQ of None bits"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {
            "weights": {"num_bits": 4, "type": "float", "strategy": "group"}}}}, "float with the strategy group"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"g": {
            "weights": {"num_bits": 4, "type": "int", "strategy": "channel"},
            "input_activations": {"num_bits": 8, "type": "int"}}}}, "activations of packed weights"),
    ],
)  # fmt: skip
def test_other_formats_are_named(model: Path, tmp_path: Path, config: dict[str, Any], named: str) -> None:
    raw = json.loads((model / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    with pytest.raises(ModelError, match=named) as error:
        read_spec(tmp_path)
    assert "\n" not in str(error.value)
