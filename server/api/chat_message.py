"""A chat message as clients send it, with every supported form of content and calls."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    AliasChoices,
    ConfigDict,
    Field,
    ModelWrapValidatorHandler,
    PrivateAttr,
    model_validator,
)

from weft.server.api.field_types import MAX_PARTS, Content, flatten_content, given
from weft.server.api.media.parts import IMAGE_KINDS, ImagePart
from weft.server.bodies import Body, parse_json
from weft.server.tools.cache_control import CacheControl, longest_mark
from weft.server.tools.tool_json import as_arguments, repaired

MAX_MESSAGES = 8192  # limited because messages are validated on the event loop
MAX_CALLS = 1024


def _as_object(arguments: str) -> str:
    """Arguments without those spellings of none, and without those faults, that other servers hand out."""
    text = arguments.strip()
    with suppress(ValueError):
        if isinstance(parse_json(text), dict):
            return arguments
    return repaired(text) if text.startswith("{") else as_arguments(text)


_WITH_IMAGES = ("user", "tool", "function")


def _has_images(parts: list[Any]) -> bool:
    return any(isinstance(part, dict) and part.get("type") in IMAGE_KINDS for part in parts)


class ToolFunction(Body):
    name: str
    arguments: Annotated[str, AfterValidator(_as_object)] = "{}"


class ToolCall(Body):
    id: str = ""
    type: Literal["function"] = "function"
    function: ToolFunction

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, data: Any) -> Any:
        """Read a custom tool's call as a function call with one text argument (`Tool`)."""
        if isinstance(data, dict) and data.get("type") == "custom" and isinstance(data.get("custom"), dict):
            custom = data["custom"]
            function = {"name": custom.get("name"), "arguments": json.dumps({"input": custom.get("input", "")})}
            return {"id": data.get("id"), "function": function}
        return data


class ChatMessage(Body):
    model_config = ConfigDict(
        json_schema_extra={
            "anyOf": [given("content"), {"properties": {"role": {"const": "assistant"}}, "required": ["role"]}]
        }
    )

    role: Annotated[str, Field(pattern=r"^[A-Za-z][A-Za-z0-9_.-]*$", max_length=64, examples=["user", "assistant"])]
    """system, developer, user, assistant, tool, or another that the chat template renders."""
    content: Content | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: str | None = None
    reasoning_content: str | None = Field(None, validation_alias=AliasChoices("reasoning_content", "reasoning"))
    """The assistant's earlier thinking, which some templates show again."""
    refusal: str | None = Field(None, exclude=True)  # the assistant's refusal, instead of content
    cache_control: CacheControl | None = Field(None, exclude=True)
    """Retain the conversation through this message. It may also be set on a content part."""

    _images: tuple[ImagePart, ...] = PrivateAttr(())

    @property
    def images(self) -> tuple[ImagePart, ...]:
        """The images whose marks are in the content, in order."""
        return self._images

    @model_validator(mode="wrap")
    @classmethod
    def _take_images(cls, data: Any, handler: ModelWrapValidatorHandler[ChatMessage]) -> ChatMessage:
        images: list[ImagePart] = []
        if isinstance(data, dict) and isinstance(parts := data.get("content"), list) and _has_images(parts):
            mark = longest_mark((data, *parts[:MAX_PARTS]))
            marked = {} if mark is None else {"cache_control": mark}
            content: Any
            try:
                content = flatten_content(parts, images if data.get("role") in _WITH_IMAGES else None)
            except ValueError as error:
                content = error  # raised by the field, whose name it then has
            data = {**data, "content": content, **marked}
        message = handler(data)
        if images:
            message._images = tuple(images)
        return message

    @model_validator(mode="before")
    @classmethod
    def _read_forms(cls, data: Any) -> Any:
        """Move the assistant's thinking parts to its reasoning, and apply a mark on a part to the message. The role
        function is OpenAI's former name of tool."""
        if isinstance(data, dict) and data.get("role") == "function":
            data = {**data, "role": "tool"}
        if not isinstance(data, dict) or not isinstance(parts := data.get("content"), list):
            return data
        assistant = data.get("role") == "assistant"
        thoughts = [
            p for p in parts if assistant and isinstance(p, dict) and p.get("type") in ("thinking", "reasoning")
        ]
        if thoughts:
            parts = [part for part in parts if not any(part is thought for thought in thoughts)]
            # The text of a thinking part is a string, or Mistral's list of text parts.
            texts = [flatten_content(part.get(part["type"], part.get("text", ""))) for part in thoughts]
            given = data.get("reasoning_content") or data.get("reasoning")
            data = {**data, "content": parts or None, "reasoning_content": given or "\n".join(texts)}
        mark = longest_mark((data, *parts[:MAX_PARTS]))
        return data if mark is None else {**data, "cache_control": mark}

    @model_validator(mode="after")
    def _has_content(self) -> ChatMessage:
        if self.content is None and self.role != "assistant":
            raise ValueError("a message needs content; only the assistant's may be null")
        if self.content is None and self.refusal is not None:
            self.content = self.refusal
        return self


Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
