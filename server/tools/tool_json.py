"""Streaming readers of tool calls as JSON objects: `{"name": …, "arguments": …}`."""

from __future__ import annotations

import json
from typing import Any

_ARGUMENTS = ("arguments", "parameters")
_FIRST = frozenset({"name", "id", "type", "index", *_ARGUMENTS})
"""First keys of a call. An object with another first key is no call and is not held back."""
_SPACE = " \t\r\n"


class JsonValue:
    """Finds the end of a JSON value in streamed text. `complete` is set once the end was seen."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._kind = ""
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Continue the value at `at`. Returns the index after its end, or the end of the text."""
        for i in range(at, len(text)):
            char = text[i]
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
                    self.complete = self._depth == 0
            elif char == '"':
                self._in_string, self._kind = True, self._kind or char
            elif char in "{[":
                self._depth, self._kind = self._depth + 1, self._kind or char
            elif char in "}]" and self._depth:
                self._depth -= 1
                self.complete = self._depth == 0
            elif self._depth == 0:
                if char in ",}]" or (self._kind and char in _SPACE):
                    self.complete = True  # a number or a word ends before the next character
                    return i
                if char not in _SPACE:
                    self._kind = char
            if self.complete:
                return i + 1
        return len(text)


class CallReader:
    """Reads the object of one call. Arguments are available as soon as the name is known. `name`: None until it is
    known. `done`: the object has ended. `failed`: this is not a call."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._state = "open"
        self._value = JsonValue()
        self._text = ""  # Text of the current key or value.
        self._key = ""
        self._arguments = ""  # Arguments that were not taken yet.
        self._any_arguments = False
        self._given = False  # Whether the arguments are complete.
        self._first = True

    def feed(self, text: str, at: int = 0) -> int:
        """Read `text` from `at`. Returns the number of characters that belong to the object."""
        begin = at
        while at < len(text) and not (self.done or self.failed):
            if self._state in ("key", "value"):
                at = self._read_string(text, at)
            else:
                self._step(text[at])
                at += not self.failed
        return at - begin

    def take_arguments(self) -> str:
        """Return new argument text; empty before the name is known."""
        if self.name is None:
            return ""
        if self.done and not self._any_arguments:
            self._any_arguments = True
            return "{}"
        out, self._arguments = self._arguments, ""
        return out

    def _step(self, char: str) -> None:
        """Read a character between keys and values."""
        if char in _SPACE or (self._state == "next" and char == ","):
            return
        if self._state == "open" and char == "{":
            self._state = "next"
        elif self._state == "next" and char == '"':
            self._begin("key")
            self._value.feed(char, 0)
            self._text = char
        elif self._state == "next" and char == "}":
            self.done = True
            self.failed = self.name is None
        elif self._state == "colon" and char == ":":
            self._begin("value")
        else:
            self.failed = True

    def _begin(self, state: str) -> None:
        self._state, self._value, self._text = state, JsonValue(), ""

    def _read_string(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        new = text[at:end]
        if not self._text:
            new = new.lstrip(_SPACE)
        self._text += new
        arguments = self._key in _ARGUMENTS and not self._given
        if self._state == "value" and arguments and self._text and self._text[0] != '"':
            self._arguments += new
            self._any_arguments = True
        if self._value.complete:
            self._end()
        return end

    def _end(self) -> None:
        try:
            value: Any = json.loads(self._text, strict=False)
        except (ValueError, RecursionError):  # invalid JSON, or nested too deeply for Python's parser
            self.failed = self._state == "key" or self._key == "name"
            value = None
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
            if isinstance(value, str):  # arguments as a string of JSON, in OpenAI's style
                self._arguments += value.encode("utf-8", "replace").decode()
                self._any_arguments = True


def _is_unicode(text: str) -> bool:
    """Return whether the text has no lone surrogates, which JSON escapes can produce."""
    return not any("\ud800" <= char < "\ue000" for char in text)
