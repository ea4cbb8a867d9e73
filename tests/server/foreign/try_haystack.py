"""haystack: its generators of chat and of responses, embedders."""

from __future__ import annotations

from typing import Any

from haystack.components.embedders import OpenAIDocumentEmbedder, OpenAITextEmbedder
from haystack.components.generators.chat import OpenAIChatGenerator, OpenAIResponsesChatGenerator
from haystack.dataclasses import ChatMessage, Document, StreamingChunk
from haystack.tools import Tool
from haystack.utils import Secret
from trial import QUESTION, SCHEMA, URL, add, run, tries

BASE: dict[str, Any] = {"api_key": Secret.from_token("none"), "api_base_url": f"{URL}/v1", "model": "demo"}
MESSAGES = [ChatMessage.from_user(QUESTION)]
ADD = Tool(name="add", description="Add two numbers.", parameters=SCHEMA, function=add)
FORM = {
    "type": "object", "properties": {"kind": {"enum": ["cat", "dog"]}}, "required": ["kind"],
    "additionalProperties": False,
}  # fmt: skip
KINDS: Any = (
    ("chat", OpenAIChatGenerator, "max_completion_tokens",
     {"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": FORM}}}),
    ("responses", OpenAIResponsesChatGenerator, "max_output_tokens",
     {"text": {"format": {"type": "json_schema", "name": "pet", "strict": True, "schema": FORM}}}),
)  # fmt: skip

for path, kind, limit, form in KINDS:
    options = {"temperature": 0, limit: 60}

    @tries(path, "plain")
    def plain(kind: Any = kind, options: Any = options) -> None:
        assert "42" in kind(**BASE, generation_kwargs=options).run(MESSAGES)["replies"][0].text

    @tries(path, "streamed")
    def streamed(kind: Any = kind, options: Any = options) -> None:
        pieces: list[StreamingChunk] = []
        reply = kind(**BASE, generation_kwargs=options, streaming_callback=pieces.append).run(MESSAGES)["replies"][0]
        assert "".join(piece.content for piece in pieces) == reply.text

    @tries(path, "tool result")
    def result(kind: Any = kind, options: Any = options) -> None:
        generator = kind(**BASE, generation_kwargs=options, tools=[ADD])
        reply = generator.run(MESSAGES)["replies"][0]
        (call,) = reply.tool_calls
        assert (call.tool_name, call.arguments) == ("add", {"a": 12, "b": 30})
        result = ChatMessage.from_tool("42", origin=call)
        assert "42" in generator.run([*MESSAGES, reply, result])["replies"][0].text

    @tries(path, "tools, streamed")
    def tools(kind: Any = kind, options: Any = options) -> None:
        reply = kind(**BASE, generation_kwargs=options, tools=[ADD], streaming_callback=lambda _: None).run(MESSAGES)
        assert reply["replies"][0].tool_calls[0].arguments == {"a": 12, "b": 30}

    @tries(path, "schema")
    def schema(kind: Any = kind, options: Any = options, form: Any = form) -> None:
        assert '"kind"' in kind(**BASE, generation_kwargs={**options, **form}).run(MESSAGES)["replies"][0].text


@tries("embeddings", "plain")
def embedded() -> None:
    assert OpenAITextEmbedder(**BASE).run("one")["embedding"]
    documents = OpenAIDocumentEmbedder(**BASE, progress_bar=False).run([Document(content="two")])["documents"]
    assert documents[0].embedding


run()
