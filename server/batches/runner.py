"""`Runner`: works through the open batches beside everything else; one process of all that share the folder does."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import NamedTuple

from weft.server.batches import lines
from weft.server.batches.files import Files
from weft.server.batches.lines import BatchLine
from weft.server.batches.records import Batch, Batches
from weft.server.batches.work import Work, begin

POLL_SECONDS = 0.5
SAVE_SECONDS = 1.0
"""between looks of others at how far a batch is"""
SWEEP_SECONDS = 300.0
AGAIN_SECONDS = 5.0
"""before a batch is begun again that could not be, for want of room on the disk"""
LONGEST_WAIT = 60.0
"""seconds of Retry-After that are believed"""
ENGINES = 3
"""so many engines may end under a request before that is its answer"""

logger = logging.getLogger("weft")


class Reply(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    request_id: str
    retry_after: float | None
    engine_died: bool = False


Ask = Callable[[BatchLine, str], Awaitable[Reply]]
"""asks for a line in the name of its batch's owner. Raises `OwnerGone`"""


class OwnerGone(Exception):
    """The key that made the batch is none any more."""


class Runner:
    """`room` tells, of the number that is open, how many more requests may be; `closing`: this process is ending."""

    def __init__(
        self, files: Files, batches: Batches, ask: Ask, room: Callable[[int], int], closing: Callable[[], bool]
    ) -> None:
        self._files, self._batches, self._ask = files, batches, ask
        self._room, self._closing = room, closing
        self._works: dict[str, Work] = {}
        self._beginning: dict[str, asyncio.Task[None]] = {}
        self._open: dict[asyncio.Task[None], Work] = {}
        self._swept = 0.0

    async def run(self) -> None:
        """Until the process closes. Whoever does it now, another process goes on afterwards."""
        while not self._closing():
            try:
                owner = await asyncio.to_thread(self._batches.own)
                if owner is not None:
                    try:
                        await self._serve()
                    finally:
                        await self._let_go()
                        os.close(owner)
            except OSError as error:
                logger.error("batches stop for a moment: %s", error.strerror or error)
            await asyncio.sleep(2 * POLL_SECONDS)

    async def _serve(self) -> None:
        looked = 0.0
        while not self._closing():
            now = time.monotonic()
            if now - looked >= POLL_SECONDS:
                looked = now
                await self._look()
            self._start()
            if self._open:
                await asyncio.wait(self._open, timeout=POLL_SECONDS / 2, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(POLL_SECONDS / 2)

    async def _let_go(self) -> None:
        """Drop what is under way: it is asked again by whoever goes on."""
        for task in self._open:
            task.cancel()
        # What begins does so in a thread, which nothing can stop.
        await asyncio.gather(*self._open, *self._beginning.values(), return_exceptions=True)
        for work in self._works.values():
            work.close()
        self._works.clear()
        self._beginning.clear()
        self._open.clear()

    async def _look(self) -> None:
        """Take in what is new, cancelled, expired or done."""
        if time.monotonic() - self._swept > SWEEP_SECONDS:
            self._swept = time.monotonic()
            await asyncio.to_thread(self._files.sweep)
            await asyncio.to_thread(self._batches.sweep)
        for batch in await asyncio.to_thread(self._batches.open):
            if batch.id not in self._works and batch.id not in self._beginning:
                task = asyncio.create_task(self._begin(batch))
                self._beginning[batch.id] = task
                task.add_done_callback(lambda _, id=batch.id: self._beginning.pop(id, None))  # type: ignore[misc]
        for work in list(self._works.values()):
            cancelled = self._batches.cancelled(work.batch.id) is not None
            if cancelled or work.batch.expires_at <= time.time():
                await self._cut(work, "cancelled" if cancelled else "expired")
            elif work.exhausted and not work.open:
                await self._finish(work, "completed")
            elif time.monotonic() - work.saved > SAVE_SECONDS and work.changed:
                self._save(work)

    async def _begin(self, batch: Batch) -> None:
        try:
            work = await asyncio.to_thread(begin, batch, self._files, self._batches)
        except OSError as error:
            logger.error("batch %s waits: %s", batch.id, error.strerror or error)
            await asyncio.sleep(AGAIN_SECONDS)
            return
        if work is not None:
            self._works[batch.id] = work

    def _start(self) -> None:
        """Open as many requests as there is room for, the batches taking turns."""
        room = self._room(len(self._open))
        now = time.monotonic()
        while room > 0:
            ready = [w for w in self._works.values() if not w.exhausted and w.not_before <= now]
            if not ready:
                return
            for work in sorted(ready, key=lambda w: w.open)[:room]:
                if (line := work.next()) is not None:
                    work.open += 1
                    task = asyncio.create_task(self._answer(work, line))
                    self._open[task] = work
                    task.add_done_callback(self._ended)
                    room -= 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        work = self._open.pop(task, None)
        if work is not None:
            work.open -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request of a batch failed", exc_info=error)

    async def _answer(self, work: Work, line: BatchLine) -> None:
        engines = 0
        while True:
            try:
                reply = await self._ask(line, work.batch.owner)
            except OwnerGone:
                work.fail("invalid_api_key", "The key that made this batch is none any more.")
                return
            engines += reply.engine_died
            if reply.status not in (429, 503) or engines >= ENGINES:
                break
            wait = min(LONGEST_WAIT, reply.retry_after or 1.0)
            work.not_before = time.monotonic() + wait
            await asyncio.sleep(wait)
        try:
            work.add(line, lines.answer(line, reply.request_id, reply.status, reply.body), failed=reply.status != 200)
        except OSError as error:
            # Asked again once there is room on the disk. Others that are open will find it full too: told once.
            if work.not_before <= time.monotonic():
                logger.error(
                    "batch %s waits: its answers cannot be written: %s", work.batch.id, error.strerror or error
                )
            work.give_back(line)
            work.not_before = time.monotonic() + LONGEST_WAIT

    async def _cut(self, work: Work, status: str) -> None:
        """End it before all its requests are answered."""
        tasks = [task for task, of in self._open.items() if of is work]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        code = f"batch_{status}"
        why = "The batch was cancelled." if status == "cancelled" else "The batch had no time left for this request."
        await asyncio.to_thread(work.fail_rest, code, why)
        await self._finish(work, status)

    async def _finish(self, work: Work, status: str) -> None:
        del self._works[work.batch.id]
        await asyncio.to_thread(work.finish, status, self._files, self._batches)

    def _save(self, work: Work) -> None:
        with suppress(OSError):
            work.save(self._batches)
