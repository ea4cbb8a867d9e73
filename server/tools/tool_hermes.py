"""Hermes and Qwen: `<tool_call>{"name": …, "arguments": …}</tool_call>`, any number, after any text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from weft.server.tools.tool_format import Marker, ObjectParser, Part, ToolParser, call_object, call_rules, partial

BEGIN, END = "<tool_call>", "</tool_call>"


class HermesFormat:
    markers = (BEGIN, END)
    markup: tuple[str, str | None] | None = (BEGIN, END)

    def parser(self, _: frozenset[str]) -> ToolParser:
        return _HermesParser()

    def grammar(self, tools: Sequence[tuple[str, dict[str, Any]]], marker: Marker, *, several: bool) -> str:
        more = ' ("\\n" wrapped)*' if several else ""
        wrapped = f'wrapped: {marker(BEGIN)} "\\n" call "\\n" {marker(END)}'
        return f"start: wrapped{more}\n{wrapped}\n{call_rules(tools, 'arguments')}"

    def write(self, name: str, arguments: str) -> str:
        return f"{BEGIN}\n{call_object(name, arguments, 'arguments')}\n{END}"


class _HermesParser:
    def __init__(self) -> None:
        self._calls = ObjectParser()
        self._state = "text"
        self._held = ""

    def feed(self, text: str) -> list[Part]:
        parts: list[Part] = []
        rest = self._held + text
        self._held = ""
        while rest:
            if self._state == "call":
                rest = self._read_call(rest, parts)
            else:
                rest = self._seek(rest, parts)
        return parts

    def flush(self) -> list[Part]:
        if self._state == "call" and not self._calls.told:
            return [BEGIN + self._calls.raw]
        return [self._held] if self._state == "text" and self._held else []

    def _seek(self, rest: str, parts: list[Part]) -> str:
        """Text up to the next marker: shown between calls, dropped inside one."""
        inside = self._state == "end"
        marker = END if inside else BEGIN
        before, found, after = rest.partition(marker)
        if not found:
            held = partial(rest, marker)
            before, self._held = rest[: len(rest) - held], rest[len(rest) - held :]
        if self._calls.writer.count and not before.strip():
            before = ""  # line breaks between calls
        if before and not inside:
            parts.append(before)
        if found:
            self._state = "text" if inside else "call"
            self._calls.begin()
        return after

    def _read_call(self, rest: str, parts: list[Part]) -> str:
        rest = rest[self._calls.feed(rest, parts) :]
        if self._calls.failed:
            parts.append(BEGIN + self._calls.raw)
            self._state = "text"
        elif self._calls.done or self._calls.broken:
            self._state = "end"
        return rest
