"""`Dialect`: how an endpoint writes an answer, whole or as server-sent events."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from weft.server.api.choice import Choice, Piece
from weft.server.errors import ApiError

MARK = "\x00"
"""the text of an event that a template is made of"""


class Dialect(Protocol):
    """Writes one answer. Of a plain one `body` is called; of a stream `of` for every piece, then `end` or `failed`."""

    silence: bytes
    """what a stream gets while nothing comes: a comment, or an event without meaning"""

    async def body(self, wholes: Sequence[Piece], /) -> bytes:
        """A whole answer; each piece is all of its choice."""
        ...

    @property
    def plain(self) -> bool:
        """After the first one, what the pieces of a choice are sent as differs in their text alone, up to the last."""
        ...

    def of(self, choice: Choice, piece: Piece, /) -> bytes:
        """The events of a piece, with those that begin the answer or the choice. Empty: nothing to show yet."""
        ...

    def quick(self, choice: Choice, token_id: int, text: str, /) -> bytes | None:
        """As `of`, for a token without log-probabilities in the middle of the choice: its event, where that is
        nothing but more text of what is open. None: it is for `of`."""
        ...

    async def end(self) -> bytes:
        """The events that end the stream, every choice having finished."""
        ...

    async def failed(self, error: ApiError, /) -> bytes:
        """What is sent instead where the stream breaks off. One that had not begun is answered with a status."""
        ...


def event(data: bytes, name: bytes = b"") -> bytes:
    """A server-sent event. `data`: one line."""
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + data + b"\n\n"
