"""A published model on a GPU against `transformers` in float32: SmolLM2, alone and in a batch, in every format.

Run it with `WEFT_TEST_MODELS=FOLDER python -m pytest tests/gpu/test_real_models.py` if the packages are not installed.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import GREEDY, Harness
from real_models import GEMMA3, SMOLLM2, Gemma3, RealModel, SmolLM2, model_file

import weft
from weft.engine.model.hub import find_model
from weft.tools import quality

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

OPTIONS = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 32, "max_model_len": 1024, "num_pages": 400,
           "tuning_seconds": 0}  # fmt: skip
TOKENS = 48
PASSAGE = (Path(weft.__file__).parent / "LICENSE").read_text()
QUESTIONS = (
    "What is the capital of France?", "What is 2+2?", "Who wrote Hamlet?", "Name three fruits.", "Why is the sky blue?",
    "Write a haiku about rain.", "Translate 'good morning' to French.", "What does a compiler do?", "Say hi.",
    "How many legs has a spider?",
)  # fmt: skip


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> SmolLM2:
    model = SmolLM2(model_file(SMOLLM2, tmp_path_factory.mktemp("model")))
    model.oracle.cuda()
    return model


@pytest.fixture(scope="module")
def path(smollm2: SmolLM2) -> Path:
    return find_model(str(smollm2.file))


@pytest.fixture(scope="module")
def prompts(smollm2: SmolLM2) -> list[list[int]]:
    asked = [smollm2.chat_ids({"role": "user", "content": question}) for question in QUESTIONS]
    passage = smollm2.ids(PASSAGE)
    return [*asked, *(passage[:length] for length in (1, 7, 64, 65, 129, 300, 600, 900, 33, 500))]


def _answers(path: Path, prompts: list[list[int]], *, together: bool = True, **options: Any) -> list[list[int]]:
    """Greedy tokens for each prompt, all at once or one after the other."""
    harness = Harness(path, **{**OPTIONS, **options})
    try:
        handles = []
        for prompt in prompts:
            handles.append(harness.add(prompt, max_tokens=TOKENS, **GREEDY))
            if not together:
                harness.run()
        harness.run()
        return [harness.tokens[handle] for handle in handles]
    finally:
        harness.engine.close()


def _assert_near(model: RealModel, prompts: list[list[int]], answers: list[list[int]]) -> None:
    """bfloat16 may choose another token only where float32 hardly prefers one, as often as that of `transformers`."""
    rounded = copy.deepcopy(model.oracle).bfloat16()
    gaps, theirs = [], 0
    for prompt, answer in zip(prompts, answers, strict=True):
        rows = model.logits(prompt + answer)[len(prompt) - 1 : -1]
        gaps += (rows.amax(-1) - rows[torch.arange(len(answer)), torch.tensor(answer)]).tolist()
        with torch.inference_mode():
            other = rounded(torch.tensor([prompt + answer], device=rounded.device)).logits[0, len(prompt) - 1 : -1]
        theirs += int((other.argmax(-1).cpu() != rows.argmax(-1)).sum())
    ours = sum(gap > 0 for gap in gaps)
    print(f"{ours} of {len(gaps)} tokens are not float32's, {theirs} of transformers'; largest gap {max(gaps):.3f}")
    assert ours <= 1.5 * theirs + 0.02 * len(gaps)
    assert max(gaps) < 0.5


@pytest.mark.parametrize("together", [False, True], ids=["alone", "together"])
def test_tokens_are_those_of_transformers_except_at_near_ties(
    smollm2: SmolLM2, path: Path, prompts: list[list[int]], together: bool
) -> None:
    _assert_near(smollm2, prompts, _answers(path, prompts, together=together))


def test_chat_answers_stop(path: Path, prompts: list[list[int]]) -> None:
    answers = _answers(path, prompts[: len(QUESTIONS)])
    assert not any(2 in answer[:-1] for answer in answers)
    assert sum(answer[-1] == 2 for answer in answers) >= 2


@pytest.mark.parametrize(
    "formats", [{}, {"quantization": "fp8"}, {"kv_cache_dtype": "fp8"}], ids=["bf16", "FP8 weights", "FP8 KV"]
)
def test_batch_invariant_tokens_do_not_depend_on_the_batch(
    path: Path, prompts: list[list[int]], formats: dict[str, Any]
) -> None:
    options = {"batch_invariant": True, "prefix_caching": False, **formats}
    alone = _answers(path, prompts, together=False, **options)
    assert _answers(path, prompts, **options) == alone
    assert _answers(path, prompts[::-1], **options)[::-1] == alone
    assert _answers(path, prompts, max_num_batched_tokens=256, **options) == alone


def test_each_format_costs_what_it_costs_on_a_cpu(path: Path) -> None:
    """Python's documentation, 4,096 tokens. The bounds are about twice what the formats cost on a CPU."""
    windows = quality.windows_of(path, quality.documentation(), 4096, 512)
    exact = quality.scores(path, windows, quality.FORMATS["float32"])
    bounds = {
        "bf16": (1.02, 0.95),
        "FP8 weights": (1.10, 0.78),
        "FP8 KV": (1.05, 0.85),
        "FP8 weights and KV": (1.12, 0.76),
    }
    for name, (dearer, agreement) in bounds.items():
        made = quality.scores(path, windows, {**quality.FORMATS[name], "device": "cuda"})
        agreed = float((made.best == exact.best).mean())
        print(f"{name}: perplexity {made.perplexity:.3f} of {exact.perplexity:.3f}, agreement {agreed:.2%}")
        assert made.perplexity < dearer * exact.perplexity
        assert agreed > agreement


@pytest.mark.parametrize("form", ["raw", "packed"])
def test_pages_from_the_host_give_the_same_tokens(path: Path, smollm2: SmolLM2, form: str) -> None:
    """Prompts fill the device several times over; each then comes back from the host."""
    passage = smollm2.ids(PASSAGE)
    prompts = [passage[start : start + 700] for start in range(0, 1600, 200)]
    options = {**OPTIONS, "num_pages": 24, "host_kv_gib": 1.0, "tier_kv_format": form, "batch_invariant": True}
    harness = Harness(path, **options)
    try:
        answers = []
        for _ in range(2):
            handles = []
            for prompt in prompts:
                handles.append(harness.add(prompt, max_tokens=8, **GREEDY))
                harness.run()
            answers.append([harness.tokens[handle] for handle in handles])
        assert sum(harness.cached[handle] for handle in handles) > 0.5 * sum(map(len, prompts))
    finally:
        harness.engine.close()
    assert answers[0] == answers[1]


def test_three_ranks_agree_with_transformers(smollm2: SmolLM2, path: Path, prompts: list[list[int]]) -> None:
    """The model's 9 heads split over 3 ranks, not over 2."""
    if torch.cuda.device_count() < 3:
        pytest.skip("needs three GPUs")
    _assert_near(smollm2, prompts, _answers(path, prompts, tensor_parallel_size=3))


@pytest.mark.parametrize("ranks", [1, 2])
def test_gemma_agrees_with_transformers(ranks: int, tmp_path: Path) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip("needs two GPUs")
    model = Gemma3(model_file(GEMMA3, tmp_path))
    model.oracle.cuda()
    path = find_model(str(model.file))
    passage = quality.windows_of(path, PASSAGE, 1800, 900)
    prompts = [*passage, passage[0][:600], passage[0][:40]]
    _assert_near(model, prompts, _answers(path, prompts, tensor_parallel_size=ranks))
