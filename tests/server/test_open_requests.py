"""A request is open, so that it counts as lost with its process, from the first byte read to the last byte written."""

from __future__ import annotations

import asyncio
import json

import pytest
from stub import Script, Server, serving

pytestmark = pytest.mark.asyncio

BODY = json.dumps({"prompt": "hi"}).encode()
HEAD = (
    b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n"
    % len(BODY)
)
GET = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n\r\n"


async def sent(server: Server, data: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    host, _, port = server.url.removeprefix("http://").partition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    return reader, writer


def open_requests(server: Server) -> int:
    return int(server.service.shared_state.http.sum())


@pytest.mark.parametrize(
    ("data", "count"),
    [
        (b"P", 1),
        (HEAD, 1),
        (HEAD + b"\r\n", 1),
        (HEAD + b"\r\n" + BODY[:3], 1),
        (HEAD + b"\r\n" + BODY, 1),
        (HEAD + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n" + BODY, 1),
        (HEAD + b"\r\n" + BODY + GET, 2),
        (HEAD + b"\r\n" + BODY + GET + GET[:9], 3),
    ],
)
async def test_a_request_is_open_from_its_first_byte(data: bytes, count: int) -> None:
    async with serving() as server:
        for leave_early in (True, False):
            gate = asyncio.Event()
            server.engine.script = Script(gate=gate)
            reader, writer = await sent(server, data)
            await server.settle(lambda: open_requests(server) == count)
            await asyncio.sleep(0.05)
            assert open_requests(server) == count
            if not leave_early or count > 1:  # while a pipelined request waits, nothing more is read
                gate.set()
                if data.endswith((BODY, GET)):
                    assert (await reader.read(12)) == b"HTTP/1.1 200"
            writer.close()
            await server.settle(lambda: open_requests(server) == 0)


@pytest.mark.parametrize(
    "data",
    [b"\r\n", b"nonsense\r\n\r\n", GET, GET.replace(b"/v1/models", b"/metrics"), GET.replace(b"/1.1", b"/3.0"),
     GET.replace(b"Host", b"Ghost"), GET.replace(b"localhost", b"x" * 70_000)],
    ids=["empty line", "nonsense", "answer", "scrape", "version", "no host", "headers"],
)  # fmt: skip
async def test_no_request_stays_open_after_its_answer(data: bytes) -> None:
    async with serving() as server:
        for _ in range(3):
            reader, writer = await sent(server, data)
            if data != b"\r\n":
                assert (await reader.read(8)) == b"HTTP/1.1"
            await server.settle(lambda: open_requests(server) == 0)
            writer.close()
        assert (await server.http.get("/v1/models")).status_code == 200
        assert open_requests(server) == 0
