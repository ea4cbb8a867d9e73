"""`Connection`: uvicorn's HTTP protocol with limits on headers, on slow clients and on unread answers.

It also answers invalid HTTP with OpenAI's error body, and scrapes without the application.
"""

from __future__ import annotations

import asyncio
import fcntl
import struct
import termios
from collections.abc import Callable, Sequence
from http import HTTPStatus
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from weft.server.api.browsers import BrowserChecks
from weft.server.api.fast_path import EXTENSION, RawWriter
from weft.server.api.service import Service
from weft.server.errors import ApiError
from weft.server.observe.metrics import PROBES, endpoint_of

MAX_HEADER_BYTES = 64 * 1024  # Limit of the request line and headers, and of trailers and chunk extensions.

HEADER_SECONDS = 20.0  # Seconds from the first byte (or the connection) to the end of the headers.

UNREAD_SECONDS = 60.0
"""Seconds from the end of an answer to the end of a request body that is still arriving."""

STALL_CHECKS = 4  # checks per stall timeout

TAKE_OVER = "weft.take_over"  # Entry of a scope: the connection counts the request as open until this is called.


class UntilClose:
    """Sends an answer of unknown length to an HTTP/1.0 client, which lacks chunks: closing ends the answer."""

    def __init__(self, cycle: RequestResponseCycle) -> None:
        self._cycle = cycle
        self._send = cycle.send
        self._endless = False

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if self._endless:
                self._cycle.keep_alive = self._cycle.chunked_encoding = False
        elif self._endless:
            self._cycle.expected_content_length = len(message.get("body", b""))  # accept any length
        await self._send(message)


def is_vital(url: bytes, root_path: str) -> bool:
    """Whether a URL is of health, metrics or administration."""
    path = url.partition(b"?")[0].decode("latin-1").removeprefix(root_path)
    return path in PROBES or path.startswith("/admin/")


class StallWatch:
    """Detects a client that leaves data of its connection unread for too long. It costs nothing while clients keep up:
    it starts a timer only when a transport is full or closing."""

    __slots__ = ("_left", "_on_stall", "_seconds", "_timer", "_transport", "_unread")

    def __init__(self, transport: asyncio.Transport, seconds: float, on_stall: Callable[[], None]) -> None:
        """`seconds`: time without progress; 0 disables the watch."""
        self._transport, self._seconds, self._on_stall = transport, seconds, on_stall
        self._timer: asyncio.TimerHandle | None = None
        self._unread = self._left = 0

    def begin(self) -> None:
        """Watch until the transport has nothing left to send. Idempotent."""
        if self._timer is None and self._seconds and self._transport.get_write_buffer_size():
            self._unread, self._left = -1, STALL_CHECKS
            self._wait()

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(self._seconds / STALL_CHECKS, self._check)

    def _check(self) -> None:
        self._timer = None
        if not (buffered := self._transport.get_write_buffer_size()):
            return
        unread = buffered + self._in_kernel()
        self._left = self._left - 1 if unread == self._unread else STALL_CHECKS - 1
        self._unread = unread
        if self._left:
            self._wait()
        else:
            self._on_stall()

    def _in_kernel(self) -> int:
        """Unacknowledged bytes in the kernel, where a slow reader makes progress before the transport can write."""
        sock = self._transport.get_extra_info("socket")
        try:
            size: int = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        except (OSError, AttributeError):  # closed, or not a socket
            return 0
        return size


_NO_SHORTCUT_HEADERS = frozenset(
    {b"content-length", b"expect", b"origin", b"traceparent", b"transfer-encoding", b"upgrade", b"x-request-id"}
)
"""Headers that require the application."""


