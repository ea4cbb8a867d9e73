"""A published model over HTTP: SmolLM2, as a GGUF file and as a safetensors checkpoint, against `transformers`."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from live import Daemon, running
from real_models import GEMMA3, SMOLLM2, Gemma3, SmolLM2, model_file

import weft

pytestmark = pytest.mark.slow

PASSAGE = (Path(weft.__file__).parent / "LICENSE").read_text()
OPTIONS = ("--dtype", "float32", "--max-model-len", "320", "--page-size", "16", "--num-pages", "23",
           "--max-num-batched-tokens", "128", "--tool-call-parser", "hermes")  # fmt: skip
WIDENED = ("--quantization", "none")
"""Compute with the file's numbers in float32, as the oracle does."""
CAPITAL = {"role": "user", "content": "What is the capital of France?"}
PARIS = "The capital of France is Paris."
AWKWARD = (
    "12345 + 67890 = 80235", "naïve café 😀 — 東京", "def f(x):\n\treturn x  # twice\n\n", "  spaces   and\ttabs ",
    "I'll, you've, it's; DON'T", "<|im_start|>user\nhi<|im_end|>", "١٢٣ ½ ²", "",
)  # fmt: skip
WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


class Served:
    """A daemon with a model, and the model's oracle."""

    def __init__(self, daemon: Daemon, model: SmolLM2) -> None:
        self.daemon, self.model = daemon, model

    def post(self, path: str, **body: Any) -> Any:
        answer = httpx.post(self.daemon.url + path, json=body, timeout=240)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def stream(self, path: str, **body: Any) -> list[Any]:
        with httpx.stream("POST", self.daemon.url + path, json={**body, "stream": True}, timeout=240) as answer:
            assert answer.status_code == 200
            lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def chat(self, *messages: dict[str, Any], **body: Any) -> Any:
        return self.post("/v1/chat/completions", messages=messages, temperature=0, return_token_ids=True, **body)

    def complete(self, prompt: Any, **body: Any) -> Any:
        return self.post("/v1/completions", prompt=prompt, temperature=0, return_token_ids=True, **body)

    def metric(self, name: str) -> float:
        text = httpx.get(self.daemon.url + "/metrics", timeout=240).text
        return sum(float(value) for value in re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", text, re.MULTILINE))


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> SmolLM2:
    return SmolLM2(model_file(SMOLLM2, tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module", params=["gguf", "safetensors"])
def served(
    request: pytest.FixtureRequest, smollm2: SmolLM2, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("daemon")
    path = smollm2.file if request.param == "gguf" else smollm2.save(folder / "smollm2")
    cache = {"XDG_CACHE_HOME": str(folder)}
    with running(folder, str(path), "--served-model-name", "smollm2", *OPTIONS, *WIDENED, env=cache) as daemon:
        yield Served(daemon, smollm2)
    shutil.rmtree(folder / "smollm2", ignore_errors=True)


def _together(calls: list[Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result() for future in [pool.submit(call) for call in calls]]


def test_the_log_names_the_end_tokens(served: Served) -> None:
    assert re.search(r"end tokens: .*\b2 <\|im_end\|> \(.*chat template\)", served.daemon.stderr())


def test_a_chat_answer_is_the_models_and_stops(served: Served) -> None:
    answer = served.chat(CAPITAL, max_tokens=24)
    (choice,) = answer["choices"]
    assert choice["message"]["content"] == PARIS
    assert choice["finish_reason"] == "stop"
    prompt = served.model.chat_ids(CAPITAL)
    assert answer["prompt_token_ids"] == prompt
    served.model.assert_greedy(prompt, choice["token_ids"])
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(prompt), len(choice["token_ids"]))


def test_a_conversation_goes_on_through_the_template(served: Served) -> None:
    turns = [{"role": "system", "content": "Answer in one word."}, CAPITAL, {"role": "assistant", "content": PARIS}]
    turns.append({"role": "user", "content": "And of Italy?"})
    answer = served.chat(*turns, max_tokens=6)
    assert answer["prompt_token_ids"] == served.model.chat_ids(*turns)
    served.model.assert_greedy(answer["prompt_token_ids"], answer["choices"][0]["token_ids"])


def test_a_streamed_chat_is_the_same_answer(served: Served) -> None:
    chunks = served.stream(
        "/v1/chat/completions", messages=[CAPITAL], temperature=0, stream_options={"include_usage": True}
    )
    deltas = [choice for chunk in chunks for choice in chunk["choices"]]
    assert "".join(choice["delta"].get("content") or "" for choice in deltas) == PARIS
    assert [choice["finish_reason"] for choice in deltas if choice["finish_reason"]] == ["stop"]
    assert chunks[-1]["usage"]["completion_tokens"] == 8


def test_other_dialects_give_the_same_answer(served: Served) -> None:
    message, response = _together(
        [
            lambda: served.post("/v1/messages", model="smollm2", messages=[CAPITAL], max_tokens=24, temperature=0),
            lambda: served.post("/v1/responses", input=CAPITAL["content"], temperature=0, store=False),
        ]
    )
    assert message["content"] == [{"type": "text", "text": PARIS}]
    assert message["stop_reason"] == "end_turn"
    assert [part["text"] for item in response["output"] for part in item["content"]] == [PARIS]


@pytest.mark.parametrize("text", AWKWARD)
def test_text_has_the_ids_of_the_models_own_tokenizer(served: Served, text: str) -> None:
    ids = served.model.ids(text)
    made = served.post("/tokenize", prompt=text, add_special_tokens=False)
    assert made["tokens"] == ids
    assert served.post("/detokenize", tokens=ids)["prompt"] == re.sub(r"<\|.*?\|>", "", text)


def test_completions_together_are_those_alone(served: Served) -> None:
    prompts = ["The three primary colors are", "def add(a, b):\n    return", "Water boils at", "Once upon a time"]
    together = served.complete(prompts, max_tokens=6)["choices"]
    for prompt, choice in zip(prompts, together, strict=True):
        served.model.assert_greedy(served.model.ids(prompt), choice["token_ids"])
    (alone,) = served.complete(prompts[0], max_tokens=6)["choices"]
    assert alone["text"] == together[0]["text"] == served.model.tokenizer.decode(together[0]["token_ids"])


def test_a_streamed_completion_is_the_same_text(served: Served) -> None:
    prompt = "The three primary colors are"
    chunks = served.stream("/v1/completions", prompt=prompt, temperature=0, max_tokens=6)
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    assert text == served.complete(prompt, max_tokens=6)["choices"][0]["text"]


def test_log_probabilities_are_those_of_the_oracle(served: Served) -> None:
    answer = served.chat(CAPITAL, max_tokens=24, logprobs=True, top_logprobs=3)
    (choice,) = answer["choices"]
    prompt, ids = answer["prompt_token_ids"], choice["token_ids"]
    expected = served.model.logits(prompt + ids)[len(prompt) - 1 : -1].log_softmax(-1)
    for row, token, entry in zip(expected, ids, choice["logprobs"]["content"], strict=False):
        assert entry["logprob"] == pytest.approx(float(row[token]), abs=1e-3)
        assert [top["logprob"] for top in entry["top_logprobs"]] == pytest.approx(row.topk(3)[0].tolist(), abs=1e-3)


def test_echoed_prompts_are_scored_as_the_oracle_does(served: Served) -> None:
    prompt = served.model.ids("The quick brown fox jumps over the lazy dog.")
    (choice,) = served.complete(prompt, max_tokens=0, echo=True, logprobs=0)["choices"]
    rows = served.model.logits(prompt)[:-1].log_softmax(-1)
    expected = rows[torch.arange(len(prompt) - 1), torch.tensor(prompt[1:])].tolist()
    assert choice["logprobs"]["token_logprobs"][1:] == pytest.approx(expected, abs=1e-3)


def test_stop_strings_end_the_text_before_or_after_them(served: Served) -> None:
    without, with_it = _together(
        [lambda extra=extra: served.chat(CAPITAL, stop=["France"], **extra) for extra in ({}, _INCLUDED)]
    )
    assert without["choices"][0]["message"]["content"] == "The capital of "
    assert with_it["choices"][0]["message"]["content"] == "The capital of France"
    assert without["choices"][0]["finish_reason"] == "stop"


_INCLUDED = {"include_stop_str_in_output": True}


def test_limits_and_stop_tokens_end_an_answer(served: Served) -> None:
    (paris,) = served.model.ids(" Paris")
    short, stopped, ignoring = _together(
        [
            lambda: served.chat(CAPITAL, max_tokens=1),
            lambda: served.chat(CAPITAL, stop_token_ids=[paris]),
            lambda: served.chat(CAPITAL, max_tokens=12, ignore_eos=True),
        ]
    )
    assert [short["choices"][0][key] for key in ("finish_reason", "token_ids")] == ["length", served.model.ids("The")]
    assert stopped["choices"][0]["stop_reason"] == paris
    assert ignoring["usage"]["completion_tokens"] == 12


def test_a_schema_is_kept(served: Served) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}, "in_europe": {"type": "boolean"}},
        "required": ["city", "in_europe"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "place", "schema": schema, "strict": True}}
    answer = served.chat(CAPITAL, response_format=form, max_tokens=40)
    assert answer["choices"][0]["finish_reason"] == "stop"
    jsonschema.validate(json.loads(answer["choices"][0]["message"]["content"]), schema)


def test_choices_and_regular_expressions_are_kept(served: Served) -> None:
    choice, number = _together(
        [
            lambda: served.chat(CAPITAL, structured_outputs={"choice": ["Lyon", "Paris"]}),
            lambda: served.chat(CAPITAL, structured_outputs={"regex": r"[0-9]{3}"}),
        ]
    )
    assert choice["choices"][0]["message"]["content"] in ("Lyon", "Paris")
    assert re.fullmatch(r"[0-9]{3}", number["choices"][0]["message"]["content"])


def test_a_tool_is_called_and_its_result_goes_through_the_template(served: Served) -> None:
    question = {"role": "user", "content": "What is the weather in Rome?"}
    once = {"tool_choice": "required", "parallel_tool_calls": False}
    answer = served.chat(question, tools=[WEATHER], **once, max_tokens=40)
    message = answer["choices"][0]["message"]
    assert answer["choices"][0]["finish_reason"] == "tool_calls"
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "get_weather"
    jsonschema.validate(json.loads(call["function"]["arguments"]), WEATHER["function"]["parameters"])
    result = {"role": "tool", "tool_call_id": call["id"], "content": "24 degrees, sunny"}
    after = served.chat(question, message, result, max_tokens=4)
    prompt = served.model.tokenizer.decode(after["prompt_token_ids"], skip_special_tokens=False)
    assert prompt.index("<tool_call>") < prompt.index("get_weather") < prompt.index(result["content"])
    assert served.model.ids(prompt) == after["prompt_token_ids"]
    served.model.assert_greedy(after["prompt_token_ids"], after["choices"][0]["token_ids"])


def test_samples_of_a_seed_are_the_same_again(served: Served) -> None:
    body = {"messages": [CAPITAL], "seed": 7, "temperature": 1.5, "n": 2, "max_tokens": 5}
    first, again = _together([lambda: served.post("/v1/chat/completions", **body)] * 2)
    texts = [[choice["message"]["content"] for choice in answer["choices"]] for answer in (first, again)]
    assert texts[0] == texts[1]
    assert texts[0][0] != texts[0][1]


def test_a_bias_changes_the_answer(served: Served) -> None:
    (paris,) = served.model.ids(" Paris")
    answer = served.chat(CAPITAL, logit_bias={str(paris): -100}, max_tokens=8)
    assert "Paris" not in answer["choices"][0]["message"]["content"]


def test_a_long_prompt_in_chunks_and_then_from_cached_pages(served: Served) -> None:
    prompt = served.model.ids(PASSAGE)[:200]
    first = served.complete(prompt, max_tokens=4)
    served.model.assert_greedy(prompt, first["choices"][0]["token_ids"])
    again = served.complete(prompt, max_tokens=4)
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    assert again["choices"][0]["token_ids"] == first["choices"][0]["token_ids"]
    longer = prompt + served.model.ids(" In conclusion,")
    after = served.complete(longer, max_tokens=4)
    assert after["usage"]["prompt_tokens_details"]["cached_tokens"] >= 192
    served.model.assert_greedy(longer, after["choices"][0]["token_ids"])


def test_requests_that_lose_their_pages_give_the_same_answers(served: Served) -> None:
    """Three requests fill 18 of 22 pages, and each grows by two."""
    ids = served.model.ids(PASSAGE)[400:]
    prompts = [ids[start : start + 96] for start in range(0, 288, 96)]
    served.post("/v1/completions", prompt="a", n=32, max_tokens=1)  # it then expects short answers and admits all
    before = served.metric("weft_preemptions_total")
    answers = _together([lambda prompt=prompt: served.complete(prompt, max_tokens=24) for prompt in prompts])
    assert served.metric("weft_preemptions_total") > before
    for prompt, answer in zip(prompts, answers, strict=True):
        served.model.assert_greedy(prompt, answer["choices"][0]["token_ids"])


def test_questions_at_once_all_stop_by_themselves(served: Served) -> None:
    questions = ["What is 2+2?", "What is the capital of Italy?", "What is the capital of Japan?"]
    turns = [{"role": "user", "content": question} for question in questions]
    answers = _together([lambda turn=turn: served.chat(turn, max_tokens=24) for turn in turns])
    for turn, answer in zip(turns, answers, strict=True):
        (choice,) = answer["choices"]
        assert choice["finish_reason"] == "stop"
        assert "<|im_end|>" not in choice["message"]["content"]
        served.model.assert_greedy(served.model.chat_ids(turn), choice["token_ids"])


@pytest.mark.nightly
def test_gemma_answers_as_the_oracle_does(tmp_path: Path) -> None:
    """Its window of 512 tokens counts from the second prompt on."""
    model = Gemma3(model_file(GEMMA3, tmp_path))
    texts = ["The capital of France is", "The sky appears blue because", PASSAGE[:4000]]
    options = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-gib", "0.2", "--served-model-name", "gemma")
    with running(tmp_path, str(model.file), *options, *WIDENED, env={"XDG_CACHE_HOME": str(tmp_path)}) as daemon:
        assert re.search(r"end tokens: 1 <eos> \(.*\), 106 <end_of_turn>", daemon.stderr())
        body = {"prompt": texts, "max_tokens": 16, "temperature": 0, "return_token_ids": True}
        answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=240).json()
        for choice in answer["choices"]:
            assert choice["prompt_token_ids"][0] == 2, "a text begins with <bos>"
            model.assert_greedy(choice["prompt_token_ids"], choice["token_ids"])
        refused = httpx.post(daemon.url + "/v1/chat/completions", json={"messages": [CAPITAL]}, timeout=240)
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "no_chat_template")


