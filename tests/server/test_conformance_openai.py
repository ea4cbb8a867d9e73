"""The official client against the real daemon and the demo model, in every shape, including effects that only an engine
has."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from typing import Any, Literal

import openai
import pydantic
import pytest
from live import Daemon, running

pytestmark = pytest.mark.slow

QUESTION: Any = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0}
TOOLS: Any = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds two numbers.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "integer", "maximum": 99}, "b": {"enum": [1, 2]}},
                "required": ["a", "b"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}},
]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def api(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=240) as api:
        yield api


def test_answers_are_the_same_in_every_shape(daemon: Daemon, api: openai.OpenAI) -> None:
    whole = api.chat.completions.create(messages=QUESTION, **GREEDY)
    text = whole.choices[0].message.content
    assert text is not None
    assert "42" in text
    stream = api.chat.completions.create(
        messages=QUESTION, stream=True, stream_options={"include_usage": True}, **GREEDY
    )
    chunks = list(stream)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == text
    assert chunks[-1].usage is not None
    assert whole.usage is not None
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens

    async def asynchronous() -> str | None:
        async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none") as other:
            many = await asyncio.gather(*(other.chat.completions.create(messages=QUESTION, **GREEDY) for _ in range(8)))
        assert len({one.choices[0].message.content for one in many}) == 1
        return many[0].choices[0].message.content

    assert asyncio.run(asynchronous()) == text


def test_completions_of_texts_and_ids_agree(daemon: Daemon, api: openai.OpenAI) -> None:
    import httpx

    ids = httpx.post(daemon.url + "/tokenize", json={"prompt": "The capital of"}, timeout=240).json()["tokens"]
    prompts: list[Any] = ["The capital of", ["The capital of"], ids, [ids]]
    texts = {
        api.completions.create(prompt=prompt, max_tokens=8, logprobs=2, **GREEDY).choices[0].text for prompt in prompts
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"model": "gpt-9"}, openai.NotFoundError),
        ({"temperature": 3}, openai.BadRequestError),
        ({"max_tokens": 100_000}, openai.BadRequestError),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "no"}}}},
         openai.BadRequestError),
        ({"extra_body": {"guided_regex": "(a{900}){900}{900}"}}, openai.BadRequestError),
        ({"messages": []}, openai.BadRequestError),
    ],
    ids=["model", "range", "context", "schema", "regex", "messages"],
)  # fmt: skip
@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_typed(
    api: openai.OpenAI, arguments: dict[str, Any], error: type[openai.APIStatusError], stream: bool
) -> None:
    with pytest.raises(error) as caught:
        api.chat.completions.create(**{**GREEDY, "messages": QUESTION, "stream": stream, **arguments})
    assert isinstance(caught.value.body, dict)
    assert set(caught.value.body) == {"message", "type", "param", "code"}


class Person(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(extra="forbid")
    kind: Literal["cat", "dog"]
    age: int = pydantic.Field(ge=0, le=20)
    tags: list[Literal["a", "b"]] = pydantic.Field(max_length=2)


def test_structured_outputs_parse_into_the_model(api: openai.OpenAI) -> None:
    for seed in range(3):
        answer = api.chat.completions.parse(
            model="demo", messages=QUESTION, response_format=Person, seed=seed, temperature=1.0, max_tokens=300
        )
        assert isinstance(answer.choices[0].message.parsed, Person)
        assert answer.choices[0].finish_reason == "stop"


@pytest.mark.parametrize(
    ("requested", "pattern"),
    [
        ({"regex": "[0-9]{4}-[0-9]{2}"}, "[0-9]{4}-[0-9]{2}"),
        ({"choice": ["red", "green", "büße"]}, "red|green|büße"),
        ({"grammar": 'root ::= "(" root ")" | "42"'}, r"\(*42\)*"),
        ({"json": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 2}}, r"\[[\s\S]*\]"),
    ],
    ids=["regex", "choice", "grammar", "json"],
)
def test_every_constraint_holds_in_every_shape(api: openai.OpenAI, requested: dict[str, Any], pattern: str) -> None:
    body = {"structured_outputs": requested}
    common: dict[str, Any] = {"model": "demo", "max_tokens": 200, "temperature": 1.0, "extra_body": body}
    chats = api.chat.completions.create(messages=QUESTION, n=3, **common)
    texts = [choice.message.content for choice in chats.choices if choice.finish_reason == "stop"]
    texts += [choice.text for choice in api.completions.create(prompt="Say", **common).choices]
    stream = api.completions.create(prompt="Say", stream=True, **common)
    texts.append("".join(chunk.choices[0].text for chunk in stream))
    stopped = [text for text in texts if text is not None]
    assert stopped
    assert [text for text in stopped if not re.fullmatch(pattern, text)] == []


def test_json_object_is_an_object(api: openai.OpenAI) -> None:
    answer = api.chat.completions.create(
        messages=QUESTION, response_format={"type": "json_object"}, model="demo", max_tokens=400, seed=1,
        logit_bias={"0": -100},
    )  # fmt: skip
    content = answer.choices[0].message.content
    assert content is not None
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("choice", ["required", "named"])
def test_tool_calls_are_enforced(api: openai.OpenAI, stream: bool, choice: str) -> None:
    named: Any = {"type": "function", "function": {"name": "add"}}
    arguments: dict[str, Any] = {
        "model": "demo",
        "messages": QUESTION,
        "tools": TOOLS,
        "tool_choice": named if choice == "named" else "required",
        "parallel_tool_calls": False,
        "temperature": 1.0,
        "seed": 3,
        "max_tokens": 200,
    }
    if stream:
        with api.chat.completions.stream(**arguments) as events:
            answer: Any = events.get_final_completion()
    else:
        answer = api.chat.completions.create(**arguments)
    (call,) = answer.choices[0].message.tool_calls
    assert call.id
    assert call.function.name in ({"add"} if choice == "named" else {"add", "now"})
    parsed = json.loads(call.function.arguments)
    assert call.function.name == "now" or (parsed["a"] <= 99 and parsed["b"] in (1, 2))
    assert answer.choices[0].finish_reason == ("stop" if choice == "named" else "tool_calls")


def test_samples_of_one_prompt_compute_it_once(daemon: Daemon, api: openai.OpenAI) -> None:
    import httpx

    def hits() -> float:
        (line,) = re.findall(
            r"^vllm:prefix_cache_hits_total\S* (\S+)", httpx.get(daemon.url + "/metrics", timeout=240).text, re.M
        )
        return float(line)

    page = 64
    prompt = [5 + i % 50 for i in range(5 * page + 7)]
    before = hits()
    answer = api.completions.create(prompt=prompt, n=4, max_tokens=2, model="demo", temperature=1.0)
    assert len(answer.choices) == 4
    deadline = 50
    while hits() - before < 3 * 5 * page and deadline:  # the gauges follow the answer
        deadline -= 1
        httpx.get(daemon.url + "/health", timeout=240)
    assert hits() - before == 3 * 5 * page


def test_embeddings_are_unit_vectors_in_either_encoding(api: openai.OpenAI) -> None:
    texts = ["The capital of France is Paris.", "12 + 30", "x"]
    coded = api.embeddings.create(model="demo", input=texts)  # base64, which the client decodes
    plain = api.embeddings.create(model="demo", input=texts, encoding_format="float")
    assert [entry.index for entry in coded.data] == [0, 1, 2]
    for a, b in zip(coded.data, plain.data, strict=True):
        assert a.embedding == pytest.approx(b.embedding, abs=1e-6)
        assert sum(x * x for x in a.embedding) == pytest.approx(1.0, abs=1e-5)
    assert coded.usage.prompt_tokens == coded.usage.total_tokens > 3
    short = api.embeddings.create(model="demo", input=texts[0], dimensions=16)
    assert len(short.data[0].embedding) == 16
    with pytest.raises(openai.BadRequestError, match="dimensions"):
        api.embeddings.create(model="demo", input="x", dimensions=10_000)


def test_embeddings_and_answers_share_iterations(daemon: Daemon, api: openai.OpenAI) -> None:
    alone = api.embeddings.create(model="demo", input=["one", "two"]).data

    async def together() -> None:
        async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none") as other:
            chat = asyncio.create_task(other.chat.completions.create(messages=QUESTION, **GREEDY))
            made = await asyncio.gather(
                *(other.embeddings.create(model="demo", input=["one", "two"]) for _ in range(6))
            )
            assert "42" in ((await chat).choices[0].message.content or "")
        for one in made:
            for a, b in zip(one.data, alone, strict=True):
                assert a.embedding == pytest.approx(b.embedding, abs=1e-4)

    asyncio.run(together())
