"""llama-index: its OpenAI-like class, its class of responses, embeddings."""

from __future__ import annotations

from typing import Any, Literal

import pydantic
from llama_index.core.llms import ChatMessage
from llama_index.core.tools import FunctionTool
from llama_index.embeddings.openai_like import OpenAILikeEmbedding
from llama_index.llms.openai import OpenAIResponses
from llama_index.llms.openai_like import OpenAILike
from trial import QUESTION, URL, add, run, tries

BASE: dict[str, Any] = {"model": "demo", "api_base": f"{URL}/v1", "api_key": "none", "temperature": 0}
chat = OpenAILike(**BASE, is_chat_model=True, is_function_calling_model=True, max_tokens=60, context_window=2048)
answers = OpenAIResponses(**BASE, max_output_tokens=60, context_window=2048)
MESSAGES = [ChatMessage(role="user", content=QUESTION)]
adder = FunctionTool.from_defaults(add)


class Pet(pydantic.BaseModel):
    """A pet."""

    kind: Literal["cat", "dog"]


for path, llm in (("chat", chat), ("responses", answers)):

    @tries(path, "plain")
    def plain(llm: Any = llm) -> None:
        assert "42" in str(llm.chat(MESSAGES))

    @tries(path, "streamed")
    def streamed(llm: Any = llm) -> None:
        assert "42" in "".join(piece.delta or "" for piece in llm.stream_chat(MESSAGES))

    @tries(path, "tools")
    def tools(llm: Any = llm) -> None:
        answer = llm.chat_with_tools([adder], chat_history=MESSAGES)
        (call,) = llm.get_tool_calls_from_response(answer)
        assert (call.tool_name, call.tool_kwargs) == ("add", {"a": 12, "b": 30})

    @tries(path, "tool result")
    def result(llm: Any = llm) -> None:
        assert "42" in str(llm.predict_and_call([adder], QUESTION))

    @tries(path, "schema")
    def form(llm: Any = llm) -> None:
        assert isinstance(llm.as_structured_llm(Pet).chat(MESSAGES).raw, Pet)


@tries("completions", "plain")
def completed() -> None:
    assert OpenAILike(**BASE, is_chat_model=False, max_tokens=8).complete("What is 12 + 30?").text


@tries("embeddings", "plain")
def embedded() -> None:
    made = OpenAILikeEmbedding(model_name="demo", api_base=f"{URL}/v1", api_key="none")
    assert len(made.get_text_embedding_batch(["one", "two"])) == 2


run()