def test_weights_in_four_bits_answer_nearly_as_the_oracle(smollm2: SmolLM2, tmp_path: Path) -> None:
    """Activations in int8 move log-probabilities by 0.06 on average, bf16 by 0.03 (docs/quantization.md)."""
    cache = {"XDG_CACHE_HOME": str(tmp_path)}
    with running(tmp_path, str(smollm2.file), "--served-model-name", "smollm2", *OPTIONS, env=cache) as daemon:
        assert "weights stay in 4 and 8 bits (Q4_1" in daemon.stderr()
        served = Served(daemon, smollm2)
        answer = served.chat(CAPITAL, max_tokens=12)
        prompt, made = answer["prompt_token_ids"], answer["choices"][0]["token_ids"]
        rows = smollm2.logits(prompt + made)[len(prompt) - 1 : -1].log_softmax(-1)
        behind = rows.amax(-1) - rows[torch.arange(len(made)), torch.tensor(made)]
        assert behind.max() < 0.5, "a token that is far from the likeliest"
        ids = smollm2.ids(PASSAGE)[:256]
        _check_scores(served.complete(ids, max_tokens=0, echo=True, logprobs=1), smollm2.logits(ids), ids)


@pytest.mark.nightly
def test_gemma_in_four_bits_scores_nearly_as_the_oracle(tmp_path: Path) -> None:
    """Its file has four types of matrices; q, k and v are joined."""
    model = Gemma3(model_file(GEMMA3, tmp_path))
    options = ("--dtype", "float32", "--max-model-len", "1024", "--kv-cache-gib", "0.2", "--served-model-name", "gemma")
    with running(tmp_path, str(model.file), *options, env={"XDG_CACHE_HOME": str(tmp_path)}) as daemon:
        assert "weights stay in 4 and 8 bits (Q8_0" in daemon.stderr()
        body = {"prompt": PASSAGE[:2000], "max_tokens": 0, "echo": True, "logprobs": 1, "return_token_ids": True}
        answer = httpx.post(daemon.url + "/v1/completions", json=body, timeout=240).json()
    ids = answer["choices"][0]["prompt_token_ids"]
    _check_scores(answer, model.logits(ids), ids)


def _check_scores(answer: Any, logits: torch.Tensor, ids: list[int]) -> None:
    """Compare a scored prompt with the oracle: the mean difference, and the share of equal best tokens by their
    log-probability."""
    rows = logits[:-1].log_softmax(-1)
    expected = rows[torch.arange(len(ids) - 1), torch.tensor(ids[1:])]
    scores = answer["choices"][0]["logprobs"]
    difference = (torch.tensor(scores["token_logprobs"][1:]) - expected).abs()
    assert 0 < difference.mean() < 0.12
    best = torch.tensor([max(tops.values()) for tops in scores["top_logprobs"][1:]])
    assert (best - rows.amax(-1)).abs().mean() < 0.12
