"""The offline interface, with the demo model: answers, order, progress, errors."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from weft import LLM, SamplingParams
from weft.engine.errors import ConfigError, ModelError, RequestError
from weft.tools.demo.corpus import held_out


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM("demo", page_size=16, num_pages=600)


def test_chat_answers_many_conversations_in_order(llm: LLM) -> None:
    examples = [e for skill in ("add", "sort", "reverse") for e in held_out(skill, 8, 11)]
    answers = llm.chat([e.messages for e in examples], progress=False)
    right = sum(a.text == e.answer for a, e in zip(answers, examples, strict=True))
    assert right >= len(examples) - 1
    assert all(a.finish_reason == "stop" for a in answers)


def test_chat_takes_one_conversation(llm: LLM) -> None:
    (answer,) = llm.chat([{"role": "user", "content": "What is 20 + 22?"}], progress=False)
    assert answer.text == "42"


def test_generate_takes_text_or_token_ids(llm: LLM) -> None:
    params = SamplingParams(max_tokens=6, temperature=0.0, logprobs=1)
    (from_text,) = llm.generate("1 2 3 4", params, progress=False)
    (from_ids,) = llm.generate(from_text.prompt_token_ids, params, progress=False)
    assert from_text.token_ids == from_ids.token_ids
    assert len(from_text.logprobs) == len(from_text.token_ids)


def test_a_script_of_nano_vllm_runs_unchanged(capfd: pytest.CaptureFixture[str]) -> None:
    """Its `example.py` and `bench.py`: options, positional arguments, outputs read as dictionaries."""
    llm = LLM("demo", enforce_eager=True, tensor_parallel_size=1, max_model_len=256, progress=False)
    params = SamplingParams(temperature=0.6, max_tokens=6)
    outputs = llm.generate(["1 2 3 4", "5 6 7"], params)
    for prompt, output in zip(("1 2 3 4", "5 6 7"), outputs, strict=True):
        assert f"{prompt!r} {output['text']!r}" == f"{prompt!r} {output.text!r}"
        assert output["token_ids"] == output.token_ids
        assert (output[0], output[:2]) == (output.text, (output.text, output.token_ids))  # still a tuple
    with pytest.raises(KeyError, match="texts"):
        outputs[0]["texts"]
    each = [SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=n) for n in (3, 5)]
    ids = llm.generate([[5, 6, 7], [8, 9]], each, use_tqdm=False)
    assert [len(output["token_ids"]) for output in ids] == [3, 5]
    assert capfd.readouterr().out == ""
    llm.close()


def test_a_refused_prompt_leaves_nothing_behind(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate([[5, 6], [10**6]], progress=False)
    (answer,) = llm.chat([{"role": "user", "content": "What is 1 + 1?"}], progress=False)
    assert answer.text == "2"
    assert llm.engine.scheduler.num_requests == 0


@pytest.mark.parametrize(
    "of",
    [
        tuple,
        np.array,
        torch.tensor,
        lambda ids: np.array(ids, np.uint64),
        lambda ids: list(np.array(ids)),
        lambda ids: list(torch.tensor(ids)),
        lambda ids: [np.array(ids)],
        lambda ids: (torch.tensor(ids),),
        lambda ids: np.array([ids]),
        lambda ids: torch.tensor([ids]),
    ],
)
def test_token_ids_may_be_in_an_array_or_a_tensor(llm: LLM, of: Callable[[list[int]], Any]) -> None:
    params, ids = SamplingParams(max_tokens=4, temperature=0.0), [7, 8, 9, 10]
    (expected,) = llm.generate(ids, params, progress=False)
    (answer,) = llm.generate(of(ids), params, progress=False)
    assert (answer.token_ids, answer.prompt_token_ids) == (expected.token_ids, ids)
    assert {type(token) for token in answer.prompt_token_ids} == {int}


@pytest.mark.parametrize("prompts", [5, None, b"text", {"prompt": "text"}, np.array(5), (p for p in ["text"])])
def test_invalid_prompts_are_a_one_line_error(llm: LLM, prompts: Any) -> None:
    with pytest.raises(RequestError, match=r"^prompts must be text, token ids or a list of them, not \w+$"):
        llm.generate(prompts, progress=False)


@pytest.mark.parametrize(
    "prompt",
    [
        [[2**40]], [["a"]], [["7"]], [[1.5, 2]], [[5, None]], [[]],
        np.array([1.0, 2.0]), torch.tensor([1.5]), np.array([2**40]), np.array([["7"]]), np.array([[[5]]]), [5, "text"],
    ],
)  # fmt: skip
def test_prompts_that_are_not_token_ids_are_refused(llm: LLM, prompt: Any) -> None:
    with pytest.raises(RequestError):
        llm.generate(prompt, progress=False)


def test_a_top_k_beyond_any_vocabulary_cuts_nothing(llm: LLM) -> None:
    params = [SamplingParams(max_tokens=6, seed=3, top_k=k, ignore_eos=True) for k in (0, 2**31, 2**70)]
    free, *cut = llm.generate(["1 2 3"] * 3, params, progress=False)
    assert [answer.token_ids for answer in cut] == [free.token_ids] * 2


def test_more_output_than_fits_the_context_is_refused(llm: LLM) -> None:
    prompt = [5] * (llm.engine.resolved.max_model_len - 4)
    for least in (5, 2**31 - 1, 2**40):
        with pytest.raises(RequestError, match="min_tokens"):
            llm.generate([prompt], SamplingParams(max_tokens=None, min_tokens=least), progress=False)
    assert llm.engine.scheduler.num_requests == 0
    (answer,) = llm.generate([prompt], SamplingParams(max_tokens=None, min_tokens=4, temperature=0), progress=False)
    assert len(answer.token_ids) == 4


def test_no_conversations_no_answers(llm: LLM) -> None:
    assert llm.chat([], progress=False) == []


def test_a_model_without_a_tokenizer_is_a_one_line_error(tiny_model: Callable[[str], Path]) -> None:
    with pytest.raises(ModelError, match="no usable tokenizer") as error:
        LLM(str(tiny_model("yi")), num_pages=8)
    assert "\n" not in str(error.value)


def test_only_the_callers_own_text_is_on_stdout(llm: LLM, capfd: pytest.CaptureFixture[str]) -> None:
    llm.generate(["1 2 3"], SamplingParams(max_tokens=2, temperature=0))
    llm.chat([{"role": "user", "content": "What is 1 + 1?"}])
    assert capfd.readouterr().out == ""


def test_errors_about_several_options_have_no_prefix() -> None:
    with pytest.raises(ConfigError, match=r"^give kv_cache_gib or num_pages, not both$"):
        LLM("demo", kv_cache_gib=1, num_pages=4)


def test_unknown_options_are_named() -> None:
    with pytest.raises(ConfigError, match="foo"):
        LLM("demo", foo=1)


@pytest.mark.slow
def test_a_script_may_end_while_the_engine_works() -> None:
    code = """
from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams
engine = Engine(EngineConfig())
engine.add(AddRequest(handle=1, prompt_token_ids=b"\\5\\0\\0\\0" * 400, params=SamplingParams(max_tokens=500)))
engine.step()
"""
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False, timeout=240).returncode == 0


def test_each_prompt_may_have_its_own_params(llm: LLM) -> None:
    with pytest.raises(RequestError):
        llm.generate(["a", "b"], [SamplingParams()], progress=False)
    outputs = llm.generate(
        ["1 2 3", "1 2 3"],
        [SamplingParams(max_tokens=n, temperature=0.0, ignore_eos=True) for n in (2, 5)],
        progress=False,
    )
    assert [len(o.token_ids) for o in outputs] == [2, 5]


def test_recall_from_a_long_context_survives_a_pool_too_small_for_all() -> None:
    examples = held_out("recall", 12, 3, context_tokens=700)
    # 12 conversations of 700 tokens, 150 pages of 16 tokens: three fit at once.
    small = LLM("demo", page_size=16, num_pages=150)
    answers = small.chat([e.messages for e in examples], progress=False)
    assert sum(a.text == e.answer for a, e in zip(answers, examples, strict=True)) >= 11
