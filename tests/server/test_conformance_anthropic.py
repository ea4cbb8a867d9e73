"""Anthropic's own client, and requests in the shape of Claude Code's, against the real daemon and the demo model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import anthropic
import claude_code
import httpx
import pydantic
import pytest
from live import Daemon, running

pytestmark = pytest.mark.slow

KEY = "secret"
QUESTION: Any = [{"role": "user", "content": "What is 12 + 30?"}]
GREEDY: dict[str, Any] = {"model": "demo", "extra_body": {"temperature": 0}, "max_tokens": 100}
ADD: Any = {
    "name": "add",
    "description": "Add two numbers.",
    "input_schema": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
WEATHER: Any = {
    "name": "get_weather",
    "description": "Get the weather for a city.",
    "input_schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
}
TOOLS: dict[str, Any] = {"tools": [ADD, WEATHER]}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon"), "--api-key", KEY) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def api(daemon: Daemon) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=daemon.url, api_key=KEY, max_retries=0, timeout=60) as api:
        yield api


def test_answers_are_the_same_in_every_shape(daemon: Daemon, api: anthropic.Anthropic) -> None:
    whole = api.messages.create(messages=QUESTION, **GREEDY)
    (block,) = whole.content
    assert block.type == "text"
    assert "42" in block.text
    assert (whole.stop_reason, whole.role, whole.model) == ("end_turn", "assistant", "demo")
    assert whole._request_id
    with api.messages.stream(messages=QUESTION, **GREEDY) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert ([each.text for each in final.content], final.stop_reason) == ([block.text], "end_turn")  # type: ignore[union-attr]
    assert final.usage.output_tokens == whole.usage.output_tokens
    raw = list(api.messages.create(messages=QUESTION, stream=True, **GREEDY))
    assert [event.type for event in raw[:2]] == ["message_start", "content_block_start"]
    assert [event.type for event in raw[-3:]] == ["content_block_stop", "message_delta", "message_stop"]

    async def concurrent() -> list[Any]:
        async with anthropic.AsyncAnthropic(base_url=daemon.url, api_key=KEY, max_retries=0) as client:

            async def streamed() -> Any:
                async with client.messages.stream(messages=QUESTION, **GREEDY) as stream:
                    return await stream.get_final_message()

            return await asyncio.gather(client.messages.create(messages=QUESTION, **GREEDY), streamed(), streamed())

    # Streamed content has its own class.
    found = [[(each.type, each.text) for each in message.content] for message in asyncio.run(concurrent())]
    assert found == [[(block.type, block.text)]] * 3


def test_a_tool_is_called_and_its_result_passed_on(api: anthropic.Anthropic) -> None:
    messages: Any = [{"role": "user", "content": "What's the weather in Paris?"}]
    requested = api.messages.create(messages=messages, **GREEDY, **TOOLS)
    (call,) = requested.content
    assert call.type == "tool_use"
    assert (requested.stop_reason, call.name, call.input) == ("tool_use", "get_weather", {"city": "Paris"})
    with api.messages.stream(messages=messages, **GREEDY, **TOOLS) as stream:
        inputs = [event.partial_json for event in stream if event.type == "input_json"]
        (streamed,) = stream.get_final_message().content
    assert streamed.type == "tool_use"
    assert streamed.input == call.input
    assert len(inputs) > 1
    result = {"type": "tool_result", "tool_use_id": call.id, "content": "It is sunny in Paris."}
    messages += [{"role": "assistant", "content": requested.content}, {"role": "user", "content": [result]}]
    answer = api.messages.create(messages=messages, **GREEDY, **TOOLS)
    assert [block.to_dict() for block in answer.content] == [{"type": "text", "text": "It is sunny in Paris."}]
    assert answer.usage.cache_read_input_tokens or answer.usage.input_tokens


def test_a_required_tool_is_called(api: anthropic.Anthropic) -> None:
    for choice in ({"type": "any"}, {"type": "tool", "name": "add"}):
        with api.messages.stream(messages=QUESTION, tool_choice=choice, **GREEDY, **TOOLS) as stream:  # type: ignore[arg-type]
            message = stream.get_final_message()
        assert message.stop_reason == "tool_use"
        assert message.content[-1].type == "tool_use"
        assert message.content[-1].name == "add"


def test_an_output_follows_its_schema(api: anthropic.Anthropic) -> None:
    class Sum(pydantic.BaseModel):
        result: bool

    parsed = api.messages.parse(messages=QUESTION, output_format=Sum, **GREEDY)
    assert isinstance(parsed.parsed_output, Sum)


def test_stop_sequences_and_limits(api: anthropic.Anthropic) -> None:
    stopped = api.messages.create(messages=QUESTION, stop_sequences=["42"], **GREEDY)
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "42")
    assert api.messages.create(messages=QUESTION, **{**GREEDY, "max_tokens": 1}).stop_reason == "max_tokens"


def test_tokens_are_counted(api: anthropic.Anthropic) -> None:
    counted = api.messages.count_tokens(messages=QUESTION, model="demo", system="Be kind.", **TOOLS)
    usage = api.messages.create(messages=QUESTION, system="Be kind.", **GREEDY, **TOOLS).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0)


def test_models(api: anthropic.Anthropic) -> None:
    (model,) = api.models.list()
    assert (model.id, model.type) == ("demo", "model")
    assert api.models.retrieve("demo").created_at == model.created_at


def test_errors_are_those_that_the_client_expects(daemon: Daemon, api: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.BadRequestError) as bad:
        api.messages.create(messages=QUESTION, **{**GREEDY, "extra_body": {"temperature": 9}})
    assert bad.value.type == "invalid_request_error"
    assert bad.value.request_id
    with pytest.raises(anthropic.NotFoundError):
        api.messages.create(messages=QUESTION, **{**GREEDY, "model": "claude"})
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        api.messages.create(messages=[{"role": "user", "content": "word " * 5000}], **GREEDY)
    wrong = anthropic.Anthropic(base_url=daemon.url, api_key="wrong", max_retries=0)
    with pytest.raises(anthropic.AuthenticationError):
        wrong.models.list()
    bearer = anthropic.Anthropic(base_url=f"{daemon.url}/v1", api_key=None, auth_token=KEY, max_retries=0)
    assert bearer.messages.create(messages=QUESTION, **GREEDY).stop_reason == "end_turn"


def test_requests_in_the_shape_of_claude_codes(daemon: Daemon) -> None:
    headers = {**claude_code.HEADERS, "x-api-key": KEY}
    with httpx.Client(base_url=daemon.url, headers=headers, params=claude_code.QUERY, timeout=60) as http:
        thinking = {"thinking": {"type": "enabled", "budget_tokens": 31999}, "output_config": {"effort": "high"}}
        for i in range(1, len(claude_code.TRANSCRIPT) + 1, 2):
            messages = claude_code.TRANSCRIPT[:i]
            body = claude_code.request(messages, f"{i:05x}", **(thinking if i > 1 else {}))
            counted = {key: body[key] for key in ("model", "messages", "system", "tools")}
            assert http.post("/v1/messages/count_tokens", json=counted).json()["input_tokens"] > 100
            answer = http.post("/v1/messages", json=body)
            assert answer.status_code == 200, answer.text
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["request-id"]
            assert answer.text.startswith("event: message_start\n")
            assert answer.text.endswith('event: message_stop\ndata: {"type":"message_stop"}\n\n')
        title = {"model": "demo", "max_tokens": 1, "messages": [{"role": "user", "content": "quota"}]}
        assert http.post("/v1/messages", json=title).status_code == 200
