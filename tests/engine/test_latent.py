"""Latent attention on weft's own layers: other dtypes, packed pages, batch invariance. `test_parity` checks tokens."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from weft.engine.model.directory import read_spec
from weft.engine.model.weights import load_weights

OPTIONS: dict[str, Any] = {"page_size": 16, "max_num_seqs": 6, "max_num_batched_tokens": 128, "num_pages": 100}
Made = Callable[[str], Path]


def _prompt(seed: int, length: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(3, 199, length)


@pytest.mark.parametrize("family", ["deepseek-v2", "deepseek-v3"])
@pytest.mark.parametrize("options", [{"dtype": "bfloat16"}, {"quantization": "fp8"}])
def test_other_formats_give_nearly_the_log_probabilities_of_float32(
    tiny_model: Made, family: str, options: dict[str, str]
) -> None:
    prompt = _prompt(1, 70)
    model = AutoModelForCausalLM.from_pretrained(tiny_model(family), dtype=torch.float32)
    with torch.inference_mode():
        want = model(torch.from_numpy(prompt)[None]).logits[0, -1].log_softmax(-1)
    harness = Harness(tiny_model(family), **{**OPTIONS, **options})
    handle = harness.add(prompt, max_tokens=1, logprobs=5, ignore_eos=True, **GREEDY)
    harness.run()
    entry = harness.logprobs[handle][0]
    assert int(want.argmax()) in entry.ids
    assert abs(max(entry.values) - float(want.max())) < 1.0


def test_packed_pages_return_as_they_were(tiny_model: Made) -> None:
    prompt, found = _prompt(2, 60), []
    for options in ({}, {"tier_kv_format": "packed"}):
        harness = Harness(tiny_model("deepseek-v3"), **OPTIONS, dtype="bfloat16", host_kv_gib=0.02, **options)
        tiers = harness.engine.tiers
        assert tiers is not None
        tiers.speeds.worthwhile = lambda entries, *_: len(entries)  # type: ignore[method-assign]
        harness.add(prompt, max_tokens=4, logprobs=2, ignore_eos=True, **GREEDY)
        harness.run()
        tiers.flush(60)
        harness.engine.scheduler.pool.evict_all()
        harness.poison_pages()
        handle = harness.add(prompt, max_tokens=4, logprobs=2, ignore_eos=True, **GREEDY)
        harness.run()
        assert harness.cached[handle] >= 48
        found.append([(entry.ids, entry.values) for entry in harness.logprobs[handle]])
        harness.engine.close()
    assert found[0] == found[1]


def test_batch_invariance(tiny_model: Made) -> None:
    prompts, found = [_prompt(3 + i, n) for i, n in enumerate((90, 3, 64, 30))], []
    for served in ([prompts[0]], prompts):
        harness = Harness(tiny_model("deepseek-v2"), **OPTIONS, dtype="bfloat16", batch_invariant=True)
        harness.poison_pages()
        handles = [harness.add(p, max_tokens=6, logprobs=2, ignore_eos=True, **GREEDY) for p in served]
        harness.run()
        found.append([(entry.ids, entry.values) for entry in harness.logprobs[handles[0]]])
    assert found[0] == found[1]


def test_layers_that_predict_further_tokens_are_not_read(
    tiny_model: Made, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tiny_model("deepseek-v3")
    tensors = {name: tensor for file in source.glob("*.safetensors") for name, tensor in load_file(file).items()}
    layer = read_spec(source).num_layers
    more = {
        f"model.layers.{layer}.eh_proj.weight": torch.ones(4, 8),
        f"model.layers.{layer}.enorm.weight": torch.ones(4),
    }
    save_file({**tensors, **more}, tmp_path / "model.safetensors")
    for name in ("config.json", "generation_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    load_weights(read_spec(tmp_path), tmp_path, device=torch.device("cpu"), dtype=torch.float32, max_positions=64)
    assert "not used" not in capsys.readouterr().err
