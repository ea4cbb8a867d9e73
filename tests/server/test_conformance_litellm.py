"""litellm against the real daemon and the demo model, as an OpenAI server and as a vLLM server."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any

import pytest
from live import Daemon, running

QUESTION = [{"role": "user", "content": "What is 12 + 30?"}]
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object", "maxProperties": 0}}}


pytestmark = [pytest.mark.slow, pytest.mark.skipif(find_spec("litellm") is None, reason="litellm is not installed")]


@pytest.fixture(scope="module")
def litellm() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # it fetches a price list otherwise
        return importlib.import_module("litellm")


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture(params=["openai", "hosted_vllm"])
def common(request: pytest.FixtureRequest, daemon: Daemon) -> dict[str, Any]:
    return {
        "model": f"{request.param}/demo", "api_base": f"{daemon.url}/v1", "api_key": "none",
        "temperature": 0, "max_tokens": 60, "num_retries": 0,
    }  # fmt: skip


def test_chat_in_every_shape(litellm: Any, common: dict[str, Any]) -> None:
    whole = litellm.completion(messages=QUESTION, **common)
    text = whole.choices[0].message.content
    assert "42" in text
    assert whole.usage.completion_tokens > 0
    chunks = litellm.completion(messages=QUESTION, stream=True, stream_options={"include_usage": True}, **common)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == text

    async def asynchronous() -> str:
        answer = await litellm.acompletion(messages=QUESTION, **common)
        return answer.choices[0].message.content

    assert asyncio.run(asynchronous()) == text


def test_structured_output_and_tools(litellm: Any, common: dict[str, Any]) -> None:
    schema = {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}  # fmt: skip
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    answer = litellm.completion(messages=QUESTION, response_format=form, **common)
    assert set(json.loads(answer.choices[0].message.content)) == {"ok"}
    answer = litellm.completion(messages=QUESTION, tools=[TOOL], tool_choice="required", **common)
    assert answer.choices[0].message.tool_calls[0].function.name == "now"
    assert answer.choices[0].finish_reason == "tool_calls"


def test_errors_are_typed(litellm: Any, common: dict[str, Any]) -> None:
    with pytest.raises(litellm.NotFoundError):
        litellm.completion(messages=QUESTION, **{**common, "model": common["model"].replace("demo", "gpt-9")})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=QUESTION, **{**common, "temperature": 3})
    with pytest.raises(litellm.BadRequestError):
        litellm.completion(messages=QUESTION, **{**common, "max_tokens": 100_000})


def test_text_completions(litellm: Any, common: dict[str, Any]) -> None:
    model = common["model"].replace("openai/", "text-completion-openai/")
    answer = litellm.text_completion(prompt="What is 12 + 30?", **{**common, "model": model})
    assert answer.choices[0].text


def test_responses(litellm: Any, common: dict[str, Any]) -> None:
    common = {**common, "max_output_tokens": common["max_tokens"]}
    del common["max_tokens"]
    whole = litellm.responses(input="What is 12 + 30?", **common)
    assert "42" in whole.output[0].content[0].text
    kinds = [event.type for event in litellm.responses(input="What is 12 + 30?", stream=True, **common)]
    assert kinds[-1] == "response.completed"
    tool = {"type": "function", **TOOL["function"]}
    (call, *_) = litellm.responses(input="What is 12 + 30?", tools=[tool], tool_choice="required", **common).output
    assert call.name == "now"


def test_embeddings(litellm: Any, common: dict[str, Any]) -> None:
    given = {name: common[name] for name in ("model", "api_base", "api_key") if name in common}
    answer = litellm.embedding(input=["one", "two"], **given)
    assert [entry["index"] for entry in answer.data] == [0, 1]
    assert len(answer.data[0]["embedding"]) == len(answer.data[1]["embedding"]) > 0
