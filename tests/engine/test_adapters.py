"""LoRA adapters: answers of every family equal those of the base model with the adapter merged in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from lora_files import merged, save_adapter, save_stacked
from tiny import FAMILIES
from transformers import AutoModelForCausalLM

from weft.engine.errors import ModelError
from weft.engine.model.adapter import adapter_digest
from weft.engine.scheduling import adapters
from weft.engine.scheduling.grammars import _Waiting
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams

Made = Callable[[str], Path]

BY_DAY = ("llama2", "qwen3", "gemma3", "phi4", "granite", "opt", "gpt2", "mixtral")
"""plain, norms of heads, post-norms, fused modules, scaled residuals, norms with bias, transposed, experts"""
REFUSING = (
    "granite-hybrid", "nemotron-h", "qwen3.5", "qwen3.5-moe", "qwen3-next", "lfm2", "lfm2-moe", "deepseek-v2",
    "deepseek-v3", "glm4-moe-lite",
)  # fmt: skip
"""recurrent layers or latent attention"""
SERVED = [name for name in FAMILIES if name not in REFUSING]
EVERY = [name if name in BY_DAY else pytest.param(name, marks=pytest.mark.nightly) for name in SERVED]
OPTIONS: dict[str, Any] = {"page_size": 4, "max_num_seqs": 8, "max_num_batched_tokens": 32}
MAX_TOKENS = 8


def _modules(paths: dict[str, Path]) -> list[str]:
    return [f"{name}={path}" for name, path in paths.items()]


def _check(harness: Harness, handle: int, prompt: np.ndarray, model: Any) -> None:
    """Every token is the argmax of the reference after those before it."""
    tokens = harness.tokens[handle]
    with torch.inference_mode():
        logits = model(torch.from_numpy(np.concatenate((prompt, tokens)))[None]).logits[0, len(prompt) - 1 : -1]
    assert logits.argmax(-1).tolist() == tokens


@pytest.mark.parametrize("family", EVERY)
def test_mixed_batches_answer_as_the_merged_models(tiny_model: Made, tmp_path: Path, family: str) -> None:
    path = tiny_model(family)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    paths = {
        "one": save_adapter(tmp_path / "one", base, seed=1),
        "two": save_adapter(tmp_path / "two", base, seed=2, rank=8, alpha=16, use_rslora=True),
    }
    models = [base, *merged(base, paths.values())]
    digests = ["", *map(adapter_digest, paths.values())]
    harness = Harness(path, lora_modules=_modules(paths), **OPTIONS)
    harness.poison_pages()
    rng = np.random.default_rng(3)
    prompts = [rng.integers(3, 199, length) for length in (5, 17, 40)]
    for _ in range(2):  # the second time behind cached prefixes
        handles = [
            (harness.add(prompt, adapter=digest, max_tokens=MAX_TOKENS, **GREEDY), prompt, model)
            for prompt in prompts
            for digest, model in zip(digests, models, strict=True)
        ]
        harness.run()
        for handle, prompt, model in handles:
            _check(harness, handle, prompt, model)
        answers = {tuple(harness.tokens[handle]) for handle, prompt, _ in handles if prompt is prompts[-1]}
        assert len(answers) == 3, "the adapters change nothing"
    assert sum(harness.cached[handle] for handle, _, _ in handles) > 0


SEPARATE = ("mlp.experts.{}.gate_proj", "mlp.experts.{}.up_proj", "mlp.experts.{}.down_proj")
OF_EXPERTS = {
    "mixtral": tuple(f"block_sparse_moe.experts.{{}}.w{i}" for i in (1, 3, 2)),
    "qwen2-moe": SEPARATE,
    "qwen3-moe": SEPARATE,
    "glm4-moe": SEPARATE,
}


@pytest.mark.parametrize(
    ("family", "ranks", "options"),
    [
        ("qwen2-moe", 1, {}),
        *(
            pytest.param(family, ranks, options, marks=pytest.mark.nightly)
            for family in OF_EXPERTS
            for ranks, options in ((1, {}), (2, {}), (1, {"batch_invariant": True, "max_num_batched_tokens": 128}))
        ),
    ],
)
def test_adapters_of_experts_answer_as_the_merged_models(
    tiny_model: Made, tmp_path: Path, family: str, ranks: int, options: dict[str, Any]
) -> None:
    """The modules of experts are separate in one adapter, with those of shared experts, and stacked in the other."""
    path, names = tiny_model(family), OF_EXPERTS[family]
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    paths = {
        "one": save_adapter(tmp_path / "one", base, seed=1, experts=names),
        "two": save_stacked(tmp_path / "two", base, seed=2),
    }
    models = [base, *merged(base, paths.values(), names)]
    digests = ["", *map(adapter_digest, paths.values())]
    harness = Harness(path, lora_modules=_modules(paths), tensor_parallel_size=ranks, **{**OPTIONS, **options})
    rng = np.random.default_rng(3)
    handles = [
        (harness.add(prompt, adapter=digest, max_tokens=MAX_TOKENS, **GREEDY), prompt, model)
        for prompt in [rng.integers(3, 199, length) for length in (5, 40)]
        for digest, model in zip(digests, models, strict=True)
    ]
    harness.run()
    for handle, prompt, model in handles:
        _check(harness, handle, prompt, model)
    assert len({tuple(harness.tokens[handle]) for handle, _, _ in handles[-3:]}) == 3, "the adapters change nothing"
    harness.engine.close()


def _serve(harness: Harness, requests: list[tuple[np.ndarray, str]]) -> list[list[int]]:
    handles = [harness.add(p, adapter=digest, max_tokens=MAX_TOKENS, logprobs=1, **GREEDY) for p, digest in requests]
    harness.run()
    return [harness.tokens[handle] for handle in handles]


@pytest.fixture
def llama(tiny_model: Made, tmp_path: Path) -> tuple[Path, dict[str, Path], list[Any]]:
    """A model, two adapters, and the merged models: base, one, two."""
    path = tiny_model("llama2")
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    paths = {
        "one": save_adapter(tmp_path / "one", base, seed=1, names="q_proj|v_proj"),
        "two": save_adapter(
            tmp_path / "two", base, seed=2, rank_pattern={"layers.0.mlp.down_proj": 2, "o_proj": 6},
            alpha_pattern={"gate_proj": 24},
        ),
    }  # fmt: skip
    return path, paths, [base, *merged(base, paths.values())]


@pytest.mark.parametrize("chunk", [1, 7, 64])
def test_chunks_change_nothing(llama: Any, chunk: int) -> None:
    path, paths, models = llama
    harness = Harness(path, lora_modules=_modules(paths), **{**OPTIONS, "max_num_batched_tokens": chunk})
    digests = ["", *map(adapter_digest, paths.values())]
    prompts = [np.random.default_rng(seed).integers(3, 199, 19) for seed in range(3)]
    for i, prompt in enumerate(prompts):
        handle = harness.add(prompt, adapter=digests[i], max_tokens=MAX_TOKENS, **GREEDY)
        harness.run()
        _check(harness, handle, prompt, models[i])


def test_preemption_changes_nothing(llama: Any) -> None:
    path, paths, models = llama
    harness = Harness(path, lora_modules=_modules(paths), num_pages=22, **OPTIONS)
    harness.expect_short_outputs()
    digests = ["", *map(adapter_digest, paths.values())]
    rng = np.random.default_rng(5)
    prompts = [rng.integers(3, 199, 12) for _ in range(6)]
    handles = [harness.add(prompt, adapter=digests[i % 3], max_tokens=20, **GREEDY) for i, prompt in enumerate(prompts)]
    harness.run()
    assert harness.engine.scheduler.preemptions > 0
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        _check(harness, handle, prompt, models[i % 3])


def test_pages_of_one_adapter_are_never_those_of_another(llama: Any) -> None:
    path, paths, models = llama
    harness = Harness(path, lora_modules=_modules(paths), **OPTIONS)
    prompt = np.random.default_rng(6).integers(3, 199, 30)
    digests = ["", *map(adapter_digest, paths.values())]
    for digest, model in zip(digests, models, strict=True):
        handle = harness.add(prompt, adapter=digest, max_tokens=MAX_TOKENS, **GREEDY)
        harness.run()
        assert harness.cached[handle] == 0
        _check(harness, handle, prompt, model)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_with_batch_invariance_neighbours_change_no_bit(llama: Any, dtype: str) -> None:
    """Neither an adapter's requests nor those of the base model depend on the others in a batch."""
    path, paths, _ = llama
    options = {**OPTIONS, "dtype": dtype, "prefix_caching": False}
    options |= {"batch_invariant": True, "max_num_batched_tokens": 128}
    harness = Harness(path, lora_modules=_modules(paths), **options)
    digests = ["", *map(adapter_digest, paths.values())]
    rng = np.random.default_rng(7)
    requests = [(rng.integers(3, 199, 11 + i), digests[i % 3]) for i in range(6)]

    def serve(some: list[tuple[np.ndarray, str]]) -> list[Any]:
        handles = [harness.add(p, adapter=d, max_tokens=MAX_TOKENS, logprobs=1, **GREEDY) for p, d in some]
        harness.run()
        return [[entry.values for entry in harness.logprobs[handle]] for handle in handles]

    together = serve(requests)
    assert together == [serve([request])[0] for request in requests]
    assert together == serve(requests[::-1])[::-1]


