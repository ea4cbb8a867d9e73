"""Dense modules of sentence-transformers: what they make of a pooled state is what torch makes of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from weft.engine.errors import ModelError
from weft.server.api.pooler import Pooler, read_pooler

WIDTH = 6


def model(folder: Path, *kinds: str) -> Path:
    """A directory with these modules, each in the folder that sentence-transformers gives it."""
    modules = [
        {"idx": i, "name": str(i), "path": f"{i}_{kind}" if i else "", "type": f"sentence_transformers.models.{kind}"}
        for i, kind in enumerate(kinds)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for module in modules:
        (folder / module["path"]).mkdir(exist_ok=True)
        if module["type"].endswith("Pooling"):
            (folder / module["path"] / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return folder


def dense(folder: Path, layer: torch.nn.Linear, activation: str | None = "torch.nn.Identity", **more: Any) -> None:
    config = {"in_features": layer.in_features, "out_features": layer.out_features, "bias": layer.bias is not None}
    named = {} if activation is None else {"activation_function": activation}
    (folder / "config.json").write_text(json.dumps({**config, **named, **more}))
    save_file({f"linear.{name}": value for name, value in layer.state_dict().items()}, folder / "model.safetensors")


def pooler(path: Path) -> Pooler:
    found = read_pooler(path, "auto", WIDTH, encoder=True)
    assert found is not None
    return found


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("activation", "module"),
    [
        ("torch.nn.modules.linear.Identity", torch.nn.Identity()),
        ("torch.nn.modules.activation.Tanh", torch.nn.Tanh()),
        (None, torch.nn.Tanh()),
        ("torch.nn.modules.activation.ReLU", torch.nn.ReLU()),
        ("torch.nn.modules.activation.GELU", torch.nn.GELU()),
        ("torch.nn.modules.activation.SiLU", torch.nn.SiLU()),
        ("torch.nn.modules.activation.Sigmoid", torch.nn.Sigmoid()),
    ],
)
def test_a_dense_layer_is_torchs(tmp_path: Path, activation: str | None, module: Any, bias: bool) -> None:
    torch.manual_seed(3)
    layer = torch.nn.Linear(WIDTH, 4, bias=bias)
    dense(model(tmp_path, "Transformer", "Pooling", "Dense") / "2_Dense", layer, activation)
    state = torch.randn(WIDTH) * 3
    with torch.inference_mode():
        expected = module(layer(state))
    found = pooler(tmp_path)
    assert (found.pooling, found.width(WIDTH)) == ("mean", 4)
    raw = found.finish(state.numpy().tobytes(), None, normalize=False)
    np.testing.assert_allclose(raw, expected.numpy(), atol=1e-6)
    unit = torch.nn.functional.normalize(expected[:3], dim=0)
    np.testing.assert_allclose(found.finish(state.numpy().tobytes(), 3), unit.numpy(), atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_layers_follow_each_other(tmp_path: Path, dtype: torch.dtype) -> None:
    torch.manual_seed(4)
    first, second = torch.nn.Linear(WIDTH, 9, dtype=dtype), torch.nn.Linear(9, 5, bias=False, dtype=dtype)
    path = model(tmp_path, "Transformer", "Pooling", "Dense", "Dense", "Normalize")
    dense(path / "2_Dense", first, "torch.nn.Tanh")
    dense(path / "3_Dense", second)
    state = torch.randn(WIDTH)
    with torch.inference_mode():
        expected = second.float()(first.float()(state).tanh())
    found = pooler(path).finish(state.numpy().tobytes(), None)
    np.testing.assert_allclose(found, torch.nn.functional.normalize(expected, dim=0).numpy(), atol=1e-6)


LAYER = torch.nn.Linear(WIDTH, 4)


@pytest.mark.parametrize(
    ("more", "layer", "words"),
    [
        ({"activation_function": "mine.Snake"}, LAYER, "activation mine.Snake|activation Snake"),
        ({"activation_function": "torch.nn.Softplus"}, LAYER, "Softplus is not supported"),
        ({"activation_function": 3}, LAYER, "activation 3 is not supported"),
        ({"use_residual": True}, LAYER, "use_residual True is not supported"),
        ({"module_input_name": "token_embeddings"}, LAYER, "module_input_name 'token_embeddings' is not supported"),
        ({}, torch.nn.Linear(WIDTH + 1, 4), r"\[4, 7\] and \[4\] do not fit 6 numbers"),
        ({"bias": True}, torch.nn.Linear(WIDTH, 4, bias=False), r"2_Dense has no linear\.bias"),
    ],
)
def test_layers_that_would_be_computed_wrongly_are_refused(
    tmp_path: Path, more: Any, layer: torch.nn.Linear, words: str
) -> None:
    dense(model(tmp_path, "Transformer", "Pooling", "Dense") / "2_Dense", layer, **more)
    with pytest.raises(ModelError, match=words):
        pooler(tmp_path)


def test_a_layer_without_weights_is_refused(tmp_path: Path) -> None:
    dense(model(tmp_path, "Transformer", "Pooling", "Dense") / "2_Dense", LAYER)
    (tmp_path / "2_Dense/model.safetensors").rename(tmp_path / "2_Dense/pytorch_model.bin")
    with pytest.raises(ModelError, match=r"2_Dense/model\.safetensors .* is missing; pickled weights"):
        pooler(tmp_path)


def test_damaged_weights_are_named(tmp_path: Path) -> None:
    file = model(tmp_path, "Transformer", "Pooling", "Dense") / "2_Dense/model.safetensors"
    dense(file.parent, LAYER)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(ModelError, match=r"linear\.\w+ in model\.safetensors cannot be read"):
        pooler(tmp_path)


@pytest.mark.parametrize(
    ("kinds", "words"),
    [
        (("Transformer", "Dense", "Pooling"), "unsupported place: Pooling after Dense"),
        (("Transformer", "Pooling", "Normalize", "Dense"), "unsupported place: Dense after Normalize"),
        (("Transformer", "Pooling", "LSTM"), "unsupported step: LSTM"),
    ],
)
def test_other_orders_and_modules_are_refused(tmp_path: Path, kinds: tuple[str, ...], words: str) -> None:
    path = model(tmp_path, *kinds)
    for folder in path.glob("*_Dense"):
        dense(folder, LAYER)
    with pytest.raises(ModelError, match=words):
        pooler(path)
