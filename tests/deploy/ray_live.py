"""A small private Ray on this machine, and clients of an application in it."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE = 400.0
"""seconds for an operation that takes one to ten on an idle machine"""
ATTEMPTS = 6
PAUSE = 5.0
"""seconds between two attempts to start Ray"""


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


def begin(init: Callable[..., Any], shutdown: Callable[[], Any], folder: str) -> None:
    """Start Ray below `folder`; a short path, because Ray puts Unix sockets below it.

    Retries, because Ray waits for the processes of a node for 15 and 30 seconds, which no setting changes. A busy
    machine takes longer, but is faster with files that an earlier attempt has read."""
    for attempt in range(1, ATTEMPTS + 1):
        try:
            init(
                num_cpus=4, object_store_memory=100 * 2**20, include_dashboard=False, log_to_driver=False,
                logging_level="warning", _temp_dir=f"{folder}/{attempt}",
            )  # fmt: skip
            return
        except Exception as error:  # Ray raises this class itself
            shutdown()
            if attempt == ATTEMPTS:
                raise
            print(f"Ray did not start, attempt {attempt} of {ATTEMPTS}: {error}", flush=True)
            time.sleep(PAUSE)


@contextmanager
def own_ray() -> Iterator[str]:
    """The URL of its Serve."""
    os.environ |= {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_AUTH_MODE": "disabled",
        # Ray's default timeouts are too short when other tests run at the same time.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "60",
        "RAY_raylet_start_wait_time_s": "120",
    }
    import ray
    from ray import serve

    port = free_port()
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as folder:
        begin(ray.init, ray.shutdown, folder)
        try:
            serve.start(http_options={"host": "127.0.0.1", "port": port})
            yield f"http://127.0.0.1:{port}"
        finally:
            serve.shutdown()
            ray.shutdown()


def until(condition: Callable[[], Any], seconds: float = PATIENCE) -> Any:
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.2)
    return value


@dataclass
class Stream:
    """The outcome of an answer."""

    status: int = 0
    events: int = 0
    pieces: list[str] = field(default_factory=list)
    error: dict[str, Any] | None = None
    done: bool = False
    cut: str = ""

    @property
    def good(self) -> bool:
        return self.done and self.error is None and self.status == 200

    @property
    def has_outcome(self) -> bool:
        """Return whether the client knows how it ended."""
        return self.good or (self.error is not None and not self.done and not self.cut)


async def ask(client: httpx.AsyncClient, text: str, stream: Stream, **fields: Any) -> Stream:
    """Send a streamed chat request. Never raises."""
    body = {"model": "demo", "stream": True, "messages": [{"role": "user", "content": text}], **fields}
    try:
        async with client.stream("POST", "/v1/chat/completions", json=body) as response:
            stream.status = response.status_code
            if response.status_code != 200:
                stream.error = json.loads(await response.aread())["error"]
                return stream
            async for event in events(response):
                stream.events += 1
                if event == "[DONE]":
                    stream.done = True
                    continue
                value = json.loads(event)
                if "error" in value:
                    stream.error = value["error"]
                elif value["choices"] and (piece := value["choices"][0]["delta"].get("content")):
                    stream.pieces.append(piece)
    except httpx.HTTPError as error:
        stream.cut = repr(error)
    return stream


async def events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


class Load:
    """`clients` clients stream without a pause until the load is stopped."""

    def __init__(self, url: str, clients: int, **fields: Any) -> None:
        self.ended: list[Stream] = []
        self._url, self._clients, self._fields = url, clients, fields
        self._stop = False

    async def __aenter__(self) -> Load:
        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=PATIENCE, limits=limits)
        self._tasks = [asyncio.create_task(self._work(i)) for i in range(self._clients)]
        return self

    async def _work(self, number: int) -> None:
        while not self._stop:
            self.ended.append(await ask(self._client, f"What is {number} + 2?", Stream(), **self._fields))

    async def __aexit__(self, *_: object) -> None:
        self._stop = True
        await asyncio.gather(*self._tasks)
        await self._client.aclose()
