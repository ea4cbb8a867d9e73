"""`Answer`: a generation as an ASGI response, plain or streamed. It ends early with its client or its deadline."""

from __future__ import annotations

import asyncio
import logging
import time
from contextlib import aclosing

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from weft.engine.errors import EngineDead
from weft.server.api.choice import Choice, Piece
from weft.server.api.events import MARK, Dialect
from weft.server.api.fast_path import EXTENSION, DialectFastPath, FastPath, RawWriter, TemplateFastPath
from weft.server.api.generate import Generation, wait_for_disconnect
from weft.server.api.service import Service
from weft.server.errors import ApiError, translate

HEARTBEAT = 15.0  # seconds of silence after which a stream gets a comment line

logger = logging.getLogger(__name__)


class Answer(Response):
    """Runs a generation when called. Errors before the first byte are raised and become status codes."""

    def __init__(self, generation: Generation, dialect: Dialect) -> None:
        self.background = None
        self.service: Service = generation.service
        self._generation, self._dialect = generation, dialect
        self._work: asyncio.Task[None] | None = None
        self._writer: RawWriter | None = None
        self._fast_paths: list[FastPath] = []
        self._interruption: ApiError | None = None
        self._cause = "disconnect"
        self._started = False

    def interrupt(self, error: ApiError, cause: str) -> None:
        """End this answer with an error. `cause` is for the metrics."""
        if self._interruption is None and self._work is not None and not self._work.done():
            self._interruption, self._cause = error, cause
            self._work.cancel()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        generation, service = self._generation, self._generation.service
        scope["weft.generation"] = generation
        timer = self._start_timer()
        self._writer = scope.get("extensions", {}).get(EXTENSION)
        self._work = work = asyncio.create_task(self._stream(send) if generation.body.stream else self._plain(send))
        gone = asyncio.create_task(wait_for_disconnect(receive))
        service.open.add(self)
        try:
            await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()  # the client disconnected or was cut off
                if self._interruption is None and scope.get("weft.stalled"):
                    self._cause = "stall"
            error = await self._outcome(work)
            generation.close(
                self._cause
            )  # before sending the error: a client that stopped reading must not block the engine
            if error is not None:
                if not self._started:
                    raise error
                if self._writer is not None:
                    self._writer.close_after_response()  # a broken stream must look broken
                await send({"type": "http.response.body", "body": await self._dialect.failed(error)})
        finally:
            service.open.discard(self)
            if timer is not None:
                timer.cancel()
            work.cancel()
            gone.cancel()
            generation.close(self._cause)

    def _start_timer(self) -> asyncio.TimerHandle | None:
        timeout = self._generation.service.config.request_timeout
        if timeout is None:
            return None
        error = ApiError(504, f"The request took longer than {timeout:g} s.", code="timeout")
        left = timeout - (time.perf_counter() - self._generation.arrival)
        return asyncio.get_running_loop().call_later(max(0.0, left), self.interrupt, error, "timeout")

    async def _outcome(self, work: asyncio.Task[None]) -> ApiError | None:
        """The error to send to the client, if any."""
        await asyncio.wait((work,))
        if work.cancelled():
            return self._interruption
        error = work.exception()
        if not isinstance(error, Exception):
            return None
        self._cause = "engine" if isinstance(error, EngineDead) else "error"
        translated = translate(error)
        if translated.code == "internal_error":
            logger.error("request %s failed", self._generation.id, exc_info=error)
        return translated

    # -- plain

    async def _plain(self, send: Send) -> None:
        generation = self._generation
        generation.replayable = True
        generation.submit()
        wholes = [Piece() for _ in generation.choices]
        current = list(generation.choices)
        async with aclosing(generation.updates()) as updates:
            async for update in updates:
                if update is not None:
                    choice, piece = update
                    if current[choice.index] is not choice:  # restarted
                        current[choice.index], wholes[choice.index] = choice, Piece()
                    wholes[choice.index].append(piece)
        body = await self._dialect.body(wholes)
        await self._start(send, b"application/json", length=len(body))
        await send({"type": "http.response.body", "body": body})

    # -- streamed

    async def _stream(self, send: Send) -> None:
        generation, dialect = self._generation, self._dialect
        generation.submit()
        sent = time.perf_counter()
        async with aclosing(generation.updates(HEARTBEAT / 3)) as updates:
            async for update in updates:
                if update is None:
                    last = max([sent, *(fast_path.sent_at for fast_path in self._fast_paths)])
                    if time.perf_counter() - last < HEARTBEAT:
                        continue
                if not self._started:
                    await self._start(send, dialect.content_type)
                data = dialect.keepalive if update is None else dialect.events(*update)
                if data:
                    sent = time.perf_counter()
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                if update is not None and update[0].stream.sink is None and self._writer is not None:
                    self._install_fast_path(update[0], self._writer)
        await send({"type": "http.response.body", "body": await dialect.end()})

    def _install_fast_path(self, choice: Choice, writer: RawWriter) -> None:
        generation, dialect = self._generation, self._dialect
        itl = generation.service.metrics.itl.labels()
        idle = generation.idle if len(generation.choices) > 1 else None
        if dialect.plain:
            fast_path: FastPath = TemplateFastPath(dialect.events(choice, Piece(MARK)), choice, writer, itl, idle)
        else:
            fast_path = DialectFastPath(dialect, choice, writer, itl, idle)
        self._fast_paths.append(fast_path)
        choice.stream.sink = fast_path

    async def _start(self, send: Send, content_type: bytes, *, length: int | None = None) -> None:
        headers = [(b"content-type", content_type)]
        if length is None:
            headers += [(b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        else:
            headers.append((b"content-length", str(length).encode()))
        self._started = True
        await send({"type": "http.response.start", "status": 200, "headers": headers})
