"""`ToolFormat`, the interface of tool call formats, and helpers for their grammars."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import orjson

from weft.engine.wire.grammar_text import json_options, literal
from weft.server.tools.stream import Reader, Steps, short_id

Schema = dict[str, Any]
Tools = Mapping[str, Schema]  # JSON schemas of the arguments by tool name.

Marker = Callable[[str], str]  # Writes a mark for a grammar: as a token if the vocabulary has it, else as text.


class ToolFormat(ABC):
    """The tool call format of a model family."""

    @property
    @abstractmethod
    def markers(self) -> tuple[str, ...]:
        """Special tokens that the parser must see."""

    @property
    def opens(self) -> tuple[str, ...]:
        """Marks that may start a call."""
        return ()

    @property
    def marked(self) -> bool:
        """Whether only a mark starts a call, so that calls are recognized anywhere in an answer."""
        return True

    @property
    def markup(self) -> tuple[str, str | None] | None:
        """Marks around calls: those of each call, or one mark before all calls. None if there are none."""
        return None

    def new_id(self) -> str:
        return short_id()

    @abstractmethod
    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        """Read an answer to a request that offers these tools."""

    @abstractmethod
    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        """Return the Lark grammar of one call, or with `several` more. `free`: allow text, then optional calls."""

    @abstractmethod
    def write(self, name: str, arguments: str) -> str:
        """Return a call in the model's format. `arguments`: a JSON object."""


def either_number(*marks: str) -> tuple[str, ...]:
    """Return marks with the spellings in the other number, such as `<tool_calls>` for `<tool_call>`, and sections with
    `tool_calls` for `function_calls`: models and versions of a format differ."""
    other = [
        _CALL.sub(lambda found: found[1] + ("" if found[2] else "s" if found[1].islower() else "S"), m) for m in marks
    ]
    named = (mark.replace("function_call", "tool_call") for mark in (*marks, *other))
    return tuple(dict.fromkeys(filter(None, (*marks, *other, *named))))


_CALL = re.compile(r"(call)(s?)(?![a-z])", re.IGNORECASE)


# -- Lark


def after_mark(rules: str, begin: str, marker: Marker, *, free: bool) -> str:
    """Return a grammar from `rules`, in which `calls` matches what follows the mark of the first call."""
    mark = marker(begin)
    if not free:
        start = f"start: {mark} calls"
    elif mark.startswith("<["):  # a single token is not text
        start = f"start: TEXT? | TEXT? {mark} calls\nTEXT: /(?s:.+)/"
    else:
        start = f"start: PLAIN? | head calls\n{ending('head', begin)}\nPLAIN: {without(begin)}"
    return f"{start}\n{rules}"


def at_start(rules: str, opening: str, *, free: bool) -> str:
    """Return a grammar from `rules`, in which `calls` is the complete answer. `opening`: characters that start a call;
    text must not start with them."""
    if not free:
        return f"start: calls\n{rules}"
    return f"start: calls | PLAIN?\nPLAIN: /\\s*[^\\s{opening}](?s:.*)/\n{rules}"


def ending(rule: str, mark: str) -> str:
    """Return a Lark rule of any text up to the first occurrence of `mark`."""
    return f"{rule}[lazy]: /(?s:.*)/ {literal(mark)}"


def through(rule: str, mark: str, marker: Marker) -> list[str]:
    """Return Lark rules of any text up to the first occurrence of `mark`, which may be a single token."""
    if (end := marker(mark)).startswith("<["):
        return [f"{rule}: {rule.upper()}_TEXT? {end}", f"{rule.upper()}_TEXT: /(?s:.+)/"]
    return [ending(rule, mark)]


def without(mark: str) -> str:
    """Return a Lark terminal of text without `mark`."""
    return f"/(?s:.*)/ & ~(/(?s:.*)/ {literal(mark)} /(?s:.*)/)"


def call_rules(tools: Sequence[tuple[str, Schema]], key: str) -> str:
    """Return Lark rules in which `call` is an object for any of these tools, with its arguments under `key`."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, _) in enumerate(tools):
        head = "{" + f'"name": {literal(name)}, "{key}": '
        rules.append(f'call_{i}: {literal(head)} arguments_{i} "}}"')
    return "\n".join([*rules, argument_rules(tools)])


def argument_rules(tools: Sequence[tuple[str, Schema]]) -> str:
    """Return Lark rules `arguments_i`, one per tool, because a schema's references start at its root."""
    return "\n".join(f"arguments_{i}: {json_value(schema)}" for i, (_, schema) in enumerate(tools))


INPUT_GRAMMAR = "x-weft-input-grammar"
"""Key in the schema of a custom tool: the name of the grammar of its text `input`, inside a JSON string."""


STRICT = "x-weft-strict"
"""Key in the schema of a strict tool: keywords that cannot be enforced are refused."""

ROOT_KEYS = ("$defs", "definitions", STRICT)  # Keys of a tool's schema that its parameters' schemas need.


def required_of(schema: Schema) -> frozenset[str]:
    """Return the names of a tool's required parameters."""
    required = schema.get("required")
    return frozenset(name for name in required if isinstance(name, str)) if isinstance(required, list) else frozenset()


def json_value(schema: Schema) -> str:
    if (name := schema.get(INPUT_GRAMMAR)) is not None:
        return f'/\\{{[ \\n]{{0,8}}"input"[ \\n]{{0,8}}:[ \\n]{{0,8}}"/ @{name} /"[ \\n]{{0,8}}\\}}/'
    given = {key: value for key, value in schema.items() if key != STRICT}
    return f"%json {orjson.dumps(json_options(given, lenient=STRICT not in schema)).decode()}"
