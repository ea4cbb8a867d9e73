"""Defines `Client`, which sends streaming requests in OpenAI's format and records their outcome."""

from __future__ import annotations

import asyncio
import time
from array import array
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
    exact_output: bool = True  # Whether to request the exact number of tokens (`ignore_eos`, `min_tokens`).

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
        exact = {"ignore_eos": True, "min_tokens": output_tokens} if self.exact_output else {}
        return orjson.dumps({**body, "max_tokens": output_tokens, **exact, **self.extra})


class Client:
    """Sends requests to one target. `epoch`: `time.monotonic()` at the start of the run."""

    def __init__(self, target: Target, epoch: float) -> None:
        self.target = target
        self.epoch = epoch
        self._pool = Pool(target.address)
        self._headers = target.all_headers()

    async def send(self, record: Record, body: bytes, *, keep_text: bool = False) -> str:
        """Send the request and complete `record`; return the answer's text if `keep_text` is set.

        Server failures never raise. If cancelled, it leaves the record `UNFINISHED` and raises `CancelledError`."""
        reader = AnswerReader(record.times, keep_text=keep_text)
        request = self.target.address.head("POST", self.target.path, self._headers, len(body)) + body
        record.start = time.monotonic() - self.epoch
        try:
            async with asyncio.timeout_at(asyncio.get_running_loop().time() + self.target.timeout):
                record.status = await self._pool.exchange(request, reader)
        except TimeoutError:
            result = Outcome.TIMEOUT, f"no complete answer within {self.target.timeout:g} s"
        except ConnectionBroken as error:
            result = Outcome.BROKEN if error.began else Outcome.CONNECTION, str(error)
        except OSError as error:
            result = Outcome.CONNECTION, f"cannot connect: {error.strerror or error}"
        else:
            result = _classify(record.status, reader)
        finally:
            if record.times:
                record.times = array("d", [t - self.epoch for t in record.times])
                record.first, record.end = record.times[0], reader.end - self.epoch
            record.prompt_tokens, record.completion_tokens = reader.prompt, reader.completion
            record.cached_tokens = reader.cached
        record.outcome, record.error = result
        return "".join(reader.text)

    def close(self) -> None:
        self._pool.close()


def _classify(status: int, reader: AnswerReader) -> tuple[Outcome, str]:
    """Return the outcome of a complete answer, and its error."""
    if status != 200:
        try:
            error = error_message(orjson.loads(reader.body))
        except orjson.JSONDecodeError:
            error = " ".join(reader.body.decode("utf-8", "replace").split())[:200]
        return Outcome.OVERLOADED if status in (429, 503) else Outcome.REFUSED, error
    if not reader.is_stream:
        return Outcome.BROKEN, "the answer is not an event stream"
    if reader.error:
        return Outcome.BROKEN, reader.error
    if not (reader.finished or reader.done):
        return Outcome.BROKEN, "the stream ended without a finish reason and without [DONE]"
    if not reader.times:
        return Outcome.BROKEN, "the stream ended without a token"
    return Outcome.OK, ""
