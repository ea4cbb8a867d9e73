"""`Dialect`: how an endpoint writes an answer, as one body or as server-sent events."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

from weft.server.api.choice import Choice, Piece
from weft.server.errors import ApiError

MARK = "\x00"  # the placeholder text of an event from which a template is made


class Dialect(ABC):
    """Writes one answer: `body` for a plain one; for a stream, `events` for each piece and then `end` or `failed`."""

    content_type = b"text/event-stream; charset=utf-8"  # of streams
    keepalive = b": waiting\n\n"  # a keep-alive for streams: a comment or an event without content

    @abstractmethod
    async def body(self, wholes: Sequence[Piece], /) -> bytes:
        """A plain answer; each piece is the complete output of its choice."""

    @property
    def plain(self) -> bool:
        """Between a choice's first and last event, events differ only in their text."""
        return False

    def events(self, choice: Choice, piece: Piece, /) -> bytes:
        """The events of a piece, including those that begin the answer or choice; empty if nothing is shown yet."""
        raise NotImplementedError

    def token_event(self, choice: Choice, token_id: int, text: str, /) -> bytes | None:  # noqa: ARG002
        """The event of a token in the middle of a choice, without log-probabilities, if it only adds text. Returns None
        if the token has to go through `events`."""
        return None

    async def end(self) -> bytes:
        """The events that end the stream after every choice has finished."""
        raise NotImplementedError

    async def failed(self, error: ApiError, /) -> bytes:
        """The events that end a started stream with an error."""
        return event(error.body())


def event(data: bytes, name: bytes = b"") -> bytes:
    """A server-sent event. `data` is a single line."""
    return (b"event: " + name + b"\n" if name else b"") + b"data: " + data + b"\n\n"
