"""Tool calls as JSON objects, read while they are written: `{"name": …, "arguments": …}`."""

from __future__ import annotations

import json
from typing import Any

_ARGUMENTS = ("arguments", "parameters")
_FIRST = frozenset({"name", "id", "type", "index", *_ARGUMENTS})
"""what a call begins with: another object is none, and need not be held back to see its end"""
_SPACE = " \t\r\n"


class JsonValue:
    """Finds the end of one JSON value in text that comes in pieces. `complete` once the end was seen."""

    def __init__(self) -> None:
        self.complete = False
        self._depth = 0
        self._kind = ""
        self._in_string = False
        self._escaped = False

    def feed(self, text: str, at: int) -> int:
        """Where the value ends in `text` if it goes on from `at`: the index behind it, or the end of the text."""
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
                    self.complete = True  # a number or a word ends in front of what follows it
                    return i
                if char not in _SPACE:
                    self._kind = char
            if self.complete:
                return i + 1
        return len(text)


class CallReader:
    """One call's object. Arguments are handed out as soon as the name is known.

    `name`: None until it is known. `done`: the object has ended. `failed`: this is no call.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self.done = False
        self.failed = False
        self._state = "open"
        self._value = JsonValue()
        self._text = ""
        """of the key or value being read"""
        self._key = ""
        self._arguments = ""
        """not handed out yet"""
        self._any_arguments = False
        self._given = False
        """the arguments were read to their end"""
        self._first = True

    def feed(self, text: str, at: int = 0) -> int:
        """Read on, from `at`; returns how much of `text` behind it belongs to the object."""
        begin = at
        while at < len(text) and not (self.done or self.failed):
            if self._state in ("key", "value"):
                at = self._read_string(text, at)
            else:
                self._step(text[at])
                at += not self.failed
        return at - begin

    def take_arguments(self) -> str:
        """Argument text that has not been handed out; nothing before the name is known."""
        if self.name is None:
            return ""
        if self.done and not self._any_arguments:
            self._any_arguments = True
            return "{}"
        out, self._arguments = self._arguments, ""
        return out

    def _step(self, char: str) -> None:
        """A character between keys and values."""
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
        except (ValueError, RecursionError):  # no JSON, or nested too deeply for Python's reader
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
            if isinstance(value, str):  # arguments as a string of JSON, as OpenAI itself writes them
                self._arguments += value.encode("utf-8", "replace").decode()
                self._any_arguments = True


def _is_unicode(text: str) -> bool:
    """JSON can spell halves of characters."""
    return not any("\ud800" <= char < "\ue000" for char in text)
