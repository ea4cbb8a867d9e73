"""`Choices`: OpenAI's dialect of completions and chat: a list of choices, streamed as chunks."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import orjson

from weft import __version__
from weft.engine.wire.messages import EngineReady
from weft.server.api.choice import Choice, Piece
from weft.server.api.events import MARK, Dialect, event
from weft.server.api.generate import Generation
from weft.server.api.protocol import StreamOptions

LARGE = 4096
"""Tokens above which an answer is assembled in a worker thread: thousands of log-probabilities take time."""


def fingerprint(ready: EngineReady) -> str:
    """OpenAI's `system_fingerprint`: another value means that a seed may give another answer."""
    text = f"{__version__} {ready.model_id} {ready.model_type} {ready.num_parameters} {ready.dtype} {ready.device}"
    return f"fp_{sha256(text.encode()).hexdigest()[:10]}"


class Choices(Dialect):
    """Events have no names; the last is `[DONE]`. Subclasses format the choices of their endpoint."""

    object: str
    chunk_object: str
    id_prefix: str

    def __init__(self, generation: Generation, model: str, created: int) -> None:
        options = generation.body.stream_options or StreamOptions()
        self._generation = generation
        self._head = {
            "id": f"{self.id_prefix}-{generation.id}",
            "object": self.chunk_object if generation.body.stream else self.object,
            "created": created,
            "model": model,
            "system_fingerprint": fingerprint(generation.service.loaded.ready),
        }
        self._before = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._usage = options.include_usage
        self._continuous = options.include_usage and options.continuous_usage_stats
        self._opened: set[int] = set()
        self._templates: dict[int, tuple[bytes, bytes]] = {}
        """The bytes before and after the text of a chunk, by choice."""

    # -- the format of choices

    @property
    @abstractmethod
    def _uniform(self) -> bool:
        """Between the first and the last chunk, a choice's chunks differ only in their text."""

    @abstractmethod
    def _chunk(self, choice: Choice, piece: Piece) -> dict[str, Any] | None:
        """The chunk of a piece; None if there is nothing to show yet."""

    @abstractmethod
    def _whole(self, choice: Choice, piece: Piece) -> dict[str, Any]:
        """A finished choice; `piece` is its complete output."""

    def _first_chunks(self, choice: Choice, /) -> list[dict[str, Any]]:  # noqa: ARG002
        """Chunks to send before the first piece of a choice."""
        return []

    def _passes(self, choice: Choice, token_id: int, text: str, /) -> bool:  # noqa: ARG002
        """Whether a token's chunk differs only in its text from the others. If so, the token is consumed."""
        return False

    def _extras(self) -> dict[str, Any]:
        """Additional fields of a plain answer and of the first chunks."""
        return {}

    # -- plain

    async def body(self, wholes: Sequence[Piece]) -> bytes:
        generation = self._generation
        if generation.usage()["total_tokens"] > LARGE:
            return await generation.service.offload(lambda: self._assemble(wholes))
        return self._assemble(wholes)

    def _assemble(self, wholes: Sequence[Piece]) -> bytes:
        choices = [self._whole(c, p) for c, p in zip(self._generation.choices, wholes, strict=True)]
        return orjson.dumps({**self._head, "choices": choices, "usage": self._generation.usage(), **self._extras()})

    # -- streamed

    @property
    def plain(self) -> bool:
        return self._uniform and not self._continuous

    def events(self, choice: Choice, piece: Piece) -> bytes:
        first = b""
        if choice.index not in self._opened:
            self._opened.add(choice.index)
            extras = orjson.dumps(self._extras())[1:-1]
            before = len(piece.token_ids)
            first = b"".join(self._event(chunk, extras, before) for chunk in self._first_chunks(choice))
        chunk = self._chunk(choice, piece)
        return first if chunk is None else first + self._event(chunk)

    def token_event(self, choice: Choice, token_id: int, text: str) -> bytes | None:
        if self._continuous or not self._passes(choice, token_id, text):
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

    def _event(self, chunk: dict[str, Any], extras: bytes = b"", unsent: int = 0) -> bytes:
        more = b"," + extras if extras else b""
        return self._before + orjson.dumps(chunk) + b"]" + more + self._usage_field(unsent) + b"}\n\n"

    def _usage_field(self, unsent: int = 0, *, final: bool = False) -> bytes:
        """`unsent`: output tokens that later chunks count."""
        if final or self._continuous:
            usage = self._generation.usage()
            for name in ("completion_tokens", "total_tokens"):
                usage[name] -= unsent
            return b',"usage":' + orjson.dumps(usage)
        return b',"usage":null' if self._usage else b""
