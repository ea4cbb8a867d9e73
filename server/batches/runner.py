"""`Runner`: works through the open batches beside everything else; one process of all that share the folder does."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
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
"""before the disk is tried again that had no room for a batch"""
TELL_SECONDS = 60.0
"""between lines in the log about that"""
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
        self._put_off: dict[str, tuple[float, float]] = {}
        """of batches that wait for room on the disk: when it is tried again, and when that was told (monotonic)"""
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
            if batch.id not in self._works and batch.id not in self._beginning and self._due(batch.id):
                task = asyncio.create_task(self._begin(batch))
                self._beginning[batch.id] = task
                task.add_done_callback(lambda _, id=batch.id: self._beginning.pop(id, None))  # type: ignore[misc]
        for work in list(self._works.values()):
            if self._due(work.batch.id):
                try:
                    await self._go_on(work)
                except OSError as error:
                    self._wait_for_room(work.batch.id, error)

    async def _go_on(self, work: Work) -> None:
        """Whatever it needs beside requests. Raises `OSError` where the disk takes nothing; it can be done again."""
        work.write()
        cancelled = self._batches.cancelled(work.batch.id) is not None
        if cancelled or work.batch.expires_at <= time.time():
            await self._cut(work, "cancelled" if cancelled else "expired")
        elif work.exhausted and not work.open:
            await self._finish(work, "completed")
        elif time.monotonic() - work.saved > SAVE_SECONDS and work.changed:
            work.save(self._batches)

    def _due(self, id: str) -> bool:
        return self._put_off.get(id, (0.0, 0.0))[0] <= time.monotonic()

    def _wait_for_room(self, id: str, error: OSError) -> None:
        """Try again in a while. While answers are not written no others are asked for."""
        now = time.monotonic()
        told = self._put_off[id][1] if id in self._put_off else -TELL_SECONDS
        if now - told >= TELL_SECONDS:
            logger.error("batch %s waits for the disk: %s", id, error.strerror or error)
            told = now
        self._put_off[id] = now + AGAIN_SECONDS, told

    async def _begin(self, batch: Batch) -> None:
        try:
            work = await asyncio.to_thread(begin, batch, self._files, self._batches)
        except OSError as error:
            self._wait_for_room(batch.id, error)
            return
        if work is not None:
            self._works[batch.id] = work
        else:
            self._put_off.pop(batch.id, None)

    def _start(self) -> None:
        """Open as many requests as there is room for, the batches taking turns."""
        room = self._room(len(self._open))
        now = time.monotonic()
        while room > 0:
            ready = [w for w in self._works.values() if not w.exhausted and w.not_before <= now and w.written]
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
        except OSError as error:  # what it took to compute is kept
            self._wait_for_room(work.batch.id, error)

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
        del self._works[work.batch.id]  # where this fails it is begun again, all of its answers there
        await asyncio.to_thread(work.finish, status, self._files, self._batches)
        self._put_off.pop(work.batch.id, None)
