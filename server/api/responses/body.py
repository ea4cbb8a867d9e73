"""`ResponseBody`: the body of `POST /v1/responses`, and its translation to `ChatBody`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from fastapi.exceptions import RequestValidationError
from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema
from pydantic.json_schema import SkipJsonSchema

from weft.server.api.field_types import INT32, bounded
from weft.server.api.protocol import ChatBody, SamplingFields
from weft.server.api.responses.items import Item, full_name, to_messages
from weft.server.bodies import Body
from weft.server.errors import bad_request, clip
from weft.server.tools.structured import Schema
from weft.server.tools.template import ThinkingSwitch
from weft.server.tools.tools import MAX_TOOLS

MAX_METADATA = 16
ENCRYPTED = "reasoning.encrypted_content"
LOGPROBS = "message.output_text.logprobs"

_IGNORED_TOOLS = ("web_search", "image_generation", "tool_search")
"""OpenAI's built-in tools that agents always send; they are ignored. A date may follow the name."""


def _parse_input(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise ValueError("must be a string or a list of items")
    return value


def _parse_conversation(value: Any) -> str:
    id = value.get("id") if isinstance(value, dict) else value
    if not isinstance(id, str) or not 0 < len(id) <= 128:
        raise ValueError("must be the id of a conversation, or an object with it")
    return id


def _parse_choice(value: Any) -> str | dict[str, Any]:
    if isinstance(value, dict) or value in ("none", "auto", "required"):
        return value
    raise ValueError('must be "none", "auto", "required" or an object with a type')


_TEXT_PART = {
    "type": "object",
    "properties": {"type": {"enum": ["input_text", "output_text"]}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
_IMAGE_PART = {
    "type": "object",
    "properties": {
        "type": {"const": "input_image"},
        "image_url": {"type": "string", "minLength": 1},
        "file_id": {"type": "string", "minLength": 1},
        "detail": {"enum": ["auto", "low", "high"]},
    },
    "required": ["type"],
    "anyOf": [{"required": ["image_url"]}, {"required": ["file_id"]}],
}
_PART = {"anyOf": [_TEXT_PART, _IMAGE_PART]}
_CONTENT = {"anyOf": [{"type": "string"}, {"type": "array", "items": _PART}]}
_NAME = {"type": "string", "minLength": 1, "maxLength": 128, "pattern": "^[a-zA-Z0-9_-]+$"}


def _item(kind: str, *optional: str, **fields: Any) -> dict[str, Any]:
    """The schema of an item. `optional`: names of optional fields, possibly including `type`."""
    required = [name for name in ("type", *fields) if name not in optional]
    return {"type": "object", "properties": {"type": {"const": kind}, **fields}, "required": required}


_ITEM = {
    "anyOf": [
        _item("message", "type", role={"enum": ["user", "assistant", "system", "developer"]}, content=_CONTENT),
        _item("function_call", call_id=_NAME, name=_NAME, arguments={"type": "string"}),
        _item("function_call_output", call_id=_NAME, output=_CONTENT),
        _item("custom_tool_call", call_id=_NAME, name=_NAME, input={"type": "string"}),
        _item("custom_tool_call_output", call_id=_NAME, output=_CONTENT),
        _item(
            "reasoning", "summary", summary={"type": "array", "items": _item("summary_text", text={"type": "string"})}
        ),
    ]
}
_CHOICE_SCHEMA = {
    "anyOf": [
        {"enum": ["none", "auto", "required"]},
        _item("function", name=_NAME),
        _item("custom", name=_NAME),
        _item(
            "allowed_tools",
            mode={"enum": ["auto", "required"]},
            tools={"type": "array", "items": _item("function", name=_NAME), "minItems": 1, "maxItems": MAX_TOOLS},
        ),
    ]
}

_TOOL = {"anyOf": [_item("function", name=_NAME), _item("custom", name=_NAME)]}
Offered = Annotated[list[dict[str, Any]], WithJsonSchema({"type": "array", "items": _TOOL})]
Input = Annotated[
    str | list[Any],
    PlainValidator(_parse_input),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _ITEM}]}),
]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=MAX_METADATA)
]


