"""The clients of `weft bench server`: streams that only count received events.

Started as `python -m weft.tools.bench.server.client HOST PORT STREAMS BODY_FILE PATH`. Prints a line once every stream
has received something. When stdin closes, it prints the count of events and ends.
"""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path

import uvloop


class _Stream(asyncio.Protocol):
    """One request; counts the events of its answer."""

    def __init__(self, request: bytes) -> None:
        self._request = request
        self.events = 0
        self.head = b""

    def connection_made(self, transport: asyncio.WriteTransport) -> None:  # type: ignore[override]
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self.head = self.head or data[:200]
        self.events += data.count(b"data: ")


async def _run(host: str, port: int, count: int, request: bytes) -> None:
    loop = asyncio.get_running_loop()
    streams = []
    for _ in range(count):
        _, stream = await loop.create_connection(lambda: _Stream(request), host, port)
        streams.append(stream)
    patience = loop.time() + 60
    while not all(stream.events for stream in streams):
        if loop.time() > patience:
            raise SystemExit("not all streams have begun within 60 s")
        if refused := [stream.head for stream in streams if stream.head and b" 200 " not in stream.head]:
            raise SystemExit(f"the API process answered {refused[0]!r}")
        await asyncio.sleep(0.05)
    print("all streams have begun", flush=True)
    await loop.run_in_executor(None, os.read, 0, 1)
    print(sum(stream.events for stream in streams), flush=True)
    os._exit(0)


def http_request(path: str, body: bytes) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body


if __name__ == "__main__":
    host, port, count, file, path = sys.argv[1:]
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(host, int(port), int(count), http_request(path, Path(file).read_bytes())))
