"""Defines `Driver`, which sends its share of a workload on an absolute schedule and measures its own lateness."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from weft.loadgen.client import Client, Target
from weft.loadgen.prompts import Content
from weft.loadgen.record import Outcome, Record
from weft.loadgen.workload import Planned, Workload

PROBE_INTERVAL = 0.005
REPORT_INTERVAL = 0.5


@dataclass(frozen=True, slots=True)
class Job:
    """One process's share `part` of `parts` of a workload. `epoch`: `time.monotonic()` at second zero."""

    workload: Workload
    target: Target
    epoch: float
    part: int = 0
    parts: int = 1
    drain: float | None = None
    """Seconds after the last arrival until running requests are given up; None: never."""
    context: int | None = None  # Context length, in tokens, at which conversations end.


@dataclass(slots=True)
class Progress:
    """Running totals of one process."""

    sent: int = 0
    done: int = 0
    failed: int = 0
    tokens: int = 0
    ttft_sum: float = 0.0
    lag: float = 0.0  # Longest lag of the last interval, in seconds.


@dataclass(slots=True)
class Outcomes:
    """Measurements of one process. `lags`: delays, in seconds, of a timer due every 5 ms of the run."""

    records: list[Record] = field(default_factory=list)
    lags: array[float] = field(default_factory=lambda: array("d"))
    cpu_seconds: float = 0.0
    ended: float = 0.0  # Seconds from the start until the last answer was complete.
    interrupted: bool = False
    conversations_cut: int = 0
    """Conversations that ended early because their next turn would have exceeded the context."""


