"""Signals to a running daemon lose nothing."""

from __future__ import annotations

import asyncio
import hashlib
import os
import pty
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
from live import Daemon, running

pytestmark = pytest.mark.slow

QUESTION = {"prompt": "What is 12 + 30?", "max_tokens": 8, "temperature": 0}
LONG = {"prompt": "What is 12 + 30?", "max_tokens": 100, "ignore_eos": True, "stream": True}
KEPT = httpx.Limits(keepalive_expiry=None)


def until(condition: Callable[[], bool], seconds: float = 240) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def asks(http: httpx.Client, key: str) -> int:
    return http.post("/v1/completions", json=QUESTION, headers={"Authorization": f"Bearer {key}"}).status_code


def test_keys_are_read_again(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("old\nboth\n")
    with (
        running(tmp_path, "--api-key-file", str(keys), "--api-workers", "2", "--rate-limit", "100") as daemon,
        httpx.Client(base_url=daemon.url, timeout=240, limits=KEPT) as http,
    ):
        assert [asks(http, key) for key in ("old", "both", "new")] == [200, 200, 401]
        opened = http._transport._pool.connections[0]  # type: ignore[attr-defined]
        keys.write_text("both\nnew\n")
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: asks(http, "new") == 200)
        assert [asks(http, key) for key in ("old", "both", "new")] == [401, 200, 200]
        assert http._transport._pool.connections == [opened]  # type: ignore[attr-defined]
        until(lambda: "2 API keys" in daemon.stderr())
        keys.write_text("# nobody\n")
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: "contains no keys" in daemon.stderr())
        keys.write_text(f"new\nsha256:{hashlib.sha256(b'old').hexdigest()}  # old\n")
        daemon.process.send_signal(signal.SIGHUP)
        until(lambda: f"{keys}, line 2: this looks like a digest" in daemon.stderr())
        assert [asks(http, key) for key in ("old", "both", "new")] == [401, 200, 200]
        # A process that starts now uses the same keys as the others, independent of the file.
        os.kill(daemon.children("weft.server.daemon.worker")[0], signal.SIGKILL)
        fresh = httpx.Limits(max_keepalive_connections=0)
        with httpx.Client(base_url=daemon.url, timeout=240, limits=fresh) as others:

            def recovered() -> bool:
                try:
                    return all(asks(others, "new") == 200 for _ in range(10))
                except httpx.HTTPError:
                    return False

            until(recovered)
            assert asks(others, "old") == 401


def test_a_key_file_that_hangs_blocks_nothing(tmp_path: Path) -> None:
    """A pipe that nobody writes to hangs as a file on a broken network disk does."""
    keys = tmp_path / "keys"
    keys.write_text("old\n")
    with (
        running(tmp_path, "--api-key-file", str(keys)) as daemon,
        httpx.Client(base_url=daemon.url, timeout=240) as http,
    ):
        keys.unlink()
        os.mkfifo(keys)
        daemon.process.send_signal(signal.SIGHUP)
        # The daemon's loop goes on meanwhile: it handles another signal first.
        daemon.process.send_signal(signal.SIGQUIT)
        until(lambda: "could not be read within 10 seconds; keeping the old keys" in daemon.stderr())
        assert "SIGQUIT: the daemon" in daemon.stderr().split("could not be read")[0]
        assert asks(http, "old") == 200
        keys.unlink()
        keys.write_text("new\n")
        for _ in range(3):
            daemon.process.send_signal(signal.SIGHUP)
        until(lambda: asks(http, "new") == 200)
        assert asks(http, "old") == 401
        keys.unlink()
        os.mkfifo(keys)
        daemon.process.send_signal(signal.SIGHUP)
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(240) == 0


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    cert, key = f"{folder}/{name}.pem", f"{folder}/{name}.key"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", f"/CN={name}"),
            *("-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert),
        ],
        check=True,
        capture_output=True,
    )
    return cert, key


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the openssl command")
def test_the_certificate_is_read_again(tmp_path: Path) -> None:
    old, new = make_certificate(tmp_path, "old"), make_certificate(tmp_path, "new")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def put(files: tuple[str, str]) -> None:
        shutil.copy(files[0], cert)
        shutil.copy(files[1], key)

    put(old)
    daemon = Daemon(tmp_path / "stderr", "--tls-cert", str(cert), "--tls-key", str(key))
    try:
        assert daemon.process.stdout is not None
        line = daemon.process.stdout.readline()
        port = int(line.split("https://127.0.0.1:")[1].split()[0])

        def served() -> str:
            return ssl.get_server_certificate(("127.0.0.1", port))

        assert served() == Path(old[0]).read_text()
        context = ssl.create_default_context(cafile=old[0])
        with httpx.Client(base_url=f"https://127.0.0.1:{port}", verify=context, timeout=240, limits=KEPT) as http:
            assert http.get("/health").status_code == 200
            put(new)
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda: served() == Path(new[0]).read_text())
            assert http.get("/health").status_code == 200  # on its existing connection
            put((old[0], new[1]))  # a key of another certificate
            daemon.process.send_signal(signal.SIGHUP)
            until(lambda: "not a certificate with its key" in daemon.stderr())
            assert served() == Path(new[0]).read_text()
            os.kill(daemon.children("weft.server.daemon.worker")[0], signal.SIGKILL)

            def recovered() -> bool:
                try:
                    return served() == Path(new[0]).read_text()
                except (OSError, ssl.SSLError):
                    return False

            until(recovered)
    finally:
        daemon.end()


