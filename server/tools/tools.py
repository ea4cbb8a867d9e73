"""Tools: request fields, and the constraint that `tool_choice` puts on an answer."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import (
    AfterValidator,
    Field,
    ModelWrapValidatorHandler,
    PlainValidator,
    ValidationError,
    WithJsonSchema,
    model_validator,
)
from pydantic.json_schema import SkipJsonSchema

from weft.engine.wire import grammar_text
from weft.engine.wire.json_schemas import check_counts, without_nulls
from weft.server.bodies import Body
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.cache_control import CacheControl, longest_mark
from weft.server.tools.lark_in_json import in_json_string
from weft.server.tools.structured import Writer
from weft.server.tools.tool_format import INPUT_GRAMMAR, STRICT, Marker, ToolFormat

MAX_TOOLS = 128

NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
"""Schema of a function without `parameters`."""

_INPUT: dict[str, Any] = {
    "type": "object",
    "properties": {"input": {"type": "string"}},
    "required": ["input"],
    "additionalProperties": False,
}
"""Schema of a custom tool, which takes one text, as a function."""

FunctionName = Annotated[str, Field(pattern=r"^[^\x00-\x20\x7f\"\\{}\[\]<>]{1,256}$")]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: Annotated[dict[str, Any], AfterValidator(without_nulls)] | None = None
    strict: bool | None = None

    @property
    def schema_(self) -> dict[str, Any]:
        return self.parameters or NO_PARAMETERS


class Tool(Body):
    """A function. A custom tool (`{"type": "custom", "custom": {"name": …}}`) is a function of one text, `input`."""

    keeps_unknown: ClassVar[bool] = True  # the template shows them

    type: Literal["function"] = "function"
    function: Function
    custom: SkipJsonSchema[bool] = Field(False, exclude=True)
    grammar: SkipJsonSchema[str | None] = Field(None, exclude=True)  # Lark grammar of a custom tool's text.
    cache_control: CacheControl | None = Field(None, exclude=True)
    """Retains tools and instructions in the cache; not passed to templates."""
    _sent: dict[str, Any] | None = None

    def for_template(self) -> dict[str, Any]:
        """Return the tool as the client sent it, with its key order and extra fields, without nulls."""
        sent = self._sent
        if sent is None or not isinstance(sent.get("function"), dict):
            return self.model_dump(exclude_none=True)
        function = _shown(sent["function"])
        if self.function.parameters is not None:
            function["parameters"] = self.function.parameters
        return {"type": self.type, **_shown(sent)} | {"function": function}

    @property
    def strict(self) -> bool:
        """Whether optional calls must follow the schema: if `strict` is set, or the input has a grammar."""
        return bool(self.function.strict) or (self.custom and self.function.parameters != _INPUT)

    @model_validator(mode="wrap")
    @classmethod
    def _as_sent(cls, data: Any, handler: ModelWrapValidatorHandler[Tool]) -> Tool:
        tool = handler(data)
        if isinstance(data, dict) and not tool.custom:
            tool._sent = data
        return tool

    @model_validator(mode="before")
    @classmethod
    def _as_function(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        mark = longest_mark((data, data.get("function"), data.get("custom")))
        if data.get("type") != "custom":
            own = {key: value for key, value in data.items() if key not in ("custom", "grammar")}
            return {**own, "cache_control": mark}
        about = data.get("custom")
        if not isinstance(about, dict):
            raise ValueError("a custom tool needs an object 'custom' with its name")
        given = {key: about[key] for key in ("name", "description") if key in about}
        parameters, grammar = _input_of(about.get("format"))
        function = {**given, "parameters": parameters}
        return {"function": function, "custom": True, "grammar": grammar, "cache_control": mark}


def _shown(sent: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in sent.items() if value is not None and key != "cache_control"}


def _input_of(form: Any) -> tuple[dict[str, Any], str | None]:
    """Return the schema and Lark grammar of a custom tool's input. The description includes the grammar."""
    if not isinstance(form, dict) or (form.get("type") or "text") == "text":
        return _INPUT, None
    grammar = form.get("grammar", form)
    if isinstance(grammar, dict) and isinstance(definition := grammar.get("definition"), str):
        if grammar.get("syntax") == "regex":
            return {**_INPUT, "properties": {"input": {"type": "string", "pattern": f"^(?:{definition})$"}}}, None
        if grammar.get("syntax") == "lark":
            about = f"Text that follows this Lark grammar:\n{definition}"
            return {**_INPUT, "properties": {"input": {"type": "string", "description": about}}}, definition
    raise ValueError("the format of a custom tool must be text, or a grammar of syntax regex or lark with a definition")


class FunctionChoice(Body):
    name: FunctionName


class NamedToolChoice(Body):
    type: Literal["function"] = "function"
    function: FunctionChoice


