"""The demo model with functions, as an agent framework uses it: the official client, `tool_choice` auto."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from live import running

pytestmark = pytest.mark.slow

NUMBERS: Any = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
PLACE: Any = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
ADD: Any = {"type": "function", "function": {"name": "add", "description": "Add two numbers.", "parameters": NUMBERS}}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "Get the weather for a city.", "parameters": PLACE},
}
COMMON: dict[str, Any] = {"model": "demo", "temperature": 0, "max_tokens": 100, "tools": [ADD, WEATHER]}


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.fixture(scope="module")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    with (
        running(tmp_path_factory.mktemp("daemon")) as daemon,
        openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=240) as api,
    ):
        yield api


@pytest.mark.parametrize(
    ("question", "name", "arguments", "result"),
    [
        ("What is 12 plus 30?", "add", {"a": 12, "b": 30}, "42"),
        ("What's the weather in Paris?", "get_weather", {"city": "Paris"}, "It is sunny in Paris."),
    ],
)
def test_a_function_is_called_and_its_result_passed_on(
    api: openai.OpenAI, question: str, name: str, arguments: dict[str, Any], result: str
) -> None:
    messages: Any = [user(question)]
    choice = api.chat.completions.create(messages=messages, **COMMON).choices[0]
    assert choice.finish_reason == "tool_calls"
    assert not choice.message.content
    (call,) = choice.message.tool_calls
    assert (call.function.name, json.loads(call.function.arguments)) == (name, arguments)
    messages += [
        choice.message.model_dump(exclude_none=True),
        {"role": "tool", "tool_call_id": call.id, "content": result},
    ]
    answer = api.chat.completions.create(messages=messages, **COMMON).choices[0]
    assert (answer.message.content, answer.finish_reason) == (result, "stop")


def test_a_call_is_streamed(api: openai.OpenAI) -> None:
    stream = api.chat.completions.create(messages=[user("What is 7 plus 5?")], stream=True, **COMMON)
    deltas = [call for chunk in stream for call in chunk.choices[0].delta.tool_calls or ()]
    assert deltas[0].function.name == "add"
    assert json.loads("".join(delta.function.arguments or "" for delta in deltas)) == {"a": 7, "b": 5}


@pytest.mark.parametrize(
    ("question", "answer"),
    [("Hello", "Hello! How can I help you?"), ("Sort these words: pear, apple, fig", "apple, fig, pear")],
)
def test_questions_that_need_no_function_are_answered(api: openai.OpenAI, question: str, answer: str) -> None:
    choice = api.chat.completions.create(messages=[user(question)], **COMMON).choices[0]
    assert choice.message.tool_calls is None
    assert choice.message.content == answer


def test_without_functions_the_model_adds_itself(api: openai.OpenAI) -> None:
    common = {key: value for key, value in COMMON.items() if key != "tools"}
    choice = api.chat.completions.create(messages=[user("What is 12 plus 30?")], **common).choices[0]
    assert (choice.message.content, choice.message.tool_calls) == ("42", None)
