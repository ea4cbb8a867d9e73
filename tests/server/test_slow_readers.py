"""A client that does not read its answer is disconnected; one that reads slowly is not."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from exposed import value_of
from stub import Script, Server, serving

from weft.server.api.connection import Connection

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"prompt": "hi", "max_tokens": 500, "stream": True, "logprobs": 5}
LONG = Script("word " * 400, burst=1)


async def connect(server: Server, body: dict[str, Any]) -> socket.socket:
    """A request whose answer is not read, on a connection with small buffers."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(sock, (host, int(port)))
    data = json.dumps(body).encode()
    head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    head += f"Content-Length: {len(data)}\r\n"
    await loop.sock_sendall(sock, head.encode() + b"\r\n" + data)
    return sock


@pytest.fixture
def connections(monkeypatch: pytest.MonkeyPatch) -> list[Connection]:
    """New connections, with buffers so small that hundreds of events, not millions, are too many."""
    made = Connection.connection_made
    seen: list[Connection] = []

    def connection_made(self: Connection, transport: asyncio.Transport) -> None:
        sock = transport.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        transport.set_write_buffer_limits(high=4096)
        seen.append(self)
        made(self, transport)

    monkeypatch.setattr(Connection, "connection_made", connection_made)
    return seen


def counted(server: Server) -> tuple[float | None, ...]:
    metrics = server.service.metrics
    stalled = value_of(metrics, "weft_clients_stalled_total")
    return stalled, *(value_of(metrics, "weft_aborted_total", {"cause": cause}) for cause in ("stall", "disconnect"))


@pytest.mark.usefixtures("connections")
async def test_a_client_that_does_not_read_is_disconnected_and_its_request_aborted() -> None:
    async with serving(client_stall_timeout=0.4) as server:
        server.engine.script = Script("word " * 400, delay=0.001)
        socks = [await connect(server, {**BODY, "n": n}) for n in (1, 2)]
        await server.settle(lambda: counted(server) == (2, 3, 0))
        await server.settle(lambda: not server.service.open and server.engine.num_open == 0)
        for sock in socks:
            sock.close()


async def test_a_slow_reader_stays_connected(connections: list[Connection]) -> None:
    async with serving(client_stall_timeout=2) as server:
        server.engine.script = LONG
        sock = await connect(server, BODY)
        loop, text = asyncio.get_running_loop(), b""
        paused = False
        begun = loop.time()
        async with asyncio.timeout(240):
            while b"[DONE]" not in text:
                text += await loop.sock_recv(sock, 4096)
                paused = paused or any(c.flow.write_paused for c in connections)
                if loop.time() - begun < 5:  # longer than the limit
                    await asyncio.sleep(0.2)
        assert paused
        assert counted(server) == (0, 0, 0)
        sock.close()


async def test_zero_waits_forever(connections: list[Connection]) -> None:
    async with serving(client_stall_timeout=0) as server:
        server.engine.script = Script("word " * 400, stop_after=390)  # open until the client leaves, without a limit
        sock = await connect(server, BODY)
        await server.settle(lambda: any(c.flow.write_paused for c in connections))
        assert all(c._stall._timer is None for c in connections if c._stall is not None)
        sock.close()
        await server.settle(lambda: not server.service.open and counted(server) == (0, 0, 1))


@pytest.mark.usefixtures("connections")
async def test_an_unread_plain_answer_is_disconnected_too() -> None:
    async with serving(client_stall_timeout=0.4) as server:
        server.engine.script = LONG
        sock = await connect(server, {**BODY, "stream": False})
        await server.settle(lambda: counted(server) == (1, 0, 0))  # the sequence had ended
        sock.close()