class AllowedTools(NamedTuple):
    """A subset of the offered tools, with mode auto or required."""

    mode: Literal["auto", "required"]
    names: frozenset[str]


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
_CHOICES = ("none", "auto", "required")
_NAMED_SCHEMA = {
    # inlined: references of a nested schema would be dangling
    **{k: v for k, v in NamedToolChoice.model_json_schema().items() if k != "$defs"},
    "properties": {**NamedToolChoice.model_json_schema()["properties"], "function": FunctionChoice.model_json_schema()},
}

_ALLOWED_PROPERTIES = {
    "mode": {"enum": ["auto", "required"]},
    "tools": {"type": "array", "items": _NAMED_SCHEMA, "minItems": 1, "maxItems": MAX_TOOLS},
}
_ALLOWED = {"type": "object", "properties": _ALLOWED_PROPERTIES, "required": ["mode", "tools"]}
_ALLOWED_SCHEMA = {
    "type": "object",
    "properties": {"type": {"const": "allowed_tools"}, "allowed_tools": _ALLOWED},
    "required": ["type", "allowed_tools"],
}


def _parse_choice(value: Any) -> str | NamedToolChoice | AllowedTools:
    """Parse by hand: errors of a pydantic union would name its members."""
    if isinstance(value, dict):
        with suppress(ValidationError, AttributeError, KeyError, TypeError, ValueError):
            if value.get("type") == "allowed_tools":
                return _parse_allowed(value.get("allowed_tools", value))
            return NamedToolChoice.model_validate(_named(value))
    elif isinstance(value, str) and value in _CHOICES:
        return value
    raise ValueError(
        'must be "none", "auto", "required", {"type": "function", "function": {"name": …}} or '
        '{"type": "allowed_tools", "allowed_tools": {"mode": "auto" or "required", "tools": […]}}'
    )


def _named(value: dict[str, Any]) -> dict[str, Any]:
    """Return a function or a custom tool as a function."""
    return {"function": value["custom"]} if value.get("type") == "custom" else value


def _parse_allowed(value: dict[str, Any]) -> AllowedTools:
    mode = value.get("mode", "auto")
    chosen = [NamedToolChoice.model_validate(_flat(tool)) for tool in value["tools"]]
    if mode not in ("auto", "required") or not 0 < len(chosen) <= MAX_TOOLS:
        raise ValueError
    return AllowedTools(mode, frozenset(tool.function.name for tool in chosen))


def _flat(tool: dict[str, Any]) -> dict[str, Any]:
    """Move a name that some clients write next to the type into `function`."""
    return {"function": {"name": tool["name"]}} if "name" in tool else _named(tool)


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice | AllowedTools,
    PlainValidator(_parse_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_CHOICES)}, _NAMED_SCHEMA, _ALLOWED_SCHEMA]}),
]


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.function.name for tool in tools)


def required_call(
    tools: Sequence[Tool], choice: ToolChoice, form: ToolFormat, tokenizer: Tokenizer, *, parallel: bool
) -> Writer | None:
    """Return the writer of the grammar that `tool_choice` requires, or None."""
    if choice in ("none", "auto"):
        return None
    if isinstance(choice, NamedToolChoice):
        tools, parallel = [tool for tool in tools if tool.function.name == choice.function.name], False
    return call_of(tools, form, tokenizer, parallel=parallel)


def call_of(
    tools: Sequence[Tool], form: ToolFormat, tokenizer: Tokenizer, *, parallel: bool, free: bool = False
) -> Writer:
    """Return the writer of a grammar of calls of these tools. `free`: allow text before or without calls."""
    marker = marker_of(tokenizer)

    def write() -> str:
        schemas, inputs = list[tuple[str, dict[str, Any]]](), dict[str, str]()
        for tool in tools:
            schema = tool.function.schema_
            if tool.grammar is not None:
                inputs[name := f"weft_input_{len(inputs)}"] = tool.grammar
                schema = {**schema, INPUT_GRAMMAR: name}
            elif tool.function.strict:
                check_counts(schema)
                schema = schema if free else {**schema, STRICT: True}
            schemas.append((tool.function.name, schema))
        lark = form.grammar(schemas, marker, several=parallel, free=free)
        # formats with tags or Python literals do not use it
        named = {name: grammar_text.lark(in_json_string(text)) for name, text in inputs.items() if f"@{name} " in lark}
        return grammar_text.joined(lark, named) if named else grammar_text.lark(lark)

    return "tools", write


def marker_of(tokenizer: Tokenizer) -> Marker:
    """Return the function that writes marks for this model's grammars."""

    def marker(text: str) -> str:
        token_id = tokenizer.token_id(text)
        return f"<[{token_id}]>" if token_id in tokenizer.mark_ids else grammar_text.literal(text)

    return marker
