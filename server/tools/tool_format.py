"""What a family's way of writing tool calls has to provide, and what the grammars of all are made of."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import orjson

from weft.engine.wire.grammar_text import json_options, literal
from weft.server.tools.stream import Call as Call
from weft.server.tools.stream import Reader, Steps

Schema = dict[str, Any]
Tools = Mapping[str, Schema]
"""JSON schemas of the arguments, by name"""

Marker = Callable[[str], str]
"""how a grammar names a mark: as one token where the vocabulary has it, as text otherwise"""


class ToolFormat(Protocol):
    """A family's format."""

    @property
    def markers(self) -> tuple[str, ...]:
        """Tokens that a parser must see although they are special."""
        ...

    @property
    def markup(self) -> tuple[str, str | None] | None:
        """What calls stand between, as far as that can be told: the marks of each, or one that all stand behind."""
        ...

    def new_id(self) -> str: ...

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        """Reads an answer to a request that offers these tools."""
        ...

    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        """Lark grammar of one call, or of one or more, of these tools. `free`: of text, and then perhaps of calls."""
        ...

    def write(self, name: str, arguments: str) -> str:
        """A call as the model would write it. `arguments`: a JSON object."""
        ...


def call_object(name: str, arguments: str, key: str) -> str:
    return f'{{"name": {orjson.dumps(name).decode()}, "{key}": {arguments}}}'


# -- Lark


def after_mark(rules: str, begin: str, marker: Marker, *, free: bool) -> str:
    """A grammar from rules, of which `calls` is what stands behind the mark of the first call."""
    mark = marker(begin)
    if not free:
        start = f"start: {mark} calls"
    elif mark.startswith("<["):  # a token of its own is no text
        start = f"start: TEXT? | TEXT? {mark} calls\nTEXT: /(?s:.+)/"
    else:
        start = f"start: PLAIN? | head calls\n{ending('head', begin)}\nPLAIN: {without(begin)}"
    return f"{start}\n{rules}"


def at_start(rules: str, opening: str, *, free: bool) -> str:
    """A grammar from rules, of which `calls` is the whole answer. `opening`: the character that calls begin with, which
    then no text does."""
    if not free:
        return f"start: calls\n{rules}"
    return f"start: calls | PLAIN?\nPLAIN: /\\s*[^\\s{opening}](?s:.*)/\n{rules}"


def ending(rule: str, mark: str) -> str:
    """A Lark rule: any text, and this at its first occurrence."""
    return f"{rule}[lazy]: /(?s:.*)/ {literal(mark)}"


def through(rule: str, mark: str, marker: Marker) -> list[str]:
    """Lark: a rule of any text, and this at its first occurrence, which may be a token of its own."""
    if (end := marker(mark)).startswith("<["):
        return [f"{rule}: {rule.upper()}_TEXT? {end}", f"{rule.upper()}_TEXT: /(?s:.+)/"]
    return [ending(rule, mark)]


def without(mark: str) -> str:
    """A Lark terminal: text in which this does not occur."""
    return f"/(?s:.*)/ & ~(/(?s:.*)/ {literal(mark)} /(?s:.*)/)"


def call_rules(tools: Sequence[tuple[str, Schema]], key: str) -> str:
    """Lark rules: `call` is the object of any of these tools, its arguments under `key`."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, _) in enumerate(tools):
        head = "{" + f'"name": {literal(name)}, "{key}": '
        rules.append(f'call_{i}: {literal(head)} arguments_{i} "}}"')
    return "\n".join([*rules, argument_rules(tools)])


def argument_rules(tools: Sequence[tuple[str, Schema]]) -> str:
    """Lark rules `arguments_i`. A rule of its own each: a schema's references start at its own root."""
    return "\n".join(f"arguments_{i}: {json_value(schema)}" for i, (_, schema) in enumerate(tools))


INPUT_GRAMMAR = "x-weft-input-grammar"
"""in a schema of arguments that are one text, `input`: the name of the grammar of what it may be, in a JSON string"""


def json_value(schema: Schema) -> str:
    if (name := schema.get(INPUT_GRAMMAR)) is not None:
        return f'/\\{{[ \\n]{{0,8}}"input"[ \\n]{{0,8}}:[ \\n]{{0,8}}"/ @{name} /"[ \\n]{{0,8}}\\}}/'
    return f"%json {orjson.dumps(json_options(schema, lenient=True)).decode()}"
