"""smolagents: its OpenAI model, and an agent that calls tools."""

from __future__ import annotations

from typing import Any

from smolagents import AgentGenerationError, OpenAIModel, ToolCallingAgent, tool
from smolagents.models import ChatMessage, MessageRole
from trial import QUESTION, URL, run, tries

model = OpenAIModel(model_id="demo", api_base=f"{URL}/v1", api_key="none", temperature=0, max_tokens=60)
MESSAGES: Any = [ChatMessage(role=MessageRole.USER, content=[{"type": "text", "text": QUESTION}])]


@tool
def add(a: float, b: float) -> float:
    """Add two numbers.

    Args:
        a: one
        b: the other
    """
    return a + b


@tries("chat", "plain")
def plain() -> None:
    assert "42" in model.generate(MESSAGES).content


@tries("chat", "streamed")
def streamed() -> None:
    assert "42" in "".join(piece.content or "" for piece in model.generate_stream(MESSAGES))


@tries("chat", "tools")
def tools() -> None:
    (call,) = model.generate(MESSAGES, tools_to_call_from=[add]).tool_calls
    assert call.function.name == "add"


@tries("chat", "tool result")
def agent() -> None:
    """Its prompt is longer than the demo's context: it is refused and reported as too long."""
    refusal = ""
    try:
        ToolCallingAgent(tools=[add], model=model, max_steps=1).run(QUESTION)
    except AgentGenerationError as error:
        refusal = str(error)
    assert "maximum context length" in refusal


run()
