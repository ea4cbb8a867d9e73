"""langchain-openai against the real daemon and the demo model."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import pydantic
import pytest
from live import Daemon, running

if find_spec("langchain_openai") is None:
    pytest.skip("the extra `conformance` is not installed", allow_module_level=True)
import langchain_openai

pytestmark = pytest.mark.slow

QUESTION = "What is 12 + 30?"


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


def chat(daemon: Daemon, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 60, "max_retries": 0, **options}
    return langchain_openai.ChatOpenAI(base_url=f"{daemon.url}/v1", api_key="none", model="demo", **options)


class Pet(pydantic.BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


def test_messages_streams_and_batches_agree(daemon: Daemon) -> None:
    model = chat(daemon)
    whole = model.invoke(QUESTION)
    assert "42" in whole.content
    assert whole.usage_metadata["input_tokens"] > 0
    assert "".join(chunk.content for chunk in model.stream(QUESTION)) == whole.content
    assert {one.content for one in model.batch([QUESTION] * 4)} == {whole.content}

    async def asynchronous() -> str:
        return "".join([chunk.content async for chunk in model.astream(QUESTION)])

    assert asyncio.run(asynchronous()) == whole.content


def test_stream_usage_is_reported(daemon: Daemon) -> None:
    chunks = list(chat(daemon, stream_usage=True).stream(QUESTION))
    assert sum(chunk.usage_metadata["output_tokens"] for chunk in chunks if chunk.usage_metadata) > 0


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output(daemon: Daemon, method: str) -> None:
    model = chat(daemon, max_tokens=200, temperature=1, seed=5).with_structured_output(Pet, method=method)
    assert isinstance(model.invoke(QUESTION), Pet)


def test_tools_are_called_on_demand(daemon: Daemon) -> None:
    def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
        """Adds."""
        return a + b

    model = chat(daemon, max_tokens=200, temperature=1, seed=5).bind_tools([add], tool_choice="required")
    (call, *_) = model.invoke(QUESTION).tool_calls
    assert call["name"] == "add"
    assert call["args"]["a"] in (1, 2)
    gathered: Any = None
    for chunk in model.stream(QUESTION):
        gathered = chunk if gathered is None else gathered + chunk
    assert gathered.tool_calls[0]["args"]["b"] in (3, 4)


def test_completions_and_log_probabilities(daemon: Daemon) -> None:
    llm = langchain_openai.OpenAI(
        base_url=f"{daemon.url}/v1", api_key="none", model="demo", temperature=0, max_tokens=8, max_retries=0
    )
    assert llm.invoke(QUESTION) == "".join(llm.stream(QUESTION))
    answer = chat(daemon, logprobs=True, top_logprobs=2).invoke(QUESTION)
    assert len(answer.response_metadata["logprobs"]["content"]) > 1


def test_responses(daemon: Daemon) -> None:
    def add(a: Literal[1, 2], b: Literal[3, 4]) -> int:
        """Adds."""
        return a + b

    model = chat(daemon, use_responses_api=True, max_tokens=100)
    whole = model.invoke(QUESTION)
    assert "42" in whole.text
    assert whole.usage_metadata["input_tokens"] > 0
    assert "".join(chunk.text for chunk in model.stream(QUESTION)) == whole.text
    (call, *_) = model.bind_tools([add], tool_choice="required").invoke(QUESTION).tool_calls
    assert call["name"] == "add"
    assert isinstance(model.with_structured_output(Pet).invoke(QUESTION), Pet)


def test_embeddings(daemon: Daemon) -> None:
    """Texts are sent as they are: langchain would split them by OpenAI's tokens."""
    model = langchain_openai.OpenAIEmbeddings(
        base_url=f"{daemon.url}/v1", api_key="none", model="demo", check_embedding_ctx_length=False
    )
    texts = ["one", "two", "three"]
    documents = model.embed_documents(texts)
    assert [len(vector) for vector in documents] == [len(documents[0])] * 3
    assert model.embed_query("two") == pytest.approx(documents[1], abs=1e-4)
    assert asyncio.run(model.aembed_documents(texts))[2] == pytest.approx(documents[2], abs=1e-4)
