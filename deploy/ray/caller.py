"""Defines `Caller`, which sends requests to a daemon over HTTP and passes answers on byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
from yarl import URL

from weft.deploy.ray.exchange import Head, HttpRequest, end_to_end

PROBE_SECONDS = 5.0


class Caller:
    """Uses one connection per request, without a limit; only the client and the daemon limit an answer's time."""

    def __init__(self, url: str, name: str = "") -> None:
        """Create it on the event loop that uses it. name: the replica's name, for heads."""
        self.name = name
        self._url = url
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PROBE_SECONDS),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def send(self, request: HttpRequest) -> AsyncGenerator[Head | bytes, None]:
        """Yield a `Head`, then the body as it arrives. Raises `aiohttp.ClientError` if the daemon breaks off.

        Closing the generator early closes the connection, and the daemon aborts the request.
        """
        async with self._session.request(
            request.method,
            URL(self._url + request.target, encoded=True),
            headers=[(n.decode("latin-1"), v.decode("latin-1")) for n, v in end_to_end(request.headers)],
            data=request.body or None,
            allow_redirects=False,
        ) as response:
            headers = end_to_end([(name.lower(), value) for name, value in response.raw_headers])
            yield Head(response.status, headers, self.name)
            async for chunk in response.content.iter_any():
                yield chunk

    async def probe(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Return status and text of a quick request. Raises `aiohttp.ClientError` and `TimeoutError`."""
        async with (
            asyncio.timeout(PROBE_SECONDS),
            self._session.request(method, self._url + path, headers=headers) as response,
        ):
            return response.status, await response.text()

    async def close(self) -> None:
        await self._session.close()
