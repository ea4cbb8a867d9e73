"""Hung and dead processes of a running daemon are detected, reported, replaced, or given up: real processes, real
signals."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Daemon, command_line, patched, running, stopped

from weft.engine.demo import MODEL_PATH
from weft.server.daemon.api_processes import SHORT_LIFE

pytestmark = pytest.mark.slow

LONG = {"prompt": "What is 12 + 30?", "max_tokens": 1900, "ignore_eos": True, "stream": True}
"""long enough that a process fails before the stream's end, on a slow machine too"""
SHORT = {"prompt": "What is 12 + 30?", "max_tokens": 3}
EACH_ITS_OWN = httpx.Limits(max_connections=None, max_keepalive_connections=0)
WORKER, ENGINE = "weft.server.daemon.worker", "weft.engine.process"
WATCHED = ("--hang-timeout", "6", "--api-hang-timeout", "6")


@contextlib.asynccontextmanager
async def client(daemon: Daemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240, limits=EACH_ITS_OWN) as http:
        yield http


async def until(condition: Callable[[], Any], seconds: float = 240) -> Any:
    async with asyncio.timeout(seconds):
        while not (value := condition()):
            await asyncio.sleep(0.05)
        return value


async def status(http: httpx.AsyncClient, path: str) -> int:
    """The status; 0 for none."""
    response = await _get(http, path)
    return 0 if response is None else response.status_code


async def _get(http: httpx.AsyncClient, path: str) -> httpx.Response | None:
    with contextlib.suppress(httpx.HTTPError):  # it may have gone to a process that has been stopped
        return await http.get(path, timeout=60)
    return None


async def until_status(http: httpx.AsyncClient, path: str, wanted: int, seconds: float = 240) -> httpx.Response:
    async with asyncio.timeout(seconds):
        while (response := await _get(http, path)) is None or response.status_code != wanted:
            await asyncio.sleep(0.1)
        return response


async def metric(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((name + " ", name + "{")))


async def until_metric(http: httpx.AsyncClient, name: str, least: float) -> None:
    async with asyncio.timeout(240):
        while await metric(http, name) < least:
            await asyncio.sleep(0.1)


async def until_served(http: httpx.AsyncClient) -> None:
    """Wait for both processes: one may be notified of a new engine after the other."""
    async with asyncio.timeout(240):
        while (await http.post("/v1/completions", json=SHORT)).status_code != 200:
            await asyncio.sleep(0.1)


async def stream(http: httpx.AsyncClient, begun: asyncio.Event, **extra: Any) -> Any:
    """The last event, the error before the first one, or the exception that ended it."""
    last: Any = None
    try:
        async with http.stream("POST", "/v1/completions", json={**LONG, **extra}) as response:
            if response.status_code != 200:
                return json.loads(await response.aread())
            async for line in response.aiter_lines():
                if line.startswith("data: "):
                    last = line[6:] if line == "data: [DONE]" else json.loads(line[6:])
                    begun.set()
    except httpx.HTTPError as error:
        return error
    return last


async def begin(http: httpx.AsyncClient, count: int, **extra: Any) -> list[asyncio.Task[Any]]:
    events = [asyncio.Event() for _ in range(count)]
    tasks = [asyncio.create_task(stream(http, event, **extra)) for event in events]
    async with asyncio.timeout(240):
        await asyncio.gather(*(event.wait() for event in events))
    return tasks


async def codes(tasks: list[asyncio.Task[Any]], seconds: float = 240) -> set[Any]:
    """The error codes that streams end with; other ends unchanged."""
    async with asyncio.timeout(seconds):
        ends = await asyncio.gather(*tasks)
    return {end["error"]["code"] if isinstance(end, dict) and "error" in end else str(end) for end in ends}


async def ended(daemon: Daemon, seconds: float = 240) -> int:
    try:
        return await asyncio.to_thread(daemon.process.wait, seconds)
    except subprocess.TimeoutExpired:
        daemon.process.send_signal(signal.SIGQUIT)
        await asyncio.sleep(2)
        raise AssertionError(f"it did not end:\n{daemon.stderr()}") from None


def everyone(daemon: Daemon) -> list[int]:
    return [daemon.process.pid, *daemon.children(ENGINE), *daemon.children(WORKER)]


def port_of(daemon: Daemon) -> int:
    return int(daemon.url.rsplit(":", 1)[1])


