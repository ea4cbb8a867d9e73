"""Tools: the fields that offer them, and the constraint that `tool_choice` puts on an answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, ValidationError, WithJsonSchema

from weft.engine.wire import grammar_text
from weft.server.bodies import Body
from weft.server.text.tokenizer import Tokenizer
from weft.server.tools.structured import Writer
from weft.server.tools.tool_format import ToolFormat

MAX_TOOLS = 128

ANY_OBJECT: dict[str, Any] = {"type": "object"}

FunctionName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]


class Function(Body):
    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Body):
    type: Literal["function"] = "function"
    function: Function


class FunctionChoice(Body):
    name: FunctionName


class NamedToolChoice(Body):
    type: Literal["function"] = "function"
    function: FunctionChoice


Tools = Annotated[list[Tool], Field(max_length=MAX_TOOLS)]
_CHOICES = ("none", "auto", "required")
_NAMED_SCHEMA = {
    # written out: references of a schema inside another would point nowhere
    **{k: v for k, v in NamedToolChoice.model_json_schema().items() if k != "$defs"},
    "properties": {
        **NamedToolChoice.model_json_schema()["properties"],
        "function": FunctionChoice.model_json_schema(),
    },
}


def _parse_choice(value: Any) -> str | NamedToolChoice:
    """By hand: a union names its members in the path of an error."""
    if isinstance(value, dict):
        try:
            return NamedToolChoice.model_validate(value)
        except ValidationError:
            pass
    elif value in _CHOICES:
        return str(value)
    raise ValueError('must be "none", "auto", "required" or {"type": "function", "function": {"name": …}}')


ToolChoice = Annotated[
    Literal["none", "auto", "required"] | NamedToolChoice,
    PlainValidator(_parse_choice),
    WithJsonSchema({"anyOf": [{"enum": list(_CHOICES)}, _NAMED_SCHEMA]}),
]


def names_of(tools: Sequence[Tool]) -> frozenset[str]:
    return frozenset(tool.function.name for tool in tools)


def required_call(
    tools: Sequence[Tool], choice: ToolChoice, form: ToolFormat, tokenizer: Tokenizer, *, parallel: bool
) -> Writer | None:
    """What writes the grammar that `tool_choice` asks for, or None."""
    if choice in ("none", "auto"):
        return None
    if isinstance(choice, NamedToolChoice):
        tools, parallel = [tool for tool in tools if tool.function.name == choice.function.name], False
    schemas = [(tool.function.name, tool.function.parameters or ANY_OBJECT) for tool in tools]

    def marker(text: str) -> str:
        token_id = tokenizer.token_id(text)
        return f"<[{token_id}]>" if token_id in tokenizer.special_ids else grammar_text.literal(text)

    return "tools", lambda: grammar_text.lark(form.grammar(schemas, marker, several=parallel))
