"""HTTP/1.1 connections for many concurrent event streams; the read callback timestamps bytes without a task."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from weft.loadgen.errors import AnswerTooLong, LoadError

MAX_HEAD_BYTES = 1 << 18
MAX_PAGE_BYTES = 64 << 20


class Reader(Protocol):
    """Receives an answer's body as it arrives, in `feed`, which may raise `AnswerTooLong`."""

    is_stream: bool
    retry_after: str  # The Retry-After header, or empty.

    def feed(self, data: bytes, now: float) -> None: ...


class Body:
    """A `Reader` that keeps the body, for example of /metrics, up to 64 MiB."""

    def __init__(self) -> None:
        self.is_stream = False
        self.retry_after = ""
        self._content = bytearray()

    def feed(self, data: bytes, _now: float) -> None:
        self._content += data
        if len(self._content) > MAX_PAGE_BYTES:
            raise AnswerTooLong(f"a body of more than {MAX_PAGE_BYTES >> 20} MiB")

    @property
    def content(self) -> bytes:
        return bytes(self._content)


@dataclass(frozen=True, slots=True)
class Address:
    """A server's address. `base`: the path before `/v1`, without a trailing slash."""

    host: str
    port: int
    tls: bool
    base: str

    @staticmethod
    def parse(url: str) -> Address:
        """Parse `http(s)://host[:port][/base]`, with or without a trailing `/v1`. Raises `LoadError`."""
        if "://" not in url:
            url = "http://" + url
        try:
            parts = urlsplit(url)
            port = parts.port
        except ValueError:
            raise LoadError(f"--server: {url!r} is not a URL") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise LoadError(f"--server: {url!r} is not a URL such as http://127.0.0.1:8000")
        tls = parts.scheme == "https"
        return Address(parts.hostname, port or (443 if tls else 80), tls, parts.path.rstrip("/").removesuffix("/v1"))

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        default = self.port == (443 if self.tls else 80)
        return f"{'https' if self.tls else 'http'}://{host}{'' if default else f':{self.port}'}{self.base}"

    def head(self, method: str, path: str, headers: dict[str, str], length: int | None = None) -> bytes:
        """Return a request's head, including the blank line."""
        lines = [f"{method} {self.base}{path} HTTP/1.1", f"Host: {str(self).split('://')[1].split('/')[0]}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        if length is not None:
            lines.append(f"Content-Length: {length}")
        return "\r\n".join([*lines, "", ""]).encode("latin-1", "replace")


class ConnectionBroken(Exception):
    """The connection ended. `began`: whether the answer's status had arrived."""

    def __init__(self, message: str, began: bool) -> None:
        super().__init__(message)
        self.began = began


class Connection(asyncio.Protocol):
    """A connection that runs one exchange at a time."""

    def __init__(self, released: Callable[[Connection], None]) -> None:
        self.alive = False
        self._released = released
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[int] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's class is no subclass
        self.alive = True

    async def exchange(self, request: bytes, reader: Reader) -> int:
        """Send a request, feed its answer's body to `reader` and return the status. Raises `ConnectionBroken`."""
        if not self.alive or self._transport is None:
            raise ConnectionBroken("the connection is closed", False)
        self._parser = httptools.HttpResponseParser(self)
        self._reader = reader
        self._done = asyncio.get_running_loop().create_future()
        self._began = self._delimited = False
        self._head_bytes = 0
        self._transport.write(request)
        try:
            return await self._done
        finally:
            if not self._done.done() or self._done.cancelled() or self._done.exception() is not None:
                self.close()
            elif self.alive:
                self._released(self)

    def close(self) -> None:
        self.alive = False
        if self._transport is not None:
            self._transport.abort()

    # -- asyncio.Protocol

    def data_received(self, data: bytes) -> None:
        self._now = time.monotonic()
        if self._done is None or self._done.done():
            self.close()  # unsolicited data
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"not HTTP: {error}")
        if self._head_bytes > MAX_HEAD_BYTES and not self._done.done():
            self._began = True
            self._fail(f"headers of more than {MAX_HEAD_BYTES >> 10} KiB")

    def connection_lost(self, exc: Exception | None) -> None:
        self.alive = False
        if self._done is not None and not self._done.done():
            if self._began and not self._delimited and exc is None:
                self._done.set_result(self._parser.get_status_code())  # end of connection ends the body
            else:
                self._fail("the connection was closed" if exc is None else f"the connection broke: {exc}")

    def _fail(self, message: str) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(ConnectionBroken(message, self._began))
        self.close()

    # -- httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._reader.is_stream = value.lower().startswith(b"text/event-stream")
        elif name in (b"content-length", b"transfer-encoding"):
            self._delimited = True
        elif name == b"retry-after":
            self._reader.retry_after = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._began = True

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        if self._done is None or self._done.done():
            return  # the exchange was given up; ignore the remainder
        try:
            self._reader.feed(body, self._now)
        except AnswerTooLong as error:
            self._fail(str(error))

    def on_message_complete(self) -> None:
        status = self._parser.get_status_code()
        if status < 200:
            self._began = self._delimited = False
            return
        if not self._parser.should_keep_alive():
            self.alive = False
            assert self._transport is not None
            self._transport.close()
        if self._done is not None and not self._done.done():
            self._done.set_result(status)


class Pool:
    """A pool with one connection per concurrent exchange to a server; connections stay open between exchanges."""

    def __init__(self, address: Address) -> None:
        self.address = address
        self._idle: list[Connection] = []
        self._tls = ssl.create_default_context() if address.tls else None

    async def exchange(self, request: bytes, reader: Reader) -> int:
        """Like `Connection.exchange`, but opens a connection if none is idle. Raises `OSError` if that fails.

        If the server had closed an idle connection before it saw the request, the exchange is repeated once."""
        while self._idle:
            if (connection := self._idle.pop()).alive:
                try:
                    return await connection.exchange(request, reader)
                except ConnectionBroken as error:
                    if error.began:
                        raise
                    break
        _, connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(self._idle.append), self.address.host, self.address.port, ssl=self._tls
        )
        return await connection.exchange(request, reader)

    def close(self) -> None:
        for connection in self._idle:
            connection.close()
        self._idle.clear()
