"""pydantic-ai: its models of chat, of responses and of Anthropic's messages."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import anthropic
import openai
import pydantic
from pydantic_ai import Agent, NativeOutput
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from trial import QUESTION, URL, add, run, tries

SETTINGS: Any = {"temperature": 0, "max_tokens": 100}


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]


def model(path: str) -> Any:
    """A separate client, because each attempt has another event loop."""
    if path == "messages":
        api = anthropic.AsyncAnthropic(base_url=URL, api_key="none", max_retries=0)
        return AnthropicModel("demo", provider=AnthropicProvider(anthropic_client=api))
    ours = OpenAIProvider(openai_client=openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0))
    return (OpenAIChatModel if path == "chat" else OpenAIResponsesModel)("demo", provider=ours)


for path in ("chat", "responses", "messages"):

    @tries(path, "plain")
    def plain(path: str = path) -> None:
        assert "42" in Agent(model(path), model_settings=SETTINGS).run_sync("What is 12 + 30?").output

    @tries(path, "streamed")
    def streamed(path: str = path) -> None:
        async def go() -> str:
            async with Agent(model(path), model_settings=SETTINGS).run_stream("What is 12 + 30?") as result:
                return "".join([text async for text in result.stream_text(delta=True)])

        assert "42" in asyncio.run(go())

    @tries(path, "tool result")
    def tools(path: str = path) -> None:
        helper = Agent(model(path), tools=[add], model_settings=SETTINGS)
        first = helper.run_sync(QUESTION)
        assert "42" in first.output
        assert isinstance(helper.run_sync("What is 5 plus 7?", message_history=first.all_messages()).output, str)

    if path != "messages":

        @tries(path, "schema")
        def form(path: str = path) -> None:
            made = Agent(model(path), output_type=NativeOutput(Pet), model_settings=SETTINGS).run_sync("A pet?")
            assert isinstance(made.output, Pet)

    @tries(path, "schema as a tool")
    def called(path: str = path) -> None:
        assert isinstance(Agent(model(path), output_type=Pet, model_settings=SETTINGS).run_sync("A pet?").output, Pet)


run()
