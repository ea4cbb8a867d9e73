"""A daemon whose log is not read, or whose stdout is full or closed, keeps serving."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import pytest
from free_port import free_port

from weft.engine.wire.log_sink import MAX_BYTES
from weft.server.api.routing import LOGGED_BODY

pytestmark = pytest.mark.slow

SERVE = [sys.executable, "-P", "-m", "weft.server", "serve", "--port"]


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[bytes]]]:
    """Daemons that a test has started. None outlives it."""
    daemons: list[subprocess.Popen[bytes]] = []
    yield daemons
    for daemon in daemons:
        daemon.kill()
        daemon.wait()


def wait_ready(port: int, daemon: subprocess.Popen[bytes]) -> None:
    until = time.monotonic() + 240
    while time.monotonic() < until:
        assert daemon.poll() is None
        try:
            if httpx.get(f"http://127.0.0.1:{port}/ready", timeout=60).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.05)
    raise AssertionError("not ready")


def answers(port: int) -> bool:
    body = {"prompt": "What is 12 + 30?", "max_tokens": 4}
    return httpx.post(f"http://127.0.0.1:{port}/v1/completions", json=body, timeout=240).status_code == 200


def fill(http: httpx.Client) -> None:
    """More lines than a pipe and the queue hold, from requests that are logged and refused at once."""
    body = {"prompt": "x" * LOGGED_BODY, "max_tokens": -1}
    for _ in range(MAX_BYTES // LOGGED_BODY + 40):
        assert http.post("/v1/completions", json=body).status_code == 400


def test_an_unread_log_blocks_nothing(port: int, started: list[subprocess.Popen[bytes]]) -> None:
    daemon = subprocess.Popen(
        [*SERVE, str(port), "--log-requests"], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, bufsize=0
    )
    started.append(daemon)
    wait_ready(port, daemon)
    url = f"http://127.0.0.1:{port}"
    with httpx.Client(base_url=url, timeout=240) as http:
        fill(http)
        assert http.get("/health").status_code == 200
        dropped = re.search(r"(?m)^weft_log_lines_dropped_total (\S+)", http.get("/metrics").text)
    assert dropped
    assert float(dropped[1]) > 0
    assert answers(port)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(240) == 0


def test_lines_return_with_the_reader(port: int, started: list[subprocess.Popen[bytes]]) -> None:
    daemon = subprocess.Popen(
        [*SERVE, str(port), "--log-requests", "--log-format", "json"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    started.append(daemon)
    wait_ready(port, daemon)
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
        fill(http)
    assert daemon.stderr is not None
    text = b""
    while b"log lines dropped" not in text:
        text = text[-1000:] + os.read(daemon.stderr.fileno(), 2**20)


@pytest.mark.parametrize(
    "redirections",
    [
        "2>/dev/full",
        *(pytest.param(each, marks=pytest.mark.nightly) for each in ("2>&-", "<&- >&- 2>&-", ">/dev/full", ">&-")),
    ],
)
def test_closed_and_full_streams_do_not_stop_the_daemon(
    port: int, started: list[subprocess.Popen[bytes]], redirections: str
) -> None:
    daemon = subprocess.Popen(["sh", "-c", f'exec "$@" {redirections}', "sh", *SERVE, str(port)])
    started.append(daemon)
    wait_ready(port, daemon)
    assert answers(port)
    daemon.send_signal(signal.SIGTERM)
    assert daemon.wait(240) == 0
