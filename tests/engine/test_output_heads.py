"""A checkpoint with another output head than `config.json` says is computed as `transformers` does, with a warning."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from tiny import save_tiny
from transformers import AutoModelForCausalLM

from weft.engine.model.directory import read_spec
from weft.engine.model.weights import NO_HEAD, OTHER_HEAD, load_weights

EMBED = "model.embed_tokens.weight"
TIED = {"llama3.1": EMBED, "gemma3": EMBED, "gpt2": "transformer.wte.weight"}


def _changed(path: Path, *, pickled: bool = False, head: Any = None, drop: str = "", **config: Any) -> Path:
    files = list(path.glob("*.safetensors"))
    state = {name: tensor for file in files for name, tensor in load_file(file).items() if name != drop}
    for file in (*files, *path.glob("*.index.json")):
        file.unlink()
    if head is not None:
        state["lm_head.weight"] = head(state)
    if pickled:
        torch.save(state, path / "pytorch_model.bin")
    else:
        save_file(state, path / "model.safetensors", metadata={"format": "pt"})
    file = path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return path


def _agrees(path: Path, **options: Any) -> None:
    """Greedy tokens of the engine are those of `transformers`' logits at their positions."""
    harness = Harness(path, page_size=4, num_pages=60, **options)
    prompt = np.random.default_rng(1).integers(3, 199, 21)
    handle = harness.add(prompt, max_tokens=12, ignore_eos=True, **GREEDY)
    harness.run()
    tokens = harness.tokens[handle]
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.concatenate((prompt, tokens)))[None]).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


def _other(family: str) -> Any:
    return lambda state: state[TIED[family]].roll(7, 0).contiguous()


@pytest.mark.parametrize("impl", ["native", "transformers"])
@pytest.mark.parametrize("family", TIED)
def test_a_head_of_its_own_is_used_although_the_config_ties_it(
    family: str, impl: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    _agrees(_changed(save_tiny(family, tmp_path), head=_other(family)), model_impl=impl)
    assert f"weft: {OTHER_HEAD}\n" in capfd.readouterr().err


@pytest.mark.parametrize("pickled", [False, True], ids=["safetensors", "pickled"])
def test_a_copy_of_the_embedding_is_no_other_head(
    pickled: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    family = "llama3.1"
    path = _changed(save_tiny(family, tmp_path), pickled=pickled, head=lambda state: state[TIED[family]].clone())
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
    weights = load_weights(read_spec(path), path, **options)
    assert weights.lm_head is weights.embedding
    assert "head" not in capfd.readouterr().err


def test_shards_of_another_head_are_its_rows(tmp_path: Path) -> None:
    family = "llama3.1"
    path = _changed(save_tiny(family, tmp_path), head=_other(family))
    spec, options = read_spec(path), {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
    whole, *parts = (load_weights(s, path, **options) for s in (spec, spec.shard(0, 2), spec.shard(1, 2)))
    assert torch.equal(torch.cat([part.lm_head for part in parts]), whole.lm_head)
    assert not torch.equal(whole.lm_head, whole.embedding)


def test_a_tied_checkpoint_may_have_only_the_head(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    family = "llama3.1"
    path = save_tiny(family, tmp_path)
    _agrees(_changed(path, head=lambda state: state.pop(TIED[family])))
    assert "head" not in capfd.readouterr().err


def test_a_missing_head_is_the_embedding(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path = _changed(save_tiny("llama2", tmp_path), drop="lm_head.weight")
    options = {"device": torch.device("cpu"), "dtype": torch.float32, "max_positions": 64}
    weights = load_weights(read_spec(path), path, **options)
    assert weights.lm_head is weights.embedding
    assert f"weft: {NO_HEAD}\n" in capfd.readouterr().err
