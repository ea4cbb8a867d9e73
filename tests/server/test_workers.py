"""Several API processes on one port, in front of one engine: as one daemon, whatever dies."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Daemon, running

LONG = {"prompt": "What is 12 + 30?", "max_tokens": 400, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "What is 12 + 30?", "max_tokens": 3}
EACH_ITS_OWN = httpx.Limits(max_keepalive_connections=0)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("workers"), "--api-workers", "2") as daemon:
        yield daemon


def client(daemon: Daemon) -> httpx.AsyncClient:
    """Every request on a connection of its own, so that the kernel shares them out."""
    return httpx.AsyncClient(base_url=daemon.url, timeout=60, limits=EACH_ITS_OWN)


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next((float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " ")), 0.0)


async def until(http: httpx.AsyncClient, name: str, value: float, timeout: float = 10.0) -> None:
    async with asyncio.timeout(timeout):
        while await metric(http, name) != value:
            await asyncio.sleep(0.05)


async def stream(http: httpx.AsyncClient, begun: asyncio.Event | None = None, **extra: Any) -> list[Any]:
    """The events of a stream; the exception in place of the rest when the connection breaks."""
    events: list[Any] = []
    try:
        async with http.stream("POST", "/v1/completions", json={**LONG, **extra}) as response:
            if response.status_code != 200:
                await response.aread()
                return [response.json()]
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                    if begun is not None:
                        begun.set()
    except httpx.HTTPError as error:
        events.append(error)
    return events


async def begin(http: httpx.AsyncClient, count: int, **extra: Any) -> list[asyncio.Task[list[Any]]]:
    """Streams that have all begun."""
    begun = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(stream(http, event, **extra)) for event in begun]
    async with asyncio.timeout(60):
        await asyncio.gather(*(event.wait() for event in begun))
    return tasks


async def test_metrics_are_those_of_the_whole_daemon_whoever_answers(daemon: Daemon) -> None:
    name = 'weft_requests_total{endpoint="/v1/completions",status="200"}'
    async with client(daemon) as http:
        before = await metric(http, name)
        responses = await asyncio.gather(*(http.post("/v1/completions", json=SHORT) for _ in range(40)))
        assert [response.status_code for response in responses] == [200] * 40
        assert len({response.headers["x-request-id"] for response in responses}) == 40
        assert len({response.json()["choices"][0]["text"] for response in responses}) == 1
        counts = {await metric(http, name) for _ in range(12)}
        assert counts == {before + 40}
        assert await metric(http, "weft_time_to_first_token_seconds_count") >= 40


async def test_both_processes_serve(daemon: Daemon) -> None:
    pids = daemon.children("weft.server.worker")
    assert len(pids) == 2
    used = [Path(f"/proc/{pid}/stat").read_text().split()[13:15] for pid in pids]
    async with client(daemon) as http:
        for _ in range(4):
            await asyncio.gather(*(http.get("/v1/models") for _ in range(100)))
    again = [Path(f"/proc/{pid}/stat").read_text().split()[13:15] for pid in pids]
    assert all(before != after for before, after in zip(used, again, strict=True))


async def test_killing_an_api_process_ends_its_streams_only(daemon: Daemon) -> None:
    async with client(daemon) as http:
        restarts = await metric(http, "weft_api_process_restarts_total")
        done = 'weft_requests_total{endpoint="/v1/completions",status="200"}'
        before = await metric(http, done)
        tasks = await begin(http, 24)
        os.kill(daemon.children("weft.server.worker")[0], signal.SIGKILL)
        async with asyncio.timeout(60):
            results = await asyncio.gather(*tasks)
        lost = [events for events in results if isinstance(events[-1], httpx.HTTPError)]
        finished = [events for events in results if events[-1] == "[DONE]"]
        assert len(lost) + len(finished) == 24
        assert lost
        assert finished
        await until(http, "weft_requests_running", 0)  # the engine has dropped what nobody waits for
        await until(http, "weft_kv_cache_usage_ratio", 0)
        assert await metric(http, "weft_api_process_restarts_total") == restarts + 1
        # What the process counted before it died is still counted.
        assert await metric(http, done) == before + len(finished)
        async with asyncio.timeout(60):
            while len(daemon.children("weft.server.worker")) < 2:
                await asyncio.sleep(0.05)
        responses = await asyncio.gather(*(http.post("/v1/completions", json=SHORT) for _ in range(20)))
        assert {response.status_code for response in responses} <= {200, 503}  # 503: the new one is still loading
    assert "SIGKILL" in daemon.stderr()


async def test_queue_bounds_hold_over_all_processes(tmp_path: Path) -> None:
    options = ("--api-workers", "2", "--max-num-seqs", "2", "--max-queued-requests", "3")
    with running(tmp_path, *options) as daemon:
        async with client(daemon) as http:
            results = await asyncio.gather(*(stream(http) for _ in range(20)))
            refused = [events for events in results if "error" in events[-1]]
            assert len(results) - len(refused) == 5  # two run, three wait
            assert {events[-1]["error"]["code"] for events in refused} == {"queue_full"}
            await until(http, 'weft_rejected_total{reason="queue_full"}', 15)
            assert (await stream(http, max_tokens=5))[-1] == "[DONE]"


async def test_engine_death_reaches_the_clients_of_every_process(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2") as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 20)
            os.kill(daemon.engine_pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                results = await asyncio.gather(*tasks)
            assert [events[-1]["error"]["code"] for events in results] == ["engine_dead"] * 20
        assert await asyncio.to_thread(daemon.process.wait, 10) == 1
        assert "Traceback" not in daemon.stderr()


async def test_an_engine_can_be_started_again(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2", "--restart-engine") as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 8)
            os.kill(daemon.engine_pid, signal.SIGKILL)
            results = await asyncio.gather(*tasks)
            assert [events[-1]["error"]["code"] for events in results] == ["engine_dead"] * 8
            refused = await http.post("/v1/completions", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
            assert (await http.get("/health")).status_code == 200
            async with asyncio.timeout(60):
                while (await http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.1)
            await asyncio.sleep(0.5)
            assert (await stream(http, max_tokens=5))[-1] == "[DONE]"
            assert await metric(http, "weft_engine_restarts_total") == 1
        daemon.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.process.wait, 10) == 0


async def test_sigterm_under_load_loses_nothing(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2", "--drain-timeout", "120") as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 12)
            daemon.process.send_signal(signal.SIGTERM)
            results = await asyncio.gather(*tasks)
            assert [events[-1] for events in results] == ["[DONE]"] * 12
        assert await asyncio.to_thread(daemon.process.wait, 10) == 0
        assert "Traceback" not in daemon.stderr()


def test_no_process_outlives_the_daemon(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2") as daemon:
        pids = [daemon.engine_pid, *daemon.children("weft.server.worker")]
        daemon.process.kill()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
