"""Streaming readers of JSON: `JsonValue` repairs a value, `CallReader` reads a call, `{"name": …, "arguments": …}`."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from typing import Any

_ARGUMENTS = ("arguments", "parameters", "args", "params", "input")
_FIRST = frozenset({"name", "id", "type", "index", "function", *_ARGUMENTS[:2]})
"""First keys of a call. An object with another first key is no call and is not held back."""
_SPACE = " \t\r\n"
_CLOSERS = {"{": "}", "[": "]"}
_RUN = re.compile(r"[^\"'\\\x00-\x1f]+")  # Text that needs no attention inside a string.
_ESCAPE = re.compile(r"\\(?:[\"\\/bfnrt]|u[0-9a-fA-F]{4})")
_PART = re.compile(r"\\(?:u[0-9a-fA-F]{0,3})?")  # Start of an escape.
_DIGITS = re.compile(r"[0-9.eE+-]+")
_NUMBER = re.compile(
    r"-?(?:(?:0|[1-9]\d*)(?:\.(?:\d+(?:[eE][+-]?\d*)?)?|[eE][+-]?\d*)?)?", re.ASCII
)  # Start of a number.
_WORD = re.compile(r"[^\s,:\[\]{}\"'<`]+")
WORDS = {"True": "true", "False": "false", "None": "null"}
_WORDS = WORDS | {"NaN": "null", "Infinity": "null", "undefined": "null"}
_KNOWN = frozenset({"true", "false", "null"})


class JsonValue:
    """Reads a JSON value from streamed text and passes it on as valid JSON.

    Valid JSON is passed on unchanged. The following is repaired: raw control characters and invalid escapes in strings,
    strings in single quotes, Python's words, missing and surplus commas, missing brackets. `complete` is set once the
    end was seen, `broken` if something had to be made up or left out. `stops`: marks that end the value outside
    strings, even if brackets are missing."""

    def __init__(self, *stops: str) -> None:
        self.complete = self.broken = False
        self._stops = tuple(filter(None, stops))
        self._out: list[str] = []
        self._brackets: list[str] = []  # Missing closing brackets.
        self._state = "value"  # What comes next: "key", "colon", "value", or "next" after a value.
        self._quote = ""  # Quote of the current string.
        self._escape = ""  # Unfinished escape in a string.
        self._word = ""  # Current word or number.
        self._held = ""  # Comma and white space after it; dropped before a closing bracket.

    def feed(self, text: str, at: int = 0, *, final: bool = False) -> int:
        """Continue the value at `at`. Returns the index after the text read. `final`: no more text follows."""
        while at < len(text) and not self.complete:
            if self._quote:
                at = self._read_string(text, at)
            elif self._word:
                at = self._read_word(text, at)
            else:
                rest = len(text) - at
                if any(text.startswith(stop, at) for stop in self._stops):
                    self._out.append(self.close())
                    break
                if not final and any(len(stop) > rest and stop.startswith(text[at:]) for stop in self._stops):
                    break
                at += self._step(text[at])
        return at

    def take(self) -> str:
        """Return new output."""
        out, self._out = "".join(self._out), []
        return out

    def close(self) -> str:
        """End the value here. Returns what completes the output."""
        out = ""
        if self._quote:
            out = self._escape.replace("\\", "\\\\") + '"'
            self._state = "colon" if self._state == "key" else "next"
        elif self._word:
            out = self._end_word()
        if self._state == "colon":
            out += ": null"
        elif self._state == "value" and self._brackets[-1:] != ["]"]:
            out += "null"
        out += "".join(reversed(self._brackets))
        self.complete, self._quote, self._word, self._brackets = True, "", "", []
        return out

    def _step(self, char: str) -> int:
        """Read a character between strings and words. Returns 1, or 0 if it is to be read again."""
        if char in _SPACE:
            if self._held:
                self._held += char
            elif self._brackets:
                self._out.append(char)
        elif char in "}]":
            if not self._brackets:
                self.complete = True
                return 0
            if char in self._brackets:
                self._close_bracket(char)
        elif self._state == "next":
            self._held, self._state = ",", "key" if self._brackets[-1] == "}" else "value"
            if char in "\"'{[":  # a missing comma
                self._held = ", "
                return 0
            if char != ",":  # anything else is lost
                self._held, self._state, self.broken = "", "next", True
        elif self._state == "colon":
            self._out.append(":")
            self._state = "value"
            return char == ":"
        elif char == ",":
            if not self._brackets:
                self.complete = True
                return 0
            if self._state == "value" and self._brackets[-1] == "}":
                self._out.append("null")
                self._held, self._state, self.broken = ",", "key", True
        else:
            return self._begin(char)
        return 1

    def _begin(self, char: str) -> int:
        """Begin a key or a value."""
        opens = char in _CLOSERS and self._state == "value"
        if not (opens or char in "\"'" or _WORD.match(char)):
            self.broken = True
            return 1
        self._out.append(self._held)
        self._held = ""
        if opens:
            self._out.append(char)
            self._brackets.append(_CLOSERS[char])
            self._state = "key" if char == "{" else "value"
        elif char in "\"'":
            self._out.append('"')
            self._quote = char
        else:
            self._word = char
            if self._streams():
                self._out.append(char)
        return 1

    def _streams(self) -> bool:
        """Whether the current word is a number, which is passed on piece by piece."""
        return self._state == "value" and self._word[0] in "-0123456789"

    def _read_string(self, text: str, at: int) -> int:
        if self._escape:
            self._escape += text[at]
            if _ESCAPE.fullmatch(self._escape):
                self._out.append(self._escape)
            elif _PART.fullmatch(self._escape):
                return at + 1
            elif self._escape == "\\'":
                self._out.append("'")
            else:  # no escape: its backslash is part of the text
                self._out.append("\\" + self._escape[:-1])
                self._escape = ""
                return at
            self._escape = ""
            return at + 1
        if (found := _RUN.match(text, at)) is not None:
            self._out.append(found.group())
            return found.end()
        char = text[at]
        if char == self._quote:
            self._out.append('"')
            self._quote = ""
            self._after()
        elif char == "\\":
            self._escape = char
        else:
            self._out.append(char if char == "'" else json.dumps(char)[1:-1])
        return at + 1

    def _read_word(self, text: str, at: int) -> int:
        found = (_DIGITS if self._streams() else _WORD).match(text, at)
        new = found.group() if found is not None else ""
        if self._streams() and (number := _NUMBER.match(self._word + new)) is not None:
            new = number.group()[len(self._word) :]
            self._out.append(new)
        self._word += new
        if not new:
            self._out.append(self._end_word())
        return at + len(new)

    def _end_word(self) -> str:
        """End the current word. Returns what is missing of it."""
        word, out = self._word, ""
        if self._streams():
            out = "0" if word[-1] in "-+.eE" else ""
        else:
            out = word = _WORDS.get(word, word) if self._state == "value" else word
            if self._state == "key" or word not in _KNOWN:
                self.broken = True
                out = json.dumps(word, ensure_ascii=False)
        self._word = ""
        self._after()
        return out

    def _after(self) -> None:
        """A key or a value has ended."""
        self._state = "colon" if self._state == "key" else "next"
        self.complete = self._state == "next" and not self._brackets

    def _close_bracket(self, char: str) -> None:
        if self._state == "colon" or (self._state == "value" and self._brackets[-1] == "}"):
            self._out.append(": null" if self._state == "colon" else "null")
            self.broken = True
        self._out.append(self._held[1:])
        self._held, self._state = "", "value"
        while (bracket := self._brackets.pop()) != char:
            self._out.append(bracket)
        self._out.append(char)
        self._after()


def repaired(text: str) -> str:
    """Return a JSON value as valid JSON (see `JsonValue`)."""
    value = JsonValue()
    value.feed(text, final=True)
    return value.take() + ("" if value.complete else value.close())


def as_arguments(text: str) -> str:
    """Return arguments that are not an object as JSON: "{}" for null and other spellings of none; a string's content,
    which is JSON in OpenAI's style. `text`: a JSON value; empty for none."""
    try:
        value = json.loads(text, strict=False) if text else None
    except (ValueError, RecursionError):
        return text
    if isinstance(value, str):
        inner = value.encode("utf-8", "replace").decode().strip()
        if inner.startswith("{"):
            return repaired(inner)
        value = None if inner in ("", "null", "None") else value
    return "{}" if value is None or value == [] else text


