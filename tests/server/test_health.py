"""`weft health`: finds a daemon at any address and checks it like its health check."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
from live import running
from stub import serving

from weft.server.commands import health
from weft.server.observe import server_urls as server_urls

DOCKERFILE = Path(__file__).parents[2] / "Dockerfile"


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide other daemons of this machine."""
    monkeypatch.setattr(server_urls, "NAME", f"weft-url-{uuid.uuid4().hex}")


def certificate(folder: Path) -> dict[str, str]:
    """Options of a server with a self-signed certificate for another name."""
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    command = ("openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=x")
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return {"tls_cert": cert, "tls_key": key}


def checked(*, ready: bool = False) -> int:
    return health.run(argparse.Namespace(ready=ready))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("tls", [False, True])
async def test_the_state_of_a_server_is_the_exit_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], tls: bool
) -> None:
    if tls and shutil.which("openssl") is None:
        pytest.skip("needs the openssl command")
    files = certificate(tmp_path) if tls else {}
    async with serving(engines=2, **files) as server:
        url = f"{'https' if tls else 'http'}://{server.url.partition('://')[2]}"
        fd = server_urls.publish(url)
        try:
            assert await asyncio.to_thread(checked) == 0
            assert capsys.readouterr().out == f"{url} ok\n"
            assert await asyncio.to_thread(checked, ready=True) == 0
            for engine in range(2):
                server.service.engine_died(engine, restarting=True)
            assert await asyncio.to_thread(checked) == 0, "it will be back"
            assert await asyncio.to_thread(checked, ready=True) == 1
            capsys.readouterr()
            for engine in range(2):
                server.service.engine_died(engine)
            assert await asyncio.to_thread(checked) == 1
            assert capsys.readouterr().out == f"{url} 503: The engine has died.\n"
        finally:
            os.close(fd)


@pytest.mark.usefixtures("alone")
def test_a_server_that_does_not_answer_or_does_not_exist_is_unhealthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert checked() == 1
    assert "no server" in capsys.readouterr().err
    fd = server_urls.publish("http://127.0.0.1:1")
    assert checked() == 1
    assert "does not respond" in capsys.readouterr().out
    os.close(fd)
    assert server_urls.published() == []


@pytest.mark.usefixtures("alone")
def test_a_daemon_is_found_while_it_closes_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process's file may disappear after it was listed and before it is read."""
    fd = server_urls.publish("http://127.0.0.1:1")
    names = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: [*(["1000000"] if path.endswith("/fd") else []), *names(path)])
    assert server_urls.published() == ["http://127.0.0.1:1"]
    os.close(fd)


@pytest.mark.usefixtures("alone")
def test_other_users_files_in_the_runtime_folder_are_ignored() -> None:
    """Root sees the processes of all users."""
    fd = os.memfd_create(server_urls.NAME)
    os.write(fd, b"\xff\xfe")
    assert server_urls.published() == []
    os.close(fd)


@pytest.mark.usefixtures("alone")
def test_a_daemon_in_another_network_namespace_is_not_queried_in_ours() -> None:
    """Root on a host sees the processes of containers, whose 127.0.0.1 is another one."""
    publish = f"server_urls.NAME = {server_urls.NAME!r}; server_urls.publish('http://127.0.0.1:1')"
    code = f"from weft.server.observe import server_urls; {publish}; print(flush=True); input()"
    command = ("unshare", "--map-root-user", "--net", sys.executable, "-P", "-c", code)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        if not process.stdout.readline():
            pytest.skip("no network of one's own can be made here")
        assert server_urls.published() == []
        process.stdin.close()


async def test_another_server_at_the_address_is_unhealthy() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readline()
        writer.write(b"HTTP/1.0 404 Not Found\r\n\r\n{}")
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1") as server:
        port = server.sockets[0].getsockname()[1]
        reported = await asyncio.to_thread(health._ask, f"http://127.0.0.1:{port}", "/health")
    assert reported == (0, "responds, but is not weft")


@pytest.mark.slow
def test_the_images_check_finds_a_daemon_on_an_unknown_port(tmp_path: Path) -> None:
    words = DOCKERFILE.read_text().partition("HEALTHCHECK")[2].partition("CMD ")[2].splitlines()[0]
    python, *check = json.loads(words)
    assert python == "python"
    (tmp_path / "weft.yaml").write_text("host: 0.0.0.0\nmax-num-seqs: 8\nnum-pages: 100\n")
    with running(tmp_path, "--config", str(tmp_path / "weft.yaml")) as daemon:
        done = subprocess.run([sys.executable, *check], capture_output=True, text=True, timeout=240, check=False)
        assert f"{daemon.url} ok" in done.stdout.splitlines(), done
