"""Malformed and hostile requests: the right status, OpenAI's error body, and a server that keeps serving."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from exposed import value_of
from stub import Script, Server, serving

from weft.server.api import connection, middleware
from weft.server.bodies import MAX_NESTING, parse_json

pytestmark = pytest.mark.asyncio(loop_scope="module")

FILES = Path("/proc/self/fd")
GET = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"


@pytest_asyncio.fixture(autouse=True, loop_scope="module")
async def keeps_serving(server: Server) -> AsyncIterator[None]:
    yield
    await server.settle(lambda: not server.service.open)
    assert (await server.complete(prompt="hi"))["choices"][0]["text"] == "hello world"
    assert server.engine.num_open == 0
    assert server.service.loaded.admission.prefill_tokens == 0


async def exchange(server: Server, *parts: bytes, pause: float = 0.01, eof: bool = False) -> tuple[int, Any]:
    """Send bytes on a separate connection. Returns the status and the body of the answer, or (0, None) without one."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        for part in parts:
            writer.write(part)
            await writer.drain()
            await asyncio.sleep(pause)
        if eof:
            writer.write_eof()
        async with asyncio.timeout(240):
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            body = await reader.readexactly(int(length.split(b":")[1]))
        return int(head.split()[1]), json.loads(body)
    except (asyncio.IncompleteReadError, ConnectionError):
        return 0, None
    finally:
        writer.close()


def with_body(body: bytes, head: bytes = POST) -> bytes:
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


