"""openai-agents with its default class of models, and with that of chat."""

from __future__ import annotations

import asyncio
from typing import Any, Literal

import agents
import openai
import pydantic
from trial import QUESTION, URL, add, run, tries

agents.set_tracing_disabled(True)


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


def client() -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0, timeout=60)


def agent(model: Any, **options: Any) -> Any:
    settings = agents.ModelSettings(temperature=0, max_tokens=100, **options.pop("settings", {}))
    return agents.Agent(name="Helper", model=model("demo", client()), model_settings=settings, **options)


for path, model in (("responses", agents.OpenAIResponsesModel), ("chat", agents.OpenAIChatCompletionsModel)):

    @tries(path, "plain")
    def plain(model: Any = model) -> None:
        assert "42" in agents.Runner.run_sync(agent(model), "What is 12 + 30?").final_output

    @tries(path, "tools, streamed")
    def streamed(model: Any = model) -> None:
        async def go() -> None:
            result = agents.Runner.run_streamed(agent(model, tools=[agents.function_tool(add)]), QUESTION)
            kinds = [event.type async for event in result.stream_events()]
            assert "run_item_stream_event" in kinds
            assert "42" in result.final_output

        asyncio.run(go())

    @tries(path, "tool result")
    def several(model: Any = model) -> None:
        helper = agent(model, tools=[agents.function_tool(add)])
        first = agents.Runner.run_sync(helper, QUESTION)
        assert "42" in first.final_output
        again = [*first.to_input_list(), {"role": "user", "content": "What is 5 plus 7?"}]
        assert isinstance(agents.Runner.run_sync(helper, again).final_output, str)

    @tries(path, "schema with tools")
    def form(model: Any = model) -> None:
        helper = agent(model, tools=[agents.function_tool(add)], output_type=Pet)
        assert isinstance(agents.Runner.run_sync(helper, QUESTION, max_turns=4).final_output, Pet)

    @tries(path, "handover")
    def handover(model: Any = model) -> None:
        other = agent(model)
        other.name = "Other"
        first = agent(model, handoffs=[other], settings={"tool_choice": "required"})
        assert agents.Runner.run_sync(first, QUESTION).last_agent.name == "Other"


@tries("responses", "stored")
def stored() -> None:
    helper = agent(agents.OpenAIResponsesModel)
    first = agents.Runner.run_sync(helper, QUESTION)
    again = agents.Runner.run_sync(helper, "What is 5 plus 7?", previous_response_id=first.last_response_id)
    assert isinstance(again.final_output, str)


@tries("responses", "conversation")
def conversation() -> None:
    async def go() -> None:
        session = agents.OpenAIConversationsSession(openai_client=client())
        helper = agent(agents.OpenAIResponsesModel)
        await agents.Runner.run(helper, "What is 12 + 30?", session=session)
        await agents.Runner.run(helper, "And 1 + 2?", session=session)
        assert [item["role"] for item in await session.get_items()] == ["user", "assistant"] * 2
        await session.clear_session()

    asyncio.run(go())


run()
