"""`BatchClient` sends the requests of a batch concurrently and retries each until it has a response to write."""

from __future__ import annotations

import asyncio
import contextlib
import random
import ssl
import time
import uuid
from collections.abc import Callable, Iterable
from typing import Protocol

import orjson

from weft.loadgen.connection import Address, Body, ConnectionBroken, Pool
from weft.server.batches import lines
from weft.server.batches.lines import BatchLine, LineError
from weft.server.commands.endpoint import Refused

PAUSE_SECONDS = (0.5, 30.0)  # First and longest pause before a retry.
LONGEST_WAIT = 300.0  # Maximum seconds of Retry-After to honor.
BREAKS = 5  # Lost connections or engines per request before it fails.
PASSING = frozenset({429, 502, 503})  # Temporary statuses, which are retried.


class _Reply(Body):
    @property
    def code(self) -> str:
        """Code of the error in the body."""
        try:
            return str(orjson.loads(self.content)["error"]["code"])
        except (ValueError, TypeError, LookupError):
            return ""

    def pause(self, attempt: int) -> float:
        """Return the seconds before the next retry."""
        with contextlib.suppress(ValueError):
            return min(LONGEST_WAIT, max(0.1, float(self.retry_after))) * random.uniform(1.0, 1.2)
        first, most = PAUSE_SECONDS
        return min(most, first * 2.0 ** min(attempt, 10)) * random.uniform(0.8, 1.2)


class Answers(Protocol):
    """Where responses go: a file, or a list in memory."""

    done: set[str]

    def add(self, custom_id: str, line: bytes, *, failed: bool) -> None: ...


class BatchClient:
    """Sends requests and writes responses. `on_answer` is called after each response."""

    def __init__(
        self, url: str, key: str | None, answers: Answers, *, patience: float, on_answer: Callable[[], None]
    ) -> None:
        """`patience`: seconds without any response, while requests fail, before it gives up."""
        self._address = Address.parse(url)
        self._pool = Pool(self._address)
        self._answers = answers
        self._patience = patience
        self._on_answer = on_answer
        self._headers = {"Content-Type": "application/json", "User-Agent": "weft-batch"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._trouble_since: float | None = None

    async def run(self, requests: Iterable[BatchLine], concurrency: int) -> None:
        """Send all requests without a response. Raises `Refused` if the server stops responding, `OSError` if responses
        cannot be written, and `LineError` if the requests have changed."""
        waiting = iter(requests)
        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(concurrency):
                    group.create_task(self._work(waiting))
        except* (Refused, OSError, LineError) as errors:
            raise errors.exceptions[0] from None
        finally:
            self._pool.close()

    async def _work(self, waiting: Iterable[BatchLine]) -> None:
        for line in waiting:
            if line.custom_id not in self._answers.done:
                written, failed = await self._answer(line)
                self._answers.add(line.custom_id, written, failed=failed)
                self._on_answer()

    async def _answer(self, line: BatchLine) -> tuple[bytes, bool]:
        body = orjson.dumps(line.body)
        name = f"batch-{uuid.uuid4().hex}"
        request = self._address.head("POST", line.url, {**self._headers, "X-Request-Id": name}, len(body)) + body
        attempt = breaks = 0
        while True:
            reply, status, why = _Reply(), 0, ""
            try:
                status = await self._pool.exchange(request, reply)
            except ssl.SSLCertVerificationError as error:
                raise Refused(f"its certificate is not trusted ({error.verify_message})", 0) from None
            except ConnectionBroken as error:
                breaks, why = breaks + 1, str(error)
            except OSError as error:
                why = error.strerror or str(error)
            if status in (401, 403):
                raise Refused(f"status {status}: give a key with --api-key", status)
            breaks += reply.code == "engine_dead"
            if (status and status not in PASSING) or breaks >= BREAKS:
                self._trouble_since = None
                if status:
                    return lines.answer(line, name, status, reply.content), status != 200
                return lines.failure(line.custom_id, "connection_broken", f"{why}, {breaks} times"), True
            self._check_patience(why or f"status {status}")
            await asyncio.sleep(reply.pause(attempt))
            attempt += 1

    def _check_patience(self, why: str) -> None:
        now = time.monotonic()
        self._trouble_since = self._trouble_since or now
        if now - self._trouble_since > self._patience:
            raise Refused(f"no response for {self._patience:g} s ({why})")
