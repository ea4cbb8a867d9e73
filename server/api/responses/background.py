"""`Background`: responses that run without their client, and `follow`, which streams their events."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from starlette.types import Message

from weft.server.api.answer import HEARTBEAT, Answer
from weft.server.api.responses.dialect import ResponseDialect
from weft.server.api.responses.records import OPEN, Records
from weft.server.api.service import Service
from weft.server.errors import ApiError, translate, unavailable

MAX_RUNS = 256  # background responses per process; each also counts as a request
RETRY_SECONDS = 2.0  # seconds before a response whose disk failed is stored again
TICK = 0.2  # Seconds between store accesses of a running response and of its followers.

_NUMBER = re.compile(rb'"sequence_number":(\d+)')

logger = logging.getLogger(__name__)


class Background:
    """The background responses of this process."""

    def __init__(self) -> None:
        self._runs: dict[asyncio.Task[None], Answer] = {}
        self._reserved = 0  # runs that have not begun yet
        self.closing = False

    @contextmanager
    def reserved(self) -> Iterator[None]:
        """Count a run from now on; `begin` it inside. Raises `ApiError` 503."""
        if len(self._runs) + self._reserved >= MAX_RUNS:
            raise unavailable("Too many background responses are running.", "background_full", 10)
        self._reserved += 1
        try:
            yield
        finally:
            self._reserved -= 1

    async def begin(self, run: Run, scope: MutableMapping[str, Any]) -> None:
        """Store a queued response and start working on it. Raises `ApiError` if it cannot be stored."""
        run.events += run.dialect.queue()
        if not await run.records.add(run.dialect.response["id"], run.record):
            what = "The request is larger than the response store (--responses-max-mib)."
            raise ApiError(413, what, code="store_full")
        # A copy without the connection: the run must not write to the client's socket.
        own = {key: value for key, value in scope.items() if key != "extensions"}
        scope.pop("weft.entered", None)  # this run keeps the model awake from now on
        task = asyncio.create_task(run.run(own, lambda: self.closing))
        self._runs[task] = run.answer
        task.add_done_callback(lambda task: self._runs.pop(task, None))
        task.add_done_callback(lambda _: Service.leave(own))

    async def close(self) -> None:
        """Fail unfinished responses; the process is ending."""
        self.closing = True
        for answer in self._runs.values():
            answer.interrupt(unavailable("The server is shutting down.", "draining", 10), "drain")
        if self._runs:
            await asyncio.wait(self._runs)


@dataclass(slots=True)
class Run:
    """A background response. For `record`, see `Records`."""

    answer: Answer
    dialect: ResponseDialect
    records: Records
    record: dict[str, Any]
    events: bytearray = field(default_factory=bytearray)

    async def run(self, scope: MutableMapping[str, Any], closing: Callable[[], bool]) -> None:
        """Work on the response, and store it, also after the disk failed for a while, unless `closing`."""
        store, id = self.records.store, self.dialect.response["id"]
        work = asyncio.create_task(self.answer(scope, _never, self._send))
        while not (await asyncio.wait((work,), timeout=TICK))[0]:
            events, going = self._take_events(), True
            try:
                going = await store.run(store.heartbeat, id, events)
            except ApiError:
                self.events[:0] = events
            if not going and not self.dialect.cancelled:
                self.dialect.cancelled = True
                self.answer.interrupt(ApiError(499, "The response was cancelled.", code="cancelled"), "disconnect")
        if (error := work.exception()) is not None and isinstance(error, Exception):
            self.events += await self.dialect.failed(translate(error))
        events = self._take_events()
        while True:
            try:
                await self.records.finish(id, self.record, events)
                return
            except ApiError as unusable:
                if closing():
                    logger.error("response %s could not be stored: %s", id, unusable.message)
                    return
            await asyncio.sleep(RETRY_SECONDS)

    async def _send(self, message: Message) -> None:
        self.events += message.get("body", b"")

    def _take_events(self) -> bytes:
        events, self.events = bytes(self.events), bytearray()
        return events if self.record["streams"] else b""


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def follow(records: Records, id: str, after: int) -> AsyncIterator[bytes]:
    """Yield the events of a stored response after number `after`, through the last."""
    store, last, silence = records.store, -1, 0.0
    while True:
        # In this order, because the last events are stored together with the final status.
        try:
            record = await records.get(id)
            found, last = await store.read(store.events, id, last)
        except ApiError as error:
            if error.status == 404:
                return  # deleted
            record, found = {"response": {"status": OPEN[0]}}, []  # the disk fails: try again
        data = b"".join(found)
        if after >= 0:
            numbered = ((_NUMBER.search(event), event) for event in data.split(b"\n\n") if event)
            data = b"".join(event + b"\n\n" for number, event in numbered if number and int(number[1]) > after)
        if data:
            silence = 0.0
            yield data
        if record["response"]["status"] not in OPEN:
            return
        await asyncio.sleep(TICK)
        silence += TICK
        if silence >= HEARTBEAT:
            silence = 0.0
            yield b": waiting\n\n"
