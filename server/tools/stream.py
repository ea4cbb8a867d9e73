"""`Reader`: an answer as it comes, read by one generator; `StreamParser`: what turns pieces of text into parts.

The one core of all formats. A format is a generator function that reads the answer from beginning to end as if it were
all there; where text is missing it waits in a `yield`. So a parser has no states of its own, and where the pieces were
cut makes no difference. Every character becomes text, thought or arguments, or belongs to marks; white space beside
marks belongs to them. What begins like a call and does not go on as one is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeVar

from weft.server.tools.call_ids import short_id
from weft.server.tools.tool_json import CallReader, JsonValue

T = TypeVar("T")
Steps = Generator[None, None, T]
"""Reads on; yields where it needs more text. At the end it is resumed once more, and waits no longer."""

SPACE = " \t\r\n"
_HELD = frozenset(SPACE)
MAX_NAME = 256
"""characters of a name, and of what stands for one"""


@dataclass(frozen=True, slots=True)
class Call:
    """What is new in a call: its first part has the id and the name."""

    index: int
    arguments: str
    id: str | None = None
    name: str | None = None


@dataclass(frozen=True, slots=True)
class Thought:
    """A piece of what the model thinks before it answers."""

    text: str


Part = str | Thought | Call
"""a piece of ordinary text, of thinking, or of a call"""

Say = Callable[[str], None]


class Reader:
    """Text that was not read yet, and the parts that came of what was."""

    def __init__(self, new_id: Callable[[], str] = short_id) -> None:
        self.text = ""
        self.at = 0
        self.ended = False
        self.calls = 0
        self._new_id = new_id
        self._parts: list[Part] = []
        self._tried: int | None = None
        """where something begins that may be no call"""
        self._gap: list[str] = []
        """white space that is text if text follows it, as it came"""
        self._quiet = False
        """a mark was read last: white space at the end belongs to it"""
        self._trims = False
        """white space before the next text belongs to a mark"""
        self._thinking = False
        self._thoughts = False
        """there were some"""
        self._open: re.Pattern[str] | None = None
        """while the reader waits for text to be handed over as it is: what could begin a mark in it"""

    # -- what comes in

    def more(self) -> Steps[bool]:
        """Wait for text. False: there will be none."""
        if self.ended:
            return False
        yield
        return True

    def passes(self, text: str) -> bool:
        """Whether a piece would come out as it is and leave everything as it was: then it need not come in."""
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

    # -- what is read

    def space(self, chars: str = SPACE) -> Steps[None]:
        """Pass over white space."""
        while True:
            while self.at < len(self.text) and self.text[self.at] in chars:
                self.at += 1
            if self.at < len(self.text) or not (yield from self.more()):
                return

    def peek(self) -> Steps[str]:
        """The next character; none at the end."""
        while self.at >= len(self.text):
            if not (yield from self.more()):
                return ""
        return self.text[self.at]

    def take(self, *marks: str) -> Steps[str]:
        """The longest of these marks that comes next, passed over; none: nothing is."""
        longest = max(map(len, marks), default=0)
        while True:
            rest = self.text[self.at : self.at + longest]
            if any(len(mark) > len(rest) and mark.startswith(rest) for mark in marks) and (yield from self.more()):
                continue
            found = max((mark for mark in marks if mark and rest.startswith(mark)), key=len, default="")
            self.at += len(found)
            return found

    def until(self, *marks: str, to: Say) -> Steps[str]:
        """Hand over what stands in front of the first of these marks, and pass over that. None: the answer ended."""
        while True:
            at, mark, waits = _find(self.text, self.at, marks, final=self.ended)
            if at > self.at:
                to(self.text[self.at : at])
            self.at = at + len(mark)
            if mark and not waits:
                return mark
            self.at = at
            if at == len(self.text) and to == self.say:
                self._open = _beginnings(marks)
            if not (yield from self.more()):
                return ""

    def name(self, *marks: str) -> Steps[tuple[str, str]]:
        """A name and the mark behind it, both passed over; ("", "") and nothing when there is none."""
        while True:
            at, mark, waits = _find(self.text, self.at, marks, final=self.ended)
            if at - self.at > MAX_NAME:
                return "", ""
            if mark and not waits:
                name = self.text[self.at : at]
                self.at = at + len(mark)
                return name, mark
            if not (yield from self.more()):
                return "", ""

    def match(self, pattern: re.Pattern[str]) -> Steps[re.Match[str] | None]:
        """What matches here, not passed over; waits while more text could make it longer."""
        while True:
            found = pattern.match(self.text, self.at)
            if (found is None or found.end() < len(self.text)) and self.at < len(self.text):
                return found
            if not (yield from self.more()):
                return found

    def json(self, to: Say) -> Steps[bool]:
        """Hand over a JSON value as it comes. False: the answer ended first."""
        value = JsonValue()
        while True:
            end = value.feed(self.text, self.at)
            if end > self.at:
                to(self.text[self.at : end])
                self.at = end
            if value.complete:
                return True
            if not (yield from self.more()):
                return False

    def object_call(self, names: frozenset[str] | None = None) -> Steps[bool]:
        """A call that is an object with its name and its arguments. `names`: others are no calls. True: it was one, or
        began as one."""
        reader, told = CallReader(), False
        while True:
            self.at += reader.feed(self.text, self.at)
            if reader.name is not None and not told:
                if names is not None and reader.name not in names:
                    return False
                self.call(reader.name)
                told = True
            self.argue(reader.take_arguments())
            if reader.done or reader.failed or not (yield from self.more()):
                return told

    # -- what it becomes

    def text_until(self, *marks: str) -> Steps[str]:
        """Text up to one of these marks, which may begin a call (`give_up`). None: the answer ended."""
        mark = yield from self.until(*marks, to=self.say)
        self._tried = self.at - len(mark) if mark else None
        return mark

    def rest(self) -> Steps[None]:
        """All that comes is text."""
        while True:
            self.say(self.text[self.at :])
            self.at = len(self.text)
            self._open = _beginnings(())
            if not (yield from self.more()):
                return

    def attempt(self) -> None:
        """What begins here may be no call."""
        self._tried = self.at

    def give_up(self, *, forget: str = "") -> None:
        """It is none: what was read of it is text. `forget`: unless it is made of these characters only."""
        assert self._tried is not None
        text, self._tried = self.text[self._tried : self.at], None
        if text.strip(forget or None) or not forget:
            self.say(text)

    def back(self) -> None:
        """Read it again as something else."""
        assert self._tried is not None
        self.at, self._tried = self._tried, None

    def accept(self) -> None:
        """It is what it seemed to be."""
        self._tried = None
        self._quiet, self._gap = True, []

    def say(self, text: str) -> None:
        if self._trims and not (text := text.lstrip(SPACE)):
            return
        if shown := self._shown(text):
            self._trims = self._quiet = False
            self._parts.append(shown)

    def think(self, text: str) -> None:
        if not self._thinking:
            text = text.lstrip(SPACE)
        if shown := self._shown(text):
            first = not self._thinking and self._thoughts
            self._parts.append(Thought(f"\n\n{shown}" if first else shown))
            self._thinking = self._thoughts = True

    def think_again(self) -> None:
        """More thinking begins, a paragraph of its own."""
        self._gap, self._thinking = [], False

    def thought(self) -> None:
        """The thinking has ended."""
        self._gap, self._trims, self._thinking = [], True, False

    def call(self, name: str, id: str | None = None) -> None:
        self.accept()
        self._trims = False
        self._parts.append(Call(self.calls, "", id or self._new_id(), name))
        self.calls += 1

    def argue(self, arguments: str) -> None:
        if arguments:
            self._parts.append(Call(self.calls - 1, arguments))

    def end(self) -> None:
        """Everything was read."""
        if self._gap and not self._quiet and not self._trims and not self._thinking:
            self._parts.append("".join(self._gap))
        self._gap = []

    def _shown(self, text: str) -> str:
        """What is told now: white space at the end waits for what follows it. Not put together while nothing does: a
        model may go on with white space for as long as it may."""
        shown = text.rstrip(SPACE)
        rest = [text[len(shown) :]] if len(text) > len(shown) else []
        if not shown:
            self._gap += rest
            return ""
        shown, self._gap = "".join([*self._gap, shown]), rest
        return shown


class StreamParser:
    """Splits one answer into text, thoughts and calls, as it comes."""

    def __init__(self, steps: Callable[[Reader], Steps[None]], new_id: Callable[[], str] = short_id) -> None:
        self._reader = Reader(new_id)
        self._steps = steps(self._reader)
        self._over = False
        self._go_on()

    def feed(self, text: str) -> list[Part]:
        if self._over:
            return [text] if text else []
        self._reader.extend(text)
        self._go_on()
        return self._reader.take_parts()

    def passes(self, text: str) -> bool:
        """Whether `feed` would give this text as it is, if any, and change nothing: then it may be left out."""
        return self._over or self._reader.passes(text)

    def flush(self) -> list[Part]:
        """The end: what was held back."""
        self._reader.ended = True
        while not self._over:
            self._go_on()
        self._reader.end()
        return self._reader.take_parts()

    def _go_on(self) -> None:
        try:
            next(self._steps)
        except StopIteration:
            self._over = True


def _find(text: str, at: int, marks: tuple[str, ...], *, final: bool) -> tuple[int, str, bool]:
    """Where the first mark is, or could begin, from `at` on: (index, mark or "", more text could make it another)."""
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
    """Characters that one of these begins with."""
    return re.compile("|".join(sorted({re.escape(mark[0]) for mark in marks if mark})) or r"(?!)")


@lru_cache(256)
def _pattern(marks: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, sorted(filter(None, marks), key=len, reverse=True))) or r"(?!)")


def quoted(text: str) -> str:
    """As it stands between the quotes of a JSON string."""
    return json.dumps(text, ensure_ascii=False)[1:-1]
