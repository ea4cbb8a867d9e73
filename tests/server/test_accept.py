"""Connections beyond the file descriptors are closed, counted and logged; TLS; a queue that another process empties."""

from __future__ import annotations

import asyncio
import resource
import socket
import ssl
from typing import Any

import pytest
from exposed import value_of
from stub import serving

from weft.server.api import http_server
from weft.server.api.http_server import SPARE, Acceptor

pytestmark = pytest.mark.asyncio(loop_scope="module")


async def test_connections_beyond_the_limit_are_closed_and_counted(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.socket() as probe:
        limit = probe.fileno() + SPARE + 40
    monkeypatch.setattr(resource, "getrlimit", lambda _: (limit, limit))
    async with serving() as server:
        host, port = server.url.removeprefix("http://").split(":")
        idle = [await asyncio.open_connection(host, int(port)) for _ in range(60)]

        def closed() -> int:
            return sum(reader.at_eof() or reader.exception() is not None for reader, _ in idle)

        await server.settle(lambda: closed() > 0 and closed() + server.front.num_connections == 60)
        assert closed() < 60
        assert value_of(server.service.metrics, "weft_accepts_refused_total") == closed()
        for _, writer in idle:
            writer.close()
        await server.settle(lambda: server.front.num_connections == 0)
        assert (await server.complete())["choices"]
    lines = [record.getMessage() for record in caplog.records if "file descriptor" in record.getMessage()]
    assert len(lines) == 1  # not one for each
    assert str(limit) in lines[0]


class Greeter(asyncio.Protocol):
    def connection_made(self, transport: Any) -> None:
        transport.write(b"hello")
        transport.close()


async def test_a_failing_accept_is_retried_without_spinning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_server, "PAUSE", 0.02)
    tries = 0

    class Listener(socket.socket):
        def accept(self) -> Any:
            nonlocal tries
            tries += 1
            if tries < 4:
                raise OSError(24, "Too many open files")
            return super().accept()

    refused: list[int] = []
    with Listener() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        acceptor = Acceptor(listener, Greeter, lambda: None, lambda: refused.append(1))
        acceptor.start()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        assert await reader.read() == b"hello"
        assert (len(refused), tries) == (3, 5)  # the last one found the queue empty
        writer.close()
        acceptor.stop()


async def test_connections_left_in_the_queue_are_taken_by_the_next_process() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        first = Acceptor(listener, Greeter, lambda: None, lambda: None)
        first.start()
        first.stop()
        first.stop()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await reader.read()
        with listener.dup() as shared:
            second = Acceptor(shared, Greeter, lambda: None, lambda: None)
            second.start()
            assert await reader.read() == b"hello"
            second.stop()
        writer.close()


async def test_a_failed_handshake_closes_its_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        acceptor = Acceptor(listener, Greeter, lambda: context, lambda: None)
        acceptor.start()
        reader, writer = await asyncio.open_connection(*listener.getsockname())
        writer.write(b"GET / HTTP/1.1\r\n\r\n")
        async with asyncio.timeout(240):
            await reader.read()
        writer.close()
        acceptor.stop()
