"""`--uds`: a daemon on a Unix socket, its file, and the commands that talk to it."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Daemon

from weft.engine.errors import ConfigError
from weft.server.commands.endpoint import Endpoint, Refused
from weft.server.config import ServeConfig
from weft.server.daemon.listen import listen_unix
from weft.server.observe.server_urls import UnixConnection, url_of


def test_a_socket_without_a_listener_is_replaced(tmp_path: Path) -> None:
    path = tmp_path / "weft.sock"
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    with listen_unix(str(path)) as listener, socket.socket(socket.AF_UNIX) as client:
        assert listener.getsockname() == str(path)
        client.connect(str(path))


def test_a_socket_in_use_and_other_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "weft.sock"
    with listen_unix(str(path)), pytest.raises(ConfigError, match="another process listens there"):
        listen_unix(str(path))
    file = tmp_path / "notes.txt"
    file.write_text("x")
    with pytest.raises(ConfigError, match="is not a socket"):
        listen_unix(str(file))
    assert file.read_text() == "x"
    for bad in (tmp_path / "none" / "weft.sock", tmp_path / ("x" * 200)):
        with pytest.raises(ConfigError, match="--uds"):
            listen_unix(str(bad))


def test_the_umask_sets_who_may_connect(tmp_path: Path) -> None:
    before = os.umask(0o007)
    try:
        listen_unix(str(tmp_path / "weft.sock")).close()
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "weft.sock").stat().st_mode) == 0o770


def test_urls_of_sockets() -> None:
    assert url_of("/run/weft.sock", tls=False) == "unix:/run/weft.sock"
    with pytest.raises(ValueError, match="no TLS"):
        ServeConfig(uds="/run/weft.sock", tls_cert="c.pem")
    with pytest.raises(Refused, match="no response"):
        Endpoint("unix:/nowhere/weft.sock", None, None).connect()
    with pytest.raises(ConfigError, match=r"unix:/run/weft\.sock"):
        Endpoint("unix:", None, None)


def ask(path: Path, url: str, body: dict[str, Any] | None = None) -> Any:
    connection = UnixConnection(str(path), timeout=240)
    headers = {"Content-Type": "application/json", "Host": "behind.a.proxy.example"}
    connection.request("POST" if body else "GET", url, json.dumps(body) if body else None, headers)
    response = connection.getresponse()
    assert response.status == 200
    value = json.loads(response.read())
    connection.close()
    return value


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-P", "-m", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, **options)


@pytest.mark.slow
def test_a_daemon_serves_commands_and_clients_on_its_socket(tmp_path: Path) -> None:
    path = tmp_path / "weft.sock"
    daemon = Daemon(tmp_path / "log", "--uds", str(path), "--api-workers", "2", "--admin-port", "0")
    try:
        assert daemon.process.stdout is not None
        assert f"at unix:{path} " in daemon.process.stdout.readline(), daemon.stderr()
        assert f"curl --unix-socket {path} http://localhost/v1/" in daemon.process.stdout.readline()
        for _ in range(8):  # both processes accept from it
            assert ask(path, "/health")["status"] == "ok"
        body = {"messages": [{"role": "user", "content": "What is 12 + 30?"}], "temperature": 0}
        assert ask(path, "/v1/chat/completions", body)["choices"][0]["message"]["content"] == "42"
        metrics = f"{daemon.admin_url()}/metrics"
        assert httpx.get(metrics, timeout=240).status_code == 200
        rebound = httpx.get(metrics, headers={"Host": "evil.example"}, timeout=240)
        assert (rebound.status_code, rebound.json()["error"]["code"]) == (403, "host_not_allowed")
        health = run("weft.server.commands.health")
        assert f"unix:{path} ok" in health.stdout
        chat = run("weft.server", "chat", "--url", f"unix:{path}", "--temperature", "0", input="What is 12 + 30?")
        assert (chat.returncode, chat.stdout.strip()) == (0, "42")
        second = run("weft.server", "serve", "--uds", str(path))
        assert (second.returncode, second.stderr.count("\n")) == (2, 1)
        assert "another process listens there" in second.stderr
        daemon.process.send_signal(signal.SIGTERM)
        assert daemon.process.wait(240) == 0
        assert not path.exists()
        with pytest.raises(FileNotFoundError):
            ask(path, "/health")
    finally:
        daemon.end()
