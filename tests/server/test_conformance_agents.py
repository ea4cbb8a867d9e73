"""Agent frameworks over the Responses API, which they use unasked: openai-agents, pydantic-ai, instructor.

They need much more than the other tests; `make clients` installs them beside and runs this.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, Literal

import openai
import pydantic
import pytest
from live import Daemon, running

pytestmark = pytest.mark.slow


def needs(module: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(find_spec(module) is None, reason=f"{module} is not installed (make clients)")


class Pet(pydantic.BaseModel):
    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 3]


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("daemon")) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def agents() -> Any:
    module = importlib.import_module("agents")
    module.set_tracing_disabled(True)
    return module


def client(daemon: Daemon) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60)


def agent(agents: Any, daemon: Daemon, **options: Any) -> Any:
    """With the default class of models."""
    settings = agents.ModelSettings(temperature=0, max_tokens=100, **options.pop("settings", {}))
    model = agents.OpenAIResponsesModel("demo", client(daemon))
    return agents.Agent(name="Helper", model=model, model_settings=settings, **options)


def adder(agents: Any, called: list[tuple[float, float]]) -> Any:
    def add(a: float, b: float) -> str:
        """Add two numbers."""
        called.append((a, b))
        return f"{a + b:g}"

    return agents.function_tool(add)


@needs("agents")
def test_an_agent_calls_a_tool_and_goes_on(agents: Any, daemon: Daemon) -> None:
    called: list[tuple[float, float]] = []
    helper = agent(agents, daemon, tools=[adder(agents, called)])
    runner = agents.Runner

    async def run() -> None:
        first = await runner.run(helper, "What is 12 plus 30?")
        assert called == [(12, 30)]
        assert "42" in first.final_output
        second = await runner.run(helper, [*first.to_input_list(), {"role": "user", "content": "What is 5 plus 7?"}])
        assert isinstance(second.final_output, str)
        stored = await runner.run(helper, "What is 5 plus 7?", previous_response_id=first.last_response_id)
        assert isinstance(stored.final_output, str)
        streamed = runner.run_streamed(helper, "What is 12 plus 30?")
        kinds = [event.type async for event in streamed.stream_events()]
        assert "run_item_stream_event" in kinds
        assert streamed.final_output == first.final_output

    asyncio.run(run())


@needs("agents")
def test_an_agent_hands_over(agents: Any, daemon: Daemon) -> None:
    other = agent(agents, daemon)
    other.name = "Other"
    first = agent(agents, daemon, handoffs=[other], settings={"tool_choice": "required"})
    result = asyncio.run(agents.Runner.run(first, "What is 12 + 30?"))
    assert result.last_agent.name == "Other"


@needs("agents")
def test_an_agent_with_tools_answers_in_a_form(agents: Any, daemon: Daemon) -> None:
    helper = agent(agents, daemon, tools=[adder(agents, [])], output_type=Pet, settings={"tool_choice": "none"})
    assert isinstance(asyncio.run(agents.Runner.run(helper, "A pet?")).final_output, Pet)
    helper = agent(agents, daemon, tools=[adder(agents, [])], output_type=Pet)
    assert isinstance(asyncio.run(agents.Runner.run(helper, "What is 12 plus 30?", max_turns=4)).final_output, Pet)


@needs("agents")
def test_a_session_in_a_conversation(agents: Any, daemon: Daemon) -> None:
    async def run() -> None:
        session = agents.OpenAIConversationsSession(openai_client=client(daemon))
        helper = agent(agents, daemon)
        await agents.Runner.run(helper, "What is 12 + 30?", session=session)
        await agents.Runner.run(helper, "And 1 + 2?", session=session)
        assert [item["role"] for item in await session.get_items()] == ["user", "assistant"] * 2
        await session.clear_session()

    asyncio.run(run())


@needs("pydantic_ai")
def test_pydantic_ai(daemon: Daemon) -> None:
    pydantic_ai = importlib.import_module("pydantic_ai")
    models = importlib.import_module("pydantic_ai.models.openai")
    provider = importlib.import_module("pydantic_ai.providers.openai").OpenAIProvider(openai_client=client(daemon))
    model = models.OpenAIResponsesModel("demo", provider=provider)
    called: list[tuple[float, float]] = []

    def add(a: float, b: float) -> str:
        """Add two numbers."""
        called.append((a, b))
        return f"{a + b:g}"

    settings = {"temperature": 0, "max_tokens": 100}
    helper = pydantic_ai.Agent(model, tools=[add], model_settings=settings)

    async def run() -> None:
        first = await helper.run("What is 12 plus 30?")
        assert called == [(12, 30)]
        assert "42" in first.output
        again = await helper.run("What is 5 plus 7?", message_history=first.all_messages())
        assert isinstance(again.output, str)
        form = pydantic_ai.Agent(model, output_type=pydantic_ai.NativeOutput(Pet), model_settings=settings)
        assert isinstance((await form.run("A pet?")).output, Pet)

    asyncio.run(run())


@needs("instructor")
def test_instructor(daemon: Daemon) -> None:
    instructor = importlib.import_module("instructor")
    plain = openai.OpenAI(base_url=f"{daemon.url}/v1", api_key="none", max_retries=0, timeout=60)
    made = instructor.from_openai(plain, mode=instructor.Mode.RESPONSES_TOOLS)
    pet = made.responses.create(model="demo", input="A pet?", response_model=Pet, temperature=0, max_output_tokens=100)
    assert isinstance(pet, Pet)
