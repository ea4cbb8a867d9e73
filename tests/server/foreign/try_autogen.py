"""autogen: its clients of chat and of Anthropic's messages, and an agent."""

from __future__ import annotations

import asyncio
from typing import Any

from autogen_agentchat.agents import AssistantAgent
from autogen_core.models import UserMessage
from autogen_ext.models.anthropic import AnthropicChatCompletionClient
from autogen_ext.models.openai import OpenAIChatCompletionClient
from trial import QUESTION, URL, add, run, tries

INFO: Any = {
    "vision": False, "function_calling": True, "json_output": True, "family": "unknown", "structured_output": True,
}  # fmt: skip
MESSAGES = [UserMessage(content="What is 12 + 30?", source="user")]


def client(path: str) -> Any:
    if path == "chat":
        return OpenAIChatCompletionClient(
            model="demo", base_url=f"{URL}/v1", api_key="none", model_info=INFO, temperature=0, max_tokens=60
        )
    return AnthropicChatCompletionClient(
        model="demo", base_url=URL, api_key="none", model_info=INFO, temperature=0, max_tokens=60
    )


for path in ("chat", "messages"):

    @tries(path, "plain")
    def plain(path: str = path) -> None:
        assert "42" in str(asyncio.run(client(path).create(MESSAGES)).content)

    @tries(path, "streamed")
    def streamed(path: str = path) -> None:
        async def go() -> str:
            return "".join([piece async for piece in client(path).create_stream(MESSAGES) if isinstance(piece, str)])

        assert "42" in asyncio.run(go())

    @tries(path, "tool result")
    def agent(path: str = path) -> None:
        helper = AssistantAgent("helper", client(path), tools=[add], system_message=None)
        messages = asyncio.run(helper.run(task=QUESTION)).messages
        assert "42" in str(messages[-1].content)
        assert any("ToolCall" in type(message).__name__ for message in messages)


run()
