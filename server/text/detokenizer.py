"""Token ids to text as they come: O(1) per token, never half a character, the same text as decoding all at once."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence
from typing import Protocol

from weft.server.text.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"


class Detokenizer(Protocol):
    """Text of one sequence. What it has emitted never changes; bytes of an unfinished character are held back."""

    def feed(self, token_id: int) -> str: ...

    def flush(self) -> str:
        """The end: what is still held back, U+FFFD for a character that never got complete."""
        ...


class ByteDetokenizer:
    """For vocabularies of known bytes: an incremental UTF-8 decoder over them.

    Args:
        skip: ids without text (special tokens).
        at_start: nothing precedes this text, so a decoder that strips the first space does.
    """

    def __init__(self, token_bytes: TokenBytes, skip: Collection[int], *, at_start: bool) -> None:
        self._bytes = token_bytes
        self._skip = skip
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode
        self._strip = at_start and token_bytes.strips_space

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        text = self._decode(self._bytes[token_id])
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text

    def flush(self) -> str:
        return self._decode(b"", True)


class WindowDetokenizer:
    """For any other decoder: decodes a short window of the last tokens with and without the new one.

    Args:
        context: the last ids before this text, without special tokens; they decide about leading spaces.
    """

    MAX_HELD = 16
    """tokens without a complete character, after which the text is taken as it is"""

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: Collection[int], context: Sequence[int]) -> None:
        self._decode = decode
        self._skip = skip
        self._ids = list(context)
        self._read = len(self._ids)  # ids before this one have been emitted
        self._before = decode(self._ids) if self._ids else ""

    def feed(self, token_id: int) -> str:
        if token_id in self._skip:
            return ""
        self._ids.append(token_id)
        text = self._decode(self._ids)
        held = len(self._ids) - self._read
        if len(text) <= len(self._before) or (text.endswith(REPLACEMENT) and held < self.MAX_HELD):
            return ""
        new = text[len(self._before) :]
        self._ids = self._ids[self._read :]
        self._read = len(self._ids)
        self._before = self._decode(self._ids)
        return new

    def flush(self) -> str:
        return self._decode(self._ids)[len(self._before) :]
