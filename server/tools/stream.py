"""`Reader` reads a streamed answer from one generator; `StreamParser` splits it into text, thoughts and calls.

All formats share this core. A format is a generator function that reads the answer as if it were complete; it waits in
a `yield` for missing text. So a parser needs no states, and chunk boundaries do not matter. Every character becomes
text, thought or arguments, or belongs to a mark; white space next to a mark belongs to the mark. Text that starts like
a call but does not continue as one stays text.
"""

from __future__ import annotations

import json
import re
import secrets
import string
from collections.abc import Callable, Container, Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from weft.server.tools.tool_json import CallReader, JsonValue, as_arguments

T = TypeVar("T")
Steps = Generator[None, None, T]
"""A parsing step. It yields to wait for more text; after the end of the answer it no longer waits."""

SPACE = " \t\r\n"
_HELD = frozenset(SPACE)
MAX_NAME = 256  # Maximum characters of a name.
MAX_LOOKED = 20_000
"""Marks of an answer that are looked at before it is known what they are: limits the work for marks without end."""


@dataclass(frozen=True, slots=True)
class Call:
    """A piece of a call. The first piece has the id and the name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of the model's reasoning."""

    text: str


Part = str | Thought | Call  # A piece of text, reasoning or a call.

Sink = Callable[[str], None]


def short_id(length: int = 24, prefix: str = "call_") -> str:
    """Return a new ID of a tool call."""
    return prefix + "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(length))


