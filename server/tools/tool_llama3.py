"""Llama 3: an answer that is one or more `{"name": …, "parameters": …}`, perhaps after `<|python_tag|>`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.server.tools.tool_format import Marker, ObjectParser, Part, ToolParser, call_object, call_rules, partial

TAG = "<|python_tag|>"


class Llama3Format:
    markers = (TAG,)
    markup: tuple[str, str | None] | None = None

    def parser(self, names: frozenset[str]) -> ToolParser:
        return _Llama3Parser(names)

    def grammar(self, tools: Sequence[tuple[str, dict[str, Any]]], _: Marker, *, several: bool) -> str:
        more = ' ("; " call)*' if several else ""
        return f"start: call{more}\n{call_rules(tools, 'parameters')}"

    def write(self, name: str, arguments: str) -> str:
        return call_object(name, arguments, "parameters")


class _Llama3Parser:
    """Nothing marks a call, so an object is one only when it names a tool that was offered."""

    def __init__(self, names: frozenset[str]) -> None:
        self._calls = ObjectParser(names=names)
        self._state = "start"
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest = text
        while rest:
            if self._state == "call":
                rest = self._read_call(rest, parts)
            elif self._state == "text":
                parts.append(rest)
                rest = ""
            else:
                rest = self._seek(self._held + rest, parts)
        return parts

    def flush(self) -> list[Part]:
        if self._state == "call" and not self._calls.told:
            return [self._held + self._calls.raw]
        if self._state == "start" and self._held and not self._calls.writer.count:
            return [self._held]
        return []

    def _seek(self, rest: str, parts: list[Part]) -> str:
        """Before a call: a tag, white space and semicolons are no text if a call follows."""
        body = rest.lstrip(" \t\r\n;" if self._calls.writer.count else " \t\r\n")
        self._held = rest
        if body.startswith(TAG):
            body = body.removeprefix(TAG).lstrip()
        if not body or partial(body, TAG) == len(body):
            return ""
        self._held = rest[: len(rest) - len(body)]
        if body.startswith("{"):
            self._state = "call"
            self._calls.begin()
            return body
        self._state = "text"
        parts.append(rest)
        return ""

    def _read_call(self, rest: str, parts: list[Part]) -> str:
        rest = rest[self._calls.feed(rest, parts) :]
        if self._calls.failed:
            parts.append(self._held + self._calls.raw)
            self._state, self._held = "text", ""
        elif self._calls.done or self._calls.broken:
            self._state, self._held = "start", ""
        return rest
