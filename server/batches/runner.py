"""`Runner`: processes open batches in the background, in one of the processes that share the folder."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from weft.server.batches import lines
from weft.server.batches.files import Files
from weft.server.batches.lines import BatchLine
from weft.server.batches.records import Batch, Batches
from weft.server.batches.work import Work, begin

POLL_SECONDS = 0.5
SAVE_SECONDS = 1.0  # seconds between saves of a batch's progress
SWEEP_SECONDS = 300.0
RETRY_SECONDS = 5.0  # seconds before retrying after the disk failed
LOG_SECONDS = 60.0  # seconds between log lines about a failing disk
LONGEST_WAIT = 60.0  # cap of Retry-After, in seconds
MAX_ENGINES = 3  # engines that may die while running a request before it fails

_ENDINGS = {"cancelled": "The batch was cancelled.", "expired": "The batch expired before this request was answered."}

logger = logging.getLogger("weft")


class Reply(NamedTuple):
    """An HTTP answer."""

    status: int
    body: bytes
    request_id: str
    retry_after: float | None
    engine_died: bool = False


Send = Callable[[BatchLine, str], Awaitable[Reply]]
"""Sends a request on behalf of the batch's owner. Raises `OwnerGone`."""


class OwnerGone(Exception):
    """The key that created the batch no longer exists."""


class Runner:
    """`headroom`: how many more requests may be opened, given those that are. `closing`: this process is ending.
    `on_failure`: called with the reason when the disk fails."""

    def __init__(
        self, files: Files, batches: Batches, send: Send, headroom: Callable[[int], int], closing: Callable[[], bool],
        on_failure: Callable[[str], None] = lambda _: None,
    ) -> None:  # fmt: skip
        self._on_failure = on_failure
        self._files, self._batches, self._send = files, batches, send
        self._headroom, self._closing = headroom, closing
        self._works: dict[str, Work] = {}
        self._beginning: dict[str, asyncio.Task[None]] = {}
        self._open: dict[asyncio.Task[None], Work] = {}
        self._retries: dict[str, tuple[float, float]] = {}
        """By batch that waits for the disk: the time of its next retry, and of the last log line (monotonic)."""
        self._swept = 0.0

    async def run(self) -> None:
        """Run until the process closes; then another process takes over."""
        while not self._closing():
            try:
                owner = await asyncio.to_thread(self._batches.try_own)
                if owner is not None:
                    try:
                        await self._serve()
                    finally:
                        await self._release()
                        os.close(owner)
            except OSError as error:
                self._on_failure(error.strerror or str(error))
                logger.error("batch processing paused: %s", error.strerror or error)
            await asyncio.sleep(2 * POLL_SECONDS)

    async def _serve(self) -> None:
        checked = 0.0
        while not self._closing():
            now = time.monotonic()
            if now - checked >= POLL_SECONDS:
                checked = now
                await self._check()
            self._start()
            if self._open:
                await asyncio.wait(self._open, timeout=POLL_SECONDS / 2, return_when=asyncio.FIRST_COMPLETED)
            else:
                await asyncio.sleep(POLL_SECONDS / 2)

    async def _release(self) -> None:
        """Drop requests in progress; the next owner sends them again."""
        for task in self._open:
            task.cancel()
        # Batches begin in threads, which cannot be stopped.
        await asyncio.gather(*self._open, *self._beginning.values(), return_exceptions=True)
        for work in self._works.values():
            async with work.lock:
                work.close()
        self._works.clear()
        self._beginning.clear()
        self._open.clear()

    async def _check(self) -> None:
        """Find new, cancelled, expired and finished batches."""
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
                    await self._advance(work)
                except OSError as error:
                    self._postpone(work.batch.id, error)

    async def _advance(self, work: Work) -> None:
        """Write, save or end a batch. Repeatable if it raises `OSError`."""
        await _in_thread(work, work.write)
        cancelled = await asyncio.to_thread(self._batches.cancelled, work.batch.id) is not None
        if cancelled or work.batch.expires_at <= self._batches.clock.earliest():
            await self._end_early(work, "cancelled" if cancelled else "expired")
        elif work.exhausted and not work.open:
            await self._finish(work, "completed")
        elif time.monotonic() - work.saved > SAVE_SECONDS and work.changed:
            await _in_thread(work, work.save, self._batches)

    def _due(self, id: str) -> bool:
        return self._retries.get(id, (0.0, 0.0))[0] <= time.monotonic()

    def _postpone(self, id: str, error: OSError) -> None:
        """Retry a batch later. It sends no requests while answers are unwritten."""
        self._on_failure(error.strerror or str(error))
        now = time.monotonic()
        logged = self._retries[id][1] if id in self._retries else -LOG_SECONDS
        if now - logged >= LOG_SECONDS:
            logger.error("batch %s waits for the disk: %s", id, error.strerror or error)
            logged = now
        self._retries[id] = now + RETRY_SECONDS, logged

    async def _begin(self, batch: Batch) -> None:
        try:
            work = await asyncio.to_thread(begin, batch, self._files, self._batches)
        except OSError as error:
            self._postpone(batch.id, error)
            return
        if work is not None:
            self._works[batch.id] = work
        else:
            self._retries.pop(batch.id, None)

    def _start(self) -> None:
        """Open as many requests as there is headroom for, alternating between batches."""
        left = self._headroom(len(self._open))
        now = time.monotonic()
        while left > 0:
            ready = [w for w in self._works.values() if not w.exhausted and w.not_before <= now and w.written]
            if not ready:
                return
            for work in sorted(ready, key=lambda w: w.open)[:left]:
                if (line := work.next()) is not None:
                    work.open += 1
                    task = asyncio.create_task(self._answer(work, line))
                    self._open[task] = work
                    task.add_done_callback(self._ended)
                    left -= 1

    def _ended(self, task: asyncio.Task[None]) -> None:
        if (work := self._open.pop(task, None)) is not None:
            work.open -= 1
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("a request of a batch failed", exc_info=error)

    async def _answer(self, work: Work, line: BatchLine) -> None:
        engines = 0
        while True:
            try:
                reply = await self._send(line, work.batch.owner)
            except OwnerGone:
                work.fail("invalid_api_key", "The API key that created this batch no longer exists.")
                return
            engines += reply.engine_died
            if reply.status not in (429, 503) or engines >= MAX_ENGINES:
                break
            wait = min(LONGEST_WAIT, reply.retry_after or 1.0)
            work.not_before = time.monotonic() + wait
            await asyncio.sleep(wait)
        work.collect(line, lines.answer(line, reply.request_id, reply.status, reply.body), failed=reply.status != 200)
        try:
            await asyncio.shield(_in_thread(work, work.write))
        except OSError as error:  # the computed answer is kept
            self._postpone(work.batch.id, error)

    async def _end_early(self, work: Work, status: str) -> None:
        """End a batch before all of its requests are answered."""
        tasks = [task for task, of in self._open.items() if of is work]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await _in_thread(work, work.fail_rest, f"batch_{status}", _ENDINGS[status])
        await self._finish(work, status)

    async def _finish(self, work: Work, status: str) -> None:
        del self._works[work.batch.id]  # if this fails, the batch begins again with all of its answers
        await _in_thread(work, work.finish, status, self._files, self._batches)
        self._retries.pop(work.batch.id, None)


async def _in_thread(work: Work, function: Callable[..., None], *arguments: Any) -> None:
    """Call a method of `work` that may block on the disk. Raises what it raises."""
    async with work.lock:
        await asyncio.to_thread(function, *arguments)
