"""The metadata of GGUF files: variants that converters and older versions write."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weft.engine.errors import ModelError
from weft.engine.model.gguf.config import to_config
from weft.engine.model.gguf.file import GgufFile

METADATA = {
    "embedding_length": 64, "feed_forward_length": 128, "block_count": 2, "attention.head_count": 4,
    "context_length": 512,
}  # fmt: skip


def _config(arch: str = "llama", **metadata: Any) -> dict[str, Any]:
    values = {f"{arch}.{name}": value for name, value in {**METADATA, **metadata}.items()}
    values["general.architecture"] = arch
    tensors = {"token_embd.weight": SimpleNamespace(shape=(100, 64), kind="Q4_0")}
    return to_config(cast(GgufFile, SimpleNamespace(path=Path("it.gguf"), tensors=tensors, get=values.get)))


@pytest.mark.parametrize(
    ("metadata", "kind", "factor"),
    [
        ({}, "default", None),
        ({"rope.scaling.factor": 2.0}, "linear", 2.0),  # llama.cpp's default kind
        ({"rope.scale_linear": 4.0}, "linear", 4.0),  # the name before scaling had kinds
        ({"rope.scale_linear": 4.0, "rope.scaling.factor": 2.0}, "linear", 2.0),
        ({"rope.scaling.type": "linear"}, "default", None),
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 1.0}, "default", None),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 2.0}, "default", None),
        ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, "yarn", 4.0),
    ],
    ids=str,
)
def test_scaled_positions(metadata: dict[str, Any], kind: str, factor: float | None) -> None:
    rope = _config(**metadata)["rope_parameters"]
    assert (rope["rope_type"], rope.get("factor")) == (kind, factor)
    assert rope.get("attention_factor") is None


def test_yarn_may_scale_attention_further() -> None:
    metadata: dict[str, Any] = {
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.attn_factor": 1.5,
    }
    assert _config(**metadata)["rope_parameters"]["attention_factor"] == 1.5 * (0.1 * math.log(4.0) + 1)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        ({"attention.head_count": 0}, "llama.attention.head_count is 0"),
        ({"attention.head_count": "4"}, "llama.attention.head_count is '4'"),
        ({"attention.head_count_kv": [2, 4]}, "layers that differ in attention.head_count_kv"),
        ({"block_count": 2.5}, "llama.block_count is 2.5"),
        ({"rope.scaling.type": "yarn"}, "no llama.rope.scaling.factor"),
    ],
    ids=str,
)
def test_unusable_values_are_one_line(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ModelError, match=words.replace("[", r"\[")):
        _config(**metadata)


def test_equal_layers_may_be_listed() -> None:
    listed: dict[str, Any] = {"attention.head_count": [4, 4], "attention.head_count_kv": [2, 2]}
    config = _config(**listed)
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (4, 2)
    pattern: dict[str, Any] = {"attention.sliding_window": 16, "attention.sliding_window_pattern": [True, True]}
    assert _config("gemma3", **pattern)["layer_types"] == ["sliding_attention"] * 2
