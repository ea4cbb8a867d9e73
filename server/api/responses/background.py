"""`Background`: responses that go on without their client, and how they are followed."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, MutableMapping
from typing import Any

from starlette.types import Message

from weft.server.api.answer import HEARTBEAT, Answer
from weft.server.api.responses.dialect import ResponseDialect
from weft.server.api.responses.records import OPEN, Records
from weft.server.api.service import Service
from weft.server.errors import ApiError, translate, unavailable

MAX_RUNS = 256
"""of one process; each also counts as a request of its own"""
TICK = 0.2
"""seconds between looks, of whoever works on a response and whoever follows it"""

_NUMBER = re.compile(rb'"sequence_number":(\d+)')

logger = logging.getLogger(__name__)


class Background:
    """The responses that this process works on. `record`s are those of `Records`."""

    def __init__(self) -> None:
        self._runs: dict[asyncio.Task[None], Answer] = {}

    def check_room(self) -> None:
        """Raises `ApiError` 503."""
        if len(self._runs) >= MAX_RUNS:
            raise unavailable("Too many responses are worked on in the background.", "background_full", 10)

    async def begin(
        self,
        answer: Answer,
        dialect: ResponseDialect,
        records: Records,
        record: dict[str, Any],
        scope: MutableMapping[str, Any],
    ) -> None:
        """Store a response that is not there yet, and work on it. Raises `ApiError` where it cannot be stored."""
        id = dialect.response["id"]
        events = dialect.queue()
        if not await records.add(id, record):
            raise ApiError(413, "The request is larger than the store of responses.", code="store_full")
        # Its own copy without the connection: nothing of it may reach the client's socket.
        own = {key: value for key, value in scope.items() if key != "extensions"}
        scope.pop("weft.entered", None)  # from here on it is this run that keeps the model awake
        task = asyncio.create_task(_Run(answer, dialect, records, record, events).run(own))
        self._runs[task] = answer
        task.add_done_callback(lambda task: self._runs.pop(task, None))
        task.add_done_callback(lambda _: Service.leave(own))

    async def close(self) -> None:
        """The process ends: what is not ready has failed."""
        for answer in self._runs.values():
            answer.interrupt(unavailable("The server is shutting down.", "draining", 10), "drain")
        if self._runs:
            await asyncio.wait(self._runs)


class _Run:
    def __init__(
        self, answer: Answer, dialect: ResponseDialect, records: Records, record: dict[str, Any], events: bytes
    ) -> None:
        self._answer = answer
        self._dialect = dialect
        self._records = records
        self._record = record
        self._events = bytearray(events)

    async def run(self, scope: MutableMapping[str, Any]) -> None:
        store, id = self._records.store, self._dialect.response["id"]
        work = asyncio.create_task(self._answer(scope, _never, self._send))
        while not (await asyncio.wait((work,), timeout=TICK))[0]:
            try:
                going = await store.run(store.beat, id, self._taken())
            except ApiError as unusable:
                going = False
                logger.error("response %s is given up: %s", id, unusable.message)
            if not going and not self._dialect.cancelled:
                self._dialect.cancelled = True
                self._answer.interrupt(ApiError(499, "The response was cancelled.", code="cancelled"), "disconnect")
        if (error := work.exception()) is not None and isinstance(error, Exception):
            self._events += await self._dialect.failed(translate(error))
        try:
            await self._records.finish(id, self._record, self._taken())
        except ApiError as unusable:
            logger.error("response %s is lost: %s", id, unusable.message)

    async def _send(self, message: Message) -> None:
        self._events += message.get("body", b"")

    def _taken(self) -> bytes:
        events, self._events = bytes(self._events), bytearray()
        return events if self._record["streams"] else b""


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError


async def follow(records: Records, id: str, after: int) -> AsyncIterator[bytes]:
    """The events of a stored response behind the `after`-th, until the last."""
    store, told, silence = records.store, -1, 0.0
    while True:
        # In this order: the last events are told with the end.
        try:
            record = await records.get(id)
        except ApiError:
            return  # it was deleted meanwhile
        found, told = await store.run(store.events, id, told)
        data = b"".join(found)
        if after >= 0:
            data = b"".join(event + b"\n\n" for event in data.split(b"\n\n") if event and _number(event) > after)
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


def _number(event: bytes) -> int:
    match = _NUMBER.search(event)
    return -1 if match is None else int(match[1])