def hanging(tmp_path: Path, *, as_on_a_gpu: bool) -> tuple[Path, dict[str, str]]:
    """A file, and the environment of a daemon whose engine never ends a step while that file exists. `as_on_a_gpu`: a
    step can only be waited for until its end."""
    trigger = tmp_path / "hang"
    code = f"""
import os, time
from weft.engine.runner.cpu import cpu_runner
run = cpu_runner.CpuRunner.run
def hang(self, batch):
    if os.path.exists({str(trigger)!r}):
        time.sleep(10_000)
    return run(self, batch)
cpu_runner.CpuRunner.run = hang
if {as_on_a_gpu}:
    cpu_runner.CpuInFlight.ends_within = lambda self, seconds: True
"""
    return trigger, patched(tmp_path / "site", code)


@pytest.mark.parametrize("streams", [pytest.param(0, marks=pytest.mark.nightly), 8])
async def test_a_stopped_engine_is_reported_within_seconds_and_replaced(tmp_path: Path, streams: int) -> None:
    with running(tmp_path, "--api-workers", "2", *WATCHED) as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, streams)
            engine = daemon.engine_pid
            os.kill(engine, signal.SIGSTOP)
            if not streams:
                with stopped(
                    daemon.process.pid
                ):  # or it might have replaced the engine before this test reads the state
                    await until_status(http, "/health", 503)
            assert await codes(tasks) <= {"engine_dead"}
            await until_metric(http, "weft_engine_hangs_total", 1)
            await until_metric(http, "weft_engine_restarts_total", 1)
            await until_served(http)
            assert daemon.engine_pid != engine
            async with asyncio.timeout(240):
                while await metric(http, "weft_engine_last_beat_seconds") >= 6:
                    await asyncio.sleep(0.1)
        daemon.wait_for_log("the engine hangs")
        log = daemon.wait_for_log("engine/process.py")  # the stacks
        if streams:
            daemon.wait_for_log("last batch: step")
        else:
            assert "last batch: step" not in log


@pytest.mark.parametrize(
    "as_on_a_gpu", [pytest.param(False, id="cpu", marks=pytest.mark.nightly), pytest.param(True, id="as on a gpu")]
)
async def test_a_step_that_never_ends_is_detected(tmp_path: Path, as_on_a_gpu: bool) -> None:
    trigger, env = hanging(tmp_path, as_on_a_gpu=as_on_a_gpu)
    with running(tmp_path, *WATCHED, "--step-timeout", "2", env=env) as daemon:
        async with client(daemon) as http:
            assert (await http.post("/v1/completions", json=SHORT)).status_code == 200
            trigger.touch()
            tasks = [asyncio.create_task(stream(http, asyncio.Event())) for _ in range(4)]
            assert await codes(tasks) == {"engine_dead"}
            trigger.unlink()
            await until_status(http, "/ready", 200)
            assert (await http.post("/v1/completions", json=SHORT)).status_code == 200
        daemon.wait_for_log("last batch: step")
        daemon.wait_for_log("in hang")  # the thread that the step blocks


async def test_an_engine_that_hangs_at_the_first_start_ends_the_daemon(tmp_path: Path) -> None:
    daemon = Daemon(tmp_path / "stderr", "--hang-timeout", "1", "--start-timeout", "3")
    try:
        (engine,) = await until(lambda: daemon.children(ENGINE))
        os.kill(engine, signal.SIGSTOP)
        assert await ended(daemon) == 1
        assert daemon.stderr().splitlines()[-1].startswith("weft: the engine hung")
    finally:
        daemon.end()


KNOWS_LATE = """
from weft.engine.wire import spawn
spawn.LAST_MESSAGES_SECONDS = 1.0
"""
"""for `patched`: a daemon that is notified of an engine's end a second late"""

STOPS_WHEN_LOADED = """
import os, signal
from weft.engine.engine import Engine
def load(self, *args, _load=Engine.__init__, **options):
    _load(self, *args, **options)
    os.kill(os.getpid(), signal.SIGSTOP)
Engine.__init__ = load
"""


async def test_an_engine_that_gets_ready_while_it_dumps_its_stacks_never_serves(tmp_path: Path) -> None:
    """It is continued for the dump. Another one would hang like it."""
    patch = patched(tmp_path / "patch", STOPS_WHEN_LOADED)
    daemon = Daemon(tmp_path / "stderr", "--hang-timeout", "1", "--start-timeout", "8", env=patch)
    try:
        assert await ended(daemon) == 1
        assert daemon.stderr().splitlines()[-1].startswith("weft: the engine hung")
    finally:
        daemon.end()


