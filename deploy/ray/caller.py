"""`Caller`: asks a daemon over HTTP, and passes on what it says byte for byte."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import aiohttp
from yarl import URL

from weft.deploy.ray.exchange import Head, Question, end_to_end

PROBE_SECONDS = 5.0


class Caller:
    """One connection a request, as many as there are; how long an answer may take is for client and daemon to say."""

    def __init__(self, url: str, name: str = "") -> None:
        """name: of the replica, for heads. To be made on the event loop that uses it."""
        self.name = name
        self._url = url
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=PROBE_SECONDS),
            skip_auto_headers=("Accept", "Accept-Encoding", "Content-Type", "User-Agent"),
        )

    async def ask(self, question: Question) -> AsyncGenerator[Head | bytes, None]:
        """A `Head`, then the body as it comes. Raises `aiohttp.ClientError` when the daemon breaks off.

        Closed early, it closes the connection, and the daemon aborts what it had begun.
        """
        async with self._session.request(
            question.method,
            URL(self._url + question.target, encoded=True),
            headers=[(n.decode("latin-1"), v.decode("latin-1")) for n, v in end_to_end(question.headers)],
            data=question.body or None,
            allow_redirects=False,
        ) as response:
            headers = end_to_end([(name.lower(), value) for name, value in response.raw_headers])
            yield Head(response.status, headers, self.name)
            async for chunk in response.content.iter_any():
                yield chunk

    async def probe(self, path: str, method: str = "GET", headers: dict[str, str] | None = None) -> tuple[int, str]:
        """Status and text of what takes no time. Raises `aiohttp.ClientError` and `TimeoutError`."""
        async with (
            asyncio.timeout(PROBE_SECONDS),
            self._session.request(method, self._url + path, headers=headers) as response,
        ):
            return response.status, await response.text()

    async def close(self) -> None:
        await self._session.close()
