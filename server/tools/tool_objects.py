"""`ObjectFormat`: calls as JSON objects, `{"name": …, "arguments": {…}}`, or lists of them, after a mark.
`BareObjects`: answers that consist of such objects alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from weft.server.tools.stream import SPACE, Reader, Steps
from weft.server.tools.tool_format import (
    Marker,
    Schema,
    ToolFormat,
    Tools,
    after_mark,
    at_start,
    call_rules,
    either_number,
)


@dataclass(frozen=True)
class ObjectFormat(ToolFormat):
    begin: str
    end: str = ""
    listed: bool = False  # Whether the model writes a list. Both forms are read.
    also: tuple[str, ...] = ()  # Alternative marks before calls.
    pad: str = ""  # White space between the marks and the object.

    @property
    def markers(self) -> tuple[str, ...]:
        return tuple(filter(None, (self.begin, self.end, *self.also)))

    @property
    def opens(self) -> tuple[str, ...]:
        return either_number(self.begin, *self.also)

    @property
    def markup(self) -> tuple[str, str | None] | None:
        return self.begin, self.end or None

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        begins, all_ends = self.opens, either_number(self.end)
        ends: tuple[str, ...] = ()
        wrapped = False  # Whether a mark surrounds all calls, in addition to those of each call.
        while mark := (yield from reader.text_until(*begins, *ends)):
            if mark in ends:
                reader.accept()
                ends, wrapped = (), False
                continue
            yield from reader.space()
            wrapped |= bool((yield from reader.take(*begins)))
            if (yield from read_objects(reader, tools, all_ends, begins)) or wrapped:
                ends = all_ends

    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        pad = f" {_text(self.pad)} " if self.pad else " "
        end = f"{pad}{marker(self.end)}" if self.end else ""
        if self.listed:
            more = ' (", " call)*' if several else ""
            rules = f'calls: "["{pad}call{more}{pad}"]"{end}'
        else:
            more = f' ("\\n" {marker(self.begin)} one)*' if several else ""
            rules = f"calls: one{more}\none:{pad}call{end}"
        return after_mark(f"{rules}\n{call_rules(tools, 'arguments')}", self.begin, marker, free=free)

    def write(self, name: str, arguments: str) -> str:
        call = _call_object(name, arguments, "arguments")
        return f"{self.begin}{self.pad}{f'[{call}]' if self.listed else call}{self.pad}{self.end}"


def read_objects(reader: Reader, tools: Tools, ends: Sequence[str], begins: Sequence[str]) -> Steps[bool]:
    """Read an object, or several of them, after a mark. Returns whether one of the marks `ends` is still missing.
    Outside a list, a second object counts only if it names an offered tool."""
    fence = yield from reader.fence()
    yield from reader.space()
    listed = yield from reader.take("[")
    found = False
    while True:
        if found:
            reader.attempt()
        yield from reader.space(SPACE + ",}" if listed else SPACE)
        if (yield from reader.peek()) != "{":
            break
        if (yield from reader.take("{{")):  # a doubled bracket, as in text of a Python format
            reader.at -= 1
        names = frozenset(tools) if found and not listed else None
        if not (yield from reader.object_call(*ends, *begins, names=names)):
            reader.give_up()
            return found and bool(ends)
        found = True
        if not listed:
            yield from reader.surplus(*filter(None, (fence, *ends)), *begins)
            if not ends:
                break
    if not found:
        reader.give_up()
        return False
    if reader.trying:
        reader.back()
    if listed:
        yield from reader.space(SPACE + "}")
        yield from reader.take("]")
    if fence:
        yield from reader.space()
        yield from reader.take(fence)
    if ends:
        yield from reader.space()
    return bool(ends) and not (yield from reader.take(*ends))


def _call_object(name: str, arguments: str, key: str) -> str:
    return f'{{"name": {orjson.dumps(name).decode()}, "{key}": {arguments}}}'


def _text(text: str) -> str:
    return '"' + text.replace("\n", "\\n") + '"'


@dataclass(frozen=True)
class BareObjects(ToolFormat):
    """Llama 3: one or more `{"name": …, "parameters": …}` separated by semicolons or in a list, optionally after a tag.
    Nothing marks a call, so an object counts as a call only if it names an offered tool."""

    tag: str = "<|python_tag|>"
    key: str = "parameters"

    @property
    def markers(self) -> tuple[str, ...]:
        return (self.tag,)

    @property
    def opens(self) -> tuple[str, ...]:
        return self.tag, "{"

    @property
    def marked(self) -> bool:
        return False

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        between = SPACE
        while True:
            reader.attempt()
            yield from reader.space(between)
            yield from reader.take(self.tag)
            yield from reader.space(SPACE if reader.calls else f"{SPACE}[")
            if (yield from reader.peek()) != "{" or not (yield from reader.object_call(names=frozenset(tools))):
                break
            yield from reader.surplus(";", self.tag)
            between = SPACE + ";,"
        at_end = not (yield from reader.peek())
        reader.give_up(forget=between if reader.calls and at_end else "")
        yield from reader.text_to_end()

    def grammar(self, tools: Sequence[tuple[str, Schema]], _: Marker, *, several: bool, free: bool = False) -> str:
        more = ' ("; " call)*' if several else ""
        return at_start(f"calls: call{more}\n{call_rules(tools, self.key)}", "{<", free=free)

    def write(self, name: str, arguments: str) -> str:
        return _call_object(name, arguments, self.key)
