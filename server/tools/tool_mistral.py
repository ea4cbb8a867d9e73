"""Mistral: `[TOOL_CALLS]` and a list of objects, or in newer models `[TOOL_CALLS]name[ARGS]{…}` for each call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.engine.wire.grammar_text import literal
from weft.server.tools.tool_format import (
    CallWriter,
    Marker,
    ObjectParser,
    Part,
    ToolParser,
    argument_rules,
    call_object,
    call_rules,
    partial,
    short_id,
)
from weft.server.tools.tool_json import JsonValue

BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"


def mistral_id() -> str:
    """Mistral's templates want nine characters."""
    return short_id(9, "")


class MistralFormat:
    markers = (BEGIN, ARGS, CALL_ID)
    markup: tuple[str, str | None] | None = (BEGIN, None)

    def __init__(self, *, has_args: bool) -> None:
        """has_args: the vocabulary has `[ARGS]`, so the model writes the newer form."""
        self._has_args = has_args

    def parser(self, _: frozenset[str]) -> ToolParser:
        return _MistralParser()

    def grammar(self, tools: Sequence[tuple[str, dict[str, Any]]], marker: Marker, *, several: bool) -> str:
        if not self._has_args:
            more = ' (", " call)*' if several else ""
            return f'start: {marker(BEGIN)} "[" call{more} "]"\n{call_rules(tools, "arguments")}'
        calls = " | ".join(f"{literal(name)} {marker(ARGS)} arguments_{i}" for i, (name, _) in enumerate(tools))
        more = "+" if several else ""
        return f"start: marked{more}\nmarked: {marker(BEGIN)} call\ncall: {calls}\n{argument_rules(tools)}"

    def write(self, name: str, arguments: str) -> str:
        if self._has_args:
            return f"{BEGIN}{name}{ARGS}{arguments}"
        return f"{BEGIN}[{call_object(name, arguments, 'arguments')}]"


class _MistralParser:
    def __init__(self) -> None:
        self._calls = ObjectParser(mistral_id)
        self._arguments = JsonValue()
        self._state = "text"
        self._held = ""

    @property
    def _writer(self) -> CallWriter:
        return self._calls.writer

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest = self._held + text
        self._held = ""
        step = {
            "text": self._seek,
            "begin": self._begin,
            "list": self._read_list,
            "call": self._read_call,
            "name": self._read_name,
            "arguments": self._read_arguments,
        }
        while rest:
            rest = step[self._state](rest, parts)
        return parts

    def flush(self) -> list[Part]:
        if self._state == "text":
            return [self._held] if self._held else []
        if self._state in ("begin", "name") and not self._writer.count:
            return [BEGIN + self._held]
        if self._state == "call" and not self._calls.told and not self._writer.count:
            return [BEGIN + "[" + self._calls.raw]
        return []

    def _seek(self, rest: str, parts: list[Part]) -> str:
        before, found, after = rest.partition(BEGIN)
        if not found:
            held = partial(rest, BEGIN)
            before, self._held = rest[: len(rest) - held], rest[len(rest) - held :]
        if self._writer.count and not before.strip():
            before = ""
        if before:
            parts.append(before)
        if found:
            self._state = "begin"
        return after

    def _begin(self, rest: str, _: list[Part]) -> str:
        rest = rest.lstrip()
        if rest:
            self._state = "list" if rest[0] == "[" else "name"
        return rest[1:] if self._state == "list" else rest

    def _read_list(self, rest: str, _: list[Part]) -> str:
        rest = rest.lstrip(" \t\r\n,")
        if rest.startswith("]"):
            self._state = "text"
            return rest[1:]
        if rest:
            self._calls.begin()
            self._state = "call"
        return rest

    def _read_call(self, rest: str, parts: list[Part]) -> str:
        rest = rest[self._calls.feed(rest, parts) :]
        if self._calls.failed:
            parts.append(self._calls.raw)
            self._state = "text"
        elif self._calls.broken:
            self._state = "text"
        elif self._calls.done:
            self._state = "list"
        return rest

    def _read_name(self, rest: str, parts: list[Part]) -> str:
        """Up to the arguments' brace; there may be an id of the model's own, which is not used."""
        at = rest.find("{")
        if at < 0:
            self._held = rest
            return ""
        name = rest[:at].partition(ARGS)[0].partition(CALL_ID)[0].strip()
        if not name:
            parts.append(BEGIN + rest[: at + 1])
            self._state = "text"
            return rest[at + 1 :]
        parts.append(self._writer.start(name))
        self._arguments = JsonValue()
        self._state = "arguments"
        return rest[at:]

    def _read_arguments(self, rest: str, parts: list[Part]) -> str:
        end = self._arguments.feed(rest, 0)
        parts += self._writer.go_on(rest[:end])
        if self._arguments.complete:
            self._state = "text"
        return rest[end:]
