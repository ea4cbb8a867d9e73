"""Layers in C++ compute what the reference does with the same packed weights, for a row in any batch the same bits."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import Kind, ggml_tensors, write_gguf
from harness import GREEDY, Harness
from tiny import save_tiny

from weft.engine.model.hub import find_model
from weft.engine.runner.cpu.cpu_executor import CpuExecutor
from weft.kernels.native import library

pytestmark = pytest.mark.skipif(
    not library.variants(library.cpu_flags()), reason="the C++ code needs AVX2"
)  # fmt: skip
FAMILIES = ("llama2", "qwen2", "qwen3", "gemma3")
SIZES: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 192, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
    "vocab_size": 256, "max_position_embeddings": 512,
}  # fmt: skip
OPTIONS: dict[str, Any] = {"device": "cpu", "num_pages": 300, "page_size": 8, "max_num_batched_tokens": 128}
Answers = list[tuple[list[int], Any]]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], Path]]:
    """Return the GGUF file of a tiny model, with random weights in several types."""
    made: dict[str, Path] = {}

    def of(family: str) -> Path:
        if family not in made:
            folder = tmp_path_factory.mktemp(family)
            source, arch = save_tiny(family, folder / "source", **SIZES), {"llama2": "llama"}.get(family, family)
            kinds = {
                name: Kind["Q8_0" if "token" in name or "output.w" in name or "attn_v" in name else "Q4_1"]
                for name, tensor in ggml_tensors(source, arch).items()
                if tensor.ndim == 2
            }
            made[family] = find_model(str(write_gguf(source, folder / "it.gguf", arch, kinds=kinds)))
        return made[family]

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.getbasetemp() / "cache"))
        yield of


def answers(model: Path, *, alone: bool = False, native: bool = True, **options: Any) -> Answers:
    """Return tokens and log-probabilities, of the prompts too."""
    harness = Harness(model, **{"dtype": "float32", **OPTIONS, **options})
    executor = harness.engine.runner._executor
    assert isinstance(executor, CpuExecutor)
    assert executor.native is not None
    if not native:
        executor.native = None
    rng = np.random.default_rng(5)
    try:
        for length in (1, 9, 23, 40, 130, 61):
            harness.add(
                rng.integers(3, 199, length), max_tokens=8, ignore_eos=True, logprobs=1, prompt_logprobs=1, **GREEDY
            )
            if alone:
                harness.run()
        harness.run()
    finally:
        harness.engine.close()
    return [
        (tokens, np.array([e.values[0] for e in (*harness.prompt_logprobs[handle], *harness.logprobs[handle])]))
        for handle, tokens in harness.tokens.items()
    ]


@pytest.mark.parametrize(("family", "dtype"), [*((f, "float32") for f in FAMILIES), ("gemma3", "bfloat16")])
def test_they_compute_what_the_reference_does(model: Callable[[str], Path], family: str, dtype: str) -> None:
    found, wanted = (answers(model(family), native=native, dtype=dtype) for native in (True, False))
    differences = []
    for (tokens, own), (others, theirs) in zip(found, wanted, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(tokens, others, strict=True)) if a != b), len(tokens))
        count = len(own) - len(tokens) + same
        differences.append(np.abs(own[:count] - theirs[:count]))
    every = np.concatenate(differences)
    assert len(every) > 250
    # an activation at the middle between two int8 values may be rounded either way
    assert np.median(every) < (0.05 if dtype == "bfloat16" else 5e-6)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_row_has_the_same_bits_in_any_batch(model: Callable[[str], Path], family: str) -> None:
    options: dict[str, Any] = {"batch_invariant": True, "prefix_caching": False}
    together, alone = answers(model(family), **options), answers(model(family), alone=True, **options)
    for (tokens, own), (others, theirs) in zip(together, alone, strict=True):
        assert tokens == others
        assert np.array_equal(own, theirs)


def test_threads_do_not_change_a_bit(model: Callable[[str], Path]) -> None:
    one, two = (answers(model("llama2"), batch_invariant=True, cpu_threads=n) for n in (1, 2))
    for (tokens, own), (others, theirs) in zip(one, two, strict=True):
        assert tokens == others
        assert np.array_equal(own, theirs)


def test_a_step_without_prompts_is_one_call(model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    harness = Harness(model("llama2"), **OPTIONS)
    native = harness.engine.runner._executor.native
    run, calls = native._steps.run, []
    monkeypatch.setattr(native._steps, "run", lambda *given: (calls.append(given[:2]), run(*given))[1])
    try:
        harness.add(np.arange(5, 20), max_tokens=4, ignore_eos=True, **GREEDY)
        harness.run()
    finally:
        harness.engine.close()
    every = len(harness.engine.runner._executor._steps)
    decodes = [part for part in calls if part[1] == every][-3:]
    assert len(decodes) == 3
    assert len(calls) < 2 * every


@pytest.mark.parametrize("changes", [{"intermediate_size": 200}, {"head_dim": 8}])
def test_what_they_cannot_compute_is_left_to_the_reference(
    tmp_path: Path, model: Callable[[str], Path], changes: dict[str, Any]
) -> None:
    assert model
    source = save_tiny("llama2", tmp_path / "source", **{**SIZES, **changes})
    kinds = {
        name: Kind.Q8_0 for name, t in ggml_tensors(source, "llama").items() if t.ndim == 2 and not t.shape[1] % 32
    }
    harness = Harness(find_model(str(write_gguf(source, tmp_path / "it.gguf", "llama", kinds=kinds))), **OPTIONS)
    try:
        assert harness.engine.runner._executor.native is None
        harness.add(np.arange(5, 20), max_tokens=4, ignore_eos=True, **GREEDY)
        harness.run()
    finally:
        harness.engine.close()