class Driver:
    """Runs one `Job`; calls `report` with the totals twice a second."""

    def __init__(self, job: Job, report: Callable[[Progress], None] | None = None) -> None:
        self.job = job
        self._report = report
        self._client = Client(job.target, job.epoch)
        self._out = Outcomes()
        self._progress = Progress()
        self._tasks: set[asyncio.Task[Any]] = set()
        self._error: BaseException | None = None
        self._stop = asyncio.Event()
        self._idle = asyncio.Event()  # Set if nothing runs or `stop` was called.
        self._idle.set()

    def stop(self) -> None:
        """Send no more requests and give up running ones."""
        self._out.interrupted = True
        self._stop.set()
        self._idle.set()

    async def run(self) -> Outcomes:
        job = self.job
        probe = asyncio.create_task(self._probe())
        cpu = time.process_time()
        try:
            if job.workload.times is not None:
                await self._open_loop()
            else:
                for user in range(job.part, job.workload.users, job.parts):
                    self._start(self._user(user))
            await self._drain()
        finally:
            self._out.cpu_seconds = time.process_time() - cpu
            probe.cancel()
            await asyncio.gather(probe, return_exceptions=True)
            self._client.close()
        if self._error is not None:
            raise self._error
        self._out.ended = max((r.end for r in self._out.records if r.end == r.end), default=self._now())
        self._out.records.sort(key=lambda record: (record.index, record.turn))
        if self._report is not None:
            self._report(self._progress)
        return self._out

    # -- schedules

    async def _open_loop(self) -> None:
        workload = self.job.workload
        for index in workload.share(self.job.part, self.job.parts):
            planned = workload.planned(index)
            body = await self._body_ahead(planned)
            assert planned.at is not None
            if not await self._sleep_until(planned.at):
                return
            self._start(self._request(planned, planned.at, body))

    async def _user(self, user: int) -> None:
        """Run one user of a closed loop, who sends every `users`-th request, each after an answer and a think time.

        Users start spread over the first second. Starting together would measure a burst that never recurs."""
        workload = self.job.workload
        index, due, turn = user, user / workload.users, 0
        while workload.count is None or index < workload.count:
            if workload.duration is not None and due >= workload.duration:
                return
            planned = workload.planned(index)
            body = await self._body_ahead(planned)
            if not await self._sleep_until(due):
                return
            turn += 1
            due = await self._request(planned, due, body) + workload.think(user, turn)
            index += workload.users

    async def _body_ahead(self, planned: Planned) -> bytes | None:
        """Build a body before it is due, so that building does not delay sending. None: it starts a conversation."""
        workload = self.job.workload
        if workload.is_conversation:
            return None
        if workload.maker.images is None:
            return self.job.target.body(workload.content(planned), planned.output_tokens)
        content = await asyncio.to_thread(workload.content, planned)  # images take milliseconds
        return self.job.target.body(content, planned.output_tokens)

    async def _request(self, planned: Planned, due: float, body: bytes | None) -> float:
        """Send a request, or a conversation if `body` is None. Return the time it ended."""
        if body is None:
            return await self._converse(planned, due)
        record = self._record(planned.index, due, planned.input_tokens, planned.output_tokens)
        await self._send(record, body)
        # After an immediate failure, a user must not retry immediately forever.
        return self._now() + (0.0 if record.ok else 0.1)

    async def _converse(self, first: Planned, due: float) -> float:
        """Run a conversation; each turn resends all earlier messages and answers. Return the time it ended."""
        workload, target = self.job.workload, self.job.target
        messages: list[dict[str, Any]] = []
        history, said = "", 0
        for turn in range(int(workload.turns[first.index % len(workload.turns)])):
            inputs, outputs = workload.turn(first.index, turn)
            if turn and self.job.context is not None and said + inputs + outputs > self.job.context:
                self._out.conversations_cut += 1
                break
            words = workload.maker.turn(first.index, turn, inputs)
            content: Content = [*messages, {"role": "user", "content": words}] if target.chat else history + words
            if not turn and workload.maker.images is not None:  # later turns resend its images
                content = await asyncio.to_thread(workload.maker.with_images, first.index, content)
            if turn:
                due += workload.think(first.index, turn)
            body = target.body(content, outputs)
            if not await self._sleep_until(due):
                break
            record = self._record(first.index, due, said + inputs, outputs)
            record.session, record.turn = first.index, turn
            answer = await self._send(record, body, keep_text=True)
            if not record.ok:
                break
            due = record.end
            if isinstance(content, str):
                history = content + answer + " "
            else:
                messages = [*content, {"role": "assistant", "content": answer}]
            said = (record.prompt_tokens if record.prompt_tokens >= 0 else said + inputs) + record.received_tokens
        return max(due, self._now())

    # -- one request

    def _record(self, index: int, due: float, inputs: int, outputs: int) -> Record:
        record = Record(index, due, inputs, outputs)
        self._out.records.append(record)
        return record

    async def _send(self, record: Record, body: bytes, *, keep_text: bool = False) -> str:
        progress = self._progress
        progress.sent += 1
        try:
            return await self._client.send(record, body, keep_text=keep_text)
        except asyncio.CancelledError:
            record.outcome, record.error = Outcome.UNFINISHED, "given up at the end of the run"
            raise
        finally:
            progress.done += 1
            progress.failed += not record.ok
            progress.tokens += record.received_tokens
            if record.ok:
                progress.ttft_sum += record.first - record.start

    def _start(self, work: Coroutine[Any, Any, Any]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        self._idle.clear()
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[Any]) -> None:
        self._tasks.discard(task)
        if not self._tasks:
            self._idle.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._error = self._error or error
            self.stop()

    # -- time

    def _now(self) -> float:
        return time.monotonic() - self.job.epoch

    async def _sleep_until(self, due: float) -> bool:
        """Sleep; return False if the run was stopped meanwhile."""
        wait = due - self._now()
        if wait <= 0:
            await asyncio.sleep(0)
        else:
            with suppress(TimeoutError):
                async with asyncio.timeout(wait):
                    await self._stop.wait()
        return not self._stop.is_set()

    async def _drain(self) -> None:
        """Wait for running requests until the drain limit or `stop`."""
        workload, limit = self.job.workload, None
        last = workload.duration
        if last is None and workload.times is not None:
            last = float(workload.times[-1])
        if self.job.drain is not None and last is not None:
            limit = max(0.0, last + self.job.drain - self._now())
        with suppress(TimeoutError):
            async with asyncio.timeout(limit):
                await self._idle.wait()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _probe(self) -> None:
        """Record this loop's lateness for every 5 ms of the run, including intervals that passed while it was late.

        Report the totals twice a second."""
        lags = self._out.lags
        due = reported = max(0.0, self._now())
        while True:
            due += PROBE_INTERVAL
            await asyncio.sleep(due - self._now())
            now = self._now()
            self._progress.lag = max(self._progress.lag, now - due)
            while due <= now:
                lags.append(now - due)
                due += PROBE_INTERVAL
            due -= PROBE_INTERVAL
            if self._report is not None and now >= reported + REPORT_INTERVAL:
                self._report(self._progress)
                self._progress.lag, reported = 0.0, now