@pytest.mark.parametrize(
    "family", [REFUSING[0], REFUSING[7], *(pytest.param(n, marks=pytest.mark.nightly) for n in REFUSING)]
)
def test_layers_that_adapters_do_not_support_end_the_start_in_one_line(
    tiny_model: Made, tmp_path: Path, family: str
) -> None:
    path = tiny_model(family)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    adapter = save_adapter(tmp_path / "one", base)
    with pytest.raises(ModelError, match="do not support yet"):
        Harness(path, lora_modules=[f"one={adapter}"], **OPTIONS)


def test_requests_that_make_room_for_another_adapter_go_on_later(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each adapter has its turn in memory for one, and no answer changes."""
    monkeypatch.setattr(adapters, "PATIENCE", 2)
    monkeypatch.setattr(adapters, "STAY", 4)
    path, paths, models = llama
    harness = Harness(path, lora_modules=_modules(paths), max_loras=1, **OPTIONS)
    digests = ["", *map(adapter_digest, paths.values())]
    rng = np.random.default_rng(8)
    prompts = [rng.integers(3, 199, 12) for _ in range(12)]
    turns: list[int] = []
    took_back = harness.engine.scheduler.withdraw

    def withdraw(adapter: int, running: bool) -> list[Any]:
        turns.append(adapter)
        return took_back(adapter, running)

    monkeypatch.setattr(harness.engine.adapters, "_withdraw", withdraw)
    handles = [
        harness.add(prompt, adapter=digests[i % 3], max_tokens=60, tenant=i % 2, **GREEDY)
        for i, prompt in enumerate(prompts)
    ]
    harness.run()
    assert harness.engine.scheduler.preemptions > 0
    assert set(turns) == {1, 2}
    harness.engine.scheduler.check()
    for i, (handle, prompt) in enumerate(zip(handles, prompts, strict=True)):
        _check(harness, handle, prompt, models[i % 3])


def test_an_adapter_is_in_use_while_a_request_of_it_waits_for_its_grammar(llama: Any) -> None:
    path, paths, _ = llama
    harness = Harness(path, lora_modules=_modules(paths), max_loras=1, **OPTIONS)
    engine = harness.engine
    assert engine.adapters is not None
    kept: dict[int, Any] = {}
    number = next(iter(engine.runner.adapters))
    engine.grammars._waiting = kept
    assert not engine.adapters._open_requests()
    prompt = np.arange(5, dtype=np.int32).tobytes()
    request = engine._arrivals.request(AddRequest(handle=9, prompt_token_ids=prompt, params=SamplingParams()))
    request.adapter = number
    kept[9] = _Waiting(request, "", None, 0.0)
    assert engine.adapters._open_requests() == {number: 1}
    kept.clear()


@pytest.mark.nightly
@pytest.mark.parametrize("family", ["llama2", "qwen2-moe"])
@pytest.mark.parametrize("options", [{"quantization": "fp8"}, {"quantization": "fp8", "tensor_parallel_size": 2}])
def test_over_an_fp8_base_an_adapter_is_as_near_to_its_merged_model_as_the_base_to_itself(
    tiny_model: Made, tmp_path: Path, family: str, options: dict[str, Any]
) -> None:
    path, names = tiny_model(family), OF_EXPERTS.get(family)
    base = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    paths = {name: save_adapter(tmp_path / name, base, seed=i, experts=names) for i, name in enumerate(("one", "two"))}
    models = [base, *merged(base, paths.values(), names)]
    harness = Harness(path, lora_modules=_modules(paths), **{**OPTIONS, **options})
    prompt = np.random.default_rng(1).integers(3, 199, 40)
    digests = ["", *map(adapter_digest, paths.values())]
    handles = [harness.add(prompt, adapter=d, max_tokens=1, prompt_logprobs=1, **GREEDY) for d in digests]
    harness.run()
    ids = torch.from_numpy(prompt)
    with torch.inference_mode():
        scores = [model(ids[None]).logits[0, :-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0] for model in models]
    for i, handle in enumerate(handles):
        found = torch.tensor([entry.values[0] for entry in harness.prompt_logprobs[handle]])
        errors = [float((found - score).abs().mean()) for score in scores]
        assert min(errors) == errors[i]
        assert errors[i] < 1 < sorted(errors)[1]
    harness.engine.close()


@pytest.mark.nightly
@pytest.mark.parametrize("speculation", ["ngram", "suffix"])
def test_drafts_are_verified_with_the_adapter(llama: Any, speculation: str) -> None:
    path, paths, models = llama
    harness = Harness(path, lora_modules=_modules(paths), speculation=speculation, **OPTIONS)
    digests = ["", *map(adapter_digest, paths.values())]
    rng = np.random.default_rng(9)
    prompt = rng.integers(3, 199, 12)
    answers: list[list[int]] = [[], [], []]
    for _ in range(2):  # the second time each answer is predicted, but for its beginning, which is another adapter's
        predictions = [answers[2][:10] + own[10:] for own in answers]
        handles = [
            harness.add(prompt, adapter=digest, max_tokens=40, prediction=prediction, **GREEDY)
            for digest, prediction in zip(digests, predictions, strict=True)
        ]
        harness.run()
        answers = [harness.tokens[handle] for handle in handles]
        for handle, model in zip(handles, models, strict=True):
            _check(harness, handle, prompt, model)
    assert sum(harness.engine.stats().speculation.accepted_tokens.values()) > 0