class TextFormat(Body):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    schema_: Schema | None = Field(None, alias="schema")
    strict: bool | None = None


class Text(Body):
    format: TextFormat = Field(default_factory=lambda: TextFormat.model_validate({}))
    verbosity: Literal["low", "medium", "high"] = "medium"


class Reasoning(Body):
    effort: str | None = Field(None, pattern=r"^[a-z]{1,16}$")
    summary: Literal["auto", "concise", "detailed", "none"] | None = None
    generate_summary: SkipJsonSchema[Literal["auto", "concise", "detailed", "none"] | None] = None
    """The older name of `summary`."""


class ResponseStreamOptions(Body):
    include_obfuscation: bool = False  # padding against observers, which this server never adds


Include = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "file_search_call.results",
    "web_search_call.results", "web_search_call.action.sources", "message.input_image.image_url",
    "computer_call_output.output.image_url", "code_interpreter_call.outputs",
]  # fmt: skip
"""OpenAI's values. Those after the first two are about tools and images in answers, which answers here do not have."""


class ResponseBody(SamplingFields):
    endpoint_path: ClassVar[str] = "/v1/responses"

    model: str | None = None
    input: Input = Field([])
    instructions: str | None = None  # placed before the conversation, for this response only
    previous_response_id: str | None = Field(None, max_length=128)
    conversation: Annotated[
        str | None,
        PlainValidator(_parse_conversation),
        WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object", "properties": {"id": {"type": "string"}}}]}),
    ] = None
    tools: Offered = Field([], max_length=2 * MAX_TOOLS)
    tool_choice: Annotated[str | dict[str, Any], PlainValidator(_parse_choice), WithJsonSchema(_CHOICE_SCHEMA)] = "auto"
    parallel_tool_calls: bool = True
    max_tool_calls: int | None = Field(None, ge=1, le=INT32)
    text: Text = Field(default_factory=lambda: Text.model_validate({}))
    reasoning: Reasoning | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=INT32)
    top_logprobs: int = bounded("logprobs", 0)
    include: list[Include] = Field([], max_length=64)
    truncation: Literal["auto", "disabled"] = "disabled"
    """auto: drop the oldest items if the conversation does not fit."""
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    metadata: Metadata = Field({})
    service_tier: str | None = Field(None, max_length=64)
    safety_identifier: str | None = Field(None, max_length=512)
    chat_template_kwargs: dict[str, Any] = Field({}, max_length=64)
    """Template variables, such as `enable_thinking`."""
    enable_thinking: bool | None = None
    thinking: bool | ThinkingSwitch | None = None  # these three as in `ChatBody`
    include_reasoning: bool = True

    def check(self) -> None:
        """Check rules between fields. Raises `ApiError`."""
        if self.response_format is not None and self.text.format.type != "text":
            raise bad_request("Give either text.format or response_format.", "response_format")
        if self.previous_response_id is not None and self.conversation is not None:
            what = "Give either previous_response_id or conversation, not both."
            raise bad_request(what, "previous_response_id")
        if self.background and not self.store:
            raise bad_request("background requires store: true, because the answer is fetched later.", "background")
        if self.text.format.type == "json_schema" and self.text.format.schema_ is None:
            raise bad_request("text.format: type json_schema requires a schema.", "text.format.schema")

    @property
    def wants_logprobs(self) -> bool:
        return LOGPROBS in self.include or self.top_logprobs > 0 or bool(self.logprob_token_ids)

    @property
    def as_summary(self) -> bool:
        """Show reasoning as a summary, which contains all of it."""
        asked = self.reasoning
        return asked is not None and (asked.summary or asked.generate_summary or "none") != "none"

    def as_chat(self, items: Sequence[Item], tools: OfferedTools) -> ChatBody:
        """The equivalent chat request over these items. Raises `ApiError` and `RequestValidationError`."""
        messages = to_messages(self.instructions, items)
        if not messages or (not items and all(message.role in ("system", "developer") for message in messages)):
            raise bad_request("input: must have at least one item to answer.", "input")
        given = {name: getattr(self, name) for name in SamplingFields.model_fields if name in self.model_fields_set}
        fields: dict[str, Any] = {
            **given,
            "model": self.model,
            "messages": messages,
            "tools": tools.as_chat,
            "tool_choice": _choice_of(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self.response_format or _format_of(self.text.format),
            "reasoning_effort": self.reasoning.effort if self.reasoning is not None else None,
            "max_completion_tokens": self.max_output_tokens,
            "logprobs": self.wants_logprobs,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "stream": self.stream,
            **{name: getattr(self, name) for name in _OF_CHAT},
        }
        try:
            return ChatBody.model_validate(fields)
        except ValidationError as error:
            errors = [{**e, "loc": ("body", *e["loc"])} for e in error.errors()]
            asked = {name: getattr(self, name) for name in self.model_fields_set}
            raise RequestValidationError(errors, body=asked) from None


_OF_CHAT = ("chat_template_kwargs", "enable_thinking", "thinking", "include_reasoning")


class OfferedTools(NamedTuple):
    """The tools of a request."""

    as_chat: list[dict[str, Any]]  # in the form of chat requests
    namespaces: dict[str, tuple[str, str]]
    """Namespace and name of namespaced tools, by the full name that the model sees."""

    @classmethod
    def of(cls, tools: Sequence[dict[str, Any]]) -> OfferedTools:
        """Read a request's tools. Raises `ApiError` for unsupported ones."""
        out = cls([], {})
        for i, tool in enumerate(tools):
            out._add(tool, f"tools[{i}]")
        return out

    def _add(self, tool: dict[str, Any], path: str, namespace: str | None = None) -> None:
        kind = tool.get("type")
        if kind == "namespace" and namespace is None:
            members = tool.get("tools")
            if not isinstance(tool.get("name"), str) or not isinstance(members, list):
                raise bad_request(f"{path}: a namespace requires a name and a list of tools.", path)
            for i, member in enumerate(members[: MAX_TOOLS + 1]):
                if isinstance(member, dict):
                    self._add(member, f"{path}.tools[{i}]", tool["name"])
            return
        if kind not in ("function", "custom"):
            if isinstance(kind, str) and kind.startswith(_IGNORED_TOOLS):
                return
            what = f"{path}: tools of type {clip(kind)!r} are not supported; use function or custom."
            raise bad_request(what, path, "unsupported_tool")
        fields = {key: value for key, value in tool.items() if key != "type" and value is not None}
        if not isinstance(fields.get("name"), str):
            raise bad_request(f"{path}: a tool requires a name.", f"{path}.name")
        if namespace is not None:
            name = fields["name"]
            fields["name"] = full_name(namespace, name)
            self.namespaces[fields["name"]] = namespace, name
        self.as_chat.append({"type": kind, kind: fields})


def _choice_of(choice: str | dict[str, Any]) -> Any:
    """A tool choice in the form of chat requests."""
    if isinstance(choice, str):
        return choice
    kind = choice.get("type")
    if kind in ("function", "custom"):
        return {"type": "function", "function": {"name": choice.get("name")}}
    if kind == "allowed_tools":
        tools = named if isinstance(named := choice.get("tools"), list) else []
        known = [t for t in tools if isinstance(t, dict) and t.get("type") in ("function", "custom")]
        return {**choice, "tools": known}
    raise bad_request(f"tool_choice: there is no tool of type {clip(kind)!r}.", "tool_choice")


def _format_of(asked: TextFormat) -> dict[str, Any] | None:
    if asked.type == "text":
        return None
    if asked.type == "json_object":
        return {"type": asked.type}
    schema = {"name": asked.name or "", "schema": asked.schema_, "strict": bool(asked.strict)}
    return {"type": asked.type, "json_schema": schema}
