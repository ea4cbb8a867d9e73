"""Hidden states as embeddings equal those of `transformers`, for any chunk size, neighbours and memory."""

from __future__ import annotations

import json
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from safetensors.torch import load_file, save_file
from transformers import AutoModel

from weft.engine.errors import ModelError, RequestError
from weft.engine.wire.messages import Finish
from weft.engine.wire.sampling import SamplingParams

TOLERANCE = 1e-5


@cache
def _expected(path: Path, prompt: tuple[int, ...]) -> dict[str, np.ndarray]:
    model = AutoModel.from_pretrained(path, dtype=torch.float32)
    with torch.inference_mode():
        states = model(torch.tensor([prompt])).last_hidden_state[0]
    return {"last": states[-1].numpy(), "mean": states.mean(0).numpy()}


def _prompts() -> list[tuple[int, ...]]:
    """Prompts of mixed lengths; all but the first share a beginning of some pages."""
    rng = np.random.default_rng(5)
    shared = rng.integers(3, 199, 30)
    own = [rng.integers(3, 199, length) for length in (9, 1, 40, 81)]
    return [tuple(own[0].tolist()), *(tuple(np.concatenate((shared, more)).tolist()) for more in own[1:])]


def _near(got: np.ndarray, want: np.ndarray) -> None:
    np.testing.assert_allclose(got, want, rtol=0, atol=TOLERANCE * max(1.0, float(np.abs(want).max())))


@pytest.mark.parametrize("chunk", [7, 64])
@pytest.mark.parametrize("family", ["llama2", "qwen3", "gemma3", "starcoder2"])
def test_they_equal_those_of_transformers_in_a_batch_with_generation(tiny_model, family: str, chunk: int) -> None:
    path = tiny_model(family)
    harness = Harness(path, max_num_batched_tokens=chunk, page_size=8, num_pages=120)
    harness.poison_pages()
    requested: dict[int, tuple[tuple[int, ...], str]] = {}
    for prompt in _prompts():
        for pooling in ("last", "mean"):
            requested[harness.add(prompt, max_tokens=0, pooling=pooling)] = prompt, pooling
        harness.add(prompt, max_tokens=5, **GREEDY)
    harness.run()
    assert set(harness.pooled) == set(requested)
    for handle, (prompt, pooling) in requested.items():
        _near(harness.pooled[handle], _expected(path, prompt)[pooling])
        assert harness.tokens[handle] == []
        assert harness.finish[handle] is Finish.LENGTH


def test_they_are_computed_by_transformers_code_too(tiny_model) -> None:
    path = tiny_model("llama2")
    harness = Harness(path, max_num_batched_tokens=16, page_size=8, num_pages=120, model_impl="transformers")
    prompt = _prompts()[2]
    handles = {pooling: harness.add(prompt, max_tokens=0, pooling=pooling) for pooling in ("last", "mean")}
    harness.add(prompt, max_tokens=3, **GREEDY)
    harness.run()
    for pooling, handle in handles.items():
        _near(harness.pooled[handle], _expected(path, prompt)[pooling])


def test_the_last_state_uses_a_cached_prefix_and_the_mean_does_not(tiny_model) -> None:
    path = tiny_model("llama2")
    harness = Harness(path, max_num_batched_tokens=32, page_size=8, num_pages=120)
    prompt = _prompts()[3]
    harness.add(prompt, max_tokens=2, **GREEDY)
    harness.run()
    last, mean = (harness.add(prompt, max_tokens=0, pooling=pooling) for pooling in ("last", "mean"))
    harness.run()
    assert harness.cached[last] == (len(prompt) - 1) // 8 * 8
    assert harness.cached[mean] == 0
    for handle, pooling in ((last, "last"), (mean, "mean")):
        _near(harness.pooled[handle], _expected(path, prompt)[pooling])


def test_a_preempted_mean_restarts(tiny_model) -> None:
    """A higher priority takes the slots while the prompt is half computed."""
    path = tiny_model("llama2")
    harness = Harness(path, max_num_batched_tokens=8, page_size=8, num_pages=60, max_num_seqs=1)
    prompt = _prompts()[3]
    handle = harness.add(prompt, max_tokens=0, pooling="mean", priority=5)
    for _ in range(4):
        harness.step()
    harness.add(prompt[:9], max_tokens=2, **GREEDY)
    harness.run()
    assert harness.engine.scheduler.preemptions == 1
    _near(harness.pooled[handle], _expected(path, prompt)["mean"])


def test_non_finite_states_end_the_request(tiny_model) -> None:
    harness = Harness(tiny_model("llama2"), page_size=8, num_pages=60)
    with torch.inference_mode():
        harness.engine.runner._executor.weights.embedding[77] = float("nan")
    bad = [harness.add([5, 77, *range(20, 30)], max_tokens=0, pooling=pooling) for pooling in ("last", "mean")]
    good = harness.add([5, 6, 7], max_tokens=0, pooling="last")
    harness.run()
    assert [harness.finish[handle] for handle in bad] == [Finish.NONFINITE] * 2
    assert set(harness.pooled) == {good}


def test_they_do_not_affect_the_expected_output_length(tiny_model) -> None:
    harness = Harness(tiny_model("llama2"), page_size=8, num_pages=60)
    before = harness.engine.scheduler.output_lengths.mean
    harness.add([5, 6, 7], max_tokens=0, pooling="last")
    harness.run()
    assert harness.engine.scheduler.output_lengths.mean == before


def test_no_output_is_generated_with_them() -> None:
    with pytest.raises(RequestError, match="max_tokens must be 0 if hidden states are pooled"):
        SamplingParams(max_tokens=1, pooling="last")


def _changed(path: Path, to: Path, **config: Any) -> Path:
    shutil.copytree(path, to)
    file = to / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **config}))
    return to


def test_checkpoints_of_the_model_without_its_head_are_read(tiny_model, tmp_path: Path) -> None:
    """The format of embedding models: `Qwen3Model`, names without `model.`, no `lm_head`."""
    path = tiny_model("qwen3")
    bare = _changed(path, tmp_path / "bare", architectures=["Qwen3Model"], tie_word_embeddings=False)
    files = list(bare.glob("*.safetensors"))
    tensors = {name: tensor for file in files for name, tensor in load_file(file).items()}
    for file in (*files, bare / "model.safetensors.index.json"):
        file.unlink(missing_ok=True)
    headless = {name.removeprefix("model."): t for name, t in tensors.items() if not name.startswith("lm_head")}
    save_file(headless, bare / "model.safetensors")
    prompt = _prompts()[0]
    harness = Harness(bare, page_size=8, num_pages=60)
    handle = harness.add(prompt, max_tokens=0, pooling="last")
    harness.run()
    _near(harness.pooled[handle], _expected(path, prompt)["last"])


@pytest.mark.parametrize("key", [{"is_causal": False}, {"use_bidirectional_attention": True}])
def test_models_with_bidirectional_attention_are_refused(tiny_model, tmp_path: Path, key: dict[str, bool]) -> None:
    path = _changed(tiny_model("qwen2"), tmp_path / "both", **key)
    with pytest.raises(ModelError, match="also attend to later ones"):
        Harness(path, num_pages=60)
