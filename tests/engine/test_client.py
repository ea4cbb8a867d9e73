"""The engine process and its client: streams, aborts, refusals, death."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from weft.engine.client import EngineClient, TokenStream
from weft.engine.config import EngineConfig
from weft.engine.errors import EngineDead, WeftError
from weft.engine.messages import Finish
from weft.engine.sampling import SamplingParams

LONG = SamplingParams(max_tokens=200, ignore_eos=True, temperature=0.0)


async def _drain(stream: TokenStream) -> tuple[list[int], Finish, str | None]:
    tokens: list[int] = []
    while True:
        delta = await stream.read()
        tokens += delta.token_ids
        if delta.finish:
            return tokens, delta.finish, delta.error


@pytest_asyncio.fixture
async def client(tiny_model: Callable[[str], Path]) -> AsyncIterator[EngineClient]:
    client = await EngineClient.start(EngineConfig(model=str(tiny_model("yi")), page_size=8, num_pages=200))
    await client.wait_ready()
    yield client
    await client.stop()


async def test_streams_bring_what_the_engine_computes(client: EngineClient) -> None:
    streams = [client.submit([5, 6, 7 + i], LONG) for i in range(20)]
    results = await asyncio.gather(*map(_drain, streams))
    assert all(len(tokens) == 200 and finish is Finish.LENGTH for tokens, finish, _ in results)
    again, _, _ = await _drain(client.submit(np.array([5, 6, 7]), LONG))
    assert again == results[0][0]
    assert client.num_open == 0


async def test_a_refused_request_gets_its_reason(client: EngineClient) -> None:
    tokens, finish, error = await _drain(client.submit([], LONG))
    assert (tokens, finish, error) == ([], Finish.ERROR, "the prompt is empty")


async def test_an_aborted_request_frees_its_pages(client: EngineClient) -> None:
    stream = client.submit([5], LONG)
    await stream.read()
    stream.abort()
    stream.abort()
    for _ in range(100):
        await _drain(client.submit([9], SamplingParams(max_tokens=1)))
        if client.stats.pages_held == 0 and client.stats.running == 0:
            return
    pytest.fail("the aborted request still holds pages")


async def test_killing_the_engine_ends_every_stream_within_two_seconds() -> None:
    client = await EngineClient.start(EngineConfig())
    endless = SamplingParams(max_tokens=2000, ignore_eos=True)
    streams = [client.submit([5 + i], endless) for i in range(20)]
    await asyncio.gather(*(s.read() for s in streams))
    begin = time.monotonic()
    os.kill(client.pid, signal.SIGKILL)
    results = await asyncio.gather(*map(_drain, streams), return_exceptions=True)
    assert time.monotonic() - begin < 2
    assert all(isinstance(r, EngineDead) for r in results)
    assert not client.alive
    assert "SIGKILL" in await client.wait_dead()
    with pytest.raises(EngineDead):
        client.submit([5], LONG)
    await client.stop()


async def test_an_engine_that_cannot_start_says_why() -> None:
    client = await EngineClient.start(EngineConfig(model="/nowhere"))
    with pytest.raises(WeftError, match="no model directory"):
        await client.wait_ready()
    await client.stop()


async def test_the_engine_ends_when_the_daemon_closes_its_stdin(client: EngineClient) -> None:
    pid = client.pid
    await client.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
