"""The real daemon with few file descriptors and many idle connections; `--admin-port`."""

from __future__ import annotations

import resource
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest
from free_port import free_port
from live import Daemon

pytestmark = pytest.mark.slow

LIMIT, CROWD, SECONDS = 256, 400, 240


PATHS = ("/health", "/ready", "/metrics", "/version", "/admin/models")


class Limited(NamedTuple):
    daemon: Daemon
    host: str
    port: int
    admin_url: str

    def get(self, url: str, path: str) -> httpx.Response:
        return httpx.get(url + path, headers={"authorization": "Bearer admin"}, timeout=SECONDS)

    @contextmanager
    def crowd(self, data: Callable[[int], bytes]) -> Iterator[None]:
        """Clients that each send `data(i)`, and then wait."""
        clients: list[socket.socket] = []
        try:
            for i in range(CROWD):
                clients.append(socket.create_connection((self.host, self.port), timeout=SECONDS))
                with suppress(OSError):  # the server has closed it
                    clients[-1].sendall(data(i))
            yield
        finally:
            for client in clients:
                client.close()


@pytest.fixture(scope="module")
def limited(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Limited]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    if before[1] < 2 * CROWD:
        pytest.skip("this process has too few file descriptors for so many clients")
    log = tmp_path_factory.mktemp("limited") / "stderr"
    limit = f"ulimit -n {LIMIT}; exec "
    words = ("--admin-port", "0", "--admin-api-key", "admin")
    daemon = Daemon(log, *words, prefix=("bash", "-c", f'{limit}"$@"', "-"))
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    try:
        daemon.wait_ready()
        url = httpx.URL(daemon.url)
        assert url.port is not None
        yield Limited(daemon, url.host, url.port, daemon.admin_url())
    finally:
        daemon.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_idle_connections_give_way(limited: Limited) -> None:
    request = b"GET /v1/models HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with limited.crowd(lambda i: request if i % 2 else b""):  # some have never sent a request
        for url in (limited.daemon.url, limited.admin_url):
            assert [limited.get(url, path).status_code for path in PATHS] == [200] * len(PATHS)
        body = {"prompt": "a", "max_tokens": 2}
        assert httpx.post(f"{limited.daemon.url}/v1/completions", json=body, timeout=SECONDS).status_code == 200


def test_clients_that_never_end_their_headers_give_way(limited: Limited) -> None:
    with limited.crowd(lambda _: b"GET /v1/models HTTP/1.1\r\nhost:"):
        for url in (limited.daemon.url, limited.admin_url):
            assert [limited.get(url, path).status_code for path in PATHS] == [200] * len(PATHS)


def test_probes_use_a_reserve_while_every_connection_is_busy(limited: Limited) -> None:
    lines = (
        "POST /v1/completions HTTP/1.1",
        "host: localhost",
        "content-type: application/json",
        "content-length: 9",
        "",
        "",
    )
    head = "\r\n".join(lines).encode()  # the body never comes
    with limited.crowd(lambda _: head):
        for _ in range(5):
            for url in (limited.daemon.url, limited.admin_url):
                assert [limited.get(url, path).status_code for path in PATHS] == [200] * len(PATHS)
        refused = limited.get(limited.daemon.url, "/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_descriptor")
        counted = 'weft_requests_total{endpoint="/v1/models",status="503"}'
        assert counted in limited.get(limited.admin_url, "/metrics").text
    assert "file descriptors" in limited.daemon.stderr()


def test_the_admin_port_serves_nothing_else(limited: Limited) -> None:
    elsewhere = limited.get(limited.admin_url, "/v1/models")
    assert elsewhere.status_code == 404
    assert "--admin-port" in elsewhere.json()["error"]["message"]


@pytest.mark.nightly
def test_a_successor_takes_the_admin_port_over(tmp_path: Path) -> None:
    port, admin_port = free_port(), free_port()
    words = ("--port", str(port), "--admin-port", str(admin_port), "--handover", str(tmp_path / "handover"))
    daemons = []
    try:
        for i in range(2):
            daemons.append(Daemon(tmp_path / f"stderr-{i}", *words))
            daemons[-1].wait_ready()
        assert daemons[0].process.wait(SECONDS) == 0
        for each in (port, admin_port):
            assert httpx.get(f"http://127.0.0.1:{each}/health", timeout=SECONDS).status_code == 200
    finally:
        for daemon in daemons:
            daemon.end()
