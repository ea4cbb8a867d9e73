"""Every accepted request ends exactly once: disconnect, timeout, drain, overload, engine exit."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from typing import Any

import httpx
import pytest
from exposed import value_of
from stub import Script, Server, serving

from weft.engine.wire.heartbeat import ENGINE, Heartbeats, Watch
from weft.server.api import answer
from weft.server.api.service import Phase
from weft.server.errors import ApiError

pytestmark = pytest.mark.asyncio(loop_scope="module")

BODY = {"prompt": "hi", "max_tokens": 100}
STALLED = Script("abc", stop_after=1)


def events(response: httpx.Response) -> list[Any]:
    lines = [line for line in response.text.split("\n\n") if line.startswith("data: ")]
    return [line[6:] if line == "data: [DONE]" else json.loads(line[6:]) for line in lines]


def aborted(server: Server, cause: str) -> float:
    return value_of(server.service.metrics, "weft_aborted_total", {"cause": cause}) or 0.0


async def open_requests(server: Server, *, streams: int, plain: int) -> list[asyncio.Task[httpx.Response]]:
    """Requests whose engine stops sending after the first token."""
    server.engine.script = STALLED
    kinds = [True] * streams + [False] * plain
    tasks = [asyncio.create_task(server.post("/v1/completions", {**BODY, "stream": kind})) for kind in kinds]
    await server.settle(lambda: len(server.service.open) == len(kinds) and not server.engine.tasks)
    await asyncio.sleep(0.05)
    return tasks


async def test_the_port_answers_while_the_model_loads() -> None:
    async with serving(attach=False) as server:
        assert (await server.http.get("/health")).status_code == 200
        for response in (
            await server.http.get("/ready"),
            await server.http.get("/v1/models"),
            await server.post("/v1/completions", BODY),
            await server.post("/tokenize", {"prompt": "hi"}),
        ):
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "loading"
            assert 0 < int(response.headers["retry-after"]) <= 120
        server.service.attach(server.engine, server.engine.describe(), server.engine.tokenizer)
        assert (await server.http.get("/ready")).status_code == 200


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_disconnects_ends_its_request(server: Server, stream: bool) -> None:
    server.engine.script = STALLED
    before = aborted(server, "disconnect")
    client = asyncio.create_task(server.post("/v1/completions", {**BODY, "stream": stream, "n": 2}))
    await server.settle(lambda: len(server.engine.added) == 2 and not server.engine.tasks)
    client.cancel()
    await server.settle(lambda: len(server.engine.aborted) == 2)
    assert server.engine.num_open == 0
    await server.settle(lambda: not server.service.open)
    assert aborted(server, "disconnect") == before + 2
    assert server.service.loaded.admission.prefill_tokens == 0


async def test_timeout_is_504_before_the_first_byte_and_an_event_after_it() -> None:
    async with serving(request_timeout=1.0) as server:
        server.engine.script = Script(gate=asyncio.Event())
        for stream in (False, True):
            response = await server.post("/v1/completions", {**BODY, "stream": stream})
            assert response.status_code == 504
            assert response.json()["error"]["type"] == "timeout_error"
        server.engine.script = STALLED
        first, last = events(await server.post("/v1/completions", {**BODY, "stream": True}))
        assert first["choices"][0]["text"] == "a"
        assert last["error"]["code"] == "timeout"
        assert server.engine.num_open == 0
        assert aborted(server, "timeout") == 3


async def test_engine_death_ends_every_request_with_an_error() -> None:
    async with serving() as server:
        tasks = await open_requests(server, streams=3, plain=2)
        server.engine.die()
        server.service.engine_died()
        async with asyncio.timeout(240):
            responses = await asyncio.gather(*tasks)
        for response in responses[:3]:
            assert response.status_code == 200
            assert events(response)[-1]["error"]["code"] == "engine_dead"
        assert [response.status_code for response in responses[3:]] == [503, 503]
        assert (await server.http.get("/health")).status_code == 503
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.post("/v1/completions", BODY)).status_code == 503
        assert 'weft_engine_up{engine="0"} 0.0' in (await server.http.get("/metrics")).text


async def test_an_engine_without_progress_is_reported_to_probes_until_it_continues(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with serving() as server:
        heartbeats = Heartbeats(2)
        now = [time.monotonic()]
        watch = Watch(heartbeats, lambda: now[0])
        monkeypatch.setattr(server.service, "_watch", watch)
        monkeypatch.setattr(server.service.metrics, "_watch", watch)
        heartbeat = heartbeats.of(ENGINE)
        heartbeat.stage("loading weights, 1 of 2", 100)
        assert (await server.http.get("/health")).json() == {"status": "ok", "stage": "loading weights, 1 of 2"}
        heartbeat()
        now[0] = heartbeats.of(ENGINE).at + 0.2
        for _ in range(9):
            now[0] += 1
            watch.look()
        health, ready = await server.http.get("/health"), await server.http.get("/ready")
        assert (health.status_code, health.json()["error"]["code"]) == (503, "engine_stalled")
        assert (ready.status_code, ready.json()["error"]["code"]) == (503, "engine_stalled")
        text = (await server.http.get("/metrics")).text
        assert 'weft_engine_up{engine="0"} 0.0' in text
        assert re.search(r'^weft_engine_last_beat_seconds{engine="0"} 9\.', text, re.MULTILINE)
        now[0] = heartbeats.of(ENGINE).at
        assert (await server.http.get("/health")).json() == {"status": "ok"}
        assert (await server.http.get("/ready")).status_code == 200
        assert "rank" not in text
        rank = heartbeats.rank(ENGINE, 1)
        rank.begin("", 0.0, os.getpid())
        now[0] = rank.at + 0.2
        watch.look()
        for _ in range(9):
            now[0] += 1
            watch.look()
        now[0] += 0.2
        heartbeat._cells[0] = now[0]  # rank 0 continues
        health = await server.http.get("/health")
        assert health.json()["error"]["message"] == "The engine's rank 1 has shown no progress for 9 seconds."
        text = (await server.http.get("/metrics")).text
        assert 'weft_engine_ranks{engine="0"} 1' in text  # the stub has no separate process
        assert re.search(r'^weft_rank_last_beat_seconds{engine="0",rank="1"} 9\.', text, re.MULTILINE)
        now[0] = rank.at
        assert 'weft_engine_up{engine="0"} 1.0' in (await server.http.get("/metrics")).text


async def test_draining_accepts_no_new_requests_and_finishes_the_old() -> None:
    async with serving() as server:
        gate = asyncio.Event()
        server.engine.script = Script("abc", gate=gate)
        old = asyncio.create_task(server.post("/v1/completions", {**BODY, "stream": True}))
        await server.settle(lambda: bool(server.engine.added))
        server.service.phase = Phase.DRAINING
        new = await server.post("/v1/completions", BODY)
        assert (new.status_code, new.json()["error"]["code"]) == (503, "draining")
        assert int(new.headers["retry-after"]) <= 120
        assert (await server.http.get("/ready")).status_code == 503
        assert (await server.http.get("/health")).status_code == 200
        gate.set()
        assert events(await old)[-1] == "[DONE]"


@pytest.mark.parametrize("phase", [Phase.DRAINING, Phase.DEAD])
async def test_every_answer_of_a_server_that_exits_closes_its_connection(phase: Phase) -> None:
    # Clients that keep connections would reuse this one, and lose the request that meets the end.
    async with serving() as server:
        server.service.phase = phase
        for method, path in [
            ("GET", "/health"),
            ("GET", "/ready"),
            ("GET", "/metrics"),
            ("GET", "/version"),
            ("GET", "/nothing"),
            ("POST", "/v1/completions"),
            ("OPTIONS", "/v1/completions"),
        ]:
            response = await server.http.request(method, path, json=BODY if method == "POST" else None)
            assert response.headers["connection"] == "close", path
            await server.settle(lambda: server.front.num_connections == 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_running_answer_closes_its_connection_when_draining_starts(stream: bool) -> None:
    async with serving() as server:
        gate = asyncio.Event()
        server.engine.script = Script("abc", gate=gate)
        old = asyncio.create_task(server.post("/v1/completions", {**BODY, "stream": stream}))
        await server.settle(lambda: bool(server.engine.added))
        server.service.phase = Phase.DRAINING
        server.front.close_after_answers()
        gate.set()
        response = await old
        assert response.status_code == 200
        assert response.headers["connection"] == "close"
        await server.settle(lambda: server.front.num_connections == 0)


async def test_interrupted_answers_look_broken() -> None:
    async with serving() as server:
        tasks = await open_requests(server, streams=1, plain=1)
        server.service.interrupt_all(ApiError(503, "The server is shutting down.", code="draining"), "drain")
        streamed, plain = await asyncio.gather(*tasks)
        assert events(streamed)[-1]["error"]["code"] == "draining"
        assert plain.status_code == 503
        assert aborted(server, "drain") == 2
        assert server.engine.num_open == 0


async def test_silent_streams_get_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answer, "HEARTBEAT", 0.05)
    async with serving() as server:
        for n in (1, 2):
            gate = asyncio.Event()
            server.engine.script = Script("abc", gate=gate)
            server.engine.added.clear()
            task = asyncio.create_task(server.post("/v1/completions", {**BODY, "stream": True, "n": n}))
            await server.settle(lambda count=n: len(server.engine.added) == count)
            await asyncio.sleep(0.3)
            gate.set()
            response = await task
            assert response.text.startswith(": ")
            assert events(response)[-1] == "[DONE]"


async def test_full_queue_is_503_with_retry_after() -> None:
    async with serving(max_queued_requests=2, max_num_seqs=1) as server:
        gate = asyncio.Event()
        server.engine.script = Script("abc", gate=gate)
        tasks = [asyncio.create_task(server.post("/v1/completions", BODY)) for _ in range(3)]
        await server.settle(lambda: server.engine.num_open == 3)
        for stream in (False, True):
            response = await server.post("/v1/completions", {**BODY, "stream": stream})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "queue_full"
            assert response.headers["retry-after"] == "1"
        assert (await server.http.get("/ready")).status_code == 503
        gate.set()
        assert [response.status_code for response in await asyncio.gather(*tasks)] == [200] * 3
        assert (await server.http.get("/ready")).status_code == 200
        assert (await server.post("/v1/completions", BODY)).status_code == 200


async def test_waiting_prompt_tokens_are_bounded() -> None:
    async with serving(max_queued_tokens=100) as server:
        gate = asyncio.Event()
        server.engine.script = Script("abc", gate=gate)
        first = asyncio.create_task(server.post("/v1/completions", {"prompt": [1] * 150}))  # an idle engine accepts it
        await server.settle(lambda: server.engine.num_open == 1)
        response = await server.post("/v1/completions", {"prompt": [1] * 10})
        assert (response.status_code, response.json()["error"]["code"]) == (503, "queue_tokens_full")
        gate.set()
        assert (await first).status_code == 200
        assert server.service.loaded.admission.prefill_tokens == 0


async def test_many_requests_at_once_each_get_their_own_answer(server: Server) -> None:
    server.engine.script = Script("hello", vary=True, delay=0.001)

    async def one(i: int) -> str:
        response = await server.post("/v1/completions", {"prompt": f"{i}", "max_tokens": 50, "stream": bool(i % 2)})
        if i % 2:
            return "".join(event["choices"][0]["text"] for event in events(response)[:-1])
        return response.json()["choices"][0]["text"]

    texts = await asyncio.gather(*(one(i) for i in range(64)))
    assert len(set(texts)) == 64
    assert server.engine.num_open == 0
    assert not server.service.open
