"""The bodies of Anthropic's Messages API, and their translation to `ChatBody`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import reduce
from operator import or_
from typing import Annotated, Any, ClassVar, Literal

import orjson
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    Discriminator,
    Field,
    GetJsonSchemaHandler,
    Tag,
    model_validator,
)
from pydantic_core import CoreSchema

from weft.server.api.chat_message import MAX_MESSAGES
from weft.server.api.field_types import (
    INT32,
    MAX_PARTS,
    MAX_STOP_CHARS,
    MAX_STOP_STRINGS,
    CacheKey,
    CacheSalt,
    Priority,
    bounded,
)
from weft.server.bodies import Body
from weft.server.errors import bad_request, clip
from weft.server.tools.cache_control import CacheControl
from weft.server.tools.template import MAX_VARIABLES
from weft.server.tools.tools import MAX_TOOLS, FunctionName


class MessagesError(BaseModel, extra="forbid"):
    type: str
    message: str


class MessagesErrorBody(BaseModel, extra="forbid"):
    """The body of every non-2xx answer of these paths."""

    type: Literal["error"]
    error: MessagesError
    request_id: str


class _AnyOf:
    """Writes `anyOf` in the schema of a tagged union: equivalent to `oneOf`, and cheaper for request generators."""

    def __get_pydantic_json_schema__(self, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        schema.pop("discriminator", None)
        schema["anyOf"] = schema.pop("oneOf")
        return schema


def _bounded(blocks: list[Any]) -> list[Any]:
    """The bound is not in the schema, because request generators would produce that many blocks."""
    if len(blocks) > MAX_PARTS:
        raise ValueError(f"must have at most {MAX_PARTS} blocks")
    return blocks


class Marked(Body):
    cache_control: CacheControl | None = None  # retain everything up to here in the cache


class TextBlock(Marked):
    type: Literal["text"]
    text: str


class TextSource(Body):
    """A document's text. Other sources (base64, url, file) are not supported."""

    type: Literal["text"]
    data: str


class DocumentBlock(Marked):
    type: Literal["document"]
    source: TextSource
    title: str | None = None
    context: str | None = None


class SearchResultBlock(Marked):
    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], AfterValidator(_bounded)]


class Base64Source(Body):
    type: Literal["base64"]
    media_type: str | None = None  # the data decides
    data: str = Field(min_length=1)


class UrlSource(Body):
    type: Literal["url"]
    url: str = Field(min_length=1)


class FileSource(Body):
    type: Literal["file"]
    file_id: str = Field(min_length=1)


class ImageBlock(Marked):
    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource | FileSource, Field(discriminator="type"), _AnyOf()]


class ToolReferenceBlock(Marked):
    """A tool found by a tool search. The model already has all tools."""

    type: Literal["tool_reference"]
    tool_name: str


class ToolUseBlock(Marked):
    type: Literal["tool_use"]
    id: str
    name: FunctionName
    input: dict[str, Any]


class ThinkingBlock(Body):
    type: Literal["thinking"]
    thinking: str


class RedactedThinkingBlock(Body):
    """Encrypted thinking, which is ignored."""

    type: Literal["redacted_thinking"]


def _known(kinds: Sequence[type[Body]]) -> BeforeValidator:
    """Rejects unknown block types with a short message."""
    names = frozenset(kind.model_fields["type"].annotation.__args__[0] for kind in kinds)  # type: ignore[union-attr]

    def check(block: Any) -> Any:
        kind = block.get("type") if isinstance(block, dict) else None
        if isinstance(kind, str) and kind not in names:
            raise ValueError(f"a block of type {clip(kind)!r} is not supported here: this server takes text and images")
        return block

    return BeforeValidator(check)


def _one_of(*kinds: type[Body]) -> Any:
    """The type of a block of these kinds."""
    return Annotated[reduce(or_, kinds), Field(discriminator="type"), _AnyOf(), _known(kinds)]


_SHOWN = (TextBlock, DocumentBlock, SearchResultBlock, ToolReferenceBlock, ImageBlock)


def _text_or(blocks: Any) -> Any:
    """The type of content: a string or a list of `blocks`. Errors refer to the form that the client used."""
    several = Annotated[list[blocks], AfterValidator(_bounded), Tag("blocks")]
    form = Discriminator(lambda value: "text" if isinstance(value, str) else "blocks")
    return Annotated[Annotated[str, Tag("text")] | several, form, _AnyOf()]


class ToolResultBlock(Marked):
    type: Literal["tool_result"]
    tool_use_id: str
    content: _text_or(_one_of(*_SHOWN)) = ""  # type: ignore[valid-type]
    is_error: bool = False


Block = _one_of(*_SHOWN, ToolUseBlock, ToolResultBlock, ThinkingBlock, RedactedThinkingBlock)


