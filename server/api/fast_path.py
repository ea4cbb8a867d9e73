"""`FastPath`: writes a stream's tokens from the engine's message directly to the socket.

Waking a task and passing ASGI layers touches so much memory per token that hundreds of streams thrash the CPU caches.
Therefore the call that delivers a token also writes its event. The answer's task only begins and ends the stream, and
writes events while the client does not keep up.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import orjson
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from weft.engine.wire.messages import TokenLogprobs
from weft.server.api.choice import Choice, Piece
from weft.server.api.events import MARK, Dialect
from weft.server.observe.counters import Buckets

EXTENSION = "weft.raw_writer"  # the ASGI scope extension that `Connection` provides

_encode = orjson.dumps
_now = time.perf_counter


class RawWriter:
    """Writes the body of a response to the socket without blocking."""

    __slots__ = ("_cycle", "_flow", "_write")

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._flow = cycle.flow
        self._write = cycle.transport.write

    def ready(self) -> bool:
        """Return whether the response has started, is chunked, and the client keeps up."""
        cycle = self._cycle
        return bool(cycle.chunked_encoding) and not (
            cycle.disconnected or cycle.response_complete or self._flow.write_paused
        )

    def write(self, data: bytes) -> None:
        self._write(b"%x\r\n%b\r\n" % (len(data), data))

    def close_after_response(self) -> None:
        self._cycle.keep_alive = False


class FastPath(ABC):
    """The sink of the `TokenStream` of a choice that has started. `sent_at`: the time of its last write."""

    __slots__ = ("_choice", "_idle", "_itl", "_writer", "sent_at")

    def __init__(self, choice: Choice, writer: RawWriter, itl: Buckets, idle: Callable[[], bool] | None) -> None:
        """`itl` observes the gaps between tokens. `idle()` returns whether no output is queued for the answer's task,
        so that a direct write keeps the order; None for a single choice, where this always holds."""
        self._choice, self._writer, self._itl, self._idle = choice, writer, itl, idle
        self.sent_at = 0.0

    @abstractmethod
    def _event(self, token_id: int, entry: TokenLogprobs | None) -> bytes:
        """Return the event of a token; empty if its text is held back or it finishes the choice."""

    @abstractmethod
    def _events(self, piece: Piece) -> bytes:
        """Return the event of a piece that neither begins nor finishes the choice; empty if its text is held back."""

    def __call__(self, token_id: int, entry: TokenLogprobs | None) -> bool:
        """Send a token. Returns False, without side effects, if that is impossible now."""
        return self._send(self._event, token_id, entry)

    def several(self, token_ids: list[int], entries: list[TokenLogprobs]) -> bool:
        """Send tokens as one event. Returns False, without side effects, if that is impossible now."""
        return self._send(self._event_of_several, token_ids, entries)

    def _event_of_several(self, token_ids: list[int], entries: list[TokenLogprobs]) -> bytes:
        piece = self._choice.take_several(token_ids, entries)
        if self._choice.finished:
            self._choice.defer(piece)
            return b""
        return self._events(piece)

    def _send(self, event: Callable[..., bytes], *of: Any) -> bool:
        if not self._writer.ready() or (self._idle is not None and not self._idle()):
            return False
        choice, now = self._choice, _now()
        try:
            data = event(*of)
        except Exception as error:  # fail this answer only: the caller delivers to others, too
            choice.defer(error)
            return True
        if choice.finished:
            return True
        if data:
            self._writer.write(data)
            self.sent_at = now
        self._itl.observe(now - choice.last_token_at)
        choice.last_token_at = now
        return True


class TemplateFastPath(FastPath):
    """Writes chunks that differ only in their text, as in plain streams."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: bytes, *rest: Any) -> None:
        """`chunk`: the event of a token with the text `MARK`."""
        super().__init__(*rest)
        self._before, _, self._after = chunk.partition(_encode(MARK))

    def _event(self, token_id: int, _: TokenLogprobs | None) -> bytes:
        return self._before + _encode(self._choice.take_text(token_id)) + self._after

    def _events(self, piece: Piece) -> bytes:
        return self._before + _encode(piece.text) + self._after


class DialectFastPath(FastPath):
    """Writes any chunk. The dialect builds it."""

    __slots__ = ("_dialect",)

    def __init__(self, dialect: Dialect, *rest: Any) -> None:
        super().__init__(*rest)
        self._dialect = dialect

    def _event(self, token_id: int, entry: TokenLogprobs | None) -> bytes:
        choice = self._choice
        piece = choice.take_one(token_id, entry)
        if choice.finished:
            choice.defer(piece)
            return b""
        data = self._dialect.token_event(choice, token_id, piece.text) if entry is None else None
        return self._dialect.events(choice, piece) if data is None else data

    def _events(self, piece: Piece) -> bytes:
        return self._dialect.events(self._choice, piece)
