"""Adapters that cannot be served are refused in one line, and none of them is served in part."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import save_adapter, save_stacked
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from weft.engine.errors import ModelError
from weft.engine.model.adapter import AdapterReader
from weft.engine.model.directory import read_spec

Change = Callable[[Path], None]
WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
Q = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tiny import save_tiny

    return save_tiny("llama2", tmp_path_factory.mktemp("base"))


def _read(model: Path, path: Path, max_rank: int = 64) -> Any:
    return AdapterReader(read_spec(model), model, torch.float32, max_rank)(path)


def _config(**fields: Any) -> Change:
    def change(path: Path) -> None:
        raw = json.loads((path / CONFIG).read_text())
        (path / CONFIG).write_text(json.dumps({**raw, **fields}))

    return change


def _tensors(edit: Callable[[dict[str, torch.Tensor]], None]) -> Change:
    def change(path: Path) -> None:
        tensors = load_file(path / WEIGHTS)
        edit(tensors)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, path / WEIGHTS)

    return change


def _set(name: str, tensor: torch.Tensor) -> Change:
    return _tensors(lambda tensors: tensors.update({name: tensor}))


def _truncate(path: Path) -> None:
    os.truncate(path / WEIGHTS, (path / WEIGHTS).stat().st_size // 2)


def _pickle(path: Path) -> None:
    (path / WEIGHTS).rename(path / "adapter_model.bin")


def _write(name: str, text: str) -> Change:
    def change(path: Path) -> None:
        (path / name).write_text(text)

    return change


HOSTILE: dict[str, tuple[Change, str]] = {
    "truncated": (_truncate, "not a complete safetensors file"),
    "not safetensors": (_write(WEIGHTS, "hello"), "not a complete safetensors file"),
    "pickle": (_pickle, "pickle file, which may run code"),
    "no config": (lambda path: (path / CONFIG).unlink(), "no adapter_config.json"),
    "LFS pointer": (_write(WEIGHTS, "version https://git-lfs.github.com/spec/v1\n"), "Git LFS pointer"),
    "config no JSON": (_write(CONFIG, "{"), "cannot read"),
    "config a list": (_write(CONFIG, "[]"), "not a JSON object"),
    "config nested": (_write(CONFIG, "[" * 100_000), "cannot read"),
    "NaN": (_set(f"{Q}.lora_A.weight", torch.full((4, 64), float("nan"))), "not finite"),
    "infinite": (_set(f"{Q}.lora_B.weight", torch.full((64, 4), float("inf"))), "not finite"),
    "rank 0": (_config(r=0), "rank 0 is outside 1 to 64"),
    "rank above the bound": (_config(r=65), "rank 65 is outside 1 to 64"),
    "rank no number": (_config(r="4"), "r is '4'"),
    "alpha a huge integer": (_config(lora_alpha=10**400), "lora_alpha"),
    "rank a huge integer": (_config(r=10**400), "r is 1000"),
    "alpha not finite": (_config(lora_alpha=float("inf")), "lora_alpha"),
    "rank differs": (_config(r=8), "its rank by adapter_config.json is 8"),
    "A without B": (_tensors(lambda t: t.pop(f"{Q}.lora_B.weight")), "lora_A only"),
    "B without A": (_tensors(lambda t: t.pop(f"{Q}.lora_A.weight")), "lora_B only"),
    "another model's": (
        _tensors(lambda t: t.update({f"{Q}.lora_A.weight": torch.ones(4, 32)})), "the base model's is 64 x 64",
    ),
    "layer beyond": (
        _tensors(lambda t: t.update({k.replace("layers.0", "layers.99"): v for k, v in list(t.items()) if Q in k})),
        "changes model.layers.99.self_attn.q_proj",
    ),
    "head": (
        _tensors(lambda t: t.update({
            "base_model.model.lm_head.lora_A.weight": torch.ones(4, 64),
            "base_model.model.lm_head.lora_B.weight": torch.ones(200, 4),
        })),
        "lm_head",
    ),
    "embedding": (_set("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(4, 8)), "lora_embedding_A"),
    "whole module": (_set("base_model.model.lm_head.weight", torch.ones(2, 2)), "lm_head.weight is not supported"),
    "magnitudes": (_set(f"{Q}.lora_magnitude_vector", torch.ones(64)), "lora_magnitude_vector"),
    "bias": (_set(f"{Q}.lora_B.bias", torch.ones(64)), "lora_B.bias"),
    "integers": (_set(f"{Q}.lora_A.weight", torch.ones(4, 64, dtype=torch.int32)), "int32"),
    "one dimension": (_set(f"{Q}.lora_A.weight", torch.ones(4)), "rank by adapter_config.json"),
    "no tensors": (_tensors(lambda t: t.clear()), "has no tensors"),
    "DoRA": (_config(use_dora=True), "use_dora"),
    "PiSSA": (_config(init_lora_weights="pissa"), "changed the base model's weights"),
    "other method": (_config(peft_type="IA3"), "peft_type 'IA3'"),
    "unknown method": (_config(use_newdora=True), "use_newdora"),
    "replication": (_config(layer_replication=[[0, 2]]), "layer_replication"),
    "slow pattern": (_config(rank_pattern={"(a+)+b": 4}), "too complex"),
    "long pattern": (_config(alpha_pattern={"a" * 600: 4}), "too complex"),
    "broken pattern": (_config(rank_pattern={"(": 4}), "invalid pattern"),
    "pattern no object": (_config(rank_pattern=[1]), "not an object"),
    "a folder as a file": (lambda path: ((path / WEIGHTS).unlink(), (path / WEIGHTS).mkdir())[1], "cannot read"),
}  # fmt: skip


@pytest.mark.parametrize(("change", "message"), HOSTILE.values(), ids=HOSTILE)
def test_an_adapter_that_cannot_be_served_is_refused(model: Path, tmp_path: Path, change: Change, message: str) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    path = save_adapter(tmp_path / "adapter", base)
    change(path)
    with pytest.raises(ModelError) as refused:
        _read(model, path)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)
    assert len(str(refused.value)) < 500


def test_stacked_matrices_of_experts_may_come_in_either_order(tmp_path: Path) -> None:
    """PEFT wraps the module once for each tensor, in the order in which the tensors are named."""
    from tiny import save_tiny

    model = save_tiny("qwen3-moe", tmp_path / "base")
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    path = save_stacked(tmp_path / "adapter", base)
    _, expected = _read(model, path)

    def swap(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".experts." in name]:
            inner, outer = ".experts.base_layer.", ".experts."
            here, there = (inner, outer) if inner in name else (outer, inner)
            tensors[f"{name.replace(here, there)}!"] = tensors.pop(name)
        for name in [name for name in tensors if name.endswith("!")]:
            tensors[name[:-1]] = tensors.pop(name)

    _tensors(swap)(path)
    _, found = _read(model, path)
    assert [layer.keys() for layer in found.layers] == [layer.keys() for layer in expected.layers]
    for layer, other in zip(found.layers, expected.layers, strict=True):
        for name, parts in layer.items():
            assert all(torch.equal(a.a, b.a) and torch.equal(a.b, b.b) for a, b in zip(parts, other[name], strict=True))


def test_harmless_fields_change_nothing(model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    plain, _ = _read(model, save_adapter(tmp_path / "a", base))
    fields = {
        "lora_dropout": 0.1, "target_modules": "all-linear", "modules_to_save": None, "inference_mode": True,
        "layers_to_transform": [0, 1], "megatron_core": "megatron.core", "qalora_group_size": 16, "use_dora": False,
        "lora_bias": False, "eva_config": None, "init_lora_weights": "gaussian", "peft_version": "0.21.2",
    }  # fmt: skip
    path = save_adapter(tmp_path / "b", base, **fields)
    other, adapter = _read(model, path)
    assert other != plain, "the digest covers the configuration"
    assert adapter.rank == 4


def test_an_adapter_of_an_embedding_model_or_of_its_text_part_has_other_prefixes(model: Path, tmp_path: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    path = save_adapter(tmp_path / "adapter", base)
    _, plain = _read(model, path)
    _tensors(lambda t: [t.update({k.replace("model.model.", "model.", 1): t.pop(k)}) for k in list(t)])(path)
    _, short = _read(model, path)
    pairs = zip(plain.tensors(), short.tensors(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)
