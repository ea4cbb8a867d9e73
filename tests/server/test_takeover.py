"""A daemon replaces another one on its port under load, and no client notices."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from free_port import free_port
from live import LOGS_MODELS, Daemon, patched, stop

pytestmark = pytest.mark.slow

QUESTION = {"prompt": "What is 12 + 30?", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "What is 12 + 30?", "max_tokens": 300, "ignore_eos": True, "stream": True}
PAUSE_SECONDS = 0.005
"""between a client's requests: the daemons need some of the processor, too"""


class Ledger:
    """The results of clients that send repeatedly, each on a kept connection or on a new one each time."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.answered = 0
        self.failed: list[str] = []
        self.closed = 0
        self.stop = asyncio.Event()

    async def ask(self, *, keep: bool) -> None:
        limits = httpx.Limits(max_keepalive_connections=1 if keep else 0)
        async with httpx.AsyncClient(base_url=self._url, timeout=240, limits=limits) as http:
            while not self.stop.is_set():
                await asyncio.sleep(PAUSE_SECONDS)
                try:
                    response = await http.post("/v1/completions", json=QUESTION)
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                    continue
                self.closed += response.headers.get("connection") == "close"
                if response.status_code == 200 and "42" in response.text:
                    self.answered += 1
                else:
                    self.failed.append(response.text)

    async def probe(self) -> None:
        """Opens connections only, hundreds a second: a listener's end would reset some."""
        async with httpx.AsyncClient(
            base_url=self._url, timeout=240, limits=httpx.Limits(max_connections=None)
        ) as http:
            while not self.stop.is_set():
                await asyncio.sleep(PAUSE_SECONDS)
                try:
                    response = await http.get("/ready", headers={"Connection": "close"})
                except httpx.HTTPError as error:
                    self.failed.append(repr(error))
                    continue
                if response.status_code == 200:
                    self.answered += 1
                else:
                    self.failed.append(response.text)


@asynccontextmanager
async def load(url: str) -> AsyncIterator[Ledger]:
    ledger = Ledger(url)
    tasks = [asyncio.create_task(ledger.ask(keep=bool(i % 2))) for i in range(8)]
    tasks += [asyncio.create_task(ledger.probe()) for _ in range(4)]
    try:
        yield ledger
    finally:
        ledger.stop.set()
        await asyncio.gather(*tasks)


async def whole_stream(url: str, begun: asyncio.Event) -> list[Any]:
    events: list[Any] = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=240) as http,
        http.stream("POST", "/v1/completions", json=LONG) as response,
    ):
        async for line in response.aiter_lines():
            if line.startswith("data: "):
                events.append(line[6:] if line == "data: [DONE]" else json.loads(line[6:]))
                begun.set()
    return events


async def ready(daemon: Daemon) -> None:
    async with asyncio.timeout(240):
        await asyncio.to_thread(daemon.wait_ready)


@pytest.mark.parametrize(("before", "after"), [pytest.param("1", "1", marks=pytest.mark.nightly), ("2", "3")])
async def test_no_request_fails_while_a_daemon_takes_over(tmp_path: Path, before: str, after: str) -> None:
    options = ("--port", str(free_port()), "--handover", f"{tmp_path}/handover", "--drain-timeout", "240")
    old = Daemon(tmp_path / "old", *options, "--api-workers", before)
    new = None
    try:
        await ready(old)
        async with load(old.url) as ledger:
            begun = asyncio.Event()
            stream = asyncio.create_task(whole_stream(old.url, begun))
            await begun.wait()
            new = Daemon(tmp_path / "new", *options, "--api-workers", after)
            await ready(new)
            assert new.url == old.url
            assert await asyncio.to_thread(old.process.wait, 240) == 0
            assert (await stream)[-1] == "[DONE]"
            count = ledger.answered
            async with asyncio.timeout(240):
                while ledger.answered < count + 50:  # only the new one
                    await asyncio.sleep(0.05)
        assert ledger.failed == []
        assert ledger.closed  # clients that keep connections were sent to another one
        new.wait_for_log(f"taking the port over from process {old.process.pid}")
        assert "Traceback" not in old.stderr() + new.stderr()
        new.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(new.process.wait, 240) == 0
    finally:
        old.end()
        if new is not None:
            new.end()


