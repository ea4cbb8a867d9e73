"""Incremental detokenization: O(1) per token, never half a character, the same text as decoding everything at once."""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection, Sequence

from weft.server.text.token_bytes import TokenBytes

REPLACEMENT = "\ufffd"


class ByteDetokenizer:
    """Decodes vocabularies with known token bytes, as incremental UTF-8.

    Args:
        skip: ids without text (special tokens).
        at_start: nothing precedes this text, so a decoder that strips the first space strips it."""

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
        """End the text: return the text held back, with U+FFFD for an incomplete character."""
        return self._decode(b"", True)


class WindowDetokenizer:
    """Works with any decoder: decodes a short window of the last tokens with and without the new one.

    Args:
        context: the last ids before this text, without special tokens; they determine leading spaces."""

    MAX_HELD = 16
    """Tokens without a complete character after which the text is emitted anyway."""

    def __init__(self, decode: Callable[[Sequence[int]], str], skip: Collection[int], context: Sequence[int]) -> None:
        self._decode = decode
        self._skip = skip
        self._ids = list(context)
        self._read = len(self._ids)  # the text of earlier ids has been emitted
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


Detokenizer = ByteDetokenizer | WindowDetokenizer
"""The text of one sequence. Emitted text never changes; bytes of an incomplete character are held back."""