class Message(Body):
    keeps_unknown: ClassVar[bool] = True

    role: Literal["user", "assistant", "system"]
    """`system`: an instruction that applies from here on; it keeps its position."""
    content: _text_or(Block)  # type: ignore[valid-type]


_TOOL_SEARCH = "tool_search_tool_"
"""Prefix of tool search types. They are ignored: the model has all tools from the start."""


class MessagesTool(Marked):
    name: FunctionName
    input_schema: dict[str, Any]
    description: str | None = None
    strict: bool | None = None
    type: Literal["custom"] = "custom"


def _client_tools(tools: Any) -> Any:
    """Drop tool searches. Raises `ValueError` for other tools that a server would have to run."""
    if not isinstance(tools, list):
        return tools
    kept = []
    for tool in tools:
        kind = tool.get("type") if isinstance(tool, dict) else None
        if isinstance(kind, str) and kind.startswith(_TOOL_SEARCH):
            continue
        if isinstance(kind, str) and kind != "custom":
            where = f"tools of type {clip(kind)!r} run at Anthropic"
            raise ValueError(f"{where}; this server supports tools with an input_schema")
        kept.append(tool)
    return kept


class MessagesToolChoice(Body):
    type: Literal["auto", "any", "tool", "none"]
    name: FunctionName | None = None
    disable_parallel_tool_use: bool = False

    @model_validator(mode="after")
    def _has_name(self) -> MessagesToolChoice:
        if (self.type == "tool") != (self.name is not None):
            raise ValueError("type 'tool' needs a name; other types must not have one")
        return self


class Thinking(Body):
    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=INT32)


class OutputFormat(Body):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(Body):
    effort: str | None = Field(None, pattern=r"^[a-z]{1,16}$")
    format: OutputFormat | None = None


class Metadata(Body):
    user_id: CacheKey | None = None


class CountTokensBody(Body):
    """The fields that determine the prompt."""

    model: str | None = None
    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    system: _text_or(TextBlock) = ""  # type: ignore[valid-type]
    tools: Annotated[list[MessagesTool], BeforeValidator(_client_tools), Field(max_length=MAX_TOOLS)] = Field([])
    tool_choice: MessagesToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=MAX_VARIABLES)
    """Template variables, such as `enable_thinking`."""
    cache_control: CacheControl | None = None  # retain the full prompt in the cache

    def as_chat(self) -> dict[str, Any]:
        """The fields of the equivalent `ChatBody`. Raises `ApiError`."""
        messages = list(_chat_messages(self.messages))
        if system := _text(self.system):
            messages.insert(0, {"role": "system", "content": system, **_mark(self.system)})
        if not messages:
            raise bad_request("messages: must have content.", "messages")
        names = ("model", "cache_control", "chat_template_kwargs")
        fields: dict[str, Any] = {"messages": messages, **{name: getattr(self, name) for name in names}}
        if messages[-1]["role"] == "assistant":  # the answer continues it
            fields |= {"add_generation_prompt": False, "continue_final_message": True}
        if self.tools:
            fields["tools"] = [_function(tool) for tool in self.tools]
        return fields | self._choice() | self._thinking() | self._format()

    def _choice(self) -> dict[str, Any]:
        if (choice := self.tool_choice) is None:
            return {}
        if choice.type in ("any", "tool") and not self.tools:
            raise bad_request(f"tool_choice: {choice.type} needs tools.", "tool_choice")
        named = {"type": "function", "function": {"name": choice.name}}
        asked = {"auto": "auto", "any": "required", "none": "none", "tool": named}[choice.type]
        return {"tool_choice": asked, "parallel_tool_calls": not choice.disable_parallel_tool_use}

    def _thinking(self) -> dict[str, Any]:
        fields: dict[str, Any] = {}
        if self.output_config is not None and self.output_config.effort is not None:
            fields["reasoning_effort"] = self.output_config.effort
        if self.thinking is not None:
            on = self.thinking.type != "disabled"
            fields["enable_thinking"] = on
            if on and self.thinking.budget_tokens is not None:
                fields["max_thinking_tokens"] = self.thinking.budget_tokens
        return fields

    def _format(self) -> dict[str, Any]:
        asked = self.output_format or (self.output_config.format if self.output_config is not None else None)
        if asked is None:
            return {}
        schema = {"name": "output", "schema": asked.schema_, "strict": True}
        return {"response_format": {"type": "json_schema", "json_schema": schema}}


