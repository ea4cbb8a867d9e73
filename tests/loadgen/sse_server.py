"""An OpenAI-compatible server on a real socket with known latencies. A `Script` sets its behaviour."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any


@dataclass
class Script:
    """Times in seconds. `service`: requests are served in sequence, each for this long (one token at its end)."""

    ttft: float = 0.0
    itl: float = 0.0
    service: float | None = None
    tokens: int | None = None
    """tokens of every answer; None: as many as the request sets"""
    context: int | None = 2048
    models: tuple[str, ...] = ("stub",)
    api_key: str | None = None
    statuses: tuple[int, ...] = ()
    """status of the first requests; later ones get 200"""
    holds: int = 0
    """requests that must have arrived before any is answered"""
    refuses_extensions: bool = False
    breaks_after: int | None = None
    """tokens after which the connection is cut"""
    error_after: int | None = None
    """tokens after which an error event ends the stream"""
    crlf: bool = False
    spaced: bool = False
    """JSON with a space after colons, as Python writes it"""
    usage: bool = True
    words_per_token: float = 1.0
    template_tokens: int = 0
    image_tokens: int | None = None
    """prompt tokens of an image; None: images are refused"""
    split: bool = False
    """write every event in two parts"""
    text: str = "word "
    silent: tuple[int, ...] = ()
    """requests, by number, whose tokens are not text"""
    tick: float | None = None
    """seconds between writes; tokens of all streams are written together, as an engine's iterations produce them"""


@dataclass
class Stub:
    """`requests`: bodies received, in order; `arrivals`: when, by the event loop's clock."""

    script: Script
    url: str = ""
    requests: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    written: list[list[float]] = field(default_factory=list)
    """when each token of each request was written"""
    served: list[float] = field(default_factory=list)
    """with `service`: when each request's service ends"""
    connections: int = 0
    metrics: str = ""
    _all_came: asyncio.Event = field(default_factory=asyncio.Event)
    _free_at: float = 0.0
    _ticking: set[_Stream] = field(default_factory=set)

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        with suppress(ConnectionError, RuntimeError, asyncio.IncompleteReadError):  # uvloop: RuntimeError
            while await self._exchange(reader, writer):
                pass
        writer.close()

    async def _exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
        except asyncio.IncompleteReadError:
            return False
        first, *lines = head.strip().split("\r\n")
        headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
        _, path, _ = first.split(" ")
        body = await reader.readexactly(int(headers.get("content-length", 0)))
        if self.script.api_key is not None and headers.get("authorization") != f"Bearer {self.script.api_key}":
            self._plain(writer, 401, {"error": {"message": "Invalid key."}})
        elif path == "/v1/models":
            context = {} if self.script.context is None else {"max_model_len": self.script.context}
            self._plain(writer, 200, {"data": [{"id": name, **context} for name in self.script.models]})
        elif path == "/metrics":
            self._plain(writer, 200, self.metrics)
        elif path in ("/v1/completions", "/v1/chat/completions"):
            self.arrivals.append(asyncio.get_running_loop().time())
            self.requests.append(json.loads(body))
            self.headers.append(headers)
            self.written.append([])
            return await self._generate(self.requests[-1], path, len(self.requests) - 1, writer)
        else:
            self._plain(writer, 404, {"detail": "Not Found"})
        return True

    def _plain(self, writer: asyncio.StreamWriter, status: int, body: Any) -> None:
        data = body.encode() if isinstance(body, str) else json.dumps(body).encode()
        kind = "text/plain" if isinstance(body, str) else "application/json"
        head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)

    async def _generate(self, body: dict[str, Any], path: str, index: int, writer: asyncio.StreamWriter) -> bool:
        script, loop = self.script, asyncio.get_running_loop()
        arrived = self.arrivals[index]
        if index < len(script.statuses) and script.statuses[index] != 200:
            self._plain(writer, script.statuses[index], {"error": {"message": f"Status {script.statuses[index]}."}})
            return True
        if script.refuses_extensions and "ignore_eos" in body:
            self._plain(writer, 400, {"error": {"message": "Unrecognized request argument supplied: ignore_eos"}})
            return True
        if script.image_tokens is None and _images(body):
            self._plain(writer, 400, {"error": {"message": "This model takes no images."}})
            return True
        tokens = body["max_tokens"] if script.tokens is None else script.tokens
        if len(self.requests) >= script.holds:
            self._all_came.set()
        await self._all_came.wait()
        if script.service is not None:
            self._free_at = max(arrived, self._free_at) + script.service
            self.served.append(self._free_at)
            await asyncio.sleep(self._free_at - loop.time())
            tokens = 1
        silent = index in script.silent
        stream = _Stream(replace(script, text="") if silent else script, writer, chat="chat" in path)
        if script.tick is not None:
            await self._tick(stream, tokens)
        for i in range(0 if script.tick is not None else tokens):
            if script.breaks_after == i:
                writer.transport.abort()
                return False
            if script.error_after == i:
                stream.event({"error": {"message": "The engine died."}})
                writer.close()
                return False
            if script.service is None:
                # Absolute times, so that the sleeps' errors do not add up.
                await asyncio.sleep(arrived + script.ttft + i * script.itl - loop.time())
            self.written[index].append(loop.time())
            if not silent or i == tokens - 1:
                stream.token(last=i == tokens - 1)
        usage = None
        if script.usage:
            usage = {"prompt_tokens": self._count(body), "completion_tokens": tokens, "total_tokens": 0}
        stream.end(usage)
        return True

    async def _tick(self, stream: _Stream, tokens: int) -> None:
        assert self.script.tick is not None
        stream.left = tokens
        if not self._ticking:
            self._ticker = asyncio.create_task(self._run_ticks(self.script.tick))
        self._ticking.add(stream)
        await stream.finished.wait()

    async def _run_ticks(self, tick: float) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while self._ticking or due == 0:
            due = max(due + tick, loop.time() - tick)
            await asyncio.sleep(due - loop.time())
            for stream in list(self._ticking):
                stream.left -= 1
                stream.token(last=not stream.left)
                if not stream.left:
                    self._ticking.discard(stream)
                    stream.finished.set()

    def _count(self, body: dict[str, Any]) -> int:
        if "messages" in body:
            words = sum(len(part["text"].split()) for part in _parts(body) if part["type"] == "text")
            images = _images(body) * (self.script.image_tokens or 0)
            return self.script.template_tokens + round(words * self.script.words_per_token) + images
        if isinstance(body["prompt"], list):
            return len(body["prompt"])
        words = len(body["prompt"].split())
        return self.script.template_tokens + round(words * self.script.words_per_token)


