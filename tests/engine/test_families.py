"""Families: what a config becomes, what a shard of it holds, and operations that a device does not know."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import FAMILIES, save_tiny

from weft.engine.errors import ModelError
from weft.engine.model.directory import read_spec
from weft.engine.model.operations import Role
from weft.engine.model.spec import ModelSpec
from weft.engine.model.weights import Weights, load_weights
from weft.engine.runner import cpu_executor
from weft.engine.runner.launchers import launchers_of


def _weights(spec: ModelSpec, path: Path, seed: int | None = None) -> Weights:
    return load_weights(
        spec, path, device=torch.device("cpu"), dtype=torch.float32, max_positions=64, dummy_seed=seed
    )  # fmt: skip


@pytest.mark.parametrize(
    ("family", "biases", "norms"),
    [("llama2", (False, False), ""), ("qwen2", (True, False), ""), ("qwen3", (False, False), "head")],
)
def test_a_config_becomes_the_parts_of_its_family(
    tiny_model: Callable[[str], Path], family: str, biases: tuple[bool, bool], norms: str
) -> None:
    spec = read_spec(tiny_model(family))
    assert (spec.qkv_bias, spec.o_bias) == biases
    assert spec.qk_norm == norms


@pytest.mark.parametrize(("used", "windows"), [(True, (None, 64, 64)), (False, (None, None, None))])
def test_a_window_counts_where_the_config_of_a_qwen_switches_it_on(
    tmp_path: Path, used: bool, windows: tuple[int | None, ...]
) -> None:
    path = save_tiny("qwen2", tmp_path)
    config = json.loads((path / "config.json").read_text())
    window = {"sliding_window": 64, "max_window_layers": 1, "layer_types": None}
    (path / "config.json").write_text(json.dumps({**config, **window, "use_sliding_window": used}))
    assert read_spec(path).windows == windows


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("ranks", [2, 4])
def test_shards_hold_the_whole_model_between_them(tiny_model: Callable[[str], Path], family: str, ranks: int) -> None:
    path = tiny_model(family)
    spec = read_spec(path)
    whole = _weights(spec, path).layers[1]
    if spec.placement.behind or spec.qk_norm == "projection":
        with pytest.raises(ModelError, match="several GPUs"):
            spec.shard(0, ranks)
        return
    shards = [spec.shard(rank, ranks) for rank in range(ranks)]
    parts = [_weights(s, path).layers[1] for s in shards]
    cut = {"o": 1, "down": 1, "gate_up": 0, "up": 0, "experts_gate_up": 1, "experts_down": 2, "shared_down": 1}
    for name, dim in cut.items():
        if name in whole:
            assert torch.equal(torch.cat([p[name].weight for p in parts], dim), whole[name].weight), name
    assert [p["o"].bias is not None for p in parts] == [whole["o"].bias is not None] + [False] * (ranks - 1)
    queries, d = spec.num_heads * spec.head_dim, spec.head_dim
    own = shards[0].num_heads * d
    assert torch.equal(torch.cat([p["qkv"].weight[:own] for p in parts]), whole["qkv"].weight[:queries])
    for rank, (shard, part) in enumerate(zip(shards, parts, strict=True)):
        # the KV heads of a rank are those that its query heads read
        first = rank * shard.num_heads // spec.heads_per_kv * d
        keys = part["qkv"].weight[own : own + shard.num_kv_heads * d]
        want = whole["qkv"].weight[queries + first : queries + first + shard.num_kv_heads * d]
        assert torch.equal(keys, want)
        if whole["qkv"].q_norm is not None:
            assert torch.equal(part["qkv"].q_norm, whole["qkv"].q_norm)


def test_made_up_weights_are_cut_from_one_model(tiny_model: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model("llama2"))
    whole = _weights(spec, Path(), 3)
    parts = [_weights(spec.shard(rank, 2), Path(), 3) for rank in range(2)]
    assert torch.equal(torch.cat([p.layers[2]["down"].weight for p in parts], 1), whole.layers[2]["down"].weight)
    assert torch.equal(parts[1].lm_head, whole.lm_head)


def test_a_shard_has_collectives_behind_partial_sums(tiny_model: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model("llama2"))
    assert spec.shard(0, 1) is spec
    assert not any(o.role is Role.NETWORK for o in spec.layer_operations())
    operations = {o.name: o for o in spec.shard(1, 2).layer_operations()}
    assert [o.name for o in operations.values() if o.role is Role.NETWORK] == ["o_reduce", "down_reduce"]
    assert operations["gate_up"].parents == ("o_reduce",)
    assert operations["o"].parameters * 2 == {o.name: o for o in spec.layer_operations()}["o"].parameters


@pytest.mark.parametrize(
    ("change", "ranks", "word"),
    [({"num_heads": 6, "num_kv_heads": 6}, 4, "heads"), ({"intermediate_size": 33}, 2, "columns"), ({}, 3, "heads")],
)
def test_what_cannot_be_cut_is_refused(
    tiny_model: Callable[[str], Path], change: dict[str, int], ranks: int, word: str
) -> None:
    spec = replace(read_spec(tiny_model("llama2")), **change)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=word):
        spec.shard(0, ranks)
    with pytest.raises(ModelError, match="none of"):
        spec.shard(2, 2)


def test_an_operation_that_no_table_knows_is_an_error_at_load(tiny_model: Callable[[str], Path]) -> None:
    spec = read_spec(tiny_model("llama2"))
    assert set(launchers_of(spec, cpu_executor.TABLE, "the CPU")) == {o.name for o in spec.layer_operations()}
    with pytest.raises(ModelError, match=r"the CPU cannot launch the operation o_reduce \(all_reduce\)"):
        launchers_of(spec.shard(0, 2), cpu_executor.TABLE, "the CPU")
