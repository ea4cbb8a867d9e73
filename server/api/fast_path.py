"""`FastPath`: the tokens of a stream go from the engine's message straight to the socket.

A task that wakes up and a chain of ASGI layers touch so much memory per token that, with hundreds of streams, the
caches hold none of it. So what a token is sent as is written in the call that brings it. The answer's task only begins
and ends the stream, and takes over while the client does not keep up.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Protocol

import orjson

from weft.engine.wire.messages import TokenLogprobs
from weft.server.api.choice import Choice
from weft.server.api.events import MARK, Dialect
from weft.server.observe.counters import Buckets

EXTENSION = "weft.outlet"
"""of the ASGI scope, where `connection` is the server"""

_encode = orjson.dumps
_now = time.perf_counter


class Outlet(Protocol):
    """The body of a response, where writing does not wait."""

    def ready(self) -> bool:
        """The response has begun, is sent in chunks, and the client keeps up."""
        ...

    def write(self, data: bytes) -> None: ...

    def close_behind(self) -> None:
        """Have the connection closed behind the response."""
        ...


class FastPath(ABC):
    """The sink of a `TokenStream` whose choice has begun.

    `sent_at`: when it last wrote something.
    """

    __slots__ = ("_choice", "_idle", "_itl", "_outlet", "sent_at")

    def __init__(self, choice: Choice, outlet: Outlet, itl: Buckets, idle: Callable[[], bool] | None) -> None:
        """`itl`: observes the gaps between tokens. `idle`: nothing of the answer is on its way through its task; None
        when that holds whenever the stream is read."""
        self._choice = choice
        self._outlet = outlet
        self._itl = itl
        self._idle = idle
        self.sent_at = 0.0

    @abstractmethod
    def _written(self, token_id: int, entry: TokenLogprobs | None) -> bytes:
        """What a token is sent as; nothing for one that is held back or has finished the choice."""

    def __call__(self, token_id: int, entry: TokenLogprobs | None) -> bool:
        """Send a token; False when that is not possible now, and nothing was done."""
        if not self._outlet.ready() or (self._idle is not None and not self._idle()):
            return False
        choice, now = self._choice, _now()
        try:
            data = self._written(token_id, entry)
        except Exception as error:  # this answer's alone: who delivers has others to deliver to
            choice.leave(error)
            return True
        if choice.finished:
            return True
        if data:
            self._outlet.write(data)
            self.sent_at = now
        self._itl.observe(now - choice.last_token_at)
        choice.last_token_at = now
        return True


class Template(FastPath):
    """For chunks that differ in their text alone, which most do."""

    __slots__ = ("_after", "_before")

    def __init__(self, chunk: bytes, *rest: Any) -> None:
        """`chunk`: what a token whose text is `MARK` is sent as."""
        super().__init__(*rest)
        self._before, _, self._after = chunk.partition(_encode(MARK))

    def _written(self, token_id: int, _: TokenLogprobs | None) -> bytes:
        return self._before + _encode(self._choice.take_text(token_id)) + self._after


class Composer(FastPath):
    """For any chunk."""

    __slots__ = ("_dialect",)

    def __init__(self, dialect: Dialect, *rest: Any) -> None:
        super().__init__(*rest)
        self._dialect = dialect

    def _written(self, token_id: int, entry: TokenLogprobs | None) -> bytes:
        choice = self._choice
        piece = choice.take_one(token_id, entry)
        if choice.finished:
            choice.leave(piece)
            return b""
        data = self._dialect.quick(choice, token_id, piece.text) if entry is None else None
        return self._dialect.of(choice, piece) if data is None else data
