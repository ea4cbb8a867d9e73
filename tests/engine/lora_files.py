"""Random LoRA adapters in PEFT's format, and the base model with one merged in, as the reference."""

from __future__ import annotations

import copy
import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

LINEAR = r"(q|k|v|o|out|qkv|gate|up|gate_up|down)_proj|c_attn|c_proj|c_fc|dense|fc1|fc2"
"""Names of the projections that adapters can change."""


def projections(model: Any, names: str = LINEAR) -> dict[str, tuple[int, int]]:
    """(out, in) of each projection of attention and of dense MLPs, by module name."""
    found = {}
    for name, module in model.named_modules():
        own = re.fullmatch(rf".*\.({names})", name)
        if own is None or ".experts." in name:
            continue
        if isinstance(module, nn.Linear):
            found[name] = (module.out_features, module.in_features)
        elif hasattr(module, "nf"):  # GPT-2 stores its matrices transposed
            found[name] = (module.nf, module.weight.shape[0])
    return found


def expert_projections(model: Any, names: tuple[str, str, str]) -> dict[str, tuple[int, int]]:
    """(out, in) of each projection of routed experts. names: gate, up and down in a layer, with {} for the expert."""
    found = {}
    for i, layer in enumerate(model.model.layers):
        if (experts := _experts(layer)) is not None:
            (count, both, hidden), inner = experts.gate_up_proj.shape, experts.down_proj.shape[2]
            assert both == 2 * inner
            for e in range(count):
                for name, shape in zip(names, ((inner, hidden), (inner, hidden), (hidden, inner)), strict=True):
                    found[f"model.layers.{i}.{name.format(e)}"] = shape
    return found


def _experts(layer: Any) -> Any:
    """The module with the stacked experts of a layer."""
    return next((module for name, module in layer.named_modules() if name.endswith("experts")
                 and hasattr(module, "gate_up_proj") and not hasattr(module.gate_up_proj, "weight")), None)  # fmt: skip


def save_stacked(path: Path, model: Any, *, seed: int = 0, rank: int = 3, strength: float = 0.3) -> Path:
    """Write a random adapter of stacked experts and routers, as PEFT's `target_parameters` does."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for i, layer in enumerate(model.model.layers):
        if (experts := _experts(layer)) is None:
            continue
        name = next(name for name, module in layer.named_modules() if module is experts)
        router = name.replace("experts", "gate"), layer.get_submodule(name.replace("experts", "gate")).weight[None]
        stacks = (f"{name}.base_layer", experts.gate_up_proj), (name, experts.down_proj), router
        for module, (count, out, inner) in ((module, weight.shape) for module, weight in stacks):
            own = f"base_model.model.model.layers.{i}.{module}"
            a = torch.randn(count * rank, inner, generator=generator) / math.sqrt(inner)
            tensors |= {f"{own}.lora_A.weight": a}
            tensors |= {f"{own}.lora_B.weight": torch.randn(out, count * rank, generator=generator) * strength}
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank}))
    return path


def _merge_stacked(model: Any, module: str, a: torch.Tensor, b: torch.Tensor, scale: float) -> None:
    """Add to each expert: rows of A are in the order of experts, columns of B in that of components."""
    experts = model.get_submodule(module.removesuffix(".base_layer"))
    stack = experts.gate_up_proj if module.endswith("base_layer") else experts.down_proj
    for e, own in enumerate(a.chunk(len(stack))):
        stack[e] += scale * (b[:, e :: len(stack)] @ own)


def _matrix_of_expert(model: Any, module: str, names: tuple[str, str, str]) -> torch.Tensor:
    """A view of the rows of a stacked tensor that a module of `expert_projections` names."""
    layer, name = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", module).groups()  # type: ignore[union-attr]
    experts = _experts(model.model.layers[int(layer)])
    expert = int(re.search(r"experts\.(\d+)\.", name)[1])  # type: ignore[index]
    which = [own.format(expert) for own in names].index(name)
    if which == 2:
        return experts.down_proj[expert]
    return experts.gate_up_proj[expert].chunk(2)[which]


def save_adapter(
    path: Path, model: Any, *, seed: int = 0, rank: int = 4, alpha: float = 8, names: str = LINEAR,
    strength: float = 0.3, experts: tuple[str, str, str] | None = None, within: str = "", **config: Any,
) -> Path:  # fmt: skip
    """Write a random adapter. No matrix is zero, so that an adapter that does nothing fails. Fields of `config` go into
    adapter_config.json; experts: see `expert_projections`; within: in the name of every
    changed module."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    shapes = projections(model, names) | ({} if experts is None else expert_projections(model, experts))
    for name, (out, inner) in shapes.items():
        if within not in name:
            continue
        own = rank_of(config, name, rank)
        a = torch.randn(own, inner, generator=generator) / math.sqrt(inner)
        b = torch.randn(out, own, generator=generator) * strength
        tensors[f"base_model.model.{name}.lora_A.weight"] = a
        tensors[f"base_model.model.{name}.lora_B.weight"] = b
    path.mkdir(parents=True, exist_ok=True)
    save_file(tensors, path / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": alpha, "target_modules": ["q_proj"], "bias": "none"}
    (path / "adapter_config.json").write_text(json.dumps({**fields, **config}))
    return path


def rank_of(config: dict[str, Any], name: str, rank: int) -> int:
    patterns = config.get("rank_pattern", {})
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", name)), rank)


def merged(model: Any, paths: Iterable[Path], experts: tuple[str, str, str] | None = None) -> list[Any]:
    """Copies of the model, each with one adapter merged in, in float32, as PEFT does it."""
    from safetensors.torch import load_file

    out = []
    for path in paths:
        config = json.loads((path / "adapter_config.json").read_text())
        tensors = load_file(path / "adapter_model.safetensors")
        own = copy.deepcopy(model)
        modules = dict(own.named_modules())
        for key in [key for key in tensors if ".lora_A." in key]:
            name = key.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
            a, b = tensors[key], tensors[key.replace(".lora_A.", ".lora_B.")]
            patterns = config.get("alpha_pattern", {})
            alpha = next((v for k, v in patterns.items() if re.match(rf"(.*\.)?({k})$", name)), config["lora_alpha"])
            scale = alpha / (math.sqrt(len(a)) if config.get("use_rslora") else len(a))
            if name.endswith((".experts", ".base_layer")):
                with torch.no_grad():
                    _merge_stacked(own, name, a, b, alpha / config["r"])
                continue
            delta = scale * (b @ a)
            weight = modules[name].weight if name in modules else _matrix_of_expert(own, name, experts)
            with torch.no_grad():
                weight += delta if weight.shape == delta.shape and not hasattr(modules.get(name), "nf") else delta.t()
        out.append(own)
    return out
