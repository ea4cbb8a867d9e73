"""The Responses API of the real daemon and the demo model: the official client, and a transcript as Codex sends it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pydantic
import pytest
from live import Daemon, running

pytestmark = pytest.mark.slow

QUESTION = "What is 12 + 30?"
ADD: Any = {
    "type": "function",
    "name": "add",
    "description": "Add two numbers.",
    "parameters": {
        "type": "object",
        "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
        "required": ["a", "b"],
    },
}
GREEDY: dict[str, Any] = {"model": "demo", "temperature": 0, "max_output_tokens": 100}
CODEX = Path(__file__).parent / "fixtures" / "codex.json"


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """Two processes answer, and each must find the other's stored responses."""
    with running(tmp_path_factory.mktemp("daemon"), "--api-workers", "2") as daemon:
        yield daemon


@pytest.fixture(scope="module")
def api(daemon: Daemon) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60) as api:
        yield api


def test_answers_are_the_same_in_every_shape(daemon: Daemon, api: openai.OpenAI) -> None:
    whole = api.responses.create(input=QUESTION, **GREEDY)
    assert "42" in whole.output_text
    assert whole.usage is not None
    chat = api.chat.completions.create(messages=[{"role": "user", "content": QUESTION}], model="demo", temperature=0)
    assert chat.choices[0].message.content == whole.output_text
    assert chat.usage is not None
    assert (whole.usage.input_tokens, whole.usage.total_tokens) == (chat.usage.prompt_tokens, chat.usage.total_tokens)
    events = list(api.responses.create(input=QUESTION, stream=True, **GREEDY))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    with api.responses.stream(input=QUESTION, **GREEDY) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == stream.get_final_response().output_text == whole.output_text

    async def asynchronous() -> str:
        async with openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", timeout=60) as api:
            made = await api.responses.create(input=QUESTION, **GREEDY)
            assert (await api.responses.retrieve(made.id)).output_text == made.output_text
            streamed = await api.responses.create(input=QUESTION, stream=True, **GREEDY)
            deltas = [event.delta async for event in streamed if event.type == "response.output_text.delta"]
            assert "".join(deltas) == made.output_text
            return made.output_text

    assert asyncio.run(asynchronous()) == whole.output_text


def test_an_answer_is_parsed(api: openai.OpenAI) -> None:
    arguments: Any = {**GREEDY, "input": QUESTION, "text_format": Pet}
    assert isinstance(api.responses.parse(**arguments).output_parsed, Pet)
    with api.responses.stream(**arguments) as stream:
        assert isinstance(stream.get_final_response().output_parsed, Pet)


def test_a_function_is_called_and_its_result_passed_on(api: openai.OpenAI) -> None:
    requested: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
    made = api.responses.create(input=requested, tools=[ADD], **GREEDY)
    (call,) = made.output
    assert call.type == "function_call"
    assert json.loads(call.arguments) == {"a": 12, "b": 30}
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    by_hand = api.responses.create(input=[*requested, call, result], tools=[ADD], **GREEDY)
    by_id = api.responses.create(input=[result], previous_response_id=made.id, tools=[ADD], **GREEDY)
    assert "42" in by_hand.output_text
    assert by_id.output_text == by_hand.output_text
    assert by_id.usage is not None
    assert by_hand.usage is not None
    assert by_id.usage.input_tokens == by_hand.usage.input_tokens


def test_any_process_finds_a_stored_response(daemon: Daemon) -> None:
    body = {"input": QUESTION, "temperature": 0, "max_output_tokens": 4}
    made = [httpx.post(f"{daemon.url}/v1/responses", json=body, timeout=240).json() for _ in range(4)]
    for response in made * 2:  # a connection each: the kernel distributes them
        assert httpx.get(f"{daemon.url}/v1/responses/{response['id']}", timeout=240).json() == response


def test_a_response_in_the_background_is_polled_cancelled_and_deleted(api: openai.OpenAI) -> None:
    made = api.responses.create(input=QUESTION, background=True, **GREEDY)
    while made.status in ("queued", "in_progress"):
        made = api.responses.retrieve(made.id)
    assert made.status == "completed"
    assert "42" in made.output_text
    endless: Any = {"ignore_eos": True}
    long = api.responses.create(input=QUESTION, model="demo", background=True, extra_body=endless)
    assert api.responses.cancel(long.id).status in ("cancelled", "incomplete")  # as slow as this client may be
    api.responses.delete(long.id)
    with pytest.raises(openai.NotFoundError):
        api.responses.retrieve(long.id)
    stream = api.responses.create(input=QUESTION, background=True, stream=True, **GREEDY)
    events = list(stream)
    assert events[-1].type == "response.completed"
    rest = list(api.responses.retrieve(events[-1].response.id, stream=True, starting_after=3))
    assert [event.sequence_number for event in rest] == [event.sequence_number for event in events[4:]]


def test_errors_are_typed(api: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError):
        api.responses.create(input=QUESTION, model="gpt-9")
    with pytest.raises(openai.BadRequestError) as refusal:
        api.responses.create(input=QUESTION, tools=[{"type": "file_search", "vector_store_ids": []}], **GREEDY)
    assert (refusal.value.param, refusal.value.code) == ("tools[0]", "unsupported_tool")


def test_a_transcript_of_codex_turn_by_turn(daemon: Daemon) -> None:
    """Each turn sends the whole history. The answers are the model's own; the test requires that every turn is
    accepted, and that earlier items are unchanged in their place."""
    codex = json.loads(CODEX.read_text())
    history: list[Any] = []
    cached: list[int] = []
    for turn in codex["turns"]:
        history += turn
        body = {**codex["request"], "input": history}
        with httpx.stream("POST", f"{daemon.url}/v1/responses", json=body, timeout=60) as response:
            assert response.status_code == 200, response.read()
            events = [json.loads(line[6:]) for line in response.iter_lines() if line.startswith("data: ")]
        last = events[-1]
        assert last["type"] in ("response.completed", "response.incomplete")
        done = [event["item"] for event in events if event["type"] == "response.output_item.done"]
        assert done == last["response"]["output"]
        usage = last["response"]["usage"]
        cached.append(usage["input_tokens_details"]["cached_tokens"])
        history += done
        before = usage["input_tokens"]
    assert cached == sorted(cached)
    assert cached[-1] > before / 2
