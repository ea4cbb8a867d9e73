"""Requests that a page of another site makes a browser send: DNS rebinding, forms, uploads, scripts."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from stub import Server, serving

from weft.server.api.browsers import BrowserChecks
from weft.server.config import ServeConfig
from weft.server.daemon.api_process import _local_hosts
from weft.server.keys import digest

pytestmark = pytest.mark.asyncio(loop_scope="module")

CROSS_SITE: list[dict[str, str]] = [
    {"Sec-Fetch-Site": "cross-site"},
    {"Sec-Fetch-Site": "same-site"},
    {"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"},
    {"Sec-Fetch-Site": "cross-site", "Origin": "null"},
    {"Sec-Fetch-Site": "unknown"},
    {"Origin": "https://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1"},
    {"Origin": "file://"},
    {"Origin": "http://["},
]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Server]:
    folder = str(tmp_path_factory.mktemp("files"))
    async with serving(allowed_host=["localhost"], files_dir=folder, admin_api_key="root") as server:
        yield server


def code_of(response: httpx.Response) -> str:
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} == error.keys()
    return str(error["code"])


async def upload(http: httpx.AsyncClient, headers: Mapping[str, str]) -> httpx.Response:
    line = {"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {"prompt": "hi"}}
    file = {"file": ("in.jsonl", json.dumps(line).encode())}
    return await http.post("/v1/files", files=file, data={"purpose": "batch"}, headers=headers)


@pytest.mark.parametrize("path", ["/v1/files", "/v1/models", "/metrics", "/health", "/", "/docs", "/nothing"])
@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "localhost.evil.example"]
)
async def test_a_name_that_an_attacker_points_here_gets_nothing(server: Server, host: str, path: str) -> None:
    for method in ("GET", "POST"):
        response = await server.http.request(method, path, headers={"Host": host, "X-Forwarded-Host": "localhost"})
        assert (response.status_code, code_of(response)) == (403, "host_not_allowed")
    assert "--allowed-host" in response.json()["error"]["message"]


async def test_a_websocket_handshake_under_an_attackers_name_gets_nothing(server: Server) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13", "Sec-WebSocket-Key": "x"}
    response = await server.http.get("/v1/files", headers={**upgrade, "Host": "evil.example"})
    assert (response.status_code, code_of(response)) == (403, "host_not_allowed")


@pytest.mark.parametrize(
    "host", ["localhost", "LocalHost:8000", "localhost.", "weft.localhost", "127.0.0.1:1", "[::1]:8000", "10.1.2.3", ""]
)
async def test_localhost_and_addresses_are_always_allowed(server: Server, host: str) -> None:
    for path in ("/v1/models", "/metrics"):
        assert (await server.http.get(path, headers={"Host": host})).status_code == 200


async def test_allowed_hosts_may_have_wildcards() -> None:
    checks = BrowserChecks(ServeConfig(allowed_host=["*.a.example", ".b.example", "C.example."]).allowed_host, [])
    for host in (
        "x.a.example",
        "x.y.a.example:1",
        "b.example",
        "x.b.example",
        "c.example",
        "c.EXAMPLE.:443",
        "localhost",
    ):
        assert checks.allows(host), host
    for host in (
        "a.example",
        "xa.example",
        "xb.example",
        "x.c.example",
        "localhost:80@evil",
        "[evil]",
        "a:b:c",
        "::1.x",
    ):
        assert not checks.allows(host), host
    assert BrowserChecks(["a", "*"], []).allows("anything")
    for odd in (
        "https://a.example",
        "a.example:8000",
        "a.example/",
        "*.*.example",
        "a*.example",
        "ex\u00e4mple",
        "a b",
    ):
        with pytest.raises(ValueError, match="not a host"):
            ServeConfig(allowed_host=[odd])


async def test_no_request_of_another_site_changes_anything(server: Server) -> None:
    paths = [getattr(route, "path", "/") for route in server.front.config.app.routes]  # type: ignore[union-attr]
    for path in {*paths, "/nothing"}:
        for method in ("POST", "PUT", "PATCH", "DELETE"):
            headers = {**CROSS_SITE[0], "Content-Type": "application/json"}
            response = await server.http.request(method, re.sub("[{}]", "", path), headers=headers, content=b"{}")
            assert response.status_code == 403, path
            assert "must not send this request" in response.text


@pytest.mark.parametrize("headers", CROSS_SITE)
async def test_a_page_of_another_site_cannot_upload(server: Server, headers: dict[str, str]) -> None:
    response = await upload(server.http, headers)
    assert (response.status_code, code_of(response)) == (403, "cross_site_request")
    assert (await server.http.get("/v1/files")).json()["data"] == []
    assert (await server.http.get("/v1/models", headers=headers)).status_code == 200  # it cannot read the answer


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Sec-Fetch-Site": "same-origin", "Origin": "https://llm.example.org"},  # the proxy changed Host
        {"Sec-Fetch-Site": "none"},
        {"Sec-Fetch-Site": "none", "Origin": "chrome-extension://abc"},
        {"Origin": "http://localhost:8000", "Host": "localhost:8000"},
        {"Origin": "https://localhost", "Host": "localhost:443"},
        {"Origin": "http://[::1]:8000", "Host": "[::1]:8000"},
        {"Origin": "https://llm.example.org", "X-Forwarded-Host": "llm.example.org, other"},
        {"Referer": "https://evil.example/"},
    ],
)
async def test_own_pages_and_other_clients_work(headers: dict[str, str]) -> None:
    async with serving(allowed_host=["localhost"], root_path="/llm") as server:
        for path in ("/v1/completions", "/llm/v1/completions"):
            assert (await server.post(path, {"prompt": "hi"}, headers=headers)).status_code == 200


async def test_origins_of_cors_may_do_what_own_pages_may(tmp_path: Path) -> None:
    page = {"Sec-Fetch-Site": "cross-site", "Origin": "https://a.example"}
    other = {"Sec-Fetch-Site": "cross-site", "Origin": "https://b.example"}
    async with serving(cors_origin=["https://a.example"], files_dir=str(tmp_path)) as server:
        assert (await upload(server.http, page)).status_code == 200
        assert (await upload(server.http, other)).status_code == 403
        assert (await server.post("/v1/completions", {"prompt": "hi"}, headers=page)).status_code == 200
        assert (await upload(server.http, {"Sec-Fetch-Site": "cross-site"})).status_code == 403
    async with serving(cors_origin=["*"], files_dir=str(tmp_path)) as server:
        assert (await upload(server.http, other)).status_code == 200


@pytest.mark.parametrize(
    ("addresses", "keys", "given", "hosts"),
    [
        (["127.0.0.1"], [], [], ["localhost"]),
        (["127.0.0.2", "::1"], [], [], ["localhost"]),
        (["127.0.0.1"], [digest("k")], [], []),
        (["0.0.0.0"], [], [], []),
        (["127.0.0.1", "0.0.0.0"], [], [], []),
        (["unix"], [], [], []),
        (["unix", "127.0.0.1"], [], [], ["localhost"]),
        (["unix", "127.0.0.1"], [digest("k")], [], []),
        (["unix"], [], ["a.example"], []),
        (["0.0.0.0"], [digest("k")], ["a.example"], []),
    ],
)
async def test_hosts_are_checked_on_loopback_without_keys_or_if_given(
    tmp_path: Path, addresses: list[str], keys: list[bytes], given: list[str], hosts: list[str]
) -> None:
    listeners = []
    for address in addresses:
        family = {"unix": socket.AF_UNIX, "::1": socket.AF_INET6}.get(address, socket.AF_INET)
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.bind(os.fspath(tmp_path / "socket") if address == "unix" else (address, 0))
        except OSError:
            pytest.skip(f"needs the address {address}")
        listeners.append(listener)
    assert _local_hosts(ServeConfig(host="::1", allowed_host=given), keys, listeners) == hosts
    for listener in listeners:
        listener.close()


async def test_a_name_that_the_server_listens_on_is_allowed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        hosts = _local_hosts(ServeConfig(host="Box.lan."), [], [listener])
    assert BrowserChecks([], [], hosts).allows("box.lan:8000")
    assert not BrowserChecks([], [], hosts).allows("evil.example")


async def test_a_unix_socket_is_checked_only_if_hosts_are_given() -> None:
    unix, tcp = ("/run/weft.sock", None), ("127.0.0.1", 8000)
    default, given = BrowserChecks([], [], ["localhost"]), BrowserChecks(["a.example"], [])
    assert default.allows("proxy.example", unix)
    assert not default.allows("proxy.example", tcp)
    assert not given.allows("proxy.example", unix)
    assert given.allows("a.example", unix)
