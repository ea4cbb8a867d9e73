"""`NamedFormat`: calls as a name followed by a JSON object, between marks: DeepSeek, Kimi, Mistral since v11."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from weft.engine.wire.grammar_text import literal
from weft.server.tools.stream import SPACE, Reader, Steps, short_id
from weft.server.tools.tool_format import Marker, Schema, ToolFormat, Tools, after_mark, argument_rules, either_number
from weft.server.tools.tool_objects import ObjectFormat, read_objects


@dataclass(frozen=True)
class NamedFormat(ToolFormat):
    begin: str  # Mark before a call.
    name_end: str
    end: str = ""  # Mark after a call.
    section: tuple[str, str] = ("", "")  # Marks around all calls.
    prefix: str = ""  # Text before the name.
    fence: tuple[str, str] = ("", "")  # Texts around the arguments.
    separator: str = ""  # Text between calls.
    numbered: bool = False  # Whether a number follows the name; together they are the call's ID.

    @property
    def markers(self) -> tuple[str, ...]:
        parts = (*self.section, self.begin, self.end, self.name_end.strip(), *_MARK.findall(self.prefix))
        return tuple(filter(None, parts))

    @property
    def markup(self) -> tuple[str, str | None] | None:
        return self.section if self.section[0] else (self.begin, self.end or None)

    @property
    def opens(self) -> tuple[str, ...]:
        return (*either_number(self.section[0]), self.begin)

    @property
    def _closes(self) -> tuple[str, ...]:
        return (*either_number(self.section[1]), self.end)

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        opens, closes = self.opens, self._closes
        open = False
        while mark := (yield from reader.text_until(*opens, *(closes if open else ()))):
            if mark in closes:
                reader.accept()
                open = mark == self.end and bool(self.section[1])
                continue
            yield from reader.space()
            if mark != self.begin and (yield from reader.take(*either_number(self.section[1]))):  # no calls
                reader.accept()
                continue
            yield from reader.take(self.begin)
            open |= yield from self._call(reader, tools)
            while open and (yield from reader.attempt_after_space(self.begin)):  # anything else is text
                yield from self._call(reader, tools)

    def _call(self, reader: Reader, tools: Tools) -> Steps[bool]:
        """Read a call from its name on. Returns False if it is text."""
        yield from reader.space()
        yield from reader.take(self.prefix, *([] if "function" in tools else [_TYPED]))
        stops = (*self._closes, *self.opens)
        name, mark = yield from reader.name(self.name_end, "{", _FENCE, *stops, names=tools)
        if mark != self.name_end:
            reader.at -= len(mark)
            name = _MARK.sub("", name)
        id, name = name.strip(), name.strip()
        if self.numbered:
            name = _NUMBER.sub("", id).removeprefix("functions.")
        fence = (yield from reader.fence()) or self.fence[1].strip()
        stops = (*stops, _FENCE)
        if not name or any(char in name for char in SPACE) or not (yield from reader.arguments_follow(*stops)):
            reader.give_up()
            return False
        reader.call(name, id if self.numbered and id != name else None)
        yield from reader.arguments(*stops)
        yield from reader.surplus(*stops)
        for mark in (fence, self.end):
            yield from reader.space()
            if not (yield from reader.take(mark)) and reader.rest_begins(mark):
                reader.at = len(reader.text)
        return True

    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        def call(i: int, name: str) -> str:
            parts = [*_pieces(self.prefix, marker)]
            if self.numbered:
                parts += [literal(f"functions.{name}:"), "NUMBER"]
            else:
                parts.append(literal(name))
            parts += [marker(self.name_end), *_pieces(self.fence[0], marker), f"arguments_{i}"]
            return " ".join([*parts, *_pieces(self.fence[1], marker), *([marker(self.end)] if self.end else [])])

        between = " ".join([*_pieces(self.separator, marker), marker(self.begin)])
        first = f"{marker(self.begin)} " if self.section[0] else ""
        last = f" {marker(self.section[1])}" if self.section[1] else ""
        more = f" ({between} call)*" if several else ""
        rules = f"calls: {first}call{more}{last}\ncall: " + " | ".join(
            call(i, name) for i, (name, _) in enumerate(tools)
        )
        if self.numbered:
            rules += "\nNUMBER: /[0-9]{1,4}/"
        return after_mark(f"{rules}\n{argument_rules(tools)}", self.section[0] or self.begin, marker, free=free)

    def write(self, name: str, arguments: str) -> str:
        name = f"functions.{name}:0" if self.numbered else name
        call = f"{self.begin}{self.prefix}{name}{self.name_end}{self.fence[0]}{arguments}{self.fence[1]}{self.end}"
        return f"{self.section[0]}{call}{self.section[1]}"


_MARK = re.compile(r"<[^<>]+>")
_TYPED = "function<｜tool▁sep｜>"  # DeepSeek's V3 writes it before the name, later models by mistake.
_FENCE = "```"
_NUMBER = re.compile(r":\d+$")


def _pieces(text: str, marker: Marker) -> list[str]:
    """Return a text as a Lark sequence, with its marks as tokens."""
    out = []
    for piece in re.split(f"({_MARK.pattern})", text):
        if piece:
            out.append(marker(piece) if _MARK.fullmatch(piece) else literal(piece))
    return out


BEGIN, ARGS, CALL_ID = "[TOOL_CALLS]", "[ARGS]", "[CALL_ID]"
_LIST = ObjectFormat(BEGIN, listed=True)
_NAMED = NamedFormat(BEGIN, ARGS)


@dataclass(frozen=True)
class MistralFormat(ToolFormat):
    """`[TOOL_CALLS]` and a list of objects, or in newer models `[TOOL_CALLS]name[ARGS]{…}` for each call."""

    has_args: bool
    """Whether the vocabulary has `[ARGS]`, so that the model writes the newer form. Both forms are read."""
    markers: tuple[str, ...] = (BEGIN, ARGS, CALL_ID)
    markup: tuple[str, str | None] | None = (BEGIN, None)

    @property
    def opens(self) -> tuple[str, ...]:
        return either_number(BEGIN)

    def new_id(self) -> str:
        return short_id(9, "")  # Mistral's templates require nine characters

    def steps(self, reader: Reader, tools: Tools) -> Steps[None]:
        while (yield from reader.text_until(*self.opens)):
            yield from reader.space()
            if (yield from reader.peek()) in ("[", "{"):
                yield from read_objects(reader, tools, (), self.opens)
            else:
                yield from self._named(reader, tools)

    def _named(self, reader: Reader, tools: Tools) -> Steps[None]:
        """Read a call. The model's own ID, if any, is ignored."""
        name, mark = yield from reader.name(ARGS, CALL_ID, "{", *self.opens, names=tools)
        if mark == CALL_ID:
            _, mark = yield from reader.name(ARGS, "{", *self.opens)
        if mark != ARGS:
            reader.at -= len(mark)
        name = name.strip()
        fence = yield from reader.fence()
        if not name or any(char in name for char in SPACE) or not (yield from reader.arguments_follow(*self.opens)):
            reader.give_up()
            return
        reader.call(name)
        yield from reader.arguments(*self.opens)
        if fence:
            yield from reader.space()
            yield from reader.take(fence)
        yield from reader.surplus(*self.opens)

    def grammar(self, tools: Sequence[tuple[str, Schema]], marker: Marker, *, several: bool, free: bool = False) -> str:
        form = _NAMED if self.has_args else _LIST
        return form.grammar(tools, marker, several=several, free=free)

    def write(self, name: str, arguments: str) -> str:
        return (_NAMED if self.has_args else _LIST).write(name, arguments)
