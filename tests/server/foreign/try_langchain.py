"""langchain: ChatOpenAI over chat and responses, ChatAnthropic, completions, embeddings, an agent."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from langchain.agents import create_agent
from langchain.agents.structured_output import ProviderStrategy
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import HumanMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI, OpenAI, OpenAIEmbeddings
from trial import QUESTION, URL, run, tries

OPENAI: dict[str, Any] = {"model": "demo", "base_url": f"{URL}/v1", "api_key": "none", "temperature": 0}
MODELS: Any = {
    "chat": ChatOpenAI(**OPENAI, max_tokens=60),
    "responses": ChatOpenAI(**OPENAI, max_tokens=60, use_responses_api=True),
    "messages": ChatAnthropic(model="demo", base_url=URL, api_key="none", temperature=0, max_tokens=60),
}


class Pet(pydantic.BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]


@tool
def add(a: float, b: float) -> str:
    """Add two numbers."""
    return f"{a + b:g}"


for path, model in MODELS.items():

    @tries(path, "plain")
    def plain(model: Any = model) -> None:
        assert "42" in model.invoke("What is 12 + 30?").text

    @tries(path, "streamed")
    def streamed(model: Any = model) -> None:
        assert "42" in "".join(piece.text for piece in model.stream("What is 12 + 30?"))

    @tries(path, "tools, streamed")
    def tools(model: Any = model) -> None:
        whole: Any = None
        for piece in model.bind_tools([add]).stream(QUESTION):
            whole = piece if whole is None else whole + piece
        (call,) = whole.tool_calls
        assert (call["name"], call["args"]) == ("add", {"a": 12, "b": 30})

    @tries(path, "tool result")
    def agent(model: Any = model) -> None:
        messages = create_agent(model, [add]).invoke({"messages": [HumanMessage(QUESTION)]})["messages"]
        assert [message.type for message in messages] == ["human", "ai", "tool", "ai"]
        assert "42" in messages[-1].text

    @tries(path, "schema")
    def form(model: Any = model) -> None:
        assert isinstance(model.with_structured_output(Pet, method="json_schema").invoke("A pet?"), Pet)

    if path != "messages":

        @tries(path, "schema with tools")
        def agent_form(model: Any = model) -> None:
            made = create_agent(model, [add], response_format=ProviderStrategy(Pet)).invoke(
                {"messages": [HumanMessage(QUESTION)]}
            )
            assert isinstance(made["structured_response"], Pet)


@tries("completions", "plain")
def completed() -> None:
    assert OpenAI(**OPENAI, max_tokens=8).invoke("What is 12 + 30?")


@tries("embeddings", "plain")
def embedded() -> None:
    made = OpenAIEmbeddings(model="demo", base_url=f"{URL}/v1", api_key="none", check_embedding_ctx_length=False)
    assert len(made.embed_documents(["one", "two"])) == 2


run()