async def test_a_stopped_api_process_is_replaced(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2", *WATCHED) as daemon:
        async with client(daemon) as http:
            stopped = daemon.children(WORKER)[0]
            os.kill(stopped, signal.SIGSTOP)
            waiting = [asyncio.create_task(http.get("/health")) for _ in range(20)]
            await until(lambda: stopped not in daemon.children(WORKER))
            # All are answered: requests connected to the stopped process, by its successor.
            async with asyncio.timeout(240):
                answers = await asyncio.gather(*waiting, return_exceptions=True)
            assert {a.status_code for a in answers if isinstance(a, httpx.Response)} == {200}
            await until(lambda: len(daemon.children(WORKER)) == 2)
            answers = await asyncio.gather(*(http.post("/v1/completions", json=SHORT) for _ in range(20)))
            assert {answer.status_code for answer in answers} == {200}
            await until_metric(http, "weft_api_process_hangs_total", 1)
        daemon.wait_for_log("API process")
        await until(lambda: "do_signal_stop" in daemon.stderr() or "no Python stacks" in daemon.stderr())


async def test_an_engine_killed_while_it_reloads_is_followed_by_another_one(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        async with client(daemon) as http:
            for restarts in (1, 2):
                os.kill(daemon.engine_pid, signal.SIGKILL)
                await until(lambda n=restarts: daemon.stderr().count("restarting in") >= n)
                await until(lambda: daemon.children(ENGINE))
            await until_status(http, "/ready", 200)
            await until_metric(http, "weft_engine_restarts_total", 2)


async def test_a_checkpoint_that_is_unreadable_for_a_while_is_waited_for(tmp_path: Path) -> None:
    model = tmp_path / "model"
    shutil.copytree(MODEL_PATH, model)
    with running(tmp_path, str(model)) as daemon:
        async with client(daemon) as http:
            (model / "config.json").rename(tmp_path / "away")
            os.kill(daemon.engine_pid, signal.SIGKILL)
            await until(lambda: daemon.stderr().count("restarting in") >= 2)
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 503
            (tmp_path / "away").rename(model / "config.json")
            await until_status(http, "/ready", 200)


@pytest.mark.nightly
async def test_too_many_restarts_end_the_daemon_with_one_line(tmp_path: Path) -> None:
    with running(tmp_path, "--engine-restart-limit", "1") as daemon:
        async with client(daemon) as http:
            os.kill(daemon.engine_pid, signal.SIGKILL)
            await until(lambda: "restarting in" in daemon.stderr())
            await until_status(http, "/ready", 200)
            os.kill(daemon.engine_pid, signal.SIGKILL)
            assert await ended(daemon) == 1
        assert "--engine-restart-limit" in daemon.stderr().splitlines()[-1]
        assert "Traceback" not in daemon.stderr()


async def test_three_exits_of_an_api_process_do_not_end_the_daemon(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2") as daemon:
        async with client(daemon) as http:
            stays = daemon.children(WORKER)[0]
            for restarts in range(1, 5):
                victim = await until(lambda: [pid for pid in daemon.children(WORKER) if pid != stays])
                os.kill(victim[0], signal.SIGKILL)
                await until(lambda n=restarts: daemon.stderr().count("restarting in") >= n)
            await until(lambda: len(daemon.children(WORKER)) == 2)
            answers = await asyncio.gather(*(http.post("/v1/completions", json=SHORT) for _ in range(20)))
            # Connections at the listener of the starting process wait for it.
            assert {answer.status_code for answer in answers} == {200}
            assert daemon.process.poll() is None


async def test_a_single_api_process_may_die_often(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        async with client(daemon) as http:
            for _ in range(4):
                (victim,) = await until(lambda: daemon.children(WORKER))
                assert (await http.post("/v1/completions", json=SHORT)).status_code == 200
                os.kill(victim, signal.SIGKILL)
                await until(lambda pid=victim: not command_line(pid))
            assert (await http.post("/v1/completions", json=SHORT)).status_code == 200


async def test_loading_is_not_reported_while_a_sibling_serves(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2") as daemon:
        async with client(daemon) as http:
            victim = daemon.children(WORKER)[0]
            os.kill(victim, signal.SIGKILL)
            seen = set()
            served_again = asyncio.create_task(until(lambda: "restarting in" in daemon.stderr()))
            for _ in range(40):
                answers = await asyncio.gather(*(status(http, "/ready") for _ in range(5)))
                seen.update(answers)
            await served_again
            assert 503 not in seen
            assert 200 in seen


@pytest.mark.parametrize("pause_ms", [0, *(pytest.param(ms, marks=pytest.mark.nightly) for ms in (4, 8))])
async def test_an_api_process_that_dies_as_the_daemon_exits_leaves_no_orphan(tmp_path: Path, pause_ms: int) -> None:
    with running(tmp_path) as daemon:
        await asyncio.sleep(SHORT_LIFE + 0.5)  # it is followed at once: the end arrives while its successor starts
        os.kill(daemon.children(WORKER)[0], signal.SIGKILL)
        time.sleep(pause_ms / 1000)
        daemon.process.send_signal(signal.SIGTERM)
        assert await ended(daemon) == 0
        with socket.socket() as free:  # a remaining listener would make this fail
            free.bind(("127.0.0.1", port_of(daemon)))
        assert "Traceback" not in daemon.stderr()


async def test_sigterm_to_all_processes_loses_no_stream(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2", "--drain-timeout", "240") as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 10, max_tokens=200)
            for pid in everyone(daemon):
                os.kill(pid, signal.SIGTERM)
            assert await codes(tasks) == {"[DONE]"}
        assert await ended(daemon) == 0
        assert "Traceback" not in daemon.stderr()


async def test_an_engine_that_exits_in_a_drain_is_reported_and_fails_the_exit(tmp_path: Path) -> None:
    with running(tmp_path, "--drain-timeout", "240") as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 3)
            daemon.process.terminate()
            daemon.wait_for_log("weft: draining")
            os.kill(daemon.engine_pid, signal.SIGKILL)
            assert await codes(tasks) == {"engine_dead"}
        assert await ended(daemon) == 1
        daemon.wait_for_log("weft: the engine ended (signal SIGKILL)")


async def test_an_engine_that_hangs_in_a_drain_is_reported_and_fails_the_exit(tmp_path: Path) -> None:
    """API processes detect the end of an engine that was silent for long by themselves, possibly before the daemon
    does."""
    late = patched(tmp_path / "site", KNOWS_LATE, of="weft.server")
    with running(tmp_path, "--drain-timeout", "240", *WATCHED, env=late) as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 3)
            os.kill(daemon.engine_pid, signal.SIGSTOP)
            daemon.process.terminate()
            assert await codes(tasks) == {"engine_dead"}
        assert await ended(daemon) == 1
        daemon.wait_for_log("weft: the engine hung")


async def test_a_killed_daemon_leaves_no_stopped_process(tmp_path: Path) -> None:
    with running(tmp_path, "--api-workers", "2") as daemon:
        children = everyone(daemon)[1:]
        for pid in children:
            os.kill(pid, signal.SIGSTOP)
        daemon.process.kill()
        await until(lambda: not any(command_line(pid) for pid in children))


async def test_the_port_is_closed_before_the_engine_ends(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        engine = daemon.engine_pid
        os.kill(engine, signal.SIGSTOP)  # it takes seconds to end
        daemon.process.send_signal(signal.SIGTERM)

        def refused() -> bool:
            with contextlib.closing(socket.socket()) as probe:
                return probe.connect_ex(("127.0.0.1", port_of(daemon))) != 0

        await until(refused)
        assert command_line(engine)
        assert await ended(daemon) == 0


@pytest.mark.parametrize("name", ["tmp", "t" * 100])
async def test_an_api_process_attaches_even_if_temporary_files_are_removed(tmp_path: Path, name: str) -> None:
    folder = tmp_path / name
    folder.mkdir()
    with running(tmp_path, env={"TMPDIR": str(folder)}) as daemon:
        async with client(daemon) as http:
            shutil.rmtree(folder)
            os.kill(daemon.children(WORKER)[0], signal.SIGKILL)
            await until(lambda: "restarting in" in daemon.stderr())
            assert (await http.post("/v1/completions", json=SHORT)).status_code == 200


async def test_an_engine_that_dies_while_the_daemon_hangs_is_reported(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        async with client(daemon) as http:
            tasks = await begin(http, 4)
            engine = daemon.engine_pid
            os.kill(daemon.process.pid, signal.SIGSTOP)
            os.kill(engine, signal.SIGKILL)
            assert await codes(tasks) == {"engine_dead"}
            await until_status(http, "/health", 503)
            os.kill(daemon.process.pid, signal.SIGCONT)
            await until_status(http, "/ready", 200)
            assert (await http.post("/v1/completions", json=SHORT)).status_code == 200
