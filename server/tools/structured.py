"""Structured outputs: request fields and the grammars that enforce them."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, PlainValidator, WithJsonSchema, model_validator

from weft.engine.errors import RequestError
from weft.engine.wire import grammar_text
from weft.engine.wire.grammar_text import MAX_GRAMMAR_CHARS, literal
from weft.engine.wire.sampling import MAX_BAD_WORDS
from weft.server.bodies import Body, parse_json
from weft.server.errors import bad_request, clip
from weft.server.tools.grammar_compiler import GrammarCompiler
from weft.server.tools.structural import structural_tag
from weft.server.tools.tool_format import Marker

MAX_CHOICES = 1024


def _parse_schema(value: Any) -> dict[str, Any] | bool:
    if isinstance(value, str):
        try:
            value = parse_json(value)
        except ValueError as error:
            raise ValueError(f"is not valid JSON: {error}") from None
    if not isinstance(value, dict | bool):
        raise ValueError("must be a JSON schema: an object, or its text")
    return value


Schema = Annotated[
    dict[str, Any] | bool,
    PlainValidator(_parse_schema),
    WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "boolean"}, {"type": "string"}]}),
]
GrammarText = Annotated[str, Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)]
MaybeGrammarText = Annotated[str, Field(max_length=MAX_GRAMMAR_CHARS)]  # A grammar; empty counts as not given.
Choices = Annotated[list[Annotated[str, Field(min_length=1)]], Field(min_length=1, max_length=MAX_CHOICES)]

Words = Annotated[list[Annotated[str, Field(min_length=1, max_length=1024)]], Field(max_length=MAX_BAD_WORDS)]


class JsonSchemaFormat(Body):
    name: str = ""
    description: str | None = None
    schema_: Schema = Field(alias="schema")
    strict: bool = False


class Structure(Body):
    begin: str = Field(min_length=1)
    schema_: Schema = Field(alias="schema")
    end: str


class ResponseFormat(Body):
    type: Literal["text", "json_object", "json_schema", "structural_tag"]
    structures: list[Structure] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    triggers: list[Annotated[str, Field(min_length=1)]] | None = Field(None, min_length=1, max_length=MAX_CHOICES)
    format: dict[str, Any] | None = None
    """Tree of formats of a structural tag (see `structural`), instead of `structures` and `triggers`."""
    json_schema: JsonSchemaFormat | None = None
    schema_: Schema | None = Field(None, alias="schema")
    """JSON schema in the style of llama.cpp, for either JSON type."""

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None and self.schema_ is None:
            raise ValueError("type json_schema needs json_schema")
        for name, kinds in _PARTS.items():
            if self.type not in kinds and getattr(self, name) not in (None, {}):
                raise ValueError(f"{name.rstrip('_')} goes with type {' or '.join(kinds)} only")
        if self.json_schema is not None and self.schema_ not in (None, self.json_schema.schema_):
            raise ValueError("json_schema and schema contradict each other")
        if self.type == "structural_tag" and self.format is None and not (self.structures and self.triggers):
            raise ValueError("type structural_tag needs format, or structures and triggers")
        return self

    @property
    def structural_tag(self) -> dict[str, Any]:
        """The structural tag in the form that `structural` takes."""
        if self.format is not None:
            return {"format": self.format}
        structures = [{"begin": s.begin, "schema": s.schema_, "end": s.end} for s in self.structures or ()]
        return {"structures": structures, "triggers": self.triggers}


_PARTS: dict[str, tuple[str, ...]] = {
    "json_schema": ("json_schema",),
    "schema_": ("json_object", "json_schema"),
    **dict.fromkeys(("structures", "triggers", "format"), ("structural_tag",)),
}
"""The types of a `ResponseFormat` that each of its fields goes with."""


def _parse_tag(value: Any) -> ResponseFormat:
    """Parse an object, or its text."""
    value = parse_json(value) if isinstance(value, str) else value
    if not isinstance(value, dict):
        raise ValueError("must be a structural tag: an object, or its text")
    return ResponseFormat.model_validate({**value, "type": "structural_tag"})


StructuralTag = Annotated[
    ResponseFormat, PlainValidator(_parse_tag), WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "string"}]})
]


class JsonStyle(NamedTuple):
    """How JSON is written."""

    whitespace: str | None = None  # pattern of whitespace between tokens; empty for none; None for the server's
    closed: bool = False  # objects have no properties besides those of the schema

    def grammar(self, schema: dict[str, Any] | bool, *, lenient: bool = False) -> str:
        schema = closed(schema) if self.closed else schema
        space = grammar_text.WHITESPACE if self.whitespace is None else self.whitespace
        return grammar_text.json_schema(schema, lenient=lenient, whitespace=space)


PLAIN = JsonStyle()
_MAPS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("enum", "const", "default", "examples")


def closed(schema: Any) -> Any:
    """A schema whose objects with `properties` have no others, unless it says so."""
    if isinstance(schema, list):
        return [closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    out = {
        key: value
        if key in _VALUES
        else {name: closed(inner) for name, inner in value.items()}
        if key in _MAPS and isinstance(value, dict)
        else closed(value)
        for key, value in schema.items()
    }
    return {"additionalProperties": False, **out} if {"properties", "patternProperties"} & out.keys() else out


class StructuredOutputs(Body):
    """One constraint. The switches of JSON may also stand alone and apply to `response_format`."""

    json_: Schema | None = Field(None, alias="json")
    json_object: bool = False
    regex: GrammarText | None = None
    choice: Choices | None = None
    grammar: GrammarText | None = None
    structural_tag: StructuralTag | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: MaybeGrammarText | None = None
    """Regular expression of the whitespace between tokens of JSON."""
    disable_additional_properties: bool = False
    """Objects have only the properties that the schema names, unless it has `additionalProperties`."""

    @property
    def json_style(self) -> JsonStyle | None:
        space = "" if self.disable_any_whitespace else self.whitespace_pattern or None
        style = JsonStyle(space, self.disable_additional_properties)
        return None if style == PLAIN else style

    @property
    def is_json(self) -> bool:
        return self.json_ is not None or self.json_object

    @model_validator(mode="after")
    def _is_one(self) -> StructuredOutputs:
        if len(given := self.given(literal)) != 1 and (given or self.json_style is None):
            raise ValueError("give exactly one of json, json_object, regex, choice, grammar and structural_tag")
        return self

    def given(self, marker: Marker, json: JsonStyle = PLAIN) -> list[Callable[[], str]]:
        """Return a function that writes the grammar for each given constraint. `json`: how to write JSON."""
        given: tuple[tuple[Any, Callable[..., str]], ...] = (
            (self.json_, json.grammar),
            ({"type": "object"} if self.json_object else None, json.grammar),
            (self.regex, grammar_text.regex),
            (self.choice, grammar_text.choice),
            (self.grammar, grammar_text.grammar),
        )
        out: list[Callable[[], str]] = [partial(write, value) for value, write in given if value is not None]
        if (tag := self.structural_tag) is not None:
            out.append(lambda: structural_tag(tag.structural_tag, marker))
        return out


Writer = tuple[str, Callable[[], str]]  # (field of the request, function that writes its grammar).


def of_response_format(asked: ResponseFormat, marker: Marker, json: JsonStyle = PLAIN) -> Writer | None:
    """Return the writer of a `response_format`; None for plain text. `marker`: writes marks for the model. `json`: how
    to write JSON."""
    if asked.type == "text":
        return None
    if asked.type == "structural_tag":
        return "response_format", lambda: structural_tag(asked.structural_tag, marker)
    if (given := asked.json_schema) is not None:
        return "response_format", lambda: json.grammar(given.schema_, lenient=not given.strict)
    schema: dict[str, Any] | bool = {"type": "object"} if asked.schema_ is None else asked.schema_
    return "response_format", lambda: json.grammar(schema, lenient=True)


def of_structured_outputs(asked: StructuredOutputs, marker: Marker, json: JsonStyle = PLAIN) -> Writer | None:
    """Return the writer of `structured_outputs`; None if they only have switches."""
    return next((("structured_outputs", write) for write in asked.given(marker, json)), None)


class LegacyConstraints(Body):
    """Constraints under their former names in vLLM and their names in SGLang and llama.cpp. `structured_outputs` and
    `response_format` take precedence, because clients of several servers send both."""

    guided_json: Schema | None = None
    guided_regex: GrammarText | None = None
    guided_choice: Choices | None = None
    guided_grammar: GrammarText | None = None
    json_schema: Schema | None = None
    regex: MaybeGrammarText | None = None
    ebnf: MaybeGrammarText | None = None
    grammar: MaybeGrammarText | None = None
    guided_whitespace_pattern: MaybeGrammarText | None = None

    @property
    def json_style(self) -> JsonStyle:
        return JsonStyle(self.guided_whitespace_pattern or None)

    def legacy_writers(self, json: JsonStyle) -> list[Writer]:
        """Return a writer for each given constraint. `json`: how to write JSON."""
        out: list[Writer] = []
        for name, write in _LEGACY.items():
            if (value := getattr(self, name)) is not None and value != "":
                out.append((name, partial(write, value)))
        for name in ("guided_json", "json_schema"):
            if (value := getattr(self, name)) is not None:
                out.append((name, partial(json.grammar, value, lenient=name == "json_schema")))
        return out


_LEGACY: dict[str, Callable[..., str]] = {
    "guided_regex": grammar_text.regex,
    "guided_choice": grammar_text.choice,
    "guided_grammar": grammar_text.grammar,
    "regex": grammar_text.regex,
    "grammar": grammar_text.grammar,
    "ebnf": grammar_text.grammar,
}


def either(writers: Sequence[Writer]) -> Writer:
    """Combine writers into a grammar that allows any of them, named after the first field."""
    return writers[0][0], lambda: grammar_text.either([write() for _, write in writers])


class Grammar(NamedTuple):
    """A verified grammar."""

    field: str  # Field of the request.
    text: str
    num_bytes: int  # Compiled size.


async def write_grammar(writer: Writer, compiler: GrammarCompiler, client: str) -> Grammar:
    """Return the verified grammar of a request. Raises `ApiError`: 400, naming the field, for an unusable grammar; 503
    if the compilers are busy. `client`: whose turn the compilation uses."""
    field, write = writer
    try:
        text = await asyncio.to_thread(_write, write)
        return Grammar(field, text, await compiler.verify(text, client))
    except RequestError as error:
        raise bad_request(f"{field}: {clip(explain(str(error)))}", field, "invalid_grammar") from None


def _write(write: Callable[[], str]) -> str:
    text = write()
    if len(text) > MAX_GRAMMAR_CHARS:
        raise RequestError(f"it has {len(text)} characters; the maximum is {MAX_GRAMMAR_CHARS}")
    return text


_EXPLAINED = (
    ("NoExtensionBias", "it describes no finite text; check for infinite recursion"),
    ("Too many items", "it is too ambiguous or too large"),
    ("fuel", "it is too complex"),
    ("too many states", "it is too complex"),
)
"""Messages of the library, and explanations."""
_IN_TOOLS = re.compile(r"^at \d+\(\d+\): failed to compile JSON schema: (.*?)(?:\s+\d+ \| .*)?$", re.DOTALL)
"""The library's error for a schema inside a grammar of this server, which the client did not write."""


def explain(reason: str) -> str:
    """Explain the library's error in words that help to fix it."""
    for part, meaning in _EXPLAINED:
        if part in reason:
            return meaning
    return _IN_TOOLS.sub(r"\1", reason.replace(" <non-verbose/>", ""))
