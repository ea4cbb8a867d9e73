"""Large bodies: those refused before they are read, and those read while other requests are served."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from stub import MAX_MODEL_LEN, Server, serving

from weft.server.api import routing
from weft.server.bodies import BodyBounds

pytestmark = pytest.mark.asyncio(loop_scope="module")

JSON = {"Content-Type": "application/json"}
BOUNDS = BodyBounds.of(None, MAX_MODEL_LEN)


async def test_bounds_follow_from_the_context() -> None:
    for context, mib in ((2048, 3), (8192, 9), (131072, 32)):
        bounds = BodyBounds.of(None, context)
        assert bounds.max_bytes == mib * 2**20
        assert bounds.max_values > min(64 * context, 2**20), "64 prompts that fill the context, as ids"
    assert BodyBounds.of(0.5, 2048).max_bytes == 2**19
    assert BodyBounds.of(None, 2**23).max_values > 2**23


def many(text: bytes, count: int, begin: bytes = b'{"prompt": "hi", "x": [', end: bytes = b"]}") -> bytes:
    return begin + b",".join([text] * count) + end


TOO_MUCH = {
    "keys": many(b'"k":0', BOUNDS.max_keys + 1, b'{"prompt": "hi", "x": {', b"}}"),
    "keys of objects": many(b'{"a":0}', BOUNDS.max_keys),
    "arrays": many(b"[[]]", BOUNDS.max_keys),
    "objects": many(b"{}", BOUNDS.max_keys),
    "values": many(b"1", BOUNDS.max_values + 2),
}


@pytest.mark.parametrize("kind", TOO_MUCH)
async def test_bodies_that_take_too_long_to_parse_are_not_read(
    server: Server, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "parse_json", lambda _: pytest.fail("was read"))
    assert len(TOO_MUCH[kind]) < BOUNDS.max_bytes
    for path in ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"):
        response = await server.http.post(path, content=TOO_MUCH[kind], headers=JSON)
        assert response.status_code == 400
        error = response.json()["error"]
        assert (error["code"], "more than" in error["message"]) == ("invalid_json", True)


async def test_large_bodies_are_read_in_a_thread(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    threads: list[bool] = []
    read = routing.parse_json

    def noted(data: Any) -> Any:
        threads.append(threading.current_thread() is threading.main_thread())
        return read(data)

    monkeypatch.setattr(routing, "parse_json", noted)
    filler = "x" * routing.LARGE_BODY
    await server.complete(prompt="hi", metadata=filler)
    assert server.engine.added[-1].prompt_token_ids
    for body, param in (({"prompt": "hi", "n": 0}, "n"), ({"prompt": 5}, "prompt"), ({}, "prompt")):
        response = await server.post("/v1/completions", {**body, "metadata": filler})
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    for content in (b"[" + b" " * routing.LARGE_BODY + b"]", b" " * routing.LARGE_BODY + b"{"):
        response = await server.http.post("/v1/completions", content=content, headers=JSON)
        assert response.status_code == 400, response.text
    assert threads == [False] * 6
    await server.complete(prompt="hi")
    assert threads[-1]


async def test_other_requests_are_answered_while_a_body_is_read(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, read = threading.Event(), routing.parse_json

    def slow(data: bytes) -> Any:
        if len(data) > routing.LARGE_BODY:
            gate.wait(240)
        return read(data)

    monkeypatch.setattr(routing, "parse_json", slow)
    waiting = asyncio.create_task(server.complete(metadata="x" * routing.LARGE_BODY))
    await asyncio.sleep(0.05)
    assert (await server.http.get("/health")).status_code == 200
    await server.complete()
    assert not waiting.done()
    gate.set()
    await waiting


async def test_ids_are_bounded_by_the_vocabulary(server: Server) -> None:
    async def status(path: str, **body: Any) -> int:
        return (await server.post(path, body)).status_code

    assert await status("/detokenize", tokens=[5] * 16 * MAX_MODEL_LEN) == 200
    assert await status("/detokenize", tokens=[5] * (16 * MAX_MODEL_LEN + 1)) == 400
    size = server.engine.tokenizer.vocab_size
    assert await status("/v1/completions", prompt="hi", allowed_token_ids=list(range(size))) == 200
    assert await status("/v1/completions", prompt="hi", allowed_token_ids=[5] * (size + 1)) == 400


async def test_the_limit_is_that_of_the_loaded_model() -> None:
    async with serving(attach=False) as server:
        before = server.service.body_bounds.max_bytes
        server.service.attach(server.engine, server.engine.describe(), server.engine.tokenizer)
        assert server.service.body_bounds == BOUNDS
        assert before > BOUNDS.max_bytes
        response = await server.http.post("/v1/completions", content=b" " * (BOUNDS.max_bytes + 1), headers=JSON)
        assert response.status_code == 413


@pytest.mark.parametrize("seed", [-(2**63) - 1, 2**63, 2**64, 10**30])
async def test_integers_that_are_too_large_are_refused_with_the_limit(server: Server, seed: int) -> None:
    error = (await server.post("/v1/completions", {"prompt": "hi", "seed": seed})).json()["error"]
    assert error["param"] == "seed"
    assert str(2**63 - 1) in error["message"]


async def test_a_value_that_is_no_object_is_refused_in_terms_of_json(server: Server) -> None:
    for body in ({"stream_options": 5}, {"structured_outputs": "x"}, {"response_format": "json"}):
        error = (await server.post("/v1/completions", {"prompt": "hi", **body})).json()["error"]
        assert error["message"] == f"{next(iter(body))}: Input should be an object"
