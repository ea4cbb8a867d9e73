"""litellm's proxy in front of the real daemon, in a separate environment: each API format of its clients, over each of
its connections to a server."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest
from free_port import free_port
from live import Daemon, running

PROXY = Path(__file__).parents[2] / "build" / "clients" / "litellm" / "bin" / "litellm"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not PROXY.exists(), reason="it could not be installed"),
]

KEY = "sk-proxy"
WAYS = {"hosted_vllm": "/v1", "openai": "/v1", "anthropic": ""}
"""providers of litellm, and the base URL of each: the first two use chat and responses, the last messages"""
QUESTION: Any = [{"role": "user", "content": "What is 12 plus 30?"}]
SCHEMA: Any = {
    "type": "object",
    "properties": {"a": {"type": "number"}, "b": {"type": "number"}},
    "required": ["a", "b"],
}
ADD: Any = {"name": "add", "description": "Add two numbers."}
SUM = {"a": 12, "b": 30}


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def proxy(daemon: Daemon, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Its address."""
    folder = tmp_path_factory.mktemp("proxy")
    models = [
        {
            "model_name": way,
            "litellm_params": {"model": f"{way}/demo", "api_base": daemon.url + base, "api_key": "none"},
        }
        for way, base in WAYS.items()
    ]
    config = folder / "config.yaml"
    settings = {"num_retries": 0, "telemetry": False}
    config.write_text(
        json.dumps({"model_list": models, "litellm_settings": settings, "general_settings": {"master_key": KEY}})
    )
    port = free_port()
    # It fetches a price list otherwise.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"LITELLM_LOCAL_MODEL_COST_MAP": "True", "PATH": f"{PROXY.parent}:{env['PATH']}"}
    command = [PROXY, "--config", config, "--host", "127.0.0.1", "--port", str(port)]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, env=env, cwd=folder)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + 240
        alive = False
        while not alive:
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < end, (folder / "log").read_text()
            with contextlib.suppress(httpx.HTTPError):
                alive = httpx.get(f"{url}/health/liveliness", timeout=60).is_success
            time.sleep(0.1)
        yield url
    finally:
        process.kill()
        process.wait()


@pytest.fixture
def api(proxy: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{proxy}/v1", api_key=KEY, max_retries=0, timeout=240) as api:
        yield api


@pytest.mark.parametrize("way", WAYS)
def test_chat(api: openai.OpenAI, way: str) -> None:
    requested: dict[str, Any] = {"model": way, "temperature": 0, "max_tokens": 60}
    whole = api.chat.completions.create(messages=QUESTION, **requested).choices[0].message.content
    assert whole is not None
    assert "42" in whole
    chunks = list(api.chat.completions.create(messages=QUESTION, stream=True, **requested))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == whole
    tools: Any = [{"type": "function", "function": {**ADD, "parameters": SCHEMA}}]
    called = api.chat.completions.create(messages=QUESTION, tools=tools, **requested).choices[0]
    (call,) = called.message.tool_calls or ()
    assert call.type == "function"
    assert (called.finish_reason, call.function.name, json.loads(call.function.arguments)) == ("tool_calls", "add", SUM)
    result: Any = {"role": "tool", "tool_call_id": call.id, "content": "42"}
    history: Any = [*QUESTION, called.message.to_dict(), result]
    answer = api.chat.completions.create(messages=history, tools=tools, **requested).choices[0].message.content
    assert answer is not None
    assert "42" in answer


@pytest.mark.parametrize("way", WAYS)
def test_responses(api: openai.OpenAI, way: str) -> None:
    requested: dict[str, Any] = {"model": way, "temperature": 0, "max_output_tokens": 60}
    whole = api.responses.create(input=QUESTION, **requested)
    assert "42" in whole.output_text
    events = list(api.responses.create(input=QUESTION, stream=True, **requested))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    assert events[-1].type == "response.completed"
    tools: Any = [{"type": "function", **ADD, "parameters": SCHEMA, "strict": False}]
    made = api.responses.create(input=QUESTION, tools=tools, **requested)
    (call,) = (item for item in made.output if item.type == "function_call")
    assert (call.name, json.loads(call.arguments)) == ("add", SUM)
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "42"}
    given: Any = {"type": "function_call", "call_id": call.call_id, "name": call.name, "arguments": call.arguments}
    assert "42" in api.responses.create(input=[*QUESTION, given, result], tools=tools, **requested).output_text
    if way != "anthropic":  # which has no earlier response to continue
        assert "42" in api.responses.create(
            input=[result], previous_response_id=made.id, tools=tools, **requested
        ).output_text  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
def test_messages(proxy: str, way: str) -> None:
    requested: dict[str, Any] = {"model": way, "max_tokens": 60, "extra_body": {"temperature": 0}}
    with anthropic.Anthropic(base_url=proxy, api_key=KEY, max_retries=0, timeout=240) as api:
        (block,) = api.messages.create(messages=QUESTION, **requested).content
        assert block.type == "text"
        assert "42" in block.text
        with api.messages.stream(messages=QUESTION, **requested) as stream:
            assert "".join(stream.text_stream) == block.text
        tools: Any = [{**ADD, "input_schema": SCHEMA}]
        made = api.messages.create(messages=QUESTION, tools=tools, **requested)
        (call,) = (each for each in made.content if each.type == "tool_use")
        assert (made.stop_reason, call.name, call.input) == ("tool_use", "add", SUM)
        with api.messages.stream(messages=QUESTION, tools=tools, **requested) as stream:
            streamed = stream.get_final_message()
        assert [each.input for each in streamed.content if each.type == "tool_use"] == [SUM]
        result = {"type": "tool_result", "tool_use_id": call.id, "content": "42"}
        history: Any = [
            *QUESTION,
            {"role": "assistant", "content": made.content},
            {"role": "user", "content": [result]},
        ]
        (answer,) = api.messages.create(messages=history, tools=tools, **requested).content
        assert answer.type == "text"
        assert "42" in answer.text


@pytest.mark.parametrize("way", ["hosted_vllm", "openai"])
def test_embeddings_and_completions(api: openai.OpenAI, way: str) -> None:
    found = api.embeddings.create(model=way, input=["one", "two"], encoding_format="float").data
    assert len(found[0].embedding) == len(found[1].embedding) > 0
    assert api.completions.create(model=way, prompt="What is 12 + 30?", max_tokens=5).choices[0].text


@pytest.mark.parametrize("way", WAYS)
def test_a_refused_request_does_not_disable_the_deployment(api: openai.OpenAI, way: str) -> None:
    for _ in range(5):  # it counts failures by the minute
        with pytest.raises(openai.BadRequestError):
            api.chat.completions.create(model=way, messages=QUESTION, temperature=9)
        with pytest.raises(openai.BadRequestError):
            api.responses.create(model=way, input="word " * 5000)
    for _ in range(3):
        assert api.chat.completions.create(model=way, messages=QUESTION, max_tokens=5).choices[0].message.content
        assert api.responses.create(model=way, input=QUESTION, max_output_tokens=16).output
