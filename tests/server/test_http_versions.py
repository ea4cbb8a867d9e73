"""HTTP as old, new and careless clients use it."""

from __future__ import annotations

import asyncio
import json
import re

import pytest
from stub import Script, Server, serving

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = b"Content-Type: application/json\r\n"


async def sent(server: Server, data: bytes) -> bytes:
    """Everything that the server sends until it closes the connection."""
    host, port = server.url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(data)
    async with asyncio.timeout(240):
        answer = await reader.read()
    writer.close()
    return answer


def post(version: str, body: dict[str, object], *, more: bytes = b"") -> bytes:
    data = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/{version}\r\nHost: x\r\nContent-Length: {len(data)}\r\n".encode()
    return head + JSON + more + b"\r\n" + data


async def test_http_1_0_gets_a_stream_without_chunks(server: Server) -> None:
    server.engine.script = Script("hello world", burst=1, delay=0.001)
    answer = await sent(server, post("1.0", {"prompt": "hi", "stream": True}))
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b" 200 " in head
    assert b"transfer-encoding" not in head.lower()
    events = [line for line in body.decode().split("\n\n") if line]
    assert events[-1] == "data: [DONE]"
    texts = [json.loads(event.removeprefix("data: "))["choices"][0]["text"] for event in events[:-1]]
    assert "".join(texts) == "hello world"


async def test_http_1_0_may_keep_its_connection_if_the_length_is_known(server: Server) -> None:
    plain = post("1.0", {"prompt": "hi"}, more=b"Connection: keep-alive\r\n")
    answer = await sent(server, plain + post("1.0", {"prompt": "hi"}))
    assert answer.count(b"HTTP/1.1 200 ") >= 1
    assert b"content-length" in answer.lower()
    assert b"transfer-encoding" not in answer.lower()


@pytest.mark.parametrize(
    ("data", "status", "code"),
    [
        (b"GET /health HTTP/2.0\r\nHost: x\r\n\r\n", 505, "http_version"),
        (
            post("1.1", {"prompt": "hi"}).replace(b"Content-Length: 16", b"Transfer-Encoding: gzip, chunked"),
            501,
            "unsupported_transfer_encoding",
        ),
        (b"CONNECT /v1/models HTTP/1.1\r\nHost: x\r\n\r\nabc", 400, "invalid_http"),
    ],
    ids=["version", "coding", "method"],
)
async def test_unsupported_protocols_are_reported(server: Server, data: bytes, status: int, code: str) -> None:
    head, _, body = (await sent(server, data)).partition(b"\r\n\r\n")
    assert head.split()[1] == str(status).encode()
    assert json.loads(body)["error"]["code"] == code


OFFER = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAEAAEAA\r\n"


@pytest.mark.parametrize("version", ["1.1", "1.0"])
async def test_a_request_that_offers_http_2_keeps_its_body(server: Server, version: str) -> None:
    """As Java's HttpClient and `curl --http2` send every request over plain TCP."""
    server.engine.script = Script("hello world")
    request = post(version, {"prompt": "hi"}, more=OFFER)
    last = post("1.1", {"prompt": "hi"}, more=b"Connection: close\r\n") if version == "1.1" else b""
    answer = await sent(server, request + last)
    assert answer.count(b" 200 OK") == answer.count(b"hello world") == (2 if last else 1)


async def test_the_body_of_a_request_that_offers_http_2_is_not_a_request(server: Server) -> None:
    inner = b"GET /nothing HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n" % len(inner) + JSON + OFFER
    last = b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
    answer = await sent(server, head + b"\r\n" + inner + last)
    assert re.findall(rb"HTTP/1.1 (\d+)", answer) == [b"400", b"200"]


@pytest.mark.parametrize("path", ["/health", "/ready", "/v1/models", "/v1/models/stub", "/version", "/metrics", "/"])
async def test_head_is_get_without_a_body(server: Server, path: str) -> None:
    get, head = await server.http.get(path), await server.http.head(path)
    assert (head.status_code, head.content) == (200, b"")
    assert head.headers["content-type"] == get.headers["content-type"]
    assert (await server.http.head("/v1/models/other")).status_code == 404


async def test_a_trailing_slash_is_ignored(server: Server) -> None:
    models = (await server.http.get("/v1/models")).json()
    assert (await server.http.get("/v1/models/")).json() == models
    assert (await server.http.get("/v1/models/stub/")).json()["id"] == "stub"
    assert (await server.post("/v1/completions/", {"prompt": "hi"})).status_code == 200
    assert (await server.http.get("/v1/models//")).status_code == 404


async def test_a_trailing_slash_gives_no_access() -> None:
    async with serving(api_key=["k"]) as server:
        for path in ("/v1/models/", "/v1/completions/", "/tokenizer_info/", "/admin/reset_prefix_cache/"):
            assert (await server.http.get(path)).status_code in (401, 404), path
        for path in ("/health/", "/favicon.ico"):
            assert (await server.http.get(path)).is_success
        assert (await server.http.get("/favicon.ico")).status_code == 204


async def test_method_not_allowed_has_the_usual_error_body() -> None:
    async with serving(cors_origin=["https://good.example"]) as server:
        for origin, method, status in (
            ("https://good.example", "POST", 200),
            ("https://evil.example", "POST", 400),
            ("https://good.example", "PATCH", 400),
        ):
            headers = {"Origin": origin, "Access-Control-Request-Method": method}
            response = await server.http.options("/v1/completions", headers=headers)
            assert response.status_code == status
            if status == 400:
                assert set(response.json()["error"]) == {"message", "type", "param", "code"}
                assert response.headers["content-type"] == "application/json"
                assert "vary" in response.headers
