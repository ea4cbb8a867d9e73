"""`Fetcher`: GET of an image over http or https, from public addresses only.

The name is resolved once, and the connection goes to an address that was checked, so a name that changes its address
gains nothing. Each redirect is checked like a new URL. Proxies, cookies and credentials are not used. Answers must not
be compressed, so that the limit counts all bytes.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Awaitable, Callable, Sequence
from functools import cache
from urllib.parse import urljoin

import httptools

from weft.server.api.media.addresses import FetchRefused, Target, check_url, public_addresses

SECONDS = 10.0  # limit of a fetch with all redirects
MAX_REDIRECTS = 3
MAX_AT_ONCE = 8
MAX_HEADER_BYTES = 65536
_REDIRECTS = (301, 302, 303, 307, 308)


class Fetcher:
    def __init__(
        self, domains: Sequence[str], max_bytes: int,
        addresses: Callable[[Target], Awaitable[Sequence[str]]] = public_addresses,
    ) -> None:  # fmt: skip
        """`domains`: see `check_url`. `addresses`: where to connect for a target."""
        self._domains, self._max_bytes, self._addresses = domains, max_bytes, addresses
        self._slots = asyncio.Semaphore(MAX_AT_ONCE)
        self.seconds = SECONDS

    async def get(self, url: str) -> bytes:
        """Raises `FetchRefused`."""
        target = check_url(url, self._domains)
        try:
            async with asyncio.timeout(self.seconds), self._slots:
                for _ in range(MAX_REDIRECTS + 1):
                    answer = await self._get(target)
                    if answer.location is None:
                        return bytes(answer.data)
                    url = urljoin(f"{target.scheme}://{target.authority}{target.path}", answer.location)
                    if target.scheme == "https" and not url.startswith("https:"):
                        raise FetchRefused("its URL redirects from https to another scheme")
                    target = check_url(url, self._domains)
                raise FetchRefused(f"its URL redirects more than {MAX_REDIRECTS} times")
        except TimeoutError:
            raise FetchRefused(f"fetching it took longer than {self.seconds:g} s") from None
        except (OSError, ssl.SSLError):
            raise FetchRefused("its host cannot be reached, or its certificate is invalid") from None
        except httptools.HttpParserError:
            raise FetchRefused("its host did not answer in HTTP") from None

    async def _get(self, target: Target) -> _Answer:
        addresses = await self._addresses(target)
        secure = _context() if target.scheme == "https" else None
        reader, writer = await asyncio.open_connection(
            addresses[0], target.port, ssl=secure, server_hostname=target.host if secure else None
        )
        try:
            head = (
                f"GET {target.path} HTTP/1.1\r\nHost: {target.authority}\r\nAccept: image/*\r\n"
                "Accept-Encoding: identity\r\nUser-Agent: weft\r\nConnection: close\r\n\r\n"
            )
            writer.write(head.encode("ascii"))
            answer = _Answer(self._max_bytes)
            while not answer.complete:
                data = await reader.read(2**16)
                answer.feed(data)
            return answer
        finally:
            writer.transport.abort()


class _Answer:
    """A response while it arrives."""

    def __init__(self, max_bytes: int) -> None:
        self.data = bytearray()
        self.location: str | None = None
        self.complete = False
        self._max_bytes = max_bytes
        self._parser = httptools.HttpResponseParser(self)
        self._begun = False
        self._header_bytes = 0
        self._next = ""
        self._refusal: FetchRefused | None = None

    def feed(self, data: bytes) -> None:
        """`data`: empty at the end of the connection. Raises `FetchRefused` and `httptools.HttpParserError`."""
        if not data:
            if not self._begun or self._sized:
                raise FetchRefused("its host ended the connection early")
            self.complete = True
            return
        if not self._begun:
            self._header_bytes += len(data)
            if self._header_bytes > MAX_HEADER_BYTES + 2**16:
                raise FetchRefused("its host sent too long headers")
        self._parser.feed_data(data)
        if self._refusal is not None:
            raise self._refusal

    # Callbacks of the parser. An exception there would be replaced by another, so refusals are kept.

    _sized = False

    def on_header(self, name: bytes, value: bytes) -> None:
        match name.lower():
            case b"location":
                self._next = value.decode("latin-1")
            case b"content-encoding" if value.strip().lower() not in (b"", b"identity"):
                self._refuse("its host sent it compressed")
            case b"content-length":
                self._sized = True
                if not value.strip().isdigit() or int(value) > self._max_bytes:
                    self._too_large()
            case b"transfer-encoding":
                self._sized = True

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._begun = status >= 200
        if status in _REDIRECTS and self._next:
            self.location, self.complete = self._next, True
        elif status >= 200 and status != 200:
            self._refuse(f"its host answered with status {status}")

    def on_body(self, body: bytes) -> None:
        if self.location is None:
            self.data += body
            if len(self.data) > self._max_bytes:
                self._too_large()

    def on_message_complete(self) -> None:
        self.complete |= self._begun

    def _too_large(self) -> None:
        self._refuse(f"it is larger than {self._max_bytes / 2**20:g} MiB")

    def _refuse(self, why: str) -> None:
        self._refusal = self._refusal or FetchRefused(why)


@cache
def _context() -> ssl.SSLContext:
    return ssl.create_default_context()
