"""`Literals`: values as Python or Gemma's function calls write them, read while they come, and handed on as JSON."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import orjson

from weft.server.bodies import parse_json
from weft.server.tools.stream import SPACE, Reader, Steps, quoted

MAX_DEPTH = 64
"""of lists in lists"""
MAX_KEY = 1024
"""characters"""

_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "a": "\a", "v": "\v", "\\": "\\", "'": "'", '"': '"'}
_ESCAPES |= {"/": "/", "\n": ""}
_HEX = {"x": 2, "u": 4, "U": 8}
_WORDS = {"True": "true", "False": "false", "None": "null"}
_CLOSING = {"[": "]", "(": ")", "{": "}"}
_KEY = re.compile(rf"""[^\s,:={{}}()\[\]"'<>]{{1,{MAX_KEY + 1}}}""")
_NUMBER = re.compile(r"[+-]?(?:0[xXoObB][0-9a-fA-F_]+|[0-9][0-9_]*)")


@dataclass(frozen=True)
class Literals:
    """How a family writes values. Nothing is an error: what is no value is a text."""

    quotes: tuple[str, ...] = ('"""', "'''", '"', "'")
    """around texts, in which a backslash escapes"""
    raw: str = ""
    """around texts, in which nothing does"""

    def value(self, reader: Reader, depth: int = 0) -> Steps[bool]:
        """Hand on a value, up to what follows it. False: the answer ended first."""
        yield from reader.space()
        quote = yield from reader.take(*self.quotes, self.raw)
        if quote:
            return (yield from self._text(reader, quote))
        char = yield from reader.peek()
        if char not in _CLOSING or depth >= MAX_DEPTH:
            return (yield from self._bare(reader))
        reader.at += 1
        if char == "{":
            return (yield from self.pairs(reader, ":", "}", depth + 1))
        return (yield from self._items(reader, _CLOSING[char], depth + 1))

    def pairs(self, reader: Reader, equals: str, end: str, depth: int = 0, keys: Sequence[str] = ()) -> Steps[bool]:
        """Hand on pairs of keys and values as an object, up to the end's mark, which is passed over. `keys`: of values
        that have none, in their order. False: the answer ended first."""
        names, count = iter(keys), 0
        while True:
            yield from reader.space(SPACE + ",")
            if (yield from reader.take(end)):
                reader.argue("}" if count else "{}")
                return True
            if not (yield from reader.peek()):
                return False
            key = yield from self._key(reader, equals)
            if key is None:
                key = next(names, f"argument_{count}")
            reader.argue(f"{', ' if count else '{'}{orjson.dumps(key).decode()}: ")
            count += 1
            if not (yield from self.value(reader, depth)):
                return False
            yield from reader.space()
            if (yield from reader.peek()) not in (",", end):
                return (yield from self._lost(reader, "}"))

    def _items(self, reader: Reader, end: str, depth: int) -> Steps[bool]:
        count = 0
        while True:
            yield from reader.space(SPACE + ",")
            if (yield from reader.take(end)):
                reader.argue("]" if count else "[]")
                return True
            if not (yield from reader.peek()):
                return False
            reader.argue(", " if count else "[")
            count += 1
            if not (yield from self.value(reader, depth)):
                return False
            yield from reader.space()
            if (yield from reader.peek()) not in (",", end):
                return (yield from self._lost(reader, "]"))

    def _lost(self, reader: Reader, closing: str) -> Steps[bool]:
        """What follows a value is no part of it: it ends here, unless the answer does."""
        if not (yield from reader.peek()):
            return False
        reader.argue(closing)
        return True

    def _key(self, reader: Reader, equals: str) -> Steps[str | None]:
        """A key and what stands between it and its value, passed over. None and nothing: there is none."""
        reader.attempt()
        key: str | None
        if equals == ":" and (quote := (yield from reader.take(*self.quotes, self.raw))):
            inside: list[str] = []
            if not (yield from self._scan(reader, quote, inside)):
                return "".join(inside)
            key = "".join(inside)
            key = str(parse_json(f'"{key}"')) if _is_text(key) else key
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

    def _text(self, reader: Reader, quote: str) -> Steps[bool]:
        reader.argue('"')
        if (yield from self._scan(reader, quote, None)):
            reader.argue('"')
            return True
        return False

    def _scan(self, reader: Reader, quote: str, into: list[str] | None) -> Steps[bool]:
        """A text up to its closing quote, as the inside of a JSON string."""
        to = reader.argue if into is None else into.append
        while True:
            marks = (quote,) if quote == self.raw else (quote, "\\")
            mark = yield from reader.until(*marks, to=lambda text: to(quoted(text)))
            if not mark:
                return False
            if mark == quote:
                return True
            to((yield from _escape(reader)))

    def _bare(self, reader: Reader) -> Steps[bool]:
        """A number, a word, or whatever else stands up to a comma or a bracket that closes."""
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
            text += char
            reader.at += 1
        if char:
            reader.argue(_bare_json(text.strip(SPACE)))
        return bool(char)


def _bare_json(text: str) -> str:
    text = _WORDS.get(text, text)
    try:
        if not isinstance(parse_json(text), str):
            return text
    except ValueError:
        pass
    if _NUMBER.fullmatch(text) and len(text) < 1000:
        try:
            return str(int(text, 0))
        except ValueError:
            pass
    return f'"{quoted(text)}"'


def _escape(reader: Reader) -> Steps[str]:
    """What a backslash stands for, as the inside of a JSON string."""
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
            # Half of a character stays an escape: the other half may follow.
            return f"\\u{code:04x}" if 0xD800 <= code < 0xE000 else quoted(chr(code))
        return quoted("\\" + char)
    return quoted(_ESCAPES.get(char, "\\" + char))


def _is_text(inside: str) -> bool:
    try:
        return isinstance(parse_json(f'"{inside}"'), str)
    except ValueError:
        return False
