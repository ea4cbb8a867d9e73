"""`Choices`: OpenAI's dialect of completions and chat: a list of choices, streamed as chunks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import orjson

from weft.server.api.choice import Choice, Piece
from weft.server.api.events import MARK, event
from weft.server.api.generate import Generation
from weft.server.api.protocol import StreamOptions
from weft.server.errors import ApiError

LARGE = 4096
"""Tokens above which an answer is assembled in a worker thread: thousands of log-probabilities take time."""


class Shape(Protocol):
    """How an endpoint formats its choices."""

    object: str
    chunk_object: str
    id_prefix: str

    @property
    def plain(self) -> bool:
        """Between the first and the last chunk, a choice's chunks differ only in their text."""
        ...

    def first_chunks(self, choice: Choice, /) -> list[dict[str, Any]]:
        """Chunks to send before the first piece of a choice."""
        ...

    def chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None if there is nothing to show yet."""
        ...

    def whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """A finished choice; `piece` is its whole output."""
        ...

    def passes(self, choice: Choice, token_id: int, text: str, /) -> bool:
        """Whether a token's chunk differs only in its text from the others. If so, the token is consumed."""
        ...

    def extras(self, generation: Generation, /) -> dict[str, Any]:
        """Additional fields of a whole answer and of the first chunks."""
        ...


class Choices:
    """The answer to one request in its endpoint's shape. Events have no names; the last is `[DONE]`."""

    keepalive = b": waiting\n\n"

    def __init__(self, generation: Generation, shape: Shape, model: str, created: int) -> None:
        options = generation.body.stream_options or StreamOptions()
        self._generation = generation
        self._shape = shape
        self._head = {
            "id": f"{shape.id_prefix}-{generation.id}",
            "object": shape.chunk_object if generation.body.stream else shape.object,
            "created": created,
            "model": model,
        }
        self._before = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._usage = options.include_usage
        self._continuous = options.include_usage and options.continuous_usage_stats
        self._opened: set[int] = set()
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        """The bytes before and after the text of a chunk, by choice."""

    # -- plain

    async def body(self, wholes: Sequence[Piece]) -> bytes:
        generation = self._generation
        if generation.usage()["total_tokens"] > LARGE:
            return await generation.service.offload(lambda: self._body(wholes))
        return self._body(wholes)

    def _body(self, wholes: Sequence[Piece]) -> bytes:
        generation, shape = self._generation, self._shape
        return orjson.dumps(
            {
                **self._head,
                "choices": [shape.whole(c, p) for c, p in zip(generation.choices, wholes, strict=True)],
                "usage": generation.usage(),
                **shape.extras(generation),
            }
        )

    # -- streamed

    @property
    def plain(self) -> bool:
        return self._shape.plain and not self._continuous

    def events(self, choice: Choice, piece: Piece) -> bytes:
        first = b""
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            extras = orjson.dumps(self._shape.extras(self._generation))[1:-1]
            first = b"".join(self._event(chunk, extras) for chunk in self._shape.first_chunks(choice))
        chunk = self._shape.chunk(choice, piece)
        return first if chunk is None else first + self._event(chunk)

    def token_event(self, choice: Choice, token_id: int, text: str) -> bytes | None:
        if self._continuous or not self._shape.passes(choice, token_id, text):
            return None
        if not text:
            return b""
        template = self._templates.get(choice.index)
        if template is None:
            before, _, after = self.events(choice, Piece(MARK)).partition(orjson.dumps(MARK))
            template = self._templates[choice.index] = before, after
        return template[0] + orjson.dumps(text) + template[1]

    async def end(self) -> bytes:
        usage = self._before + b"]" + self._usage_field(final=True) + b"}\n\n" if self._usage else b""
        return usage + event(b"[DONE]")

    async def failed(self, error: ApiError) -> bytes:
        return event(error.body())

    def _event(self, chunk: dict[str, Any], extras: bytes = b"") -> bytes:
        more = b"," + extras if extras else b""
        return self._before + orjson.dumps(chunk) + b"]" + more + self._usage_field() + b"}\n\n"

    def _usage_field(self, *, final: bool = False) -> bytes:
        if final or self._continuous:
            return b',"usage":' + orjson.dumps(self._generation.usage())
        return b',"usage":null' if self._usage else b""
