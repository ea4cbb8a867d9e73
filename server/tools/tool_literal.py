"""`Literals` reads streamed values in the syntax of Python or Gemma's function calls and emits them as JSON."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

import orjson

from weft.server.bodies import parse_json
from weft.server.tools.parameter_types import fitted, flattened
from weft.server.tools.stream import MAX_LOOKED, SPACE, Reader, Sink, Steps, drop, quoted
from weft.server.tools.tool_format import Schema
from weft.server.tools.tool_json import WORDS

MAX_DEPTH = 64  # Maximum nesting of values.
MAX_KEY = 1024  # Maximum characters of a key.

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_ESCAPES |= {"/": "/", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_KEY = re.compile(rf"""[^\s,:={{}}()\[\]"'<>]{{1,{MAX_KEY + 1}}}""")
_PREFIX = re.compile(r"[rRuUbBfF]{0,2}")
_NUMBER = re.compile(r"[+-]?(?:0[xXoObB][0-9a-fA-F_]+|[0-9][0-9_]*)")
_FLOAT = re.compile(r"[+-]?(?:[0-9]+\.[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?", re.ASCII)


Fit = Callable[[str], str]


@dataclass(frozen=True)
class Literals:
    """A family's syntax of values. There are no errors: anything that is not a value becomes text."""

    quotes: tuple[str, ...] = ('"""', "'''", '"', "'")  # Quotes around texts with backslash escapes.
    raw: str = ""  # Quotes around texts without escapes. Numbers and words may then stand for texts.
    stop: str = ""  # Mark that ends everything, even if brackets or quotes are missing.

    def value(self, reader: Reader, depth: int = 0, fit: Fit = str) -> Steps[bool]:
        """Emit a value. Returns False if the answer ended first. `fit`: converts a number or a word."""
        yield from reader.space()
        prefix = "" if self.raw else (yield from self._prefix(reader))
        quote = yield from reader.take(*self.quotes, self.raw)
        if quote:
            reader.emit_arguments('"')
            closed = yield from self._scan(reader, quote, reader.emit_arguments, escapes="r" not in prefix)
            if closed or not reader.cut:
                reader.emit_arguments('"')
            return closed
        char = yield from reader.peek()
        if char not in _CLOSING or depth >= MAX_DEPTH:
            return (yield from self._bare(reader, fit))
        reader.at += 1
        if char == "{" and not (yield from self._set_begins(reader)):
            return (yield from self.pairs(reader, ":", "}", depth + 1))
        return (yield from self._elements(reader, _CLOSING[char], "[]", depth + 1, _no_head))

    def _set_begins(self, reader: Reader) -> Steps[bool]:
        """Return whether an element without a key comes next, as in Python's sets. Skips nothing."""
        reader.attempt()
        yield from reader.space()
        empty = yield from reader.take("}")
        if not empty and (quote := (yield from reader.take(*self.quotes, self.raw))):
            yield from self._scan(reader, quote, drop)
        elif not empty and (found := (yield from reader.match(_KEY))) is not None:
            reader.at = found.end()
        yield from reader.space()
        after = yield from reader.peek()
        reader.back()
        return not empty and after in (",", "}")

    def pairs(self, reader: Reader, equals: str, end: str, depth: int = 0, schema: Schema | None = None) -> Steps[bool]:
        """Emit pairs of keys and values as an object and skip the mark `end`. Returns False if the answer ended first.
        `schema`: names positional values, in order."""
        properties = flattened(schema or {}).get("properties")
        names = iter(properties if isinstance(properties, dict) else ())

        def head(count: int) -> Steps[tuple[str, Fit]]:
            key = yield from self._key(reader, equals)
            key = next(names, f"argument_{count}") if key is None else key
            return f"{orjson.dumps(key).decode()}: ", partial(fitted, schema, key) if schema and self.raw else str

        return (yield from self._elements(reader, end, "{}", depth, head))

    def _elements(
        self, reader: Reader, end: str, brackets: str, depth: int, head: Callable[[int], Steps[tuple[str, Fit]]]
    ) -> Steps[bool]:
        """Emit values up to the mark `end` between `brackets`. `head`: reads what precedes the i-th value. Returns it
        and the conversion of the value."""
        count = 0
        while True:
            yield from reader.space(SPACE + ",")
            if (yield from reader.take(end)):
                reader.emit_arguments(brackets[1] if count else brackets)
                return True
            if not (yield from reader.peek()):
                break
            before, fit = yield from head(count)
            reader.emit_arguments(f"{', ' if count else brackets[0]}{before}")
            count += 1
            if not (yield from self.value(reader, depth, fit)):
                break
            yield from reader.space()
            if not (char := (yield from reader.peek())):
                break
            if char not in (",", end):  # lost: close the collection
                reader.emit_arguments(brackets[1])
                return True
        if not reader.cut:
            reader.emit_arguments(brackets[1] if count else brackets)
        return False

    def _prefix(self, reader: Reader) -> Steps[str]:
        """Skip and return the prefix of a Python string, in lower case."""
        reader.attempt()
        found = yield from reader.match(_PREFIX)
        reader.at = found.end() if found is not None else reader.at
        if found is None or not (yield from reader.peek()) or reader.text[reader.at] not in "\"'":
            reader.back()
            return ""
        reader.accept()
        return found.group().lower()

    def _key(self, reader: Reader, equals: str) -> Steps[str | None]:
        """Skip and return a key and its separator; None without skipping if there is none."""
        reader.attempt()
        key: str | None
        if equals == ":" and (quote := (yield from reader.take(*self.quotes, self.raw))):
            inside: list[str] = []
            if not (yield from self._scan(reader, quote, inside.append)):
                return "".join(inside)
            key = "".join(inside)
            with suppress(ValueError):
                key = str(parse_json(f'"{key}"'))
        else:
            found = yield from reader.match(_KEY)
            if found is None or found.end() - found.start() > MAX_KEY:
                reader.back()
                return None
            key = found.group()
            reader.at = found.end()
            yield from reader.space()
            if (yield from reader.peek()) != equals:
                reader.back()
                return None
        reader.accept()
        yield from reader.space()
        yield from reader.take(equals)
        return key

    def _scan(self, reader: Reader, quote: str, to: Sink, *, escapes: bool = True) -> Steps[bool]:
        """Read a text up to its closing quote, escaped for a JSON string. A quote before other text is part of the text
        if another quote closes it. `escapes`: whether a backslash begins an escape, not text."""
        lost = f"}}{self.stop}" if quote == self.raw else ""  # a missing quote
        marks = (quote, lost) if quote == self.raw else (quote, "\\")
        while True:
            mark = yield from reader.until(*marks, to=lambda text: to(quoted(text)))
            if not mark:
                return False
            if mark == lost:
                reader.at -= len(mark)
                if not (yield from self._closes_later(reader, quote, (quote,), most=1)):
                    return True
                to(quoted(mark))
                reader.at += len(mark)
            elif mark == quote:
                if (yield from self._closes(reader)) or not (yield from self._closes_later(reader, quote, marks)):
                    return True
                to(quoted(mark))
            elif escapes:
                to((yield from _escape(reader)))
            else:
                char = yield from reader.peek()
                to(quoted(mark + char))
                reader.at += len(char)

    def _closes(self, reader: Reader) -> Steps[bool]:
        """Return whether a text may end here: at a comma, a colon, a closing bracket or the end of the answer."""
        at = reader.tried_length if (nested := reader.trying) else 0
        if not nested:
            reader.attempt()
        yield from reader.space()
        char = yield from reader.peek()
        if nested:
            reader.tried_length = at
        else:
            reader.back()
        return char in ("", ",", ":", ")", "]", "}")

    def _closes_later(self, reader: Reader, quote: str, marks: tuple[str, ...], most: int = MAX_LOOKED) -> Steps[bool]:
        """Return whether one of the next quotes, at most `most`, closes the text."""
        if reader.trying:  # a key, which is short
            return False
        reader.attempt()
        found, most = False, min(most, MAX_LOOKED - reader.looked)
        while not found and most > 0 and (mark := (yield from reader.until(*marks, to=drop))):
            reader.looked, most = reader.looked + 1, most - 1
            if mark == "\\":
                char = yield from reader.peek()  # not within the next statement, which reads `at` first
                reader.at += len(char)
            elif mark != quote:
                break
            else:
                found = yield from self._closes(reader)
        reader.back()
        return found

    def _bare(self, reader: Reader, fit: Fit) -> Steps[bool]:
        """Read a number, a word or other text up to a comma or a closing bracket."""
        text, depth = "", 0
        while True:
            char = yield from reader.peek()
            if not char:
                break
            if char in "([{":
                depth += 1
            elif char in ")]}":
                if not depth:
                    break
                depth -= 1
            elif not depth and char == ",":
                break
            elif self.stop.startswith(char) and (yield from reader.take(self.stop)):
                reader.at -= len(self.stop)
                break
            text += char
            reader.at += 1
        if char or not reader.cut:
            reader.emit_arguments(fit(_bare_json(text.strip(SPACE))))
        return bool(char)


