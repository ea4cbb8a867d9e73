"""The short way of plain tokens: the same bytes as the long one, whatever the connection does."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest
from stub import Script, Server, serving

from weft.engine.wire.messages import TokenLogprobs
from weft.server.api import connection
from weft.server.api.fast_path import FastPath
from weft.server.text.detokenizer import ByteDetokenizer

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


def by_choice(events: list[Any]) -> list[Any]:
    """Events of several choices come in any order, those of one do not. Ids of calls are random."""
    *events, done = events
    for event in events:
        for choice in event["choices"]:
            for call in choice.get("delta", {}).get("tool_calls", ()):
                call.pop("id", None)
    return [*sorted(events, key=lambda event: [choice["index"] for choice in event["choices"]] or [99]), done]


FIELDS: list[dict[str, Any]] = [
    {},
    {"stream_options": {"include_usage": True}},
    {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    {"stop": ["nowhere", "\n\x00"]},
    {"stop": ["d\n"], "include_stop_str_in_output": True, "min_tokens": 9, "return_token_ids": True},
    {"return_token_ids": True, "max_tokens": 70},
    {"n": 3, "max_tokens": 40},
    {"n": 2, "stop": "wörld", "stream_options": {"include_usage": True}},
]
OF_COMPLETIONS = [
    {"logprobs": 2},
    {"logprobs": 0, "echo": True, "stop": "end"},
    {"prompt": ["a", "b"], "logprobs": 1, "max_tokens": 40},
]
OF_CHAT = [{"logprobs": True, "top_logprobs": 2}, {"logprobs": True, "n": 2, "stop": "\\"}]
CASES = [
    *(("/v1/completions", fields) for fields in FIELDS + OF_COMPLETIONS),
    *(("/v1/chat/completions", fields) for fields in FIELDS + OF_CHAT),
]


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that went the short way."""
    tokens: list[int] = []
    call = FastPath.__call__

    def counting(self: FastPath, token_id: int, entry: TokenLogprobs | None) -> bool:
        done = call(self, token_id, entry)
        if done:
            tokens.append(token_id)
        return done

    monkeypatch.setattr(FastPath, "__call__", counting)
    return tokens


@pytest.mark.parametrize(("path", "fields"), CASES, ids=str)
async def test_events_are_those_of_the_long_way(
    server: Server, monkeypatch: pytest.MonkeyPatch, taken: list[int], path: str, fields: dict[str, Any]
) -> None:
    server.engine.script = Script(TEXT, delay=0.001 if "n" in fields or "prompt" in fields else 0.0)
    short = await body(server, path, **fields)
    assert len(taken) > 10
    aborted = len(server.engine.aborted)
    monkeypatch.setattr(connection.Outlet, "ready", lambda _: False)
    taken.clear()
    long = await body(server, path, **fields)
    assert not taken
    assert by_choice(short) == by_choice(long)
    assert len(server.engine.aborted) == 2 * aborted


async def test_tool_calls_are_those_of_the_long_way(monkeypatch: pytest.MonkeyPatch, taken: list[int]) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    async with serving(tool_call_parser="hermes") as server:
        server.engine.script = Script('Let me <tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>')
        short = await body(server, "/v1/chat/completions", tools=[tool])
        assert len(taken) > 10
        monkeypatch.setattr(connection.Outlet, "ready", lambda _: False)
        assert by_choice(short) == by_choice(await body(server, "/v1/chat/completions", tools=[tool]))


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}], ids=str)
async def test_a_defect_ends_the_one_stream_that_has_it(
    server: Server, monkeypatch: pytest.MonkeyPatch, fields: dict[str, Any]
) -> None:
    server.engine.script = Script("abcdef", stop_after=5)
    feed = ByteDetokenizer.feed
    (e,) = server.engine.tokenizer.encode("e")

    def broken(self: ByteDetokenizer, token_id: int) -> str:
        return feed(self, token_id // (token_id != e))

    monkeypatch.setattr(ByteDetokenizer, "feed", broken)
    response = await server.post("/v1/completions", {"prompt": "hi", "stream": True, **fields})
    *_, last = [json.loads(line[6:]) for line in response.text.split("\n\n") if line]
    assert last["error"]["code"] == "internal_error"
    assert server.engine.aborted == [server.engine.added[-1].handle]


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