class MessagesBody(CountTokensBody):
    endpoint_path: ClassVar[str] = "/v1/messages"

    max_tokens: int = bounded("max_tokens", le=INT32)
    """0 computes and caches the prompt without an answer. Larger values are clamped to the context."""
    stop_sequences: list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]] = Field(
        [], max_length=MAX_STOP_STRINGS
    )
    stream: bool = False
    temperature: float = bounded("temperature", 1.0)
    top_p: float = bounded("top_p", 1.0)
    top_k: int = bounded("top_k", 0, le=INT32)
    metadata: Metadata | None = None  # `user_id` routes requests to the same engine, like `prompt_cache_key`
    priority: Priority = 0
    cache_salt: CacheSalt = ""

    def as_chat(self) -> dict[str, Any]:
        fields = super().as_chat()
        names = ("stream", "temperature", "top_p", "top_k", "priority", "cache_salt")
        fields |= {name: getattr(self, name) for name in names}
        if self.metadata is not None and self.metadata.user_id is not None:
            fields |= {"user": self.metadata.user_id, "prompt_cache_key": self.metadata.user_id}
        return fields


def _function(tool: MessagesTool) -> dict[str, Any]:
    function: dict[str, Any] = {"name": tool.name}
    if tool.description is not None:
        function["description"] = tool.description
    function["parameters"] = tool.input_schema
    if tool.strict is not None:
        function["strict"] = tool.strict
    return {"type": "function", "function": function, **_mark([tool])}


def _chat_messages(messages: Sequence[Message]) -> Iterator[dict[str, Any]]:
    """Translate each message separately, so that later messages never change earlier ones."""
    for message in messages:
        blocks = message.content
        if isinstance(blocks, str):
            blocks = [TextBlock(type="text", text=blocks)]
        if message.role != "user" and any(isinstance(block, ImageBlock) for block in blocks):
            raise bad_request("messages: images are supported only in messages of users and tools.", "messages")
        if message.role == "assistant":
            yield {**_assistant(blocks), **_mark(blocks)}
        elif message.role == "system":
            content = _text(block for block in blocks if isinstance(block, _SHOWN))
            yield {"role": "system", "content": content, **_mark(blocks)}
        else:
            yield from _user(blocks)


def _assistant(blocks: Sequence[Body]) -> dict[str, Any]:
    text = "".join(block.text for block in blocks if isinstance(block, TextBlock))
    thinking = "".join(block.thinking for block in blocks if isinstance(block, ThinkingBlock))
    calls = [_call(block) for block in blocks if isinstance(block, ToolUseBlock)]
    message: dict[str, Any] = {"role": "assistant", "content": text if text or not calls else None}
    if thinking:
        message["reasoning_content"] = thinking
    if calls:
        message["tool_calls"] = calls
    return message


def _call(use: ToolUseBlock) -> dict[str, Any]:
    function = {"name": use.name, "arguments": orjson.dumps(use.input).decode()}
    return {"id": use.id, "type": "function", "function": function}


def _user(blocks: Sequence[Body]) -> Iterator[dict[str, Any]]:
    """Text and results in order: one message per run of text and per result."""
    run: list[Body] = []
    for block in blocks:
        if isinstance(block, ToolResultBlock):
            if run:
                yield {"role": "user", "content": _content(run), **_mark(run)}
                run = []
            content = _content(block.content, "Error: " if block.is_error else "")
            mark = _mark([block, *_blocks(block.content)])
            yield {"role": "tool", "tool_call_id": block.tool_use_id, "content": content, **mark}
        elif isinstance(block, _SHOWN):
            run.append(block)
    if run or not blocks:
        yield {"role": "user", "content": _content(run), **_mark(run)}


def _content(content: Any, before: str = "") -> str | list[dict[str, Any]]:
    """Content of a chat message: a text, or a list of parts if there are images."""
    if not any(isinstance(block, ImageBlock) for block in _blocks(content)):
        return before + _text(content)
    parts: list[dict[str, Any]] = [{"type": "text", "text": before}] if before else []
    for block in content:
        if isinstance(block, ImageBlock):
            parts.append({"type": "image", "source": block.source.model_dump()})
        else:
            parts.append({"type": "text", "text": _block_text(block)})
    return parts


def _blocks(content: Any) -> Sequence[Any]:
    return () if isinstance(content, str) else content


def _mark(blocks: Any) -> dict[str, Any]:
    """The longest mark of these blocks, if any."""
    marks = [block.cache_control for block in _blocks(blocks) if getattr(block, "cache_control", None)]
    return {"cache_control": max(marks, key=lambda mark: mark.seconds)} if marks else {}


def _text(content: Any) -> str:
    """The text of a string, or of blocks joined with newlines."""
    return content if isinstance(content, str) else "\n".join(map(_block_text, content))


def _block_text(block: Body) -> str:
    match block:
        case TextBlock():
            return block.text
        case DocumentBlock():
            return "\n".join(part for part in (block.title, block.context, block.source.data) if part)
        case SearchResultBlock():
            return "\n".join([block.title, block.source, *(part.text for part in block.content)])
        case ToolReferenceBlock():
            return f"The tool {block.tool_name} is there."
    raise TypeError(block)
