"""Writes an FP8 checkpoint in the formats of other projects, and its values in float32, for `transformers`."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from weft.engine.config import EngineConfig
from weft.engine.ranks import loading

E4M3 = torch.float8_e4m3fn
INPUT_SCALE = 0.03


def _scheme(strategy: str, dynamic: bool, **more: Any) -> dict[str, Any]:
    return {"num_bits": 8, "type": "float", "strategy": strategy, "dynamic": dynamic, "symmetric": True, **more}


def _compressed(weights: dict[str, Any], inputs: dict[str, Any] | None) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": inputs, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": "float-quantized", "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
    }  # fmt: skip


_DYNAMIC, _STATIC = _scheme("token", True), _scheme("tensor", False)
FORMATS: dict[str, tuple[str, bool, dict[str, Any]]] = {
    "compressed-tensors, channel, dynamic": ("channel", False, _compressed(_scheme("channel", False), _DYNAMIC)),
    "compressed-tensors, tensor, static": ("tensor", True, _compressed(_scheme("tensor", False), _STATIC)),
    "compressed-tensors, block": (
        "block",
        False,
        _compressed(_scheme("block", False, block_structure=[128, 128]), _scheme("group", True, group_size=128)),
    ),
    "compressed-tensors, weights alone": ("channel", False, _compressed(_scheme("channel", False), None)),
    "modelopt": ("tensor", True, {"quant_method": "modelopt", "quant_algo": "FP8", "ignore": ["lm_head"]}),
    "modelopt, per channel": (
        "channel",
        False,
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "exclude_modules": ["lm_head"]},
    ),
    "fbgemm_fp8": (
        "channel",
        False,
        {"quant_method": "fbgemm_fp8", "activation_scale_ub": 1200.0, "modules_to_not_convert": ["lm_head"]},
    ),
    "fp8, block": (
        "inverse block",
        False,
        {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
    ),
    "fp8, static": ("tensor", True, {"quant_method": "fp8", "activation_scheme": "static"}),
}
"""tensors with a scale, whether activations are static, the config"""
_MATRIX = re.compile(
    r"layers\.\d+\..*(_proj|w[123]|fc[12]|query_key_value|gate_up_proj|input_linear|output_linear)\.weight$"
)


def quantized(weight: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """e4m3 values, the scale as in files, and the float32 values; experts in one tensor are quantized one by one."""
    if weight.ndim == 3:
        values, scales, meant = zip(*(quantized(each, kind) for each in weight), strict=True)
        return torch.stack(values), torch.stack(scales), torch.stack(meant)
    if kind == "tensor":
        scale = weight.abs().max() / 448
        by_element = scale.expand(weight.shape)
    elif kind == "channel":
        scale = weight.abs().amax(1, keepdim=True) / 448
        by_element = scale.expand(weight.shape)
    else:
        out, inner = weight.shape
        blocks = [
            [weight[i : i + 128, j : j + 128].abs().max() for j in range(0, inner, 128)] for i in range(0, out, 128)
        ]
        scale = torch.tensor(blocks) / 448
        by_element = torch.kron(scale, torch.ones(128, 128))[:out, :inner]
    values = (weight / by_element).clamp(-448, 448).to(E4M3)
    return values, scale.clone(), values.float() * by_element


def write_fp8(source: Path, folder: Path, form: str, keep: str = "$nothing") -> tuple[Path, Path]:
    """Write the checkpoint at `source` in one of `FORMATS`, and the same numbers in float32. Matrices whose names match
    `keep` are unchanged."""
    kind, static, config = FORMATS[form]
    tensors = {n: t.float() for file in sorted(source.glob("*.safetensors")) for n, t in load_file(file).items()}
    stored: dict[str, Tensor] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        stored[name] = plain[name] = tensor
        if _MATRIX.search(name) and not re.search(keep, name):
            values, scale, meant = quantized(tensor, kind.removeprefix("inverse "))
            module = name.removesuffix(".weight")
            stored[name], plain[name] = values, meant.contiguous()
            stored[f"{module}.weight_scale{'_inv' if kind.startswith('inverse') else ''}"] = scale
            if static:
                stored[f"{module}.input_scale"] = torch.tensor(INPUT_SCALE)
    paths = folder / "fp8", folder / "plain"
    for path, which in zip(paths, (stored, plain), strict=True):
        shutil.copytree(source, path, ignore=shutil.ignore_patterns("*.safetensors*"))
        save_file(which, path / "model.safetensors", {"format": "pt"})
    raw = json.loads((source / "config.json").read_text())
    (paths[0] / "config.json").write_text(json.dumps({**raw, "quantization_config": config}))
    return paths


@pytest.fixture
def unrounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Activations are not rounded, so a model of the dequantised weights has the same tokens."""
    chosen = loading.choose_spec

    def choose(config: EngineConfig) -> Any:
        spec, words = chosen(config)
        assert spec.quantization is not None
        return replace(spec, quantization=replace(spec.quantization, activations="none")), words

    monkeypatch.setattr(loading, "choose_spec", choose)
