"""The fast path of plain tokens sends the same bytes as the slow path, on any connection."""

from __future__ import annotations

import asyncio
import json
import re
import socket
from typing import Any

import pytest
from stub import Script, Server, serving

from weft.engine.wire.messages import TokenLogprobs
from weft.server.api import connection
from weft.server.api.choices import Choices
from weft.server.api.fast_path import FastPath
from weft.server.api.messages import MessagesDialect
from weft.server.api.responses.dialect import ResponseDialect
from weft.server.text.detokenizer import ByteDetokenizer

pytestmark = pytest.mark.asyncio(loop_scope="module")

TEXT = 'héllo "quoted" \\ 😀 wörld\n\x00\u2028 end ' * 8


async def body(server: Server, path: str, **fields: Any) -> list[Any]:
    messages = [{"role": "user", "content": "x"}]
    requested = {"prompt": "hi", "messages": messages, "stream": True, "max_tokens": 400, **fields}
    response = await server.post(path, requested, headers={"X-Request-Id": "same"})
    lines = response.text.split("\n\n")
    assert lines.pop() == ""
    out = [line if line == "data: [DONE]" else json.loads(line.removeprefix("data: ")) for line in lines]
    for event in out[:-1]:
        event["created"] = 0
    return out


def by_choice(events: list[Any]) -> list[Any]:
    """Events of several choices arrive in any order, those of one do not. Ids of calls are random."""
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
def fast_tokens(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The tokens that took the fast path."""
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
async def test_events_equal_those_of_the_slow_path(
    server: Server, monkeypatch: pytest.MonkeyPatch, fast_tokens: list[int], path: str, fields: dict[str, Any]
) -> None:
    server.engine.script = Script(TEXT, delay=0.001 if "n" in fields or "prompt" in fields else 0.0)
    short = await body(server, path, **fields)
    assert len(fast_tokens) > 10
    aborted = len(server.engine.aborted)
    monkeypatch.setattr(connection.RawWriter, "ready", lambda _: False)
    fast_tokens.clear()
    long = await body(server, path, **fields)
    assert not fast_tokens
    assert by_choice(short) == by_choice(long)
    assert len(server.engine.aborted) == 2 * aborted


BURSTS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {}),
    (
        "/v1/completions",
        {"stop": ["d\n"], "include_stop_str_in_output": True, "min_tokens": 9, "return_token_ids": True},
    ),
    ("/v1/completions", {"logprobs": 2, "stop": "end"}),
    ("/v1/chat/completions", {"stop": ["nowhere", "\n\x00"], "stream_options": {"include_usage": True}}),
    ("/v1/chat/completions", {"logprobs": True, "top_logprobs": 2}),
]


@pytest.mark.parametrize(("path", "fields"), BURSTS, ids=str)
async def test_tokens_of_one_iteration_are_one_event(
    server: Server, monkeypatch: pytest.MonkeyPatch, fast_tokens: list[int], path: str, fields: dict[str, Any]
) -> None:
    together: list[int] = []
    several = FastPath.several

    def counting(self: FastPath, token_ids: list[int], entries: list[TokenLogprobs]) -> bool:
        done = several(self, token_ids, entries)
        together.extend(token_ids * done)
        return done

    monkeypatch.setattr(FastPath, "several", counting)
    server.engine.script = Script(TEXT, burst=3)
    short = await body(server, path, **fields)
    assert len(together) > 10
    assert not fast_tokens
    monkeypatch.setattr(connection.RawWriter, "ready", lambda _: False)
    assert by_choice(short) == by_choice(await body(server, path, **fields))
    server.engine.script = Script(TEXT)
    single = await body(server, path, **fields)
    assert len(single) > 2 * len(short)
    assert joined(single) == joined(short)


def joined(events: list[Any]) -> list[Any]:
    """The text, token ids, log-probabilities and end of a stream's events."""
    choices = [choice for event in events[:-1] for choice in event["choices"]]
    texts = [choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]
    scores = [part for choice in choices for part in ((choice.get("logprobs") or {}).get("content") or ())]
    tokens = [part for choice in choices for part in ((choice.get("logprobs") or {}).get("tokens") or ())]
    ids = [part for choice in choices for part in choice.get("token_ids") or ()]
    return ["".join(texts), scores, tokens, ids, [choice["finish_reason"] for choice in choices][-1]]


async def test_tool_calls_equal_those_of_the_slow_path(monkeypatch: pytest.MonkeyPatch, fast_tokens: list[int]) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    async with serving(tool_call_parser="hermes") as server:
        server.engine.script = Script('Let me <tool_call>{"name": "f", "arguments": {"a": [1, "é"]}}</tool_call>')
        short = await body(server, "/v1/chat/completions", tools=[tool])
        assert len(fast_tokens) > 10
        monkeypatch.setattr(connection.RawWriter, "ready", lambda _: False)
        assert by_choice(short) == by_choice(await body(server, "/v1/chat/completions", tools=[tool]))


WITH_CALLS = """ Some words of text that nothing marks. Let me\n\n see: a < b and \x00 <tool_call>
{"name": "f", "arguments": {"a": [1, "é"]}}
</tool_call> so <tool_cal"""
TOOL_OF = {
    "/v1/chat/completions": {"type": "function", "function": {"name": "f"}},
    "/v1/responses": {"type": "function", "name": "f", "parameters": {}},
    "/v1/messages": {"name": "f", "input_schema": {"type": "object"}},
}


@pytest.mark.parametrize("offered", [True, False])
@pytest.mark.parametrize("path", TOOL_OF)
async def test_every_api_format_gives_the_same_on_the_fast_path(
    hermes: Server, monkeypatch: pytest.MonkeyPatch, fast_tokens: list[int], path: str, offered: bool
) -> None:
    """Ids and times differ. Most tokens take the fast step of the format."""
    quick = 0

    async def events() -> list[str]:
        requested: dict[str, Any] = {"max_tokens": 400, "max_output_tokens": 400, "stream": True}
        requested |= {"input": "x"} if path == "/v1/responses" else {"messages": [{"role": "user", "content": "x"}]}
        response = await hermes.post(path, requested | ({"tools": [TOOL_OF[path]]} if offered else {}))
        assert response.status_code == 200, response.text
        text = re.sub(r'"(created|created_at|completed_at)":\d+', r'"\1":0', response.text)
        return re.sub(r'"((?:call|msg|fc|resp|rs|toolu|chatcmpl)[_-])[0-9A-Za-z-]+"', r'"\1"', text).split("\n\n")

    for dialect in (Choices, ResponseDialect, MessagesDialect):

        def counting(self: Any, *given: Any, of: Any = dialect.token_event) -> bytes | None:
            nonlocal quick
            data = of(self, *given)
            quick += data is not None
            return data

        monkeypatch.setattr(dialect, "token_event", counting)
    hermes.engine.script = Script(WITH_CALLS)
    short = await events()
    assert len(fast_tokens) > 10
    assert quick > 10 or not offered
    monkeypatch.setattr(connection.RawWriter, "ready", lambda _: False)
    assert short == await events()


@pytest.mark.parametrize("fields", [{}, {"logprobs": 1}], ids=str)
async def test_an_error_ends_only_its_own_stream(
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


async def test_a_slow_reader_gets_everything_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stub.MAX_MODEL_LEN", 1 << 20)
    text = " ".join(f"w{i}" for i in range(8000))
    paused = 0
    ready = connection.RawWriter.ready

    def counting(self: connection.RawWriter) -> bool:
        nonlocal paused
        paused += not ready(self)
        return ready(self)

    monkeypatch.setattr(connection.RawWriter, "ready", counting)
    async with serving() as server:
        server.engine.script = Script(text, burst=4)
        raw = json.dumps({"prompt": "hi", "stream": True, "max_tokens": 100_000}).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.setblocking(False)
            host, port = server.url.removeprefix("http://").split(":")
            await asyncio.get_running_loop().sock_connect(sock, (host, int(port)))
            reader, writer = await asyncio.open_connection(sock=sock, limit=4096)
            head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: {len(raw)}\r\n"
            writer.write(head.encode() + b"Content-Type: application/json\r\n\r\n" + raw)
            await server.settle(lambda: paused > 0)  # the client does not read yet
            data = bytearray()
            while part := await reader.read(65536):
                data += part
            writer.close()
    events = [json.loads(line[6:]) for line in data.split(b"\n") if line.startswith(b"data: {")]
    assert "".join(event["choices"][0]["text"] for event in events) == text
    assert paused