@pytest.mark.parametrize(
    "data",
    [
        b"\x00\x01\x02\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # a TLS hello
        b"GET / HTTP/9.9\r\nHost: x\r\n\r\n",
        b"GET\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET /health HTTP/1.1\r\nno colon\r\n\r\n",
        b"GET /health HTTP/1.1\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nA: \x01\r\n\r\n",
        b"CONNECT x:1 HTTP/1.1\r\nHost: x\r\n\r\n",
        POST + b"Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n",
        POST + b"Content-Length: -5\r\n\r\n",
        POST + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\nZZ\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n" + b"F" * 17 + b"\r\n",
        POST + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{}\r\n",
    ],
    ids=repr,
)
async def test_requests_that_are_not_http_are_400(server: Server, data: bytes) -> None:
    status, body = await exchange(server, data)
    assert status == 400
    assert set(body["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize("host", [b"", b"a b", b"[::1]:99999", b"x/../admin", b"\xff\xfe", b"evil.example, other"])
async def test_unusual_hosts_change_nothing(server: Server, host: bytes) -> None:
    status, body = await exchange(server, b"GET /health HTTP/1.1\r\nHost: " + host + b"\r\n\r\n")
    assert (status, body) == (200, {"status": "ok"})


@pytest.mark.parametrize("target", [b"*", b"/%00", b"/%ff%fe", b"//", b"/v1/../health", b"http://other/health?x=\x27"])
async def test_unusual_targets_get_an_answer(server: Server, target: bytes) -> None:
    status, _ = await exchange(server, b"GET " + target + b" HTTP/1.1\r\nHost: x\r\n\r\n")
    assert status in (200, 400, 404)


@pytest.mark.parametrize("whole", [True, False], ids=["complete", "endless"])
@pytest.mark.parametrize("kind", ["one", "many", "path"])
async def test_huge_headers_are_431(server: Server, whole: bool, kind: str) -> None:
    size = connection.MAX_HEADER_BYTES + 10
    fill = {
        "one": b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * size,
        "many": b"GET /health HTTP/1.1\r\nHost: x" + b"\r\nA: a" * (size // 5),
        "path": b"GET /" + b"a" * size + b" HTTP/1.1\r\nHost: x",
    }[kind]
    status, body = await exchange(server, fill + b"\r\n\r\n" * whole)
    assert (status, body["error"]["code"]) == (431, "headers_too_large")


async def test_slow_headers_are_408(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 0.1)
    status, body = await exchange(server, b"GET /he", b"alth HTTP/1.1\r\nHo", pause=0.02)
    assert (status, body["error"]["code"]) == (408, "slow_request")
    assert await exchange(server, pause=0.3) == (0, None)  # nothing at all: closed without an answer
    # The second request of a connection has as much time as the first.
    status, _ = await exchange(server, b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", b"GET", pause=0.3)
    assert status == 200


async def test_hundreds_of_slow_clients_do_not_delay_others(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADER_SECONDS", 600.0)
    files = len(list(FILES.iterdir()))
    head = POST + b"Content-Length: 100\r\n"
    parts = [head[:20], *(head[i : i + 1] for i in range(20, 25))]
    slow = [asyncio.create_task(exchange(server, *parts, pause=0.1)) for _ in range(300)]
    await server.settle(
        lambda: len(list(FILES.iterdir())) > files + 500
    )  # two each, except those that earlier tests left
    for _ in range(5):
        assert (await server.complete(prompt="hi"))["choices"][0]["text"] == "hello world"
    assert not any(task.done() for task in slow)
    for task in slow:
        task.cancel()
    await server.settle(lambda: len(list(FILES.iterdir())) < files + 100)


async def test_a_slow_body_is_408(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(middleware.BodyLimit, "BODY_SECONDS", 0.2)
    status, body = await exchange(server, POST + b"Content-Length: 100\r\n\r\n", b"{", pause=0.01)
    assert (status, body["error"]["code"]) == (408, "slow_request")


async def test_a_body_that_is_not_read_must_end_in_time(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 0.2)
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 1000000\r\n\r\n{")
    async with asyncio.timeout(240):
        assert (await reader.readline()).split()[1] == b"404"
        await reader.read()  # the end of the connection
    writer.close()
    # A request that ends in time keeps its connection.
    monkeypatch.setattr(connection, "UNREAD_SECONDS", 2.0)
    late = b"POST /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, int(port))
    for _ in range(2):
        writer.write(late)
        assert (await reader.readuntil(b"\r\n\r\n")).split()[1] == b"404"
        writer.write(b"{}")
        await reader.readuntil(b"}}")
    await asyncio.sleep(2.2)
    writer.write(GET)
    assert (await reader.readline()).split()[1] == b"200"
    writer.close()


@pytest.mark.parametrize(
    ("begin", "rest"),
    [(b"5;", b"a"), (b"0\r\nA: ", b"a"), (b"0\r\n", b"A: a\r\n")],
    ids=["extension", "trailer", "trailers"],
)
async def test_chunk_headers_are_limited_like_headers(server: Server, begin: bytes, rest: bytes) -> None:
    flood = begin + rest * (connection.MAX_HEADER_BYTES // len(rest) + 10)
    parts = [flood[i : i + 2**14] for i in range(0, len(flood), 2**14)]
    status, body = await exchange(server, POST + b"Transfer-Encoding: chunked\r\n\r\n", *parts)
    assert (status, body["error"]["code"]) == (431, "headers_too_large")


async def test_trailers_are_not_headers() -> None:
    async with serving(api_key=["k"]) as server:
        trailer = b"0\r\nAuthorization: Bearer k\r\n\r\n"
        data = b'd\r\n{"prompt":"a"\r\n1\r\n}\r\n' + trailer
        status, body = await exchange(server, POST + b"Transfer-Encoding: chunked\r\n\r\n" + data)
        assert (status, body["error"]["code"]) == (401, "invalid_api_key")
        key = b"Authorization: Bearer k\r\nTransfer-Encoding: chunked\r\n\r\n"
        assert (await exchange(server, POST + key + data))[0] == 200


@pytest.mark.parametrize("chunked", [False, True])
async def test_33_mib_are_413(server: Server, chunked: bool) -> None:
    size, block = 33 * 2**20, b"x" * 2**20
    if chunked:
        parts = [POST + b"Transfer-Encoding: chunked\r\n\r\n", *[b"100000\r\n" + block + b"\r\n"] * 33, b"0\r\n\r\n"]
    else:
        parts = [POST + b"Content-Length: %d\r\n\r\n" % size, *[block] * 33]
    status, body = await exchange(server, *parts, pause=0)
    assert (status, body["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize(
    "data",
    [
        POST + b"Content-Length: 100\r\n\r\n{",
        POST + b'Transfer-Encoding: chunked\r\n\r\n5\r\n{"a"',
        POST + b"Transfer-Encoding: chunked\r\n\r\n",
    ],
    ids=repr,
)
async def test_an_incomplete_body_is_not_a_server_error(server: Server, data: bytes) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    counted = partial(value_of, server.service.metrics)
    labels = {"endpoint": "/v1/completions", "status": "499"}
    before = counted("weft_requests_total", labels) or 0
    _, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    await asyncio.sleep(0.05)
    writer.close()
    await server.settle(lambda: counted("weft_requests_total", labels) == before + 1)
    assert counted("weft_requests_total", {"endpoint": "/v1/completions", "status": "500"}) is None


def nested(levels: int, kind: str = "array") -> bytes:
    """A JSON document."""
    opening, closing = {"array": (b"[", b"]"), "object": (b'{"a":', b"}"), "schema": (b'{"not":', b"}")}[kind]
    return opening * (levels - 1) + b"{}" + closing * (levels - 1)


PATHS = (
    b"/v1/completions", b"/v1/chat/completions", b"/v1/embeddings", b"/v1/responses", b"/v1/responses/input_tokens",
    b"/v1/messages", b"/v1/messages/count_tokens",
)  # fmt: skip
BAD_JSON = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"text"',
    b'{"prompt": "\\ud800"}',
    b'{"\\udfff": "hi"}',
    b'{"messages": [{"role": "user", "content": "\\ud83d"}]}',
    b'{"messages": [{"role": "user", "content": [{"type": "text", "text": "\\ude00\\ud83d"}]}]}',
    b'{"logit_bias": {"5": 1e999}}',
    b'{"response_format": {"type": "json_schema", "json_schema": {"schema": {"minimum": -1e999}}}}',
    b'{"prompt": "\xff"}',
    b'{"prompt": "\xed\xa0\x80"}',
    b'{"prompt": "hi", "temperature": NaN}',
    b'{"prompt": "hi", "temperature": 1e999}',
    b'{"prompt": "hi", "temperature": -Infinity}',
    b'{"prompt": "hi", "seed": 1e999}',
    b'{"prompt": "hi", "max_tokens": 1e30}',
    b'{"prompt": "hi", "max_tokens": 999999999999999999999999999}',
    b'{"prompt": [1e999]}',
    b'{"prompt": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    b'{"prompt": "hi"' + b" " * 1_000_000 + b"",
]


@pytest.mark.parametrize(
    ("path", "data"),
    [
        (path, data)
        for path in (*PATHS, b"/tokenize", b"/detokenize")
        for data in BAD_JSON
        if b"max_tokens" not in data or path.startswith(b"/v1")  # no field of the others
    ],
    ids=lambda value: repr(value[:40]),
)
async def test_invalid_bodies_are_400(server: Server, path: bytes, data: bytes) -> None:
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    status, body = await exchange(server, with_body(data, head), pause=0)
    assert status == 400
    assert body["error"]["type"] == "invalid_request_error"


FREE_FORM = [
    b'"metadata": %b',
    b'"guided_json": %b',
    b'"structured_outputs": {"json": %b}',
    b'"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": %b}}',
    b'"tools": [{"type": "function", "function": {"name": "f", "parameters": %b}}], "tool_choice": "required"',
    b'"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": %b}}]}]',
]


RESPONSES = [
    b'"metadata": %b',
    b'"text": {"format": {"type": "json_schema", "name": "n", "schema": %b}}',
    b'"tools": [{"type": "function", "name": "f", "parameters": %b}], "tool_choice": "required"',
    b'"input": [{"type": "function_call", "call_id": "c", "name": "f", "arguments": %b}]',
    b'"input": [{"type": "function_call_output", "call_id": "c", "output": %b}]',
]
MESSAGES = [
    b'"metadata": %b',
    b'"output_config": {"format": {"type": "json_schema", "schema": %b}}',
    b'"tools": [{"name": "f", "input_schema": %b}], "tool_choice": {"type": "any"}',
    b'"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "f", "input": %b}]}]',
    b'"messages": [{"role": "user", "content": [{"type": "tool_result", "tool_use_id": "t", "content": %b}]}]',
]
SAID = b'{"messages": [{"role": "user", "content": "a"}], '


@pytest.mark.parametrize(
    ("path", "start", "field"),
    [
        (path, start, field)
        for path, start, fields in (
            (b"/v1/completions", b'{"prompt": "hi", ', FREE_FORM),
            (b"/v1/chat/completions", SAID, FREE_FORM),
            (b"/tokenize", b'{"prompt": "hi", ', FREE_FORM),
            (b"/v1/responses", b'{"input": "hi", "max_output_tokens": 2, ', RESPONSES),
            (b"/v1/messages", SAID + b'"model": "stub", "max_tokens": 2, ', MESSAGES),
        )
        for field in fields
    ],
    ids=lambda value: repr(value.partition(b":")[0]),
)
@pytest.mark.parametrize("kind", ["object", "schema"])
async def test_deep_json_is_not_a_server_error(
    server: Server, path: bytes, start: bytes, field: bytes, kind: str
) -> None:
    """As deep as the parsers of bodies and grammars, a serializer, or Python itself allow, and slightly deeper."""
    head = b"POST " + path + b" HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    for levels in (100, 120, 127, 250, 260, 900, 1010, 1100):
        document = nested(levels, kind)
        for value in (document, json.dumps(document.decode()).encode()):  # plain, and in a string
            status, body = await exchange(server, with_body(start + field % value + b"}", head), pause=0)
            assert status in (200, 400), body
            if levels > MAX_NESTING and value is document:
                # Anthropic's errors have no code.
                assert (status, body["error"].get("code", "invalid_json")) == (400, "invalid_json")


async def test_nesting_counts_by_level() -> None:
    for kind in ("array", "object"):
        parse_json(nested(MAX_NESTING, kind))
        with pytest.raises(ValueError, match="levels of nesting"):
            parse_json(nested(MAX_NESTING + 1, kind))
    wide = b"[" + b",".join([nested(MAX_NESTING - 1)] * 100) + b"]"
    assert len(parse_json(wide)) == 100


async def test_random_bytes_never_cause_a_500(server: Server) -> None:
    rng = random.Random(7)
    seed = with_body(b'{"prompt": "hi", "stream": true, "max_tokens": 3, "stop": ["x"]}')
    server.engine.script = Script("abc")
    for _ in range(200):
        data = bytearray(seed)
        for _ in range(rng.randint(1, 8)):
            at = rng.randrange(len(data))
            match rng.randrange(3):
                case 0:
                    data[at] = rng.randrange(256)
                case 1:
                    del data[at : at + rng.randint(1, 20)]
                case 2:
                    data[at:at] = rng.randbytes(rng.randint(1, 20))
        host, port = server.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(bytes(data))
        writer.write_eof()
        try:
            async with asyncio.timeout(0.3):
                head = await reader.readline()
        except (TimeoutError, ConnectionError):
            head = b""
        writer.close()
        assert not head or head.split()[1][:1] in (b"2", b"4"), bytes(data)
    server.engine.script = Script()


async def test_garbage_after_a_request_does_not_affect_its_answer(server: Server) -> None:
    gate = asyncio.Event()
    server.engine.script = Script("abc", gate=gate)
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(with_body(b'{"prompt": "hi", "stream": true}') + b"\x00garbage\r\n\r\n")
    await asyncio.sleep(0.05)
    gate.set()
    data = await reader.read()
    writer.close()
    assert b"HTTP/1.1 400" not in data[1:]
    server.engine.script = Script()
