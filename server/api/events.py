"""`Events`: the events of a streamed answer, in the shape of its endpoint."""

from __future__ import annotations

from typing import Any, Protocol

import orjson

from weft.server.api.choice import Choice, Piece
from weft.server.api.generate import Generation
from weft.server.api.protocol import StreamOptions


class Shape(Protocol):
    """How an endpoint writes its choices."""

    object: str
    chunk_object: str
    id_prefix: str

    @property
    def plain(self) -> bool:
        """After its first chunk, a choice's chunks differ in their text alone, up to the last."""
        ...

    def first_chunks(self, choice: Choice, /) -> list[dict[str, Any]]:
        """Chunk choices to send before the first piece of a choice."""
        ...

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """One chunk choice; None when there is nothing to show yet."""
        ...

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """A finished choice; `piece` is all of it."""
        ...

    def extras(self, generation: Generation, /) -> dict[str, Any]:
        """Further fields of a whole answer, and of the first chunks."""
        ...


class Events:
    """What the pieces of an answer are sent as: server-sent events, each with one chunk."""

    def __init__(self, generation: Generation, shape: Shape, head: bytes) -> None:
        """`head`: what all chunks begin with, as an object."""
        options = generation.body.stream_options or StreamOptions()
        self._generation = generation
        self._shape = shape
        self._before = b"data: " + head[:-1] + b',"choices":['
        self._usage = options.include_usage
        self._continuous = options.include_usage and options.continuous_usage_stats
        self._opened: set[int] = set()

    @property
    def plain(self) -> bool:
        """After the first ones, events of a choice differ in their text alone, up to the last."""
        return self._shape.plain and not self._continuous

    def of(self, choice: Choice, piece: Piece) -> bytes:
        """The events of a piece, with those that begin its choice. Empty when there is nothing to show yet."""
        first = b""
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            extras = orjson.dumps(self._shape.extras(self._generation))[1:-1]
            first = b"".join(self._event(chunk, extras) for chunk in self._shape.first_chunks(choice))
        chunk = self._shape.chunk(choice, piece)
        return first if chunk is None else first + self._event(chunk)

    def end(self) -> bytes:
        """The event with the usage, if it was asked for."""
        return self._before + b"]" + self._usage_field(final=True) + b"}\n\n" if self._usage else b""

    def _event(self, chunk: dict[str, Any], extras: bytes = b"") -> bytes:
        more = b"," + extras if extras else b""
        return self._before + orjson.dumps(chunk) + b"]" + more + self._usage_field() + b"}\n\n"

    def _usage_field(self, *, final: bool = False) -> bytes:
        if final or self._continuous:
            return b',"usage":' + orjson.dumps(self._generation.usage())
        return b',"usage":null' if self._usage else b""
