"""The short way of plain tokens: the same bytes as the long one, whatever the connection does."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from stub import Script, Server, serving

from weft.server import connection
from weft.server.express import Express

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = 'héllo "quoted" \\ 😀 wörld\n\x00\u2028 end ' * 8


async def body(server: Server, path: str, **fields: Any) -> list[Any]:
    messages = [{"role": "user", "content": "x"}]
    asked = {"prompt": "hi", "messages": messages, "stream": True, "max_tokens": 400, **fields}
    response = await server.post(path, asked, headers={"X-Request-Id": "same"})
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    out = [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]
    for event in out[:-1]:
        event["created"] = 0
    return out


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    "options", [None, {"include_usage": True}, {"include_usage": True, "continuous_usage_stats": True}]
)
async def test_events_are_those_of_the_long_way(
    server: Server, monkeypatch: pytest.MonkeyPatch, path: str, options: dict[str, bool] | None
) -> None:
    server.engine.script = Script(TEXT)
    taken = 0
    call = Express.__call__

    def counting(self: Express, token_id: int) -> bool:
        nonlocal taken
        taken += 1
        return call(self, token_id)

    monkeypatch.setattr(Express, "__call__", counting)
    short = await body(server, path, stream_options=options)
    assert (taken > 100) == (options is None or len(options) == 1)
    monkeypatch.setattr(connection.Outlet, "ready", lambda _: False)
    assert short == await body(server, path, stream_options=options)


@pytest.mark.parametrize("fields", [{"stop": "zzz"}, {"logprobs": 1}, {"return_token_ids": True}, {"n": 2}])
async def test_what_is_not_plain_goes_the_long_way(
    server: Server, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    monkeypatch.setattr(Express, "__call__", lambda *_: pytest.fail("took the short way"))
    server.engine.script = Script("hello world")
    assert (await body(server, "/v1/completions", **fields))[-1] == "data: [DONE]"


async def test_a_client_that_reads_slowly_gets_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stub.MAX_MODEL_LEN", 1 << 20)
    text = " ".join(f"w{i}" for i in range(8000))
    paused = 0
    ready = connection.Outlet.ready

    def counting(self: connection.Outlet) -> bool:
        nonlocal paused
        paused += not ready(self)
        return ready(self)

    monkeypatch.setattr(connection.Outlet, "ready", counting)
    async with serving() as server:
        server.engine.script = Script(text, burst=100)
        raw = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 100_000}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            host, port = server.url.removeprefix("http://").split(":")
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
            await asyncio.sleep(0.5)
            data = bytearray()
            while part := await reader.read(65536):
                data += part
            writer.close()
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert paused