@pytest.mark.nightly
async def test_other_signals_end_nothing(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        async with (
            httpx.AsyncClient(base_url=daemon.url, timeout=240) as http,
            http.stream("POST", "/v1/completions", json=LONG) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            for name in ("SIGHUP", "SIGUSR2", "SIGALRM", "SIGQUIT"):
                for child in daemon.children("weft"):  # as a signal to the whole group does
                    os.kill(child, getattr(signal, name))
                daemon.process.send_signal(getattr(signal, name))
            daemon.process.send_signal(signal.SIGUSR1)
            last = [line async for line in lines if line][-1]
            assert last == "data: [DONE]"
            async with asyncio.timeout(240):
                for reported in ("SIGQUIT: the daemon", "SIGQUIT: the engine", "SIGQUIT: API process 0"):
                    while reported not in daemon.stderr():
                        await asyncio.sleep(0.05)
            assert (await http.get("/ready")).status_code == 200
        daemon.process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(daemon.process.wait, 240) == 0
        daemon.wait_for_log("another Ctrl-C or SIGTERM ends at once")


async def test_an_engine_that_dumps_its_stacks_while_it_computes_continues(tmp_path: Path) -> None:
    """Python's own handler, which reads the frames of running threads, killed it after a few."""
    with running(tmp_path) as daemon:

        async def requested() -> None:
            for count in range(1, 21):
                daemon.process.send_signal(signal.SIGQUIT)
                await asyncio.to_thread(daemon.wait_for_log, "SIGQUIT: API process 0", count)

        async def streams(http: httpx.AsyncClient) -> str:
            last = ""
            while not asking.done():
                async with http.stream("POST", "/v1/completions", json=LONG) as response:
                    last = [line async for line in response.aiter_lines() if line][-1]
                assert last == "data: [DONE]"
            return last

        async with httpx.AsyncClient(base_url=daemon.url, timeout=240) as http:
            asking = asyncio.create_task(requested())
            assert set(await asyncio.gather(*(streams(http) for _ in range(4)))) == {"data: [DONE]"}
            await asking
        assert "ended (signal" not in daemon.stderr()
        assert "no Python stacks" not in daemon.stderr()


@pytest.mark.parametrize("nohup", [pytest.param(False, marks=pytest.mark.nightly), True])
def test_a_closing_terminal_ends_the_daemon_started_on_it(tmp_path: Path, nohup: bool) -> None:
    serve = [sys.executable, "-P", "-m", "weft.server.daemon.cli", "serve", "--port", "0"]
    with (tmp_path / "stdout").open("wb") as out, (tmp_path / "stderr").open("wb") as err:
        pid, terminal = pty.fork()
        if pid == 0:
            os.dup2(out.fileno(), 1)
            os.dup2(err.fileno(), 2)
            # These tests may run under nohup.
            signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
            os.execv(serve[0], serve)
    try:
        until(lambda: b"try:" in (tmp_path / "stdout").read_bytes(), 120)
        os.close(terminal)
        if nohup:
            until(lambda: "SIGHUP: reloaded 0 API keys" in (tmp_path / "stderr").read_text())
            assert os.waitpid(pid, os.WNOHANG) == (0, 0)
            os.kill(pid, signal.SIGTERM)
        _, status = os.waitpid(pid, 0)
        assert os.waitstatus_to_exitcode(status) == 0
        assert "draining" in (tmp_path / "stderr").read_text()
        pid = 0
    finally:
        if pid:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def test_ports_are_free_at_once_for_the_next_daemon(tmp_path: Path) -> None:
    with running(tmp_path) as daemon:
        port = int(daemon.url.rsplit(":", 1)[1])
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(240) == 0
        with socket.create_server(("127.0.0.1", port)):
            pass
