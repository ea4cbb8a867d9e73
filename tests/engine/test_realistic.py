"""Made-up weights that look trained (`--dummy-weights realistic`): seeded, cut alike by every rank, with outliers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tiny import FAMILIES

from weft.engine.config import EngineConfig
from weft.engine.memory.kv_layout import KvLayout
from weft.engine.memory.model_id import model_id
from weft.engine.model.directory import read_spec
from weft.engine.model.realistic import RealisticDummy
from weft.engine.model.weights import Weights, load_weights
from weft.engine.runner.cpu.cpu_executor import CpuExecutor

Made = Callable[[str], Path]
DUMMY: dict[str, Any] = {"load_format": "dummy", "dummy_weights": "realistic"}
CPU: dict[str, Any] = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 32}


def made_up(path: Path, seed: int = 0, rank: int = 0, ranks: int = 1) -> Weights:
    spec = read_spec(path).shard(rank, ranks)
    return load_weights(spec, path, dummy_seed=seed, dummy_realistic=True, **CPU)


def tensors_of(weights: Weights) -> list[torch.Tensor]:
    return [weights.embedding, weights.norm, *(t for w in weights.layers for p in w.values() for t in p.tensors())]


@pytest.mark.parametrize("family", FAMILIES)
def test_any_family_gives_finite_answers(tiny_model: Made, family: str) -> None:
    harness = Harness(tiny_model(family), page_size=8, num_pages=80, **DUMMY)
    handle = harness.add(np.arange(3, 23), max_tokens=3, logprobs=5, ignore_eos=True, **GREEDY)
    harness.run()
    assert len(harness.tokens[handle]) == 3
    assert all(np.isfinite(entry.values).all() for entry in harness.logprobs[handle])
    # neither certain of one token nor undecided
    assert -5.5 < harness.logprobs[handle][0].values[0] < -1e-4


def test_a_seed_makes_one_model(tiny_model: Made) -> None:
    path = tiny_model("qwen2-moe")
    one, same, other = (tensors_of(made_up(path, seed)) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def test_ranks_cut_the_same_model(tiny_model: Made) -> None:
    path = tiny_model("llama2")
    whole, parts = made_up(path), [made_up(path, 0, rank, 2) for rank in range(2)]
    for layer, own in enumerate(whole.layers):
        assert torch.equal(torch.cat([p.layers[layer]["gate_up"].weight for p in parts]), own["gate_up"].weight)
        assert torch.equal(torch.cat([p.layers[layer]["down"].weight for p in parts], 1), own["down"].weight)


def test_scales_are_spread_and_channels_stand_out(tiny_model: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """Checks the matrices, and the stream after the last layer, for any tokens."""
    path = tiny_model("llama2")
    spec = read_spec(path)
    seen: dict[str, torch.Tensor] = {}
    forward = CpuExecutor._forward

    def noted(executor: CpuExecutor, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen["x"], sumsq = forward(executor, *given)
        return seen["x"], sumsq

    monkeypatch.setattr(CpuExecutor, "_forward", noted)
    stand_out = {}
    for kind in ("plain", "realistic"):
        harness = Harness(path, page_size=8, num_pages=20, load_format="dummy", dummy_weights=kind)
        harness.add(np.arange(3, 33), max_tokens=0, prompt_logprobs=1)
        harness.run()
        size = seen["x"].abs().mean(0)
        stand_out[kind] = (size / size.median()).sort().values
    assert stand_out["plain"][-1] < 4
    assert (stand_out["realistic"][-2:] > 8).all()
    weights = load_weights(spec, path, dummy_seed=0, dummy_realistic=True, **CPU)
    rows = weights.layers[1]["down"].weight.float().square().mean(1).sqrt().log()
    assert rows.std() > 0.3
    names = {"device": torch.device("cpu")}
    dummy = RealisticDummy(0, names["device"], spec, _names(spec.architecture))
    assert len(dummy.outliers) == 2
    assert (weights.norm[dummy.outliers] < 0.5 * weights.norm.median()).all()


@pytest.mark.parametrize("family", ["llama2", "phi3", "gpt2"])
def test_keys_have_outlier_channels_also_if_q_k_and_v_are_one_tensor(tiny_model: Made, family: str) -> None:
    spec = read_spec(tiny_model(family))
    names = _names(spec.architecture)
    wide, queries = spec.num_kv_heads * spec.head_dim, spec.num_heads * spec.head_dim
    out, first = (spec.qkv_size, queries) if names.qkv else (wide, 0)
    shape = (spec.hidden_size, out) if names.transposed else (out, spec.hidden_size)
    dummy = RealisticDummy(0, torch.device("cpu"), spec, names)
    made = dummy(f"{names.layer.format(0)}{names.qkv or names.k}.weight", shape)
    rows = (made.t() if names.transposed else made).square().mean(1).sqrt()
    keys = rows[first : first + wide]
    assert (keys[::32] > 2 * keys.median()).all()
    others = torch.cat((keys[1:32], rows[:first], rows[first + wide :]))
    assert others.max() < 4 * others.median()


@pytest.mark.parametrize("family", ["mixtral", "granite-moe", "gpt-oss"])
def test_experts_write_more_to_the_outlier_channels(tiny_model: Made, family: str) -> None:
    path = tiny_model(family)
    spec = read_spec(path)
    channels = RealisticDummy(0, torch.device("cpu"), spec, _names(spec.architecture)).outliers
    rows = made_up(path).layers[0]["experts_down"].weight.square().mean((0, 2)).sqrt()
    assert (rows[channels] > 1.5 * rows.median()).all()


def _names(architecture: str) -> Any:
    from weft.engine.model.families import family_of

    return family_of(architecture).names


def test_it_is_part_of_a_pages_identity_and_needs_dummies(tiny_model: Made) -> None:
    path = str(tiny_model("llama2"))
    spec = read_spec(Path(path))
    layout = KvLayout.of(spec, 8, torch.float32)
    kinds: list[Any] = ["plain", "realistic"]
    configs = [EngineConfig(model=path, load_format="dummy", dummy_weights=kind) for kind in kinds]
    assert len({model_id(config, layout, spec, torch.float32, 64) for config in configs}) == 2
    with pytest.raises(ValueError, match="dummy_weights needs load_format dummy"):
        EngineConfig(model=path, dummy_weights="realistic")