class Reader:
    """Buffers unread text and collects the parts."""

    def __init__(self, new_id: Callable[[], str] = short_id) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.cut = False
        """Whether the answer was cut off, so that calls stay incomplete. Otherwise missing brackets are added."""
        self.broken = False  # Whether something that is no part of a call interrupted one.
        self.strays: tuple[str, ...] = ()
        """Marks to drop once from the text: ends of reasoning that a call interrupted."""
        self.calls = 0
        self.looked = 0  # Marks that were looked at before it was known what they are.
        self._new_id = new_id
        self._parts: list[Part] = []
        self._tried: int | None = None  # Start of a tentative call; None if there is none.
        self._gap: list[str] = []  # Pending white space, which is emitted if text follows.
        self._quiet = False  # Whether a mark was read last, so that trailing white space belongs to it.
        self._trims = False  # Whether white space before the next text belongs to a mark.
        self._thinking = False
        self._thoughts = False  # Whether any reasoning was emitted.
        self._open: re.Pattern[str] | None = None
        """While plain text passes through: matches characters that could start a mark."""

    # -- input

    def more(self) -> Steps[bool]:
        """Wait for text. Returns False at the end of the answer."""
        if self.ended:
            return False
        yield
        return True

    def passes(self, text: str) -> bool:
        """Return whether a piece of text can bypass the reader, because it would be emitted unchanged."""
        if self._open is None or self._gap or self._trims or self._quiet:
            return False
        return text[-1:] not in _HELD and self._open.search(text) is None

    def extend(self, text: str) -> None:
        self._open = None
        start = self.at if self._tried is None else self._tried
        self.text = self.text[start:] + text
        self.at -= start
        if self._tried is not None:
            self._tried = 0

    def take_parts(self) -> list[Part]:
        parts, self._parts = self._parts, []
        return parts

    # -- reading

    def space(self, chars: str = SPACE) -> Steps[None]:
        """Skip white space."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in chars:
                self.at += 1
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def peek(self) -> Steps[str]:
        """Return the next character; empty at the end."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def take(self, *marks: str) -> Steps[str]:
        """Skip and return the longest of these marks that comes next; empty if none does."""
        longest = max(map(len, marks), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            if any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks) and (yield from self.more()):
                continue
            found = max((mark for mark in marks if mark and rest.startswith(mark)), key=len, default="")
            self.at += len(found)
            return found

    def until(self, *marks: str, to: Sink) -> Steps[str]:
        """Send text up to the first of these marks to `to`, and skip the mark. Returns it; empty at the end."""
        while True:
            at, mark, waits = _find(self.text, self.at, marks, final=self.ended)
            if self.ended and self.calls and self._quiet and to == self.emit_text and self.rest_begins(*marks):
                self.at = len(self.text)
                return ""
            if at > self.at:
                to(self.text[self.at : at])
            self.at = at + len(mark)
            if mark and not waits:
                return mark
            self.at = at
            if at == len(self.text) and to == self.emit_text:
                self._open = _beginnings(marks)
            if not (yield from self.more()):
                return ""

    def rest_begins(self, *marks: str) -> bool:
        """Return whether the answer ends with only a part of one of these marks."""
        rest = self.text[self.at :].strip(SPACE)
        return self.ended and bool(rest) and rest not in marks and any(mark.startswith(rest) for mark in marks)

    def name(self, *marks: str, names: Container[str] = ()) -> Steps[tuple[str, str]]:
        """Skip and return a name and the mark after it; ("", "") without skipping if there is none. `names`: names that
        the end of the answer may also end."""
        while True:
            at, mark, waits = _find(self.text, self.at, marks, final=self.ended)
            if at - self.at > MAX_NAME:
                return "", ""
            if mark and not waits:
                name = self.text[self.at : at]
                self.at = at + len(mark)
                return name, mark
            if not (yield from self.more()):
                if self.cut or (name := self.text[self.at :].strip()) not in names:
                    return "", ""
                self.at = len(self.text)
                return name, ""

    def fence(self) -> Steps[str]:
        """Skip white space and the beginning of a code fence around JSON. Returns the mark that ends the fence."""
        yield from self.space()
        return "```" if (yield from self.take("```json", "```")) else ""

    def match(self, pattern: re.Pattern[str]) -> Steps[re.Match[str] | None]:
        """Return the match at this position without skipping it. Waits while it could become longer."""
        while True:
            found = pattern.match(self.text, self.at)
            if (found is None or found.end() < len(self.text)) and self.at < len(self.text):
                return found
            if not (yield from self.more()):
                return found

    def json(self, to: Sink, *stops: str) -> Steps[None]:
        """Send a JSON value, repaired, to `to`. `stops`: marks that end it even if brackets are missing."""
        value = JsonValue(*stops)
        while not value.complete:
            self.at = value.feed(self.text, self.at, final=self.ended)
            self.broken |= value.broken
            to(value.take())
            if not value.complete and not (yield from self.more()):
                to("" if self.cut else value.close())
                return

    def arguments_follow(self, *stops: str) -> Steps[bool]:
        """Return whether arguments come next, which may be null or absent. Skips white space."""
        yield from self.space()
        if not (yield from self.peek()):
            return not self.cut
        mark = yield from self.take("{", '"', "[]", "null", "None", *stops)
        self.at -= len(mark)
        return bool(mark)

    def arguments(self, *stops: str) -> Steps[None]:
        """Emit the arguments of a call: a JSON object, a string of JSON, or nothing. `stops`: marks that end them."""
        if (yield from self.peek()) == "{":
            yield from self.json(self.emit_arguments, *stops)
            return
        found: list[str] = []
        if mark := (yield from self.take(*stops)):
            self.at -= len(mark)
        elif (yield from self.peek()):
            yield from self.json(found.append, *stops)
        if found or not (self.cut and self.at == len(self.text)):
            self.emit_arguments(as_arguments("".join(found)))

    def surplus(self, *stops: str) -> Steps[None]:
        """Skip closing brackets that are left over before one of these marks or the end of the answer."""
        self.attempt()
        yield from self.space(f"{SPACE}}}]")
        mark = yield from self.take(*stops)
        if not mark and (yield from self.peek()):
            self.back()
            return
        self.at -= len(mark)
        self.accept()

    def object_call(self, *stops: str, names: frozenset[str] | None = None) -> Steps[bool]:
        """Read a call as an object with a name and arguments. Returns whether it was, or began as, a call. `stops`:
        marks that end it even if brackets are missing. `names`: names that count as calls; None for all."""
        reader, named = CallReader(*stops), False
        while True:
            self.at += reader.feed(self.text, self.at, final=self.ended)
            if reader.name is not None and not named:
                if names is not None and reader.name not in names:
                    return False
                self.call(reader.name)
                named = True
            self.emit_arguments(reader.take_arguments())
            self.broken |= reader.broken
            if reader.done or reader.failed:
                return named
            if not (yield from self.more()):
                if named and not self.cut:
                    reader.close()
                    self.emit_arguments(reader.take_arguments())
                return named

    # -- output

    def text_until(self, *marks: str) -> Steps[str]:
        """Emit text up to one of these marks, which tentatively starts a call. Returns it; empty at the end."""
        mark = yield from self.until(*marks, *self.strays, to=self.emit_text)
        while mark and mark in self.strays:
            self.end_thought()
            self.strays = ()
            mark = yield from self.until(*marks, to=self.emit_text)
        self._tried = self.at - len(mark) if mark else None
        return mark

    def text_to_end(self) -> Steps[None]:
        """Emit everything that follows as text."""
        if self.strays:
            yield from self.text_until()
            return
        while True:
            self.emit_text(self.text[self.at :])
            self.at = len(self.text)
            self._open = _beginnings(())
            if not (yield from self.more()):
                return

    def attempt(self) -> None:
        """Start a tentative call here."""
        self._tried = self.at

    def give_up(self, *, forget: str = "") -> None:
        """Emit a tentative call as text. `forget`: drop it if it only has these characters."""
        assert self._tried is not None
        text, self._tried = self.text[self._tried : self.at], None
        if text.strip(forget or None) or not forget:
            self.emit_text(text)

    @property
    def trying(self) -> bool:
        """Whether a tentative call has started."""
        return self._tried is not None

    @property
    def tried_length(self) -> int:
        """Characters read since the start of a tentative call."""
        assert self._tried is not None
        return self.at - self._tried

    @tried_length.setter
    def tried_length(self, length: int) -> None:
        assert self._tried is not None
        self.at = self._tried + length

    def back(self) -> None:
        """Rewind to the start of a tentative call."""
        assert self._tried is not None
        self.at, self._tried = self._tried, None

    def attempt_after_space(self, mark: str) -> Steps[bool]:
        """Start a tentative call at white space and `mark`, and skip both. Returns False, without skipping, if there is
        no mark."""
        self.attempt()
        yield from self.space()
        if not (yield from self.take(mark)):
            self.back()
            return False
        return True

    def accept(self) -> None:
        """Confirm a tentative call or mark."""
        self._tried = None
        self._quiet, self._gap = True, []

    def emit_text(self, text: str) -> None:
        if self._trims and not (text := text.lstrip(SPACE)):
            return
        if shown := self._shown(text):
            self._trims = self._quiet = False
            self._parts.append(shown)

    def emit_thought(self, text: str) -> None:
        if not self._thinking:
            text = text.lstrip(SPACE)
        if shown := self._shown(text):
            first = not self._thinking and self._thoughts
            self._parts.append(Thought(f"\n\n{shown}" if first else shown))
            self._thinking = self._thoughts = True

    def begin_thought(self) -> None:
        """Start a new paragraph of reasoning."""
        self._gap, self._thinking = [], False

    def end_thought(self) -> None:
        """End the reasoning."""
        self._gap, self._trims, self._thinking = [], True, False

    def call(self, name: str, id: str | None = None) -> None:
        self.accept()
        self._trims = False
        self._parts.append(Call(self.calls, "", id or self._new_id(), name))
        self.calls += 1

    def emit_arguments(self, arguments: str) -> None:
        if arguments:
            self._parts.append(Call(self.calls - 1, arguments))

    def end(self) -> None:
        """Finish: emit pending white space that is text."""
        if self._gap and not self._quiet and not self._trims and not self._thinking:
            self._parts.append("".join(self._gap))
        self._gap = []

    def _shown(self, text: str) -> str:
        """Return the text to emit now and hold back trailing white space. White space is kept in pieces until text
        follows: a model may emit it without end."""
        shown = text.rstrip(SPACE)
        rest = [text[len(shown) :]] if len(text) > len(shown) else []
        if not shown:
            self._gap += rest
            return ""
        shown, self._gap = "".join([*self._gap, shown]), rest
        return shown