async def test_a_successor_takes_connections_once_it_serves_all_models(tmp_path: Path) -> None:
    models = ("--model", "demo served_model_name=a", "--model", "demo served_model_name=b")
    options = ("--port", str(free_port()), "--handover", f"{tmp_path}/handover", "--cpu-threads", "1", *models)
    old, new = Daemon(tmp_path / "old", *options), None
    try:
        await ready(old)
        site = patched(tmp_path / "site", LOGS_MODELS, of="weft.server.daemon.worker")
        new = Daemon(tmp_path / "new", *options, env=site)
        while len(engines := new.children("weft.engine.process")) < 2:
            assert new.process.poll() is None
            await asyncio.sleep(0.005)
        stop(engines[1])
        await asyncio.to_thread(new.wait_for_log, "serves a")
        async with httpx.AsyncClient(base_url=old.url, timeout=240) as http:
            for model in "ab" * 16:  # each on its own connection
                answer = await http.post(
                    "/v1/completions", json={**QUESTION, "model": model}, headers={"Connection": "close"}
                )
                assert answer.status_code == 200, answer.text
            os.kill(engines[1], signal.SIGCONT)
            await ready(new)
            assert await asyncio.to_thread(old.process.wait, 240) == 0
            assert (await http.post("/v1/completions", json={**QUESTION, "model": "b"})).status_code == 200
    finally:
        old.end()
        if new is not None:
            new.end()


async def test_a_successor_that_cannot_start_changes_nothing(tmp_path: Path) -> None:
    port = str(free_port())
    options = ("--port", port, "--handover", f"{tmp_path}/handover")
    old = Daemon(tmp_path / "old", *options)
    try:
        await ready(old)
        async with load(old.url) as ledger:
            for wrong in (("--model", "/nowhere"), ("--port", "1")):
                new = Daemon(tmp_path / "new", *options, *wrong)
                assert await asyncio.to_thread(new.process.wait, 240) in (1, 2)
                assert re.fullmatch(r"weft.*: .+\n", new.stderr())
        assert ledger.failed == []
        assert ledger.closed == 0
        assert old.process.poll() is None
    finally:
        old.end()


@pytest.mark.nightly
async def test_a_restart_with_a_held_port_refuses_no_connection(tmp_path: Path) -> None:
    """As with systemd's socket unit: connections wait in the queue from the end of one daemon to the start of the
    next."""
    with socket.create_server(("127.0.0.1", 0), backlog=512) as held:
        url = f"http://127.0.0.1:{held.getsockname()[1]}"

        def start(name: str) -> subprocess.Popen[str]:
            script = 'exec 3<&"$1"; shift; export LISTEN_PID=$$ LISTEN_FDS=1; exec "$@"'
            serve = [sys.executable, "-P", "-m", "weft.server.daemon.cli", "serve", "--api-workers", "2"]
            with (tmp_path / name).open("wb") as log:
                return subprocess.Popen(
                    ["bash", "-c", script, "bash", str(held.fileno()), *serve],
                    pass_fds=[held.fileno()],
                    stdout=subprocess.PIPE,
                    stderr=log,
                    text=True,
                )

        first = second = None
        try:
            first = start("first")
            assert first.stdout is not None
            assert url in await asyncio.to_thread(first.stdout.readline)
            first.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(first.wait, 240) == 0
            async with httpx.AsyncClient(base_url=url, timeout=240) as http:
                waiting = [asyncio.create_task(http.get("/health")) for _ in range(20)]
                await asyncio.sleep(0.2)
                assert not any(task.done() for task in waiting)
                second = start("second")
                assert {(await task).status_code for task in waiting} == {200}
                assert second.stdout is not None
                assert url in await asyncio.to_thread(second.stdout.readline)
                assert "42" in (await http.post("/v1/completions", json=QUESTION)).text
            second.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(second.wait, 240) == 0
        finally:
            for daemon in (first, second):
                if daemon is not None:
                    daemon.kill()
                    daemon.wait()


async def test_a_service_manager_is_notified_of_the_daemons_lifetime(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind(f"{tmp_path}/notify")
        manager.settimeout(240)
        monkeypatch.setenv("NOTIFY_SOCKET", f"{tmp_path}/notify")
        monkeypatch.setenv("WATCHDOG_USEC", "1000000")
        keys = tmp_path / "keys"
        keys.write_text("one\n")
        daemon = Daemon(tmp_path / "stderr", "--api-key-file", str(keys))
        try:

            async def received(start: str) -> str:
                while not (message := (await asyncio.to_thread(manager.recv, 4096)).decode()).startswith(start):
                    pass
                return message

            await received("WATCHDOG=1")
            assert "serving demo" in await received("READY=1")
            await ready(daemon)
            for pid in daemon.children("weft"):
                assert b"NOTIFY_SOCKET" not in Path(f"/proc/{pid}/environ").read_bytes()
            daemon.process.send_signal(signal.SIGHUP)
            await received("RELOADING=1\nMONOTONIC_USEC=")
            await received("READY=1")
            daemon.process.send_signal(signal.SIGTERM)
            await received("STOPPING=1")
            assert await asyncio.to_thread(daemon.process.wait, 240) == 0
        finally:
            daemon.end()
    os.unlink(tmp_path / "notify")
