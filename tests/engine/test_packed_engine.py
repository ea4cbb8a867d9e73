"""Engines with weights in 4 and 8 bits: close to the widened model, and equal to themselves in any batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import Kind, ggml_tensors, write_gguf
from harness import GREEDY, Harness
from integer_files import Form, write_integers
from lora_files import save_adapter
from tiny import save_tiny
from transformers import AutoModelForCausalLM

from weft.engine.config import Share
from weft.engine.model.adapter import adapter_digest
from weft.engine.model.hub import find_model
from weft.engine.runner.start import load
from weft.engine.wire.weight_exchange import WeightExchange

OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 80, "page_size": 4, "max_num_batched_tokens": 32}
KINDS = {
    "attn_q": "Q4_0", "attn_k": "Q4_1", "attn_v": "Q8_0", "attn_output": "Q5_1", "ffn_gate": "Q4_1", "ffn_up": "Q4_1",
    "ffn_down": "Q5_0", "token_embd": "Q8_0", "output.weight": "Q8_0",
}  # fmt: skip
BOUND = 0.3
"""mean difference of log-probabilities of these models, whose random weights are large: other weights give above 1"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """With a cache that is shared, so that kernels are compiled once."""
    folder = tmp_path_factory.mktemp("packed")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        yield folder


@pytest.fixture(scope="module")
def plain(folder: Path) -> Path:
    return save_tiny(
        "llama2", folder / "plain", hidden_size=128, intermediate_size=192, num_attention_heads=4,
        num_key_value_heads=4, head_dim=32, vocab_size=256,
    )  # fmt: skip


@pytest.fixture(scope="module")
def model(folder: Path, plain: Path) -> Path:
    chosen = {
        name: Kind[kind]
        for name, tensor in ggml_tensors(plain, "llama").items()
        if tensor.ndim == 2
        for part, kind in KINDS.items()
        if part in name
    }
    return find_model(str(write_gguf(plain, folder / "it.gguf", "llama", kinds=chosen)))


def _prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(5)
    return [rng.integers(3, 199, n) for n in (1, 9, 23, 40, 61)]


def _answers(
    model: Path, *, alone: bool = False, adapter: str = "", neighbor: str = "", **options: Any
) -> list[tuple[list[int], Any]]:
    """Tokens and log-probabilities, of the prompts too."""
    harness = Harness(model, **{**OPTIONS, **options})
    try:
        for prompt in _prompts():
            harness.add(prompt, adapter=adapter, max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1, **GREEDY)
            if alone:
                harness.run()
        own = [*harness.tokens]
        if neighbor:
            harness.add(_prompts()[1], adapter=neighbor, max_tokens=40, ignore_eos=True, **GREEDY)
        harness.run()
    finally:
        harness.engine.close()
    found = []
    for handle in own:
        tokens = harness.tokens[handle]
        entries = [*harness.prompt_logprobs[handle], *harness.logprobs[handle]]
        found.append((tokens, np.array([entry.values[0] for entry in entries])))
    return found


def _differences(one: list[tuple[list[int], Any]], other: list[tuple[list[int], Any]]) -> np.ndarray:
    """Differences of log-probabilities while the tokens are the same."""
    found = []
    for (tokens, own), (others, theirs), prompt in zip(one, other, _prompts(), strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        count = len(prompt) - 1 + same
        found.append(np.abs(own[:count] - theirs[:count]))
    return np.concatenate(found)


def test_answers_are_close_to_the_widened_models(model: Path) -> None:
    packed, wide = _answers(model), _answers(model, quantization="none")
    differences = _differences(packed, wide)
    assert 0 < differences.mean() < BOUND
    assert len(differences) > 130


def test_a_row_has_the_same_bits_in_any_batch(model: Path) -> None:
    options: dict[str, Any] = {"batch_invariant": True, "max_num_batched_tokens": 128, "prefix_caching": False}
    together, alone = _answers(model, **options), _answers(model, alone=True, **options)
    for (tokens, own), (others, theirs) in zip(together, alone, strict=True):
        assert tokens == others
        assert np.array_equal(own, theirs)


def test_an_adapter_in_the_batch_leaves_the_bits_of_a_row(model: Path, plain: Path, folder: Path) -> None:
    path = save_adapter(folder / "neighbor", AutoModelForCausalLM.from_pretrained(plain), seed=2)
    options: dict[str, Any] = {"batch_invariant": True, "max_num_batched_tokens": 128, "prefix_caching": False}
    options |= {"lora_modules": [f"one={path}"]}
    alone = _answers(model, **options)
    for (tokens, own), (others, theirs) in zip(
        alone, _answers(model, neighbor=adapter_digest(path), **options), strict=True
    ):
        assert tokens == others
        assert np.array_equal(own, theirs)


@pytest.mark.nightly
def test_two_ranks_are_close_to_one(model: Path) -> None:
    one, two = _answers(model, quantization="none"), _answers(model, tensor_parallel_size=2)
    assert 0 < _differences(two, one).mean() < BOUND


def test_adapters_add_to_packed_matrices(model: Path, plain: Path, folder: Path) -> None:
    base = AutoModelForCausalLM.from_pretrained(plain)
    path = save_adapter(folder / "adapter", base, seed=1)
    options: dict[str, Any] = {"lora_modules": [f"one={path}"], "adapter": adapter_digest(path)}
    packed, wide = _answers(model, **options), _answers(model, quantization="none", **options)
    assert 0 < _differences(packed, wide).mean() < BOUND
    assert [tokens for tokens, _ in packed] != [tokens for tokens, _ in _answers(model)]


def test_act_order_is_followed(plain: Path, tmp_path: Path) -> None:
    there, _ = write_integers(plain, tmp_path, Form("gptq", 4, 32, act_order=True))
    assert 0 < _differences(_answers(there), _answers(there, quantization="none")).mean() < BOUND


def test_a_model_in_codes_sleeps_and_wakes_unchanged(model: Path, tmp_path: Path) -> None:
    harness = Harness(model, **OPTIONS, share=Share(sleeps=True), cache_dir=str(tmp_path), prefix_caching=False)
    try:
        engine = harness.engine
        assert engine.runner._executor.native is not None  # type: ignore[attr-defined]  # C++ holds their addresses
        before = _tokens(harness)
        for _ in range(2):
            assert engine.sleep() >= engine._memory.weights + engine._memory.kv_pages
            engine.wake()
            assert _tokens(harness) == before
    finally:
        harness.engine.close()


def _tokens(harness: Harness) -> list[list[int]]:
    added = [harness.add(prompt, max_tokens=8, ignore_eos=True, **GREEDY) for prompt in _prompts()]
    harness.run()
    return [harness.tokens[handle] for handle in added]


def test_replicas_map_one_copy_of_the_codes(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loads: list[int] = []
    read = load.load_weights

    def counted(*arguments: Any, **options: Any) -> Any:
        loads.append(1)
        return read(*arguments, **options)

    monkeypatch.setattr(load, "load_weights", counted)
    harnesses = [Harness(model, **OPTIONS)]
    expected = _tokens(harnesses[0])
    exchange = WeightExchange()
    share = Share(sharers=2, weight_sharers=2)
    try:
        for _ in range(2):
            harnesses.append(Harness(model, exchange, share=share, **OPTIONS))
            assert harnesses[-1].engine.runner._executor.native is not None  # type: ignore[attr-defined]
            assert _tokens(harnesses[-1]) == expected
        assert len(loads) == 2  # the one alone, and the first replica
    finally:
        for harness in harnesses:
            harness.engine.close()
        exchange.clear()
        exchange.close()
