"""No API key can keep another one waiting: not by priority, and not by long answers. Progress is counted in answers and
tokens, so that a busy machine changes nothing."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from live import Daemon, running

pytestmark = pytest.mark.slow

SLOTS = 8


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = Path(tmp_path_factory.mktemp("keys")) / "keys"
    file.write_text("greedy\nother\ngranted priority=-5\n")
    return file


@pytest.fixture(scope="module")
def daemon(keys: Path) -> Iterator[Daemon]:
    with running(keys.parent, "--api-key-file", str(keys), "--max-num-seqs", str(SLOTS)) as daemon:
        yield daemon


async def complete(http: httpx.AsyncClient, key: str, max_tokens: int, **fields: int) -> int:
    body = {"prompt": "Once upon a time", "max_tokens": max_tokens, "ignore_eos": True, **fields}
    response = await http.post("/v1/completions", json=body, headers={"x-api-key": key})
    assert response.status_code == 200, response.text
    return int(response.json()["usage"]["completion_tokens"])


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " ")), 0.0)


async def until(http: httpx.AsyncClient, name: str, least: float) -> None:
    async with asyncio.timeout(240):
        while await metric(http, name) < least:
            await asyncio.sleep(0.02)


class Flood:
    """Clients of one key that send one request after the other."""

    def __init__(self) -> None:
        self.answers = 0


@asynccontextmanager
async def flood(
    http: httpx.AsyncClient, key: str, clients: int, max_tokens: int, **fields: int
) -> AsyncIterator[Flood]:
    flood = Flood()

    async def client() -> None:
        while True:
            await complete(http, key, max_tokens, **fields)
            flood.answers += 1

    tasks = [asyncio.create_task(client()) for _ in range(clients)]
    try:
        await until(http, "weft_requests_running", SLOTS)
        await until(http, "weft_requests_waiting", clients - SLOTS)
        yield flood
    finally:
        for task in tasks:
            task.cancel()
        for ended in await asyncio.gather(*tasks, return_exceptions=True):
            assert isinstance(ended, asyncio.CancelledError), ended
        await until_idle(http)


async def until_idle(http: httpx.AsyncClient) -> None:
    async with asyncio.timeout(240):
        while await metric(http, "weft_requests_running") or await metric(http, "weft_requests_waiting"):
            await asyncio.sleep(0.02)


def client(daemon: Daemon) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=daemon.url, timeout=240, limits=httpx.Limits(max_connections=None))


@pytest.mark.parametrize("priority", [0, -1, -1000])
async def test_a_better_priority_keeps_no_other_key_waiting(daemon: Daemon, priority: int) -> None:
    async with client(daemon) as http, flood(http, "greedy", 32, 60, priority=priority) as others:
        before = others.answers
        answers = [asyncio.create_task(complete(http, "other", 5)) for _ in range(8)]
        while not all(answer.done() for answer in answers):
            assert others.answers - before < 6 * SLOTS, "the other key waits for too many answers"
            await asyncio.sleep(0.01)
        assert [answer.result() for answer in answers] == [5] * 8


async def test_long_answers_of_one_key_keep_not_every_slot(daemon: Daemon) -> None:
    async with client(daemon) as http, flood(http, "greedy", 2 * SLOTS, 1800) as long:
        yielded = await metric(http, "weft_yielded_total")
        assert await asyncio.gather(*[complete(http, "other", 5) for _ in range(4)]) == [5] * 4
        assert long.answers == 0, "it waits until an answer ends"
        await until(http, "weft_yielded_total", yielded + 1)
        assert await complete(http, "other", 5, priority=9) == 5
        assert long.answers == 0


async def test_a_key_with_a_better_priority_outranks_others(daemon: Daemon) -> None:
    async with client(daemon) as http, flood(http, "greedy", 2 * SLOTS, 1800) as long:
        displaced = await metric(http, "weft_displaced_total")
        assert await complete(http, "granted", 5, priority=-5) == 5
        assert long.answers == 0
        await until(http, "weft_displaced_total", displaced + 1)


async def test_the_time_that_each_key_waits_is_in_the_metrics(daemon: Daemon) -> None:
    async with client(daemon) as http:
        name = 'weft_key_queue_time_seconds_count{key="1"}'
        before = await metric(http, name)
        async with flood(http, "greedy", 2 * SLOTS, 60):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0):
                    await complete(http, "other", 5)
            await complete(http, "other", 5)
        await until(http, name, before + 1)
        assert "other" not in (await http.get("/metrics")).text.partition("weft_key_queue")[2].partition("# ")[0]


async def test_the_best_priorities_are_read_again(daemon: Daemon, keys: Path) -> None:
    keys.write_text("greedy\nother priority=-5\ngranted\n")
    daemon.process.send_signal(signal.SIGHUP)
    await asyncio.to_thread(daemon.wait_for_log, "SIGHUP: reloaded 3 API keys")
    async with client(daemon) as http, flood(http, "greedy", 2 * SLOTS, 1800):
        displaced = await metric(http, "weft_displaced_total")
        async with asyncio.timeout(240):  # the API process reads its message after the log
            while await metric(http, "weft_displaced_total") == displaced:
                assert await complete(http, "other", 5, priority=-5) == 5
