"""`Express`: the plain tokens of a stream go from the engine's message straight to the socket.

A task that wakes up, a chain of ASGI layers and a JSON encoder touch so much memory per token that, with hundreds of
streams, the caches hold none of it. Most chunks of a stream differ in their text alone, so they are written from a
template in the call that brings the token; whatever is not plain goes the way through the answer's task.
"""

from __future__ import annotations

import time
from typing import Protocol

import orjson

from weft.server.choice import Choice
from weft.server.counters import Buckets

EXTENSION = "weft.outlet"
"""of the ASGI scope, where `connection` is the server"""

MARK = "\x00"
"""the text of the chunk that a template is made of"""

_encode = orjson.dumps
_now = time.perf_counter


class Outlet(Protocol):
    """The body of a response, where writing does not wait."""

    def ready(self) -> bool:
        """The response has begun, is sent in chunks, and the client keeps up."""
        ...

    def write(self, data: bytes) -> None: ...


class Express:
    """The sink of a `TokenStream` whose choice has begun."""

    __slots__ = ("_after", "_before", "_choice", "_itl", "_outlet")

    def __init__(self, choice: Choice, outlet: Outlet, chunk: bytes, itl: Buckets) -> None:
        """`chunk`: what a token whose text is `MARK` is sent as. `itl`: observes the gaps between tokens."""
        self._choice = choice
        self._outlet = outlet
        self._before, _, self._after = chunk.partition(_encode(MARK))
        self._itl = itl

    def __call__(self, token_id: int) -> bool:
        """Send a token; False when that is not possible now, and nothing was done."""
        if not self._outlet.ready():
            return False
        choice, now = self._choice, _now()
        self._outlet.write(self._before + _encode(choice.feed(token_id)) + self._after)
        self._itl.observe(now - choice.last_token_at)
        choice.last_token_at = now
        return True