class StreamParser:
    """Splits one streamed answer into text, thoughts and calls."""

    def __init__(self, steps: Callable[[Reader], Steps[None]], new_id: Callable[[], str] = short_id) -> None:
        self._reader = Reader(new_id)
        self._steps = steps(self._reader)
        self._over = False
        self._resume()

    def feed(self, text: str) -> list[Part]:
        if self._over:
            return [text] if text else []
        self._reader.extend(text)
        self._resume()
        return self._reader.take_parts()

    @property
    def broken(self) -> bool:
        """Whether something that is no part of a call interrupted one."""
        return self._reader.broken

    def passes(self, text: str) -> bool:
        """Return whether this text can bypass `feed`, because it would be emitted unchanged."""
        return self._over or self._reader.passes(text)

    def flush(self, *, cut: bool = False) -> list[Part]:
        """End the answer and return the output held back. `cut`: it was cut off before the model ended it."""
        self._reader.ended, self._reader.cut = True, cut
        while not self._over:
            self._resume()
        self._reader.end()
        return self._reader.take_parts()

    def _resume(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._over = True


def call_follows(
    reader: Reader,
    steps: Callable[[Reader], Steps[None]],
    names: Container[str],
    ends: tuple[str, ...],
    *,
    marked: bool,
) -> Steps[bool]:
    """Return whether a call begins here, inside reasoning: a call of one of these tools that is complete, or that the
    answer ends with. Skips nothing. `steps`: reads the call. `ends`: marks after the reasoning. `marked`: False if no
    mark starts a call, so that it must be the end of the answer."""
    reader.attempt()
    trial, arguments = StreamParser(steps), JsonValue()
    result, found, over = None, False, False
    while result is None and not over:
        at, mark, waits = _find(reader.text, reader.at, ends, final=reader.ended)
        closed = bool(mark) and not waits
        over = closed or reader.ended
        # character by character, so that the result does not depend on how the answer is split
        pieces = [*reader.text[reader.at : at], *([None] if over else [])]
        reader.at = at
        for piece in pieces:
            for part in trial.flush(cut=closed or reader.cut) if piece is None else trial.feed(piece):
                if not isinstance(part, Call):
                    result = False if not (found and marked) and str(part).strip() else result
                elif part.name is not None and part.name not in names:
                    result = False if result is None else result
                else:
                    found = True
                    arguments.feed(part.arguments)
            if result is None and arguments.complete and marked and not trial.broken:
                result = True
            if result is not None:
                break
        else:
            if not over:
                yield from reader.more()
    reader.back()
    return found and not closed if result is None else result


def _find(text: str, at: int, marks: tuple[str, ...], *, final: bool) -> tuple[int, str, bool]:
    """Find the first mark from `at` on: (index, mark or "", whether more text could change it)."""
    found = _pattern(marks).search(text, at)
    hit = found.start() if found else len(text)
    if not final:
        longest = max(map(len, marks), default=0)
        for i in range(max(at, len(text) - longest + 1), min(hit + 1, len(text))):
            tail = text[i:]
            if any(len(mark) > len(tail) and mark.startswith(tail) for mark in marks):
                return i, "", True
    return hit, found.group() if found else "", False


@lru_cache(256)
def _beginnings(marks: tuple[str, ...]) -> re.Pattern[str]:
    """Return a pattern of the first characters of these marks."""
    return re.compile("|".join(sorted({re.escape(mark[0]) for mark in marks if mark})) or r"(?!)")


@lru_cache(256)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(filter(None, marks), key=len, reverse=True))) or r"(?!)")


def drop(_: str) -> None:
    """Ignore text that is only looked at."""


def quoted(text: str) -> str:
    """Escape text for a JSON string, without the quotes."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
