"""The fairness metrics over HTTP: preempted slots, and requests that overtook another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from live import Daemon, running

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(Path(tmp_path_factory.mktemp("fair")), "--max-num-seqs", "1") as daemon:
        yield daemon


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


async def until(http: httpx.AsyncClient, name: str, value: float) -> None:
    async with asyncio.timeout(240):
        while await metric(http, name) < value:
            await asyncio.sleep(0.05)


@asynccontextmanager
async def with_slot_taken(
    daemon: Daemon, http: httpx.AsyncClient, priority: int = 0
) -> AsyncIterator[asyncio.Task[int]]:
    """A request holds the slot and continues after this context, in which the engine is stopped."""
    while True:
        request = asyncio.create_task(complete(http, "one", 250, priority))
        await until(http, "weft_requests_running", 1)
        with daemon.held():
            if await open_sequences(http) == 1:
                yield request
                return
        await request  # this process is so late that it has ended


async def open_sequences(http: httpx.AsyncClient) -> int:
    return int((await http.get("/load")).json()["server_load"])


async def until_open(http: httpx.AsyncClient, count: int) -> None:
    async with asyncio.timeout(240):
        while await open_sequences(http) != count:
            await asyncio.sleep(0.05)


async def complete(http: httpx.AsyncClient, prompt: str, max_tokens: int, priority: int = 0) -> int:
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "priority": priority}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["completion_tokens"])


async def test_a_preemption_by_a_higher_priority_is_counted(daemon: Daemon) -> None:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:
        before = await metric(http, "weft_displaced_total")
        async with with_slot_taken(daemon, http, priority=1) as worse:
            better = asyncio.create_task(complete(http, "two", 2))
            await until_open(http, 2)
        assert await better == 2
        await until(http, "weft_displaced_total", before + 1)
        assert await worse == 250


async def test_short_prompts_that_overtake_the_head_are_counted(daemon: Daemon) -> None:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:
        before = await metric(http, "weft_overtaken_total")
        async with with_slot_taken(daemon, http) as request:
            long = [asyncio.create_task(complete(http, f"{k} " * 50, 2)) for k in range(8)]
            await until_open(http, 9)
            short = [asyncio.create_task(complete(http, str(k), 2)) for k in range(4)]
            await until_open(http, 13)
        assert await asyncio.gather(request, *long, *short) == [250] + [2] * 12
        await until(http, "weft_overtaken_total", before + 1)
