"""What a family's way of writing tool calls has to provide, and what its parsers share."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import orjson

from weft.engine.wire.grammar_text import json_options, literal
from weft.server.tools.tool_json import CallReader

_ID_CHARS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True)
class Call:
    """What is new in a call: its first part has the id and the name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


Part = str | Call
"""a piece of ordinary text, or of a call"""


class ToolParser(Protocol):
    """Splits one answer into text and calls, as it comes."""

    def feed(self, text: str) -> list[Part]: ...

    def flush(self) -> list[Part]:
        """The end: what was held back."""
        ...


Marker = Callable[[str], str]
"""how a grammar names a marker: as one token where the vocabulary has it, as text otherwise"""


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

    def parser(self, names: frozenset[str]) -> ToolParser:
        """For one answer to a request that offers these tools."""
        ...

    def grammar(self, tools: Sequence[tuple[str, dict[str, Any]]], marker: Marker, *, several: bool) -> str:
        """Lark grammar of one call, or of one or more, of these tools: (name, JSON schema of the arguments)."""
        ...

    def write(self, name: str, arguments: str) -> str:
        """A call as the model would write it. `arguments`: a JSON object."""
        ...


def call_object(name: str, arguments: str, key: str) -> str:
    return f'{{"name": {orjson.dumps(name).decode()}, "{key}": {arguments}}}'


def call_rules(tools: Sequence[tuple[str, dict[str, Any]]], key: str) -> str:
    """Lark rules: `call` is the object of any of these tools, its arguments under `key`."""
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(tools)))]
    for i, (name, _) in enumerate(tools):
        head = "{" + f'"name": {literal(name)}, "{key}": '
        rules.append(f'call_{i}: {literal(head)} arguments_{i} "}}"')
    return "\n".join([*rules, argument_rules(tools)])


def argument_rules(tools: Sequence[tuple[str, dict[str, Any]]]) -> str:
    """Lark rules `arguments_i`. A rule of its own each: a schema's references start at its own root."""
    schemas = [json_options(schema, lenient=True) for _, schema in tools]
    return "\n".join(f"arguments_{i}: %json {_dump(schema)}" for i, schema in enumerate(schemas))


def _dump(schema: dict[str, Any]) -> str:
    return orjson.dumps(schema).decode()


def short_id(length: int = 24, prefix: str = "call_") -> str:
    return prefix + "".join(secrets.choice(_ID_CHARS) for _ in range(length))


def partial(text: str, marker: str) -> int:
    """Length of the longest end of `text` that begins `marker` and is not all of it."""
    return next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)


class CallWriter:
    """Numbers calls, and says what is new in the one being read."""

    def __init__(self, new_id: Callable[[], str] = short_id) -> None:
        self.count = 0
        self._new_id = new_id

    def start(self, name: str) -> Call:
        self.count += 1
        return Call(self.count - 1, "", self._new_id(), name)

    def go_on(self, arguments: str) -> list[Part]:
        return [Call(self.count - 1, arguments)] if arguments else []


class ObjectParser:
    """Follows one call's object after another for the parsers of a family."""

    def __init__(self, new_id: Callable[[], str] = short_id, names: frozenset[str] | None = None) -> None:
        """`names`: an object with another name is no call."""
        self.writer = CallWriter(new_id)
        self._names = names
        self._reader = CallReader()
        self._told = False

    def begin(self) -> None:
        self._reader, self._told = CallReader(), False

    @property
    def done(self) -> bool:
        return self._reader.done

    @property
    def failed(self) -> bool:
        """This is no call; `raw` is text."""
        return not self._told and self._reader.failed

    @property
    def broken(self) -> bool:
        """It began as a call and did not go on as one."""
        return self._told and self._reader.failed

    @property
    def raw(self) -> str:
        return self._reader.raw

    @property
    def told(self) -> bool:
        """The client knows of this call."""
        return self._told

    def feed(self, text: str, parts: list[Part]) -> int:
        """Read on, and append what is new; returns how much of `text` was read."""
        reader = self._reader
        read = reader.feed(text)
        if reader.name is not None and not self._told:
            if self._names is not None and reader.name not in self._names:
                reader.failed = True
                return read
            parts.append(self.writer.start(reader.name))
            self._told = True
        parts += self.writer.go_on(reader.take_arguments())
        return read
