"""The real daemon, on its own event loop, against clients that do not read and too many clients."""

from __future__ import annotations

import asyncio
import json
import re
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from free_port import free_port

pytestmark = pytest.mark.slow

MANY = {"prompt": "Tell me", "n": 16, "max_tokens": 250, "logprobs": 20, "ignore_eos": True, "stream": True}
"""some megabytes of events"""


@asynccontextmanager
async def serving(tmp_path: Path, *options: str, files: str = "") -> AsyncIterator[str]:
    """Yield a daemon's URL. `files`: limits its file descriptors, as options of ulimit."""
    limit = f"ulimit {files}; " if files else ""
    port = str(free_port())
    command = [sys.executable, "-P", "-m", "weft.server.daemon.cli", "serve", "--port", port, *options]
    with (tmp_path / "stderr").open("wb") as log:
        daemon = subprocess.Popen(
            ["bash", "-c", f'{limit}exec "$@"', "bash", *command], stdout=subprocess.PIPE, stderr=log, text=True
        )
    try:
        assert daemon.stdout is not None
        line = await asyncio.to_thread(daemon.stdout.readline)
        found = re.search(r"https?://\S+", line)
        assert found, (tmp_path / "stderr").read_text()
        yield found[0]
    finally:
        daemon.kill()
        daemon.wait()


async def value(http: httpx.AsyncClient, name: str) -> float:
    lines = (await http.get("/metrics")).text.splitlines()
    return next(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + " "))


def certificate(folder: Path) -> tuple[str, ...]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x")
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return ("--tls-cert", cert, "--tls-key", key)


@pytest.mark.parametrize("tls", [False, True])
async def test_a_client_that_does_not_read_is_disconnected(tmp_path: Path, tls: bool) -> None:
    options = certificate(tmp_path) if tls else ()
    async with serving(tmp_path, "--client-stall-timeout", "1", *options) as url:
        port = int(url.rsplit(":", 1)[1])
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.connect(("127.0.0.1", port))
        if tls:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            sock = context.wrap_socket(sock)
        body = json.dumps(MANY).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        sock.sendall(f"{head}Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        async with httpx.AsyncClient(base_url=url, timeout=240, verify=False) as http:
            async with asyncio.timeout(240):
                while not await value(http, "weft_clients_stalled_total"):
                    await asyncio.sleep(0.1)
                while await value(http, "weft_requests_running"):
                    await asyncio.sleep(0.1)
            assert await value(http, 'weft_aborted_total{cause="disconnect"}') == 0
        sock.close()


async def value_on_any_connection(http: httpx.AsyncClient, name: str) -> float:
    """Like `value`, on another connection if the server closed an idle one to free its descriptor."""
    while True:
        try:
            return await value(http, name)
        except httpx.TransportError:
            await asyncio.sleep(0.1)


async def test_connections_beyond_the_file_limit_are_refused_and_logged(tmp_path: Path) -> None:
    async with serving(tmp_path, files="-n 160") as url:
        host, port = "127.0.0.1", int(url.rsplit(":", 1)[1])
        async with httpx.AsyncClient(base_url=url, timeout=240) as http:
            assert (await http.get("/ready")).status_code == 200
            idle = [await asyncio.open_connection(host, port) for _ in range(200)]
            async with asyncio.timeout(240):
                while (refused := await value_on_any_connection(http, "weft_accepts_refused_total")) < 200 - 160:
                    await asyncio.sleep(0.1)
            assert refused < 200
            async with asyncio.timeout(240):
                while "lack of file descriptors" not in (tmp_path / "stderr").read_text():
                    await asyncio.sleep(0.1)
            for _, writer in idle:
                writer.close()
        async with asyncio.timeout(240), httpx.AsyncClient(base_url=url, timeout=240) as http:
            while True:
                try:
                    response = await http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2})
                except httpx.HTTPError:
                    await asyncio.sleep(0.1)
                    continue
                assert response.status_code == 200
                break


async def test_a_low_file_limit_is_raised_if_the_hard_limit_allows(tmp_path: Path) -> None:
    async with serving(tmp_path, files="-Sn 20") as url, httpx.AsyncClient(base_url=url, timeout=240) as http:
        requested = [http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 2}) for _ in range(8)]
        assert [answer.status_code for answer in await asyncio.gather(*requested)] == [200] * 8


@pytest.mark.parametrize("files", [10, 40])
def test_a_daemon_with_too_few_files_exits_with_the_required_number(files: int) -> None:
    command = [sys.executable, "-P", "-m", "weft.server.daemon.cli", "serve", "--port", "0", "--api-workers", "2"]
    ended = subprocess.run(
        ["bash", "-c", f'ulimit -n {files}; exec "$@"', "bash", *command], capture_output=True, text=True, timeout=240
    )
    assert ended.returncode == 2
    (line,) = ended.stderr.splitlines()
    assert line.startswith(
        f"weft: the limit of {files} open files is too low: this daemon needs 160, plus one per connection; "
    )
    assert "raise the hard limit (ulimit -Hn 4096" in line
