"""Several API processes on one port, in front of one engine, act as one daemon, even if one dies."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_port import free_port
from live import LOGS_MODELS, Daemon, command_line, patched, running, stop, stopped

from weft.engine.demo import MODEL_PATH
from weft.server.daemon.control import Channel, Drain, Idle

pytestmark = pytest.mark.slow

LONG = {"prompt": "What is 12 + 30?", "max_tokens": 200, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "What is 12 + 30?", "max_tokens": 3}
EACH_ITS_OWN = httpx.Limits(max_keepalive_connections=0)
KEPT = httpx.Limits(keepalive_expiry=None)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    options = ("--api-workers", "2", "--api-hang-timeout", "0")  # tests stop processes for as long as they need
    with running(tmp_path_factory.mktemp("workers"), *options) as daemon:
        yield daemon


def client(daemon: Daemon, limits: httpx.Limits = EACH_ITS_OWN) -> httpx.AsyncClient:
    """A client that opens a connection for every request, so that the kernel distributes them."""
    return httpx.AsyncClient(base_url=daemon.url, timeout=240, limits=limits)


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))


async def until(http: httpx.AsyncClient, name: str, value: float, timeout: float = 240) -> None:
    end = time.monotonic() + timeout
    while (now := await metric(http, name)) != value:
        assert time.monotonic() < end, f"{name} is {now}, not {value}"
        await asyncio.sleep(0.05)


async def stream(http: httpx.AsyncClient, begun: asyncio.Future[int] | None = None, **extra: Any) -> list[Any]:
    """The events of a stream; the exception in place of the rest when the connection breaks. `begun`: gets the client's
    port with the first event."""
    events: list[Any] = []
    try:
        async with http.stream("POST", "/v1/completions", json={**LONG, **extra}) as response:
            if response.status_code != 200:
                await response.aread()
                return [response.json()]
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                    if begun is not None and not begun.done():
                        begun.set_result(response.extensions["network_stream"].get_extra_info("client_addr")[1])
    except httpx.HTTPError as error:
        events.append(error)
    return events


async def begin(http: httpx.AsyncClient, count: int, **extra: Any) -> dict[int, asyncio.Task[list[Any]]]:
    """Streams that have all started, by their clients' ports."""
    begun = [asyncio.get_running_loop().create_future() for _ in range(count)]
    tasks = [asyncio.create_task(stream(http, future, **extra)) for future in begun]
    async with asyncio.timeout(240):
        return dict(zip(await asyncio.gather(*begun), tasks, strict=True))


@contextlib.asynccontextmanager
async def underway(
    daemon: Daemon, http: httpx.AsyncClient, count: int, asking: httpx.AsyncClient | None = None, **extra: Any
) -> AsyncIterator[dict[int, asyncio.Task[list[Any]]]]:
    """The same, and none can end within this context, because the engine is stopped. `asking`: the client whose
    connection counts them."""
    while True:
        tasks = await begin(http, count, **extra)
        with daemon.held():
            if await open_sequences(asking or http) == count:
                yield tasks
                return
        await asyncio.gather(*tasks.values())  # this process is so late that some have ended


async def open_sequences(http: httpx.AsyncClient) -> int:
    """Open sequences in all API processes."""
    return int((await http.get("/load")).json()["server_load"])


async def plain(http: httpx.AsyncClient, **extra: Any) -> httpx.Response | httpx.HTTPError:
    try:
        return await http.post("/v1/completions", json={**LONG, "stream": False, **extra})
    except httpx.HTTPError as error:
        return error


def ports_of(pid: int) -> set[int]:
    """Ports of the clients that are connected to a process."""
    sockets = set()
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            sockets.add(os.readlink(link))
    lines = [line.split() for line in Path(f"/proc/{pid}/net/tcp").read_text().splitlines()[1:]]
    return {int(fields[2].rpartition(":")[2], 16) for fields in lines if f"socket:[{fields[9]}]" in sockets}