def _parts(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Parts of all messages, with strings as text parts."""
    contents = [message["content"] for message in body.get("messages", ())]
    return [
        part
        for content in contents
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def _images(body: dict[str, Any]) -> int:
    return sum(part["type"] == "image_url" for part in _parts(body))


class _Stream:
    """Writes one answer's events in chunks of its body."""

    def __init__(self, script: Script, writer: asyncio.StreamWriter, *, chat: bool) -> None:
        self._script = script
        self._writer = writer
        self._chat = chat
        self._begun = False
        self.left = 0
        self.finished = asyncio.Event()

    def token(self, *, last: bool) -> None:
        finish = "length" if last else None
        if not self._chat:
            self.event({"id": "x", "choices": [{"index": 0, "text": self._script.text, "finish_reason": finish}]})
            return
        if not self._begun:
            delta = {"role": "assistant", "content": ""}
            self.event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": None}]})
        delta = {"content": self._script.text}
        self.event({"id": "x", "choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    def event(self, value: dict[str, Any]) -> None:
        separators = None if self._script.spaced else (",", ":")
        end = "\r\n" if self._script.crlf else "\n"
        data = f"data: {json.dumps(value, separators=separators)}{end}{end}".encode()
        self._head()
        middle = len(data) // 2 if self._script.split else len(data)
        for part in (data[:middle], data[middle:]):
            if part:
                self._writer.write(b"%x\r\n%s\r\n" % (len(part), part))

    def end(self, usage: dict[str, Any] | None) -> None:
        if usage is not None:
            self.event({"id": "x", "choices": [], "usage": usage})
        self._head()
        self._writer.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")

    def _head(self) -> None:
        if not self._begun:
            self._begun = True
            kind = b"Content-Type: text/event-stream; charset=utf-8"
            self._writer.write(b"HTTP/1.1 200 OK\r\n" + kind + b"\r\nTransfer-Encoding: chunked\r\n\r\n")


@asynccontextmanager
async def serving(script: Script | None = None, **fields: Any) -> AsyncIterator[Stub]:
    """A stub on a free port of this machine."""
    stub = Stub(script or Script(**fields))
    server = await asyncio.start_server(stub.handle, "127.0.0.1", 0, backlog=4096)
    stub.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield stub
    finally:
        server.close()


async def _main() -> None:
    """`python sse_server.py '{"tick": 0.0667}'`: serve until interrupted, for measuring the load generator itself."""
    import sys

    async with serving(**json.loads(sys.argv[1])) as stub:
        print(stub.url, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    import uvloop

    uvloop.run(_main())