class CallReader:
    """Reads the object of one call. Arguments are available as soon as the name is known. `name`: None until it is
    known. `done`: the object has ended. `failed`: this is not a call, or it broke off. `broken`: so did the arguments.
    `stops`: marks that end the call even if brackets are missing."""

    def __init__(self, *stops: str) -> None:
        self.name: str | None = None
        self.done = self.failed = self.broken = False
        self._stops = stops
        self._state = "open"
        self._value = JsonValue()
        self._text: list[str] = []  # Text of the current key or value; not that of arguments which are an object.
        self._key: Any = ""
        self._arguments = ""  # Arguments that were not taken yet.
        self._given = False  # Whether arguments were found.
        self._streams = False  # Whether the current value is the object of the arguments.
        self._first = True
        self._nested = False  # Inside the object `function`, which has the name and the arguments in OpenAI's style.

    def feed(self, text: str, at: int = 0, *, final: bool = False) -> int:
        """Read `text` from `at`. Returns the number of characters that belong to the object. `final`: no more text
        follows."""
        begin = at
        while at < len(text) and not (self.done or self.failed):
            if self._state in ("key", "value"):
                end = self._read(text, at, final=final)
                if end == at and not self._value.complete:
                    break
                at = end
            else:
                self._step(text[at])
                at += not self.failed
        return at - begin

    def take_arguments(self) -> str:
        """Return new argument text; empty before the name is known."""
        if self.name is None:
            return ""
        if (self.done or self.failed) and not self._given:
            self._given, self.broken = True, self.failed
            return "{}"
        out, self._arguments = self._arguments, ""
        return out

    def close(self) -> None:
        """End the call here: complete its arguments."""
        if self._streams and not self._value.complete:
            self._arguments += self._value.close()
        self.failed = True

    def _step(self, char: str) -> None:
        """Read a character between keys and values."""
        if char in _SPACE or (self._state == "next" and char == ","):
            return
        if self._state == "open" and char == "{":
            self._state = "next"
        elif self._state == "next" and char in "\"'":
            self._begin("key")
            self._value.feed(char)
        elif self._state == "next" and char == "}":
            self.done = not self._nested
            self.failed = self.done and self.name is None
            self._nested = False
        elif self._state == "colon" and char == ":" and self._key == "function" and not self._nested:
            self._state, self._nested = "open", True
        elif self._state == "colon" and char == ":":
            self._begin("value")
        else:
            self.failed = True

    def _begin(self, state: str) -> None:
        self._state, self._value, self._text, self._streams = state, JsonValue(*self._stops), [], False

    def _read(self, text: str, at: int, *, final: bool) -> int:
        end = self._value.feed(text, at, final=final)
        new = self._value.take()
        if new and not self._text and not self._streams and self._state == "value" and not self._given:
            self._streams = self._given = new[0] == "{" and self._key in _ARGUMENTS
        if self._streams:
            self._arguments += new
            self.broken = self._value.broken
        elif new:
            self._text.append(new)
        if self._value.complete:
            self._end()
        return end

    def _end(self) -> None:
        text, value = "".join(self._text), None
        with suppress(ValueError, RecursionError):  # nested too deeply for Python's parser
            value = json.loads(text) if text else None
        if self._state == "key":
            self._key, self._state = value, "colon"
            self.failed |= self._first and value not in _FIRST
            self._first = False
            return
        self._state = "next"
        if self._key == "name" and self.name is None:
            self.name = value if isinstance(value, str) and value and _is_unicode(value) else None
            self.failed = self.name is None
        elif self._key in _ARGUMENTS and not self._given:
            self._given = True
            self._arguments += as_arguments(text)


def _is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogates, which JSON escapes can produce."""
    return not any("\ud800" <= char < "\ue000" for char in text)