async def test_metrics_cover_the_whole_daemon_from_any_process(daemon: Daemon) -> None:
    name = 'weft_requests_total{endpoint="/v1/completions",status="200"}'
    async with client(daemon) as http:
        before = await metric(http, name)
        responses = await asyncio.gather(*(http.post("/v1/completions", json=SHORT) for _ in range(40)))
        assert [response.status_code for response in responses] == [200] * 40
        assert len({response.headers["x-request-id"] for response in responses}) == 40
        assert len({response.json()["choices"][0]["text"] for response in responses}) == 1
        await until(http, name, before + 40)  # it is counted after its last byte
        counts = {await metric(http, name) for _ in range(12)}
        assert counts == {before + 40}
        assert await metric(http, "weft_time_to_first_token_seconds_count") >= 40


async def test_both_processes_serve(daemon: Daemon) -> None:
    pids = daemon.children("weft.server.daemon.worker")
    assert len(pids) == 2
    used = [Path(f"/proc/{pid}/stat").read_text().split()[13:15] for pid in pids]
    async with client(daemon) as http:
        for _ in range(4):
            await asyncio.gather(*(http.get("/v1/models") for _ in range(100)))
    again = [Path(f"/proc/{pid}/stat").read_text().split()[13:15] for pid in pids]
    assert all(before != after for before, after in zip(used, again, strict=True))


async def test_killing_an_api_process_ends_its_streams_only(daemon: Daemon) -> None:
    # A request is counted after its last byte. So the process that dies must not have answered the last request.
    async with client(daemon) as http, client(daemon, KEPT) as other:
        restarts = await metric(http, "weft_api_process_restarts_total")
        done = 'weft_requests_total{endpoint="/v1/completions",status="200"}'
        crashed = 'weft_aborted_total{cause="crash"}'
        names = (done, crashed, "weft_requests_lost_total")
        before = [await metric(http, name) for name in names]
        async with other.stream("GET", "/load") as response:
            port = response.extensions["network_stream"].get_extra_info("client_addr")[1]
            victim = next(pid for pid in daemon.children("weft.server.daemon.worker") if port not in ports_of(pid))
            await response.aread()
        async with underway(daemon, http, 24, other) as tasks:
            os.kill(victim, signal.SIGKILL)
            await holds(lambda: not command_line(victim))
        async with asyncio.timeout(240):
            results = await asyncio.gather(*tasks.values())
        lost = [events for events in results if isinstance(events[-1], httpx.HTTPError)]
        finished = [events for events in results if events[-1] == "[DONE]"]
        assert len(lost) + len(finished) == 24
        assert lost
        assert finished
        await until_recovered(daemon, http, restarts + 1)
        # Counts of the process before it died remain. Requests open in it then are counted by the daemon: the metrics
        # agree with its clients' ledger.
        for name, figure, more in zip(names, before, (finished, lost, lost), strict=True):
            await until(http, name, figure + len(more))
        responses = await asyncio.gather(*(http.post("/v1/completions", json=SHORT) for _ in range(20)))
        assert {response.status_code for response in responses} == {200}  # the new one accepts none before it serves
    daemon.wait_for_log("SIGKILL")


async def until_recovered(daemon: Daemon, http: httpx.AsyncClient, restarts: float) -> None:
    """The engine has dropped abandoned requests, and there are two processes again."""
    await until(http, "weft_requests_running", 0)
    await until(http, "weft_kv_cache_usage_ratio", 0)
    await until(http, "weft_api_process_restarts_total", restarts)
    await holds(lambda: len(daemon.children("weft.server.daemon.worker")) == 2)


async def holds(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.05)