def _no_head(_: int) -> Steps[tuple[str, Fit]]:
    yield from ()
    return "", str


def _bare_json(text: str) -> str:
    text = WORDS.get(text, text)
    with suppress(ValueError):
        if not isinstance(parse_json(text), str):
            return text
    if _NUMBER.fullmatch(text) and len(text) < 1000:
        with suppress(ValueError):
            return str(int(text, 0))
    if _FLOAT.fullmatch(text) and math.isfinite(number := float(text)):
        return repr(number)
    return f'"{quoted(text)}"'


def _escape(reader: Reader) -> Steps[str]:
    """Read the rest of a backslash escape and return it escaped for a JSON string."""
    char = yield from reader.peek()
    if not char:
        return ""
    reader.at += 1
    if char in _HEX:
        while len(reader.text) - reader.at < _HEX[char] and (yield from reader.more()):
            pass
        digits = reader.text[reader.at : reader.at + _HEX[char]]
        if len(digits) == _HEX[char] and re.fullmatch(r"[0-9a-fA-F]+", digits) and int(digits, 16) < 0x110000:
            reader.at += len(digits)
            code = int(digits, 16)
            # A lone surrogate stays an escape: the other half may follow.
            return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code))
        return quoted("\\" + char)
    return quoted(_ESCAPES.get(char, "\\" + char))
