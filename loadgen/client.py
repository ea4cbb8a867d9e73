"""Defines `Client`, which sends streaming requests in OpenAI's format and records their outcome."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from weft.loadgen.connection import Address, ConnectionBroken, Pool
from weft.loadgen.prompts import Content
from weft.loadgen.record import Outcome, Record
from weft.loadgen.stream import AnswerReader, error_message


@dataclass(frozen=True, slots=True)
class Target:
    """A server and its request options. `extra`: fields of every body. `timeout`: seconds until the answer ends."""

    name: str
    address: Address
    model: str
    chat: bool = False
    api_key: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    extra: Mapping[str, Any] = field(default_factory=dict)
    timeout: float = 600.0
    exact_output: bool = True
    """Whether to request the exact number of tokens (`ignore_eos`, `min_tokens`)."""

    @property
    def path(self) -> str:
        return "/v1/chat/completions" if self.chat else "/v1/completions"

    def all_headers(self) -> dict[str, str]:
        headers = {"User-Agent": "weft-load", "Content-Type": "application/json", "Accept": "text/event-stream"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        return {**headers, **self.headers}

    def body(self, content: Content, output_tokens: int) -> bytes:
        """Return the request body as JSON."""
        body: dict[str, Any] = {"model": self.model, "stream": True, "stream_options": {"include_usage": True}}
        if self.chat:
            body["messages"] = [{"role": "user", "content": content}] if isinstance(content, str) else content
        else:
            body["prompt"] = content
        body["max_tokens"] = output_tokens
        if self.exact_output:
            body["ignore_eos"] = True
            body["min_tokens"] = output_tokens
        return orjson.dumps({**body, **self.extra})


class Client:
    """Sends requests to one target. `epoch`: `time.monotonic()` at the start of the run."""

    def __init__(self, target: Target, epoch: float) -> None:
        self.target = target
        self.epoch = epoch
        self._pool = Pool(target.address)
        marker = "\0"
        head = target.address.head("POST", target.path, {**target.all_headers(), "Content-Length": marker})
        self._head, self._tail = head.split(marker.encode())

    async def send(self, record: Record, body: bytes, *, keep_text: bool = False) -> str:
        """Send the request and complete `record`; return the answer's text if `keep_text` is set.

        Server failures never raise. If cancelled, it leaves the record `UNFINISHED` and raises `CancelledError`.
        """
        reader = AnswerReader(record.times, keep_text=keep_text)
        request = self._head + str(len(body)).encode() + self._tail + body
        started = time.monotonic()
        record.start = started - self.epoch
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self.target.timeout):
                record.status = await self._pool.exchange(request, reader)
        except TimeoutError:
            self._fail(record, Outcome.TIMEOUT, f"no complete answer within {self.target.timeout:g} s")
        except ConnectionBroken as error:
            self._fail(record, Outcome.BROKEN if error.began else Outcome.CONNECTION, str(error))
        except OSError as error:
            self._fail(record, Outcome.CONNECTION, f"cannot connect: {error.strerror or error}")
        else:
            self._classify(record, reader)
        finally:
            self._take_times(record, reader)
        return "".join(reader.text)

    def _classify(self, record: Record, reader: AnswerReader) -> None:
        if record.status != 200:
            overloaded = record.status in (429, 503)
            self._fail(record, Outcome.OVERLOADED if overloaded else Outcome.REFUSED, _explain(reader.body))
        elif not reader.is_stream:
            self._fail(record, Outcome.BROKEN, "the answer is not an event stream")
        elif reader.error:
            self._fail(record, Outcome.BROKEN, reader.error)
        elif not (reader.finished or reader.done):
            self._fail(record, Outcome.BROKEN, "the stream ended without a finish reason and without [DONE]")
        elif not record.times:
            self._fail(record, Outcome.BROKEN, "the stream ended without a token")
        else:
            record.outcome = Outcome.OK

    @staticmethod
    def _fail(record: Record, outcome: Outcome, error: str) -> None:
        record.outcome, record.error = outcome, error

    def _take_times(self, record: Record, reader: AnswerReader) -> None:
        if record.times:
            record.times = type(record.times)("d", [t - self.epoch for t in record.times])
            record.first = record.times[0]
            record.end = reader.end - self.epoch
        record.prompt_tokens, record.completion_tokens = reader.prompt, reader.completion
        record.cached_tokens = reader.cached

    def close(self) -> None:
        self._pool.close()


def _explain(body: bytes) -> str:
    try:
        return error_message(orjson.loads(body))
    except orjson.JSONDecodeError:
        return " ".join(body.decode("utf-8", "replace").split())[:200]