async def test_a_process_that_stops_reading_and_dies_blocks_no_other(daemon: Daemon) -> None:
    async with client(daemon) as http:
        restarts = await metric(http, "weft_api_process_restarts_total")
        stopped = daemon.children("weft.server.daemon.worker")[0]
        async with underway(daemon, http, 16) as tasks:
            stop(stopped)
            held = ports_of(stopped) & set(tasks)
        assert 0 < len(held) < 16
        async with asyncio.timeout(240):  # the engine continues for the others, while its messages to this one pile up
            others = await asyncio.gather(*(task for port, task in tasks.items() if port not in held))
        assert [events[-1] for events in others] == ["[DONE]"] * len(others)
        assert not any(tasks[port].done() for port in held)
        os.kill(stopped, signal.SIGKILL)
        async with asyncio.timeout(240):
            lost = await asyncio.gather(*(tasks[port] for port in held))
        assert all(isinstance(events[-1], httpx.HTTPError) for events in lost)
        await until_recovered(daemon, http, restarts + 1)
        # No connection waits forever at the listener of the dead process: its successor takes over.
        replies = await asyncio.gather(*(plain(http, **SHORT) for _ in range(20)))
        assert all(isinstance(reply, httpx.Response) and reply.status_code == 200 for reply in replies)


async def test_an_exit_with_unread_messages_is_an_exit() -> None:
    ours, theirs = socket.socketpair()
    channel = await Channel.of_daemon(ours)
    channel.send(Drain())
    theirs.send(b'{"type":"idle"}\n')
    async with asyncio.timeout(240):
        received = [await anext(channel.messages())]
        theirs.close()  # `Drain` was never read
        received += [message async for message in channel.messages()]
    assert received == [Idle()]
    channel.send(Drain())  # to no process
    channel.close()


async def test_queue_bounds_hold_over_all_processes(tmp_path: Path) -> None:
    options = ("--api-workers", "2", "--max-num-seqs", "2", "--max-queued-requests", "3")
    with running(tmp_path, *options) as daemon:
        async with client(daemon) as http:
            with daemon.held():  # or the first has its answer before the last is sent
                tasks = [asyncio.create_task(stream(http, max_tokens=20)) for _ in range(20)]
                await until(http, 'weft_rejected_total{reason="queue_full"}', 15)
            results = await asyncio.gather(*tasks)
            refused = [events for events in results if "error" in events[-1]]
            assert len(results) - len(refused) == 5  # two run, three wait
            assert {events[-1]["error"]["code"] for events in refused} == {"queue_full"}
            assert (await stream(http, max_tokens=5))[-1] == "[DONE]"


