"""`Pooler`: how a model's states become embeddings, read from the files of sentence-transformers without torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from weft.engine.errors import ModelError
from weft.engine.wire.sampling import DECODER_POOLING, Pooling
from weft.server.api.scorer import read_rows
from weft.server.errors import clip

MODULES = "modules.json"
PROMPTS = "config_sentence_transformers.json"
_MODES: dict[str, Pooling] = {
    "lasttoken": "last", "mean": "mean", "mean_tokens": "mean", "cls": "cls", "cls_token": "cls", "max": "max",
    "max_tokens": "max",
}  # fmt: skip
_ORDER = ("Transformer", "Pooling", "Dense", "Normalize")

Vector = npt.NDArray[np.float64]


def _gelu(x: Vector) -> Vector:
    return x * (1 + np.vectorize(math.erf, otypes=[np.float64])(x / math.sqrt(2))) / 2


def _silu(x: Vector) -> Vector:
    return x * _sigmoid(x)


def _sigmoid(x: Vector) -> Vector:
    return (1 + np.tanh(x / 2)) / 2


_ACTIVATIONS: dict[str, Callable[[Vector], Vector]] = {
    "Identity": np.array, "Tanh": np.tanh, "ReLU": lambda x: np.maximum(x, 0), "GELU": _gelu, "SiLU": _silu,
    "Sigmoid": _sigmoid,
}  # fmt: skip
"""Modules of `torch.nn` with their defaults."""


@dataclass(frozen=True, slots=True, eq=False)
class Dense:
    """A layer that a pooled state passes: `activation(weight @ x + bias)`."""

    weight: npt.NDArray[np.float32]  # [out, in]
    bias: npt.NDArray[np.float32] | None  # [out]
    activation: Callable[[Vector], Vector]

    def __call__(self, x: Vector) -> Vector:
        y = (self.weight @ x.astype(np.float32)).astype(np.float64)
        return self.activation(y if self.bias is None else y + self.bias)


@dataclass(frozen=True, slots=True)
class Pooler:
    """Pools hidden states, applies dense layers, truncates to the requested dimensions and normalizes."""

    pooling: Pooling
    prompts: dict[str, str] = field(default_factory=dict)  # text prefixes by name
    default: str = ""  # the prefix for requests that name none
    layers: tuple[Dense, ...] = ()

    def width(self, hidden_size: int) -> int:
        """Numbers of an embedding."""
        return len(self.layers[-1].weight) if self.layers else hidden_size

    def finish(self, state: bytes, dimensions: int | None, *, normalize: bool = True) -> npt.NDArray[np.float32]:
        """The embedding `[dimensions]` of a pooled float32 hidden state. None keeps all dimensions."""
        vector = np.frombuffer(state, np.float32).astype(np.float64)
        for layer in self.layers:
            vector = layer(vector)
        vector = vector[:dimensions]
        length = float(np.linalg.norm(vector)) if normalize else 1.0
        return (vector / (length or 1.0)).astype(np.float32)


def read_pooler(
    path: Path, asked: Literal["auto", "last", "mean", "none"], hidden_size: int, *, encoder: bool = False
) -> Pooler | None:
    """The pooler of the model at `path`; None if embeddings are disabled. An explicit `asked` overrides the model's
    pooling but not its prompts and layers. Raises `ModelError` for unreadable files and unsupported steps."""
    if asked == "none":
        return None
    pooling, layers, reached = None, list[Dense](), 0
    for module in _read(path / MODULES, list) or ():
        kind = str(module.get("type", "")).rpartition(".")[2] if isinstance(module, dict) else ""
        if kind not in _ORDER:
            raise ModelError(f"{MODULES} has an unsupported step: {clip(kind)}")
        if _ORDER.index(kind) < reached:
            raise ModelError(f"{MODULES} has a step in an unsupported place: {kind} after {_ORDER[reached]}")
        reached, folder = _ORDER.index(kind), path / str(module.get("path", ""))
        if kind == "Pooling":
            config = _read(folder / "config.json", dict) or {}
            pooling = _pooling_of(config, encoder=encoder, strict=asked == "auto")
        elif kind == "Dense":
            layers.append(_read_dense(folder, len(layers[-1].weight) if layers else hidden_size))
    about = _read(path / PROMPTS, dict) or {}
    prompts = {str(k): v for k, v in (about.get("prompts") or {}).items() if isinstance(v, str)}
    default = prompts.get(str(about.get("default_prompt_name")), "")
    usual: Pooling = "mean" if encoder else "last"
    return Pooler(pooling or usual if asked == "auto" else asked, prompts, default, tuple(layers))


def _read_dense(folder: Path, width: int) -> Dense:
    """width: numbers that the layer gets. Raises `ModelError`."""
    config, name = _read(folder / "config.json", dict) or {}, folder.name
    for key, usual in (("module_input_name", "sentence_embedding"), ("module_output_name", "sentence_embedding"),
                       ("use_residual", False)):  # fmt: skip
        if config.get(key) not in (None, usual):
            raise ModelError(f"{name}: {key} {clip(repr(config[key]))} is not supported")
    module, _, activation = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    if not module.startswith("torch.nn") or activation not in _ACTIVATIONS:
        raise ModelError(f"{name}: the activation {clip(activation)} is not supported")
    weight, bias = read_rows(folder, "linear.weight"), read_rows(folder, "linear.bias")
    if weight is None:
        raise ModelError(f"{name}/model.safetensors with linear.weight is missing; pickled weights are not read")
    if bias is None and config.get("bias", True):
        raise ModelError(f"{name} has no linear.bias")
    if weight.ndim != 2 or weight.shape[1] != width or (bias is not None and bias.shape != weight.shape[:1]):
        shapes = f"{list(weight.shape)} and {None if bias is None else list(bias.shape)}"
        raise ModelError(f"{name}: a weight and a bias of {shapes} do not fit {width} numbers")
    return Dense(weight, bias, _ACTIVATIONS[activation])


def _pooling_of(config: dict[str, Any], *, encoder: bool, strict: bool) -> Pooling | None:
    """The mode in a `1_Pooling/config.json`. Unsupported modes raise `ModelError` if `strict`, else return None."""
    modes = [key.removeprefix("pooling_mode_") for key, on in config.items() if key.startswith("pooling_mode_") and on]
    if isinstance(named := config.get("pooling_mode"), str):
        modes = [named]
    mode = _MODES.get(modes[0]) if len(modes) == 1 else None
    if mode is not None and (encoder or mode in DECODER_POOLING):
        return mode
    if not strict:
        return None
    found = clip(", ".join(modes)) or "nothing"
    raise ModelError(f"its pooling ({found}) is not supported; override it with --pooling last or mean")


def _read(path: Path, kind: type) -> Any:
    """The value of a JSON file; None if the file is missing. Raises `ModelError`."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ModelError(f"{path.name} cannot be read: {clip(str(error))}") from None
    if not isinstance(value, kind):
        raise ModelError(f"{path.name} is not in the format of sentence-transformers")
    return value