class Connection(HttpToolsProtocol):
    def __init__(
        self, *args: Any, service: Service, shortcuts: dict[bytes, Callable[[], bytes]], browsers: BrowserChecks,
        **kwargs: Any,
    ) -> None:  # fmt: skip
        """`shortcuts`: functions that make the raw response to a plain GET of a URL. They bypass the application, whose
        overhead exceeds the cost of a scrape."""
        super().__init__(*args, **kwargs)
        self._service = service
        self._shortcuts = shortcuts
        self._browsers = browsers
        self._shortcut: Callable[[], bytes] | None = None  # the shortcut of the request being read
        self._header_bytes = 0
        self._in_headers = True
        self._refused = False
        self._begun = 0  # requests whose first byte has been read, and that the application has not taken over
        self._timer: asyncio.TimerHandle | None = None
        self._stall: StallWatch | None = None
        self._quiet_since = self.loop.time()
        self.vital_only: ApiError | None = None
        """The error for other than `is_vital` paths. Such a connection closes after one answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._timer = self.loop.call_later(HEADER_SECONDS, self._on_slow_headers)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        if self._stall is not None:
            self._stall.end()
        self._dismiss(self._begun)
        super().connection_lost(exc)

    @property
    def idle_since(self) -> float | None:
        """The loop's time since which the client waits for nothing and has sent at most a part of its headers. None if
        it has sent more."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if answering or (self._begun and not self._in_headers) or self.transport.is_closing():
            return None
        return self._quiet_since

    def data_received(self, data: bytes) -> None:
        if self._refused:
            return
        self._header_bytes += len(data)
        if self._in_headers and self._timer is None:
            self._timer = self.loop.call_later(HEADER_SECONDS, self._on_slow_headers)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self.send_400_response("Invalid HTTP request received.")
        if self._header_bytes > MAX_HEADER_BYTES:
            self._refuse_size()

    def _parse(self, data: bytes) -> None:
        """Feed the parser. Raises `HttpParserError`. The parser ends a request that offers a protocol upgrade at its
        head, even if it has a body. This server ignores upgrades, so it parses the head again without the offer."""
        rest = memoryview(data)
        while rest:
            try:
                self.parser.feed_data(rest)
                return
            except httptools.HttpParserUpgrade as offer:
                if self._refused:
                    return
                rest = rest[offer.args[0] :]
                line = self.parser.get_method(), self.url, self.parser.get_http_version().encode()
                kept = b"".join(b"%b: %b\r\n" % header for header in self.headers if header[0] != b"upgrade")
                self._dismiss(1)  # it begins again
                self.parser = httptools.HttpRequestParser(self)  # one that has not seen the end of a request
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
                self.parser.feed_data(b"%b %b HTTP/%b\r\n" % line + kept + b"\r\n")

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._begun += 1
        self._quiet_since = self.loop.time()
        self._service.metrics.request_began()
        self.scope[TAKE_OVER] = self._dismiss  # type: ignore[literal-required]

    def _dismiss(self, count: int = 1) -> None:
        """Stop counting requests as open here: the application counts them from now on, or nothing does."""
        for _ in range(min(count, self._begun)):
            self._begun -= 1
            self._service.metrics.request_dismissed()

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_headers:  # ignore trailers: the request has already started
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        if self._is_upgrade():
            return
        self._in_headers = False
        self._header_bytes = 0
        self._stop_timer()
        hosts, size = [], len(self.url)
        for name, value in self.headers:
            size += len(name) + len(value) + 4
            if name == b"host":
                hosts.append(value.decode("latin-1"))
        if size > MAX_HEADER_BYTES:
            self._refuse_size()
        elif len(hosts) > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            self._refuse(ApiError(400, "The request must have exactly one Host header.", code="invalid_http"))
        elif (refusal := self._unsupported()) is not None:
            self._refuse(refusal)
        elif self.vital_only is not None and not is_vital(self.url, self._service.config.root_path):
            self._begun -= 1
            path = self.url.partition(b"?")[0].decode("latin-1")
            self._service.metrics.request_ended(endpoint_of(path), self.vital_only.status)
            self._refuse(self.vital_only)
        elif self._is_plain_get(hosts) and (shortcut := self._shortcuts.get(self.url)) is not None:
            self._shortcut = shortcut
        else:
            super().on_headers_complete()
            extensions: dict[str, Any] = {EXTENSION: RawWriter(self.cycle)}
            self.scope["extensions"] = extensions
            if self.parser.get_http_version() == "1.0":
                self.cycle.send = UntilClose(self.cycle).send  # type: ignore[method-assign]
            if self._service.closing or self.vital_only is not None:
                self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        self._header_bytes = 0
        if not self._refused:
            super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._quiet_since = self.loop.time()
        if self.transport.is_closing():
            self._watch_reader()  # closing waits until the last byte is sent
        if not self._in_headers and self.cycle.response_complete:
            self._timer = self.loop.call_later(UNREAD_SECONDS, self.transport.close)

    def on_message_complete(self) -> None:
        if self._is_upgrade():
            return
        self._in_headers = True
        self._header_bytes = 0
        self._stop_timer()
        if self._refused:
            return
        if self._shortcut is None:
            super().on_message_complete()
        else:
            self.transport.write(self._shortcut())
            self._dismiss()
            self._shortcut = None
            self.on_response_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._watch_reader()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch_reader()

    def _watch_reader(self) -> None:
        if self._stall is None:
            seconds = self._service.config.client_stall_timeout
            self._stall = StallWatch(self.transport, seconds, self._on_stall)
        self._stall.begin()

    def _on_stall(self) -> None:
        self._service.metrics.clients_stalled.inc()
        if self.cycle is not None:
            self.cycle.scope["weft.stalled"] = True  # type: ignore[typeddict-unknown-key]
        self.transport.abort()

    def close_after_answer(self) -> None:
        """Close after the current answer. If its headers are not sent yet, they announce it."""
        if self.cycle is not None:
            self.cycle.keep_alive = False

    def _is_upgrade(self) -> bool:
        """The request offers a protocol upgrade and is parsed again without it."""
        return bool(self.parser.should_upgrade()) and self.parser.get_method() != b"CONNECT"

    def _unsupported(self) -> ApiError | None:
        """The error for valid HTTP that this server does not support."""
        version = self.parser.get_http_version()
        if version == "0.9":
            return ApiError(400, "The request line has no HTTP version.", code="invalid_http")
        if version not in ("1.0", "1.1"):
            return ApiError(505, "This server supports HTTP/1.1.", code="http_version")
        if self.parser.get_method() == b"CONNECT":
            return ApiError(400, "CONNECT is not supported: this server is not a proxy.", code="invalid_http")
        codings = [value for name, value in self.headers if name == b"transfer-encoding"]
        if codings and b",".join(codings).strip().lower() != b"chunked":
            what = "The only Transfer-Encoding supported is chunked."
            return ApiError(501, what, code="unsupported_transfer_encoding")
        return None

    def _is_plain_get(self, hosts: Sequence[str]) -> bool:
        """A request without a body or special headers, on a connection with no other answer in progress."""
        return (
            self.parser.get_method() == b"GET"
            and self.parser.get_http_version() == "1.1"
            and self.parser.should_keep_alive()
            and (self.cycle is None or self.cycle.response_complete)
            and not self.flow.write_paused
            and not self._service.closing
            and self.vital_only is None
            and not any(name in _NO_SHORTCUT_HEADERS for name, _ in self.headers)
            and all(self._browsers.allows(host, self.server) for host in hosts)
        )

    def send_400_response(self, msg: str) -> None:
        if not self._refused:
            self._refuse(ApiError(400, msg, code="invalid_http"))

    def _on_slow_headers(self) -> None:
        self._timer = None
        if self._header_bytes:
            self._refuse(ApiError(408, "The headers took too long to arrive.", code="slow_request"))
        elif not self._busy:
            self.transport.close()

    def _refuse_size(self) -> None:
        self._refuse(ApiError(431, f"The headers are larger than {MAX_HEADER_BYTES} bytes.", code="headers_too_large"))

    @property
    def _busy(self) -> bool:
        """An answer is in progress, or due because its request is complete."""
        cycle = self.cycle
        return cycle is not None and not cycle.response_complete and (cycle.response_started or not cycle.more_body)

    def _refuse(self, error: ApiError) -> None:
        """Send an error and close. If an answer is in progress, only close."""
        self._refused = True
        self._stop_timer()
        if not self._busy and not self.transport.is_closing():
            body = error.body()
            head = (
                f"HTTP/1.1 {error.status} {HTTPStatus(error.status).phrase}\r\n"
                f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            )
            self.transport.write(head.encode() + body)
        self.transport.close()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