@contextlib.asynccontextmanager
async def under_load(
    daemon: Daemon, http: httpx.AsyncClient, slots: int
) -> AsyncIterator[tuple[list[asyncio.Task[Any]], list[asyncio.Task[Any]]]]:
    """Streams and plain requests; some of each are running and some wait. None can end within this context."""
    half = range(slots // 2)
    async with underway(daemon, http, slots) as begun:
        streams = [*begun.values(), *(asyncio.create_task(stream(http)) for _ in half)]
        plains = [asyncio.create_task(plain(http)) for _ in half]
        async with asyncio.timeout(240):
            while await open_sequences(http) < 2 * slots:
                await asyncio.sleep(0.05)
        yield streams, plains


async def test_engine_death_reaches_the_clients_of_every_process(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2", "--max-num-seqs", "8", "--no-restart-engine") as daemon:
        async with client(daemon) as http:
            async with under_load(daemon, http, 8) as (streams, plains):
                os.kill(daemon.engine_pid, signal.SIGKILL)
            async with asyncio.timeout(240):
                results = await asyncio.gather(*streams)
                replies = await asyncio.gather(*plains)
            assert [events[-1]["error"]["code"] for events in results] == ["engine_dead"] * 12
            assert [(reply.status_code, reply.json()["error"]["code"]) for reply in replies] == [
                (503, "engine_dead")
            ] * 4
        assert await asyncio.to_thread(daemon.process.wait, 240) == 1
        assert "Traceback" not in daemon.stderr()


@pytest.mark.nightly
async def test_an_engine_can_be_started_again(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_PATH, model)
    with running(tmp_path, "--api-workers", "2", str(model)) as daemon:
        async with client(daemon) as http:
            totals = (
                "weft_generation_tokens_total",
                "weft_prompt_tokens_total",
                'weft_iterations_total{plan="serial"}',
            )
            async with underway(daemon, http, 8) as tasks:
                figures = {name: await metric(http, name) for name in totals}
                (model / "config.json").rename(tmp_path / "away")  # no other engine is ready before it returns
                os.kill(daemon.engine_pid, signal.SIGKILL)
            results = await asyncio.gather(*tasks.values())
            assert [events[-1]["error"]["code"] for events in results] == ["engine_dead"] * 8
            refused = await http.post("/v1/completions", json=SHORT)
            assert (refused.status_code, refused.json()["error"]["code"]) == (503, "loading")
            assert (await http.get("/health")).status_code == 200
            (tmp_path / "away").rename(model / "config.json")
            async with asyncio.timeout(240):
                while (await http.get("/ready")).status_code != 200:
                    await asyncio.sleep(0.01)
            ends = [events[-1] for events in await asyncio.gather(*(stream(http, max_tokens=5) for _ in range(8)))]
            assert ends == ["[DONE]"] * 8, "ready in one process, loading in another"
            assert await metric(http, "weft_engine_restarts_total") >= 1
            for name, figure in figures.items():  # counters continue, and another process gives the same
                assert await metric(http, name) >= figure > 0
        daemon.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.process.wait, 240) == 0


async def of_the_other_process(daemon: Daemon, ask: Callable[[httpx.AsyncClient], Awaitable[bool]]) -> None:
    """Ask on new connections until one answer is True. Those to the process that was stopped wait."""

    async def once() -> bool:
        async with httpx.AsyncClient(base_url=daemon.url, timeout=240, limits=EACH_ITS_OWN) as http:
            with contextlib.suppress(httpx.TransportError):
                return await ask(http)
        return False

    asking: set[asyncio.Task[bool]] = set()
    try:
        async with asyncio.timeout(240):
            found = False
            while not found:
                asking.add(asyncio.create_task(once()))
                done, asking = await asyncio.wait(asking, timeout=0.5, return_when=asyncio.FIRST_COMPLETED)
                found = any(task.result() for task in done)
                await asyncio.sleep(0.05)
    finally:
        for task in asking:
            task.cancel()
        await asyncio.gather(*asking, return_exceptions=True)


async def test_no_process_reports_ready_while_another_one_is_not(tmp_path: Path) -> None:
    """The kernel sends a new connection to any of them."""
    port = free_port()
    daemon = Daemon(tmp_path / "log", "--port", str(port), "--device", "cpu", "--api-workers", "2")
    daemon.url = f"http://127.0.0.1:{port}"
    worker = "weft.server.daemon.worker"
    try:
        while len(workers := await asyncio.to_thread(daemon.children, worker)) < 2:
            assert daemon.process.poll() is None
            await asyncio.sleep(0.005)
        stop(late := workers[1])

        async def served(http: httpx.AsyncClient) -> bool:
            return (await http.post("/v1/completions", json=SHORT)).status_code == 200

        async def loading(http: httpx.AsyncClient) -> bool:
            assert (await http.get("/ready")).json()["error"]["code"] == "loading"
            return True

        await of_the_other_process(daemon, served)
        for _ in range(3):
            await of_the_other_process(daemon, loading)
        os.kill(late, signal.SIGCONT)
        async with client(daemon) as http, asyncio.timeout(240):
            while (await http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
            answers = await asyncio.gather(*(http.post("/v1/completions", json=SHORT) for _ in range(8)))
        assert [answer.status_code for answer in answers] == [200] * 8
    finally:
        daemon.end()


async def test_no_process_reports_ready_while_another_one_lacks_a_model(tmp_path: Path) -> None:
    port = free_port()
    models = ("--model", "demo served_model_name=a", "--model", "demo served_model_name=b")
    options = ("--device", "cpu", "--cpu-threads", "1", "--api-workers", "2", "--port", str(port), *models)
    daemon = Daemon(tmp_path / "log", *options)
    daemon.url = f"http://127.0.0.1:{port}"

    async def served(model: str, http: httpx.AsyncClient) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return (await http.post("/v1/completions", json={**SHORT, "model": model})).status_code == 200
        return False

    async def loading(http: httpx.AsyncClient) -> bool:
        assert (await http.get("/ready")).json()["error"]["code"] == "loading"
        return True

    try:
        while len(workers := daemon.children("weft.server.daemon.worker")) < 2:
            assert daemon.process.poll() is None
            await asyncio.sleep(0.005)
        while len(engines := daemon.children("weft.engine.process")) < 2:
            assert daemon.process.poll() is None
            await asyncio.sleep(0.005)
        stop(engines[1])
        in_a_row = 0
        while in_a_row < 16:  # from both processes
            async with httpx.AsyncClient(base_url=daemon.url, timeout=240, limits=EACH_ITS_OWN) as http:
                in_a_row = in_a_row + 1 if await served("a", http) else 0
            await asyncio.sleep(0.02)
        stop(late := workers[1])
        os.kill(engines[1], signal.SIGCONT)
        await of_the_other_process(daemon, partial(served, "b"))
        for _ in range(3):
            await of_the_other_process(daemon, loading)
        os.kill(late, signal.SIGCONT)
        async with client(daemon) as http, asyncio.timeout(240):
            while (await http.get("/ready")).status_code != 200:
                await asyncio.sleep(0.01)
            bodies = [{**SHORT, "model": model} for model in "ab" * 4]
            requested = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        assert [answer.status_code for answer in requested] == [200] * 8
    finally:
        daemon.end()


async def test_a_successor_process_serves_all_its_models_before_it_accepts_connections(tmp_path: Path) -> None:
    models = ("--model", "demo served_model_name=a", "--model", "demo served_model_name=b")
    site = patched(tmp_path / "site", LOGS_MODELS, of="weft.server.daemon.worker")
    body = {**SHORT, "model": "b"}
    with running(tmp_path, "--device", "cpu", "--cpu-threads", "1", *models, env=site) as daemon:
        (worker,) = daemon.children("weft.server.daemon.worker")
        engines = daemon.children("weft.engine.process")
        async with client(daemon) as http:
            with stopped(engines[1]):  # its answer to a new connection takes a while
                os.kill(worker, signal.SIGKILL)
                await asyncio.to_thread(daemon.wait_for_log, "serves a", 2)
                with pytest.raises(httpx.ReadTimeout):
                    await http.post("/v1/completions", json=body, timeout=0.5)
            assert (await http.post("/v1/completions", json=body)).status_code == 200


async def test_sigterm_under_load_loses_nothing(tmp_path: Path) -> None:
    options = ("--api-workers", "2", "--max-num-seqs", "8", "--drain-timeout", "240")
    with running(tmp_path, *options) as daemon:
        async with client(daemon) as http:
            async with under_load(daemon, http, 8) as (streams, plains):
                daemon.process.send_signal(signal.SIGTERM)
                async with asyncio.timeout(240):
                    while any([(await http.get("/ready")).status_code == 200 for _ in range(12)]):
                        pass  # either process may not have been notified yet
                reply = await http.post("/v1/completions", json=SHORT)
                assert (reply.status_code, reply.json()["error"]["code"]) == (503, "draining")
                assert 0 < int(reply.headers["retry-after"]) <= 120
            assert [events[-1] for events in await asyncio.gather(*streams)] == ["[DONE]"] * 12
            assert [reply.status_code for reply in await asyncio.gather(*plains)] == [200] * 4
        assert await asyncio.to_thread(daemon.process.wait, 240) == 0
        assert "Traceback" not in daemon.stderr()


def test_no_process_outlives_the_daemon(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2") as daemon:
        pids = [daemon.engine_pid, *daemon.children("weft.server.daemon.worker")]
        daemon.process.kill()
        deadline = time.monotonic() + 240
        while any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes() for pid in pids):
            assert time.monotonic() < deadline
            time.sleep(0.05)
