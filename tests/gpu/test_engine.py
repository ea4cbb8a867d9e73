"""The whole engine on the GPU: the demo model's answers, preemption, seeds, log-probabilities, poisoned pages."""

from __future__ import annotations

import importlib.util

import numpy as np
import pytest
import torch
from harness import GREEDY, Harness
from tokenizers import Tokenizer

from weft.engine.demo import MODEL_PATH
from weft.engine.wire.messages import Finish
from weft.kernels.common.gpu import is_hopper
from weft.tools.demo.corpus import prompt_ids
from weft.tools.demo.skills import held_out

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
SMALL = {"device": "cuda", "dtype": "bfloat16", "max_num_seqs": 64, "max_num_batched_tokens": 256}


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(MODEL_PATH / "tokenizer.json"))


def _answers(harness: Harness, tokenizer: Tokenizer, examples: list) -> list[str]:
    handles = [harness.add(prompt_ids(tokenizer, e), max_tokens=60, **GREEDY) for e in examples]
    harness.run()
    return [tokenizer.decode(harness.tokens[h], skip_special_tokens=True) for h in handles]


@pytest.mark.parametrize("page_size", [16, 64])
def test_the_demo_model_answers_as_on_the_cpu(tokenizer: Tokenizer, page_size: int) -> None:
    examples = [e for skill in ("add", "subtract", "sort", "reverse", "count") for e in held_out(skill, 20, 5)]
    examples += held_out("recall", 20, 5, context_tokens=1500)
    harness = Harness("demo", page_size=page_size, num_pages=60_000 // page_size, **SMALL)
    harness.poison_pages()
    gpu = _answers(harness, tokenizer, examples)
    right = sum(a == e.answer for a, e in zip(gpu, examples, strict=True))
    assert right >= len(examples) - 1


@pytest.mark.skipif(importlib.util.find_spec("flash_attn") is None, reason="needs flash-attn")
def test_the_demo_model_answers_through_flash_attn(tokenizer: Tokenizer) -> None:
    examples = [*held_out("add", 20, 5), *held_out("recall", 10, 5, context_tokens=900)]
    harness = Harness("demo", page_size=256, num_pages=200, attention_backend="flash-attn", **SMALL)
    harness.poison_pages()
    answers = _answers(harness, tokenizer, examples)
    assert sum(a == e.answer for a, e in zip(answers, examples, strict=True)) >= len(examples) - 1


def test_recall_survives_a_pool_too_small_for_all(tokenizer: Tokenizer) -> None:
    examples = held_out("recall", 24, 7, context_tokens=900)
    harness = Harness("demo", page_size=16, num_pages=300, **SMALL)
    harness.expect_short_outputs()
    harness.poison_pages()
    answers = _answers(harness, tokenizer, examples)
    assert sum(a == e.answer for a, e in zip(answers, examples, strict=True)) >= 23


def test_every_request_ends_under_preemption_and_aborts() -> None:
    rng = np.random.default_rng(0)
    harness = Harness("demo", page_size=16, num_pages=60, **SMALL)
    harness.expect_short_outputs()
    for i in range(60):
        harness.add(rng.integers(6, 2000, int(rng.integers(1, 200))), max_tokens=100, seed=i, ignore_eos=True)
    harness.run(lambda step: harness.engine.abort(step // 4 * 3) if step % 4 == 0 else None)
    assert harness.engine.scheduler.preemptions > 0
    for handle, reason in harness.finish.items():
        assert reason in (Finish.LENGTH, Finish.ABORT)
        if reason is Finish.LENGTH:
            assert len(harness.tokens[handle]) == 100


def test_logprobs_bias_and_penalties_agree_with_the_cpu() -> None:
    prompt = np.random.default_rng(1).integers(6, 2000, 50)
    outputs = []
    for options in (SMALL, {"device": "cpu", "dtype": "bfloat16", "max_num_seqs": 64}):
        harness = Harness("demo", page_size=16, num_pages=200, **options)
        harness.add(prompt, max_tokens=4, logprobs=5, prompt_logprobs=2, logit_bias={77: 100.0}, **GREEDY)
        harness.add(prompt, max_tokens=12, repetition_penalty=1.5, frequency_penalty=1.0, ignore_eos=True, **GREEDY)
        harness.run()
        outputs.append(harness)
    gpu, cpu = outputs
    assert gpu.tokens[0] == [77] * 4
    assert len(set(gpu.tokens[1])) > 6
    for a, b in zip(gpu.prompt_logprobs[0], cpu.prompt_logprobs[0], strict=True):
        assert a.ids[0] == b.ids[0]
        assert a.values[0] == pytest.approx(b.values[0], abs=0.35)
    for a, b in zip(gpu.logprobs[0], cpu.logprobs[0], strict=True):
        assert a.ids[0] == b.ids[0] == 77
        assert a.values[0] == pytest.approx(b.values[0], abs=0.5)


def test_the_same_seed_gives_the_same_tokens_alone_and_in_a_batch() -> None:
    alone = Harness("demo", num_pages=200, **SMALL)
    alone.add([5, 60, 70, 80], temperature=0.7, seed=42, max_tokens=20, ignore_eos=True)
    alone.run()
    crowd = Harness("demo", num_pages=200, **SMALL)
    for i in range(20):
        crowd.add([5 + i, 9], temperature=1.5, seed=i, max_tokens=15, ignore_eos=True)
    handle = crowd.add([5, 60, 70, 80], temperature=0.7, seed=42, max_tokens=20, ignore_eos=True)
    crowd.run()
    assert crowd.tokens[handle][:3] == alone.tokens[0][:3]


def test_logits_without_numbers_end_their_requests_and_no_later_one(tokenizer: Tokenizer) -> None:
    harness = Harness("demo", page_size=16, num_pages=200, prefix_caching=False, **SMALL)
    norm = harness.engine.runner.weights.norm
    examples = held_out("add", 8, 5)
    right = _answers(harness, tokenizer, examples)
    with torch.inference_mode():
        kept = norm.clone()
        norm.fill_(float("nan"))
        torch.cuda.synchronize()
    spoilt = [
        harness.add(prompt_ids(tokenizer, e), **(GREEDY if i % 2 else {"seed": i})) for i, e in enumerate(examples)
    ]
    harness.run()
    assert {harness.finish[handle] for handle in spoilt} == {Finish.NONFINITE}
    with torch.inference_mode():
        norm.copy_(kept)
        torch.cuda.synchronize()
    assert _answers(harness, tokenizer, examples) == right


@pytest.mark.parametrize("pod", ["auto", "on"])
def test_attention_in_one_launch_gives_the_same_answers(tokenizer: Tokenizer, pod: str) -> None:
    if not is_hopper():
        pytest.skip("needs a Hopper GPU")
    examples = [e for skill in ("add", "sort", "reverse") for e in held_out(skill, 12, 5)]
    examples += held_out("recall", 12, 5, context_tokens=1500)
    harness = Harness("demo", page_size=64, num_pages=1000, pod=pod, **SMALL)
    harness.poison_pages()
    answers = _answers(harness, tokenizer, examples)
    assert sum(a == e.answer for a, e in zip(answers, examples, strict=True)) >= len(examples) - 1
    paths = harness.engine.stats().scheduler.attention
    assert paths.get("serial", 0) == 0
    assert sum(paths.get(path, 0) for path in ("pod", "pod_in_turn", "pod_tiles", "pod_together")) > 0
    if pod == "on":
        assert paths["pod_together"] > 0
