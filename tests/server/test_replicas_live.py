"""Three engines of the demo model on one port: one is killed, others are restarted, the daemon drains; clients and
counters agree on all of it. Real processes, one daemon for all cases, which run in order."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import os
import signal
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from live import Daemon, running
from prometheus_client.parser import text_string_to_metric_families

pytestmark = [pytest.mark.slow, pytest.mark.asyncio(loop_scope="module")]

OPTIONS = ("--replicas", "3", "--api-workers", "2", "--admin-api-key", "secret", "--page-size", "16")
SMALL = ("--max-model-len", "1024", "--max-num-seqs", "16", "--num-pages", "400", "--drain-timeout", "240")
ADMIN = {"Authorization": "Bearer secret"}
EACH_ITS_OWN = httpx.Limits(max_connections=None, max_keepalive_connections=0)
ENGINES = range(3)


class Ledger:
    """The results of clients."""

    def __init__(self) -> None:
        self.statuses: Counter[int] = Counter()
        self.ends: Counter[str] = Counter()
        """by finish reason, or error code"""
        self.prompt_tokens = 0
        self.tokens = 0

    def __sub__(self, earlier: Ledger) -> Ledger:
        less = Ledger()
        less.statuses, less.ends = self.statuses - earlier.statuses, self.ends - earlier.ends
        less.prompt_tokens = self.prompt_tokens - earlier.prompt_tokens
        less.tokens = self.tokens - earlier.tokens
        return less

    async def ask(self, http: httpx.AsyncClient, begun: asyncio.Event | None = None, **fields: Any) -> str:
        """Send a request and return how it ended."""
        body = {"prompt": "What is 12 + 30?", "temperature": 0, "ignore_eos": True, **fields}
        if not body.get("stream"):
            response = await http.post("/v1/completions", json=body)
            self.statuses[response.status_code] += 1
            answer = response.json()
            return self._end(answer.get("usage"), answer)
        usage, last = None, None
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            self.statuses[response.status_code] += 1
            with contextlib.suppress(httpx.RemoteProtocolError):  # a broken one ends without its last chunk
                async for line in response.aiter_lines():
                    if line.startswith("data: {"):
                        event = json.loads(line[6:])
                        usage = event.get("usage") or usage
                        last = event if event.get("choices") or "error" in event else last
                        if begun is not None:
                            begun.set()
        return self._end(usage, last)

    def _end(self, usage: dict[str, int] | None, last: dict[str, Any] | None) -> str:
        if usage is not None:
            self.prompt_tokens += usage["prompt_tokens"]
            self.tokens += usage["completion_tokens"]
        assert last is not None
        end = last["error"]["code"] if "error" in last else last["choices"][0]["finish_reason"]
        self.ends[end or "nothing"] += 1
        return str(end)


class Figures:
    def __init__(self, text: str) -> None:
        families = text_string_to_metric_families(text)
        self._samples = {(s.name, *s.labels.values()): s.value for family in families for s in family.samples}

    def __call__(self, name: str, *labels: str) -> float:
        return self._samples.get((f"weft_{name}", *labels), 0.0)

    def check(self) -> None:
        """The metrics of the engines add up to the totals."""
        for name in ("prompt_tokens_total", "generation_tokens_total", "requests_running"):
            assert sum(self(f"engine_{name}", str(i)) for i in ENGINES) == self(name), name


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(tmp_path_factory.mktemp("replicas"), *OPTIONS, *SMALL) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return Ledger()


@contextlib.asynccontextmanager
async def client(daemon: Daemon) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=daemon.url, timeout=240, limits=EACH_ITS_OWN) as http:
        yield http


async def figures(http: httpx.AsyncClient) -> Figures:
    found = Figures((await http.get("/metrics")).text)
    found.check()
    return found


async def answered(http: httpx.AsyncClient, ledger: Ledger) -> bool:
    """Wait until all answers are counted, which happens after an answer's last byte."""
    found = await figures(http)
    return all(found("requests_total", "/v1/completions", str(s)) == n for s, n in ledger.statuses.items())


async def wait_until_all_counted(http: httpx.AsyncClient, ledger: Ledger) -> Figures:
    """Wait until either API process has the engines' counts of the clients' requests."""
    for _ in range(4):  # on separate connections
        await until(lambda: _heard(http, ledger))
    return await figures(http)


async def _heard(http: httpx.AsyncClient, ledger: Ledger) -> bool:
    found = await figures(http)
    return found("generation_tokens_total") >= ledger.tokens and not found("requests_running")


async def states(http: httpx.AsyncClient) -> list[str]:
    response = await http.get("/ready")
    assert response.status_code == 200, response.text
    return [engine["state"] for engine in response.json()["engines"]]


async def until(condition: Callable[[], Any], seconds: float = 240) -> None:
    async with asyncio.timeout(seconds):
        while not await condition():
            await asyncio.sleep(0.05)


async def all_serve(http: httpx.AsyncClient) -> bool:
    return all([await states(http) == ["serving"] * 3 for _ in range(4)])


@contextlib.asynccontextmanager
async def some_load(http: httpx.AsyncClient, ledger: Ledger) -> AsyncIterator[None]:
    """Continuous requests, streams and others."""
    enough = asyncio.Event()

    async def go_on(i: int) -> None:
        while not enough.is_set():
            await ledger.ask(http, prompt=f"What is {i} + 30?", max_tokens=12, stream=bool(i % 2))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(enough.wait(), 0.6)

    asking = [asyncio.create_task(go_on(i)) for i in range(4)]
    try:
        yield
    finally:
        enough.set()
        await asyncio.gather(*asking)


async def test_requests_are_distributed_and_counted(daemon: Daemon, ledger: Ledger) -> None:
    assert "3 engines with 400 KV pages" in daemon.ready_line
    async with client(daemon) as http:
        assert await states(http) == ["serving"] * 3
        requested = [{"prompt": f"{i} times two is", "max_tokens": 8, "stream": bool(i % 2)} for i in range(24)]
        ends = await asyncio.gather(*(ledger.ask(http, **fields) for fields in requested))
        assert set(ends) == {"length"}
        found = await wait_until_all_counted(http, ledger)
        each = [found("engine_generation_tokens_total", str(i)) for i in ENGINES]
        assert min(each) > 0
        assert max(each) <= 2 * sum(each) / 3
        assert sum(each) == ledger.tokens == 24 * 8
        assert found("prompt_tokens_total") == ledger.prompt_tokens
        assert found("finished_total", "length") == 24
        await until(lambda: answered(http, ledger))


def weights_of(pid: int) -> set[str]:
    """The memory files that an engine has mapped for weights, by their inodes."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split()[4] for line in maps if "memfd:weft-weights" in line}


def assert_one_set_of_weights(daemon: Daemon) -> None:
    (one,) = set.union(*(weights_of(pid) for pid in daemon.children("weft.engine.process")))
    assert all(weights_of(pid) == {one} for pid in daemon.children("weft.engine.process"))


async def test_engines_share_one_set_of_weights(daemon: Daemon) -> None:
    assert daemon.process.stdout is not None
    assert "shared weights" in daemon.process.stdout.readline()
    assert_one_set_of_weights(daemon)


async def test_conversations_find_their_pages(daemon: Daemon, ledger: Ledger) -> None:
    async with client(daemon) as http:
        before = await figures(http)

        async def talk(i: int) -> int:
            """Prompt tokens that could be found: the full pages of the previous round."""
            text, could = f"Conversation {i}: " + "one two three four " * 8, 0
            for _ in range(4):
                response = await http.post(
                    "/v1/completions", json={"prompt": text, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
                )
                ledger.statuses[200] += 1
                answer = response.json()
                ledger._end(answer["usage"], answer)
                could += answer["usage"]["total_tokens"] // 16 * 16
                last, text = text, text + answer["choices"][0]["text"] + " and then? "
                assert text.startswith(last)
            return could - answer["usage"]["total_tokens"] // 16 * 16

        could = sum(await asyncio.gather(*(talk(i) for i in range(6))))
        after = await wait_until_all_counted(http, ledger)
        hits = [
            after("engine_prefix_hit_tokens_total", str(i)) - before("engine_prefix_hit_tokens_total", str(i))
            for i in ENGINES
        ]
        assert sum(hits) >= 0.6 * could  # an API process with late news may route some elsewhere
        assert sum(hit > 0 for hit in hits) > 1


async def test_a_killed_engine_ends_only_the_streams_that_had_started_there(daemon: Daemon, ledger: Ledger) -> None:
    async with client(daemon) as http:
        before = await figures(http)
        async with twelve(daemon, http, ledger) as (streams, whole):
            there = await figures(http)
            assert min(there("engine_requests_running", str(i)) for i in ENGINES) >= 2
            os.kill(daemon.children("weft.engine.process")[1], signal.SIGKILL)
        await until(lambda: restarted(http))
        after = await figures(http)
        (killed,) = [i for i in ENGINES if after("engine_restarts_total", str(i))]
        assert set(await asyncio.gather(*whole)) == {"length"}
        ends = Counter(await asyncio.gather(*streams))
        assert set(ends) == {"length", "engine_dead"}
        await until(lambda: all_serve(http))
        after = await wait_until_all_counted(http, ledger)  # and of those that were restarted
        retried = after("retried_total") - before("retried_total")
        assert ends["engine_dead"] + retried == there("engine_requests_running", str(killed))
        assert after("aborted_total", "engine") == after("finished_total", "abort") == ends["engine_dead"]
        assert after("engine_restarts_total", str(killed)) == 1
        assert_one_set_of_weights(daemon)


@contextlib.asynccontextmanager
async def twelve(
    daemon: Daemon, http: httpx.AsyncClient, ledger: Ledger
) -> AsyncIterator[tuple[list[asyncio.Task[str]], list[asyncio.Task[str]]]]:
    """Six running streams and six other requests. The engines are stopped within this context."""
    while True:
        begun = [asyncio.Event() for _ in range(6)]
        streams = [
            asyncio.create_task(ledger.ask(http, event, prompt=f"Count from {i}:", max_tokens=300, stream=True))
            for i, event in enumerate(begun)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        whole = [asyncio.create_task(ledger.ask(http, prompt=f"{i} and", max_tokens=200)) for i in range(6)]
        while not any(task.done() for task in (*streams, *whole)):
            with daemon.held():
                found = await figures(http)
                load = (await http.get("/load")).json()["server_load"]
                if load == found("requests_running") == 12:
                    yield streams, whole
                    return
            await asyncio.sleep(0.02)
        await asyncio.gather(*streams, *whole)  # this process is so late that some have ended


async def restarted(http: httpx.AsyncClient) -> bool:
    found = await figures(http)
    return sum(found("engine_restarts_total", str(i)) for i in ENGINES) == 1


@pytest.mark.parametrize("requested", [[2], pytest.param([], marks=pytest.mark.nightly)], ids=["one", "all"])
async def test_engines_are_restarted_one_by_one_without_a_failed_request(
    daemon: Daemon, ledger: Ledger, requested: list[int]
) -> None:
    async with client(daemon) as http:
        engines = daemon.children("weft.engine.process")
        logged = daemon.stderr().count("serves again after") + (len(requested) or len(engines))
        before, had = await figures(http), copy.deepcopy(ledger)
        async with some_load(http, ledger):
            body = {"engines": requested}
            twice = (http.post("/admin/engines/restart", json=body, headers=ADMIN) for _ in range(2))
            assert sorted([response.status_code for response in await asyncio.gather(*twice)]) == [202, 409]
            await until(lambda: asyncio.to_thread(lambda: daemon.stderr().count("serves again after") >= logged))
            await until(lambda: all_serve(http))
        assert_one_set_of_weights(daemon)
        kept = set(engines) & set(daemon.children("weft.engine.process"))
        assert len(kept) == (2 if requested else 0)
        had = ledger - had
        assert set(had.ends) == {"length"}
        assert set(had.statuses) == {200}
        await until(lambda: answered(http, ledger))
        after = await wait_until_all_counted(http, ledger)
        assert after("generation_tokens_total") - before("generation_tokens_total") == had.tokens
        assert after("prompt_tokens_total") - before("prompt_tokens_total") == had.prompt_tokens
        restarts = [found("engine_restarts_total", str(i)) for found in (before, after) for i in ENGINES]
        assert restarts[:3] == restarts[3:]  # those were not failures


async def test_open_requests_finish_when_the_daemon_exits_even_during_a_restart_of_engines(
    daemon: Daemon, ledger: Ledger
) -> None:
    async with client(daemon) as http:
        await until(lambda: answered(http, ledger))
        found = await wait_until_all_counted(http, ledger)
        assert found("finished_total", "length") == ledger.ends["length"]
        assert found("finished_total", "abort") == ledger.ends["engine_dead"]
        assert not found("requests_running") + found("requests_waiting")
        begun = [asyncio.Event() for _ in range(6)]
        streams = [
            asyncio.create_task(ledger.ask(http, event, max_tokens=60 * i, stream=True))
            for i, event in enumerate(begun, 1)
        ]
        await asyncio.gather(*(event.wait() for event in begun))
        assert (await http.post("/admin/engines/restart", json={}, headers=ADMIN)).status_code == 202
        known = len(daemon.stderr())
        daemon.process.send_signal(signal.SIGTERM)
        assert set(await asyncio.gather(*streams)) == {"length"}
    assert await asyncio.to_thread(daemon.process.wait, 240) == 0
    assert "Traceback" not in daemon.stderr()
    assert "did not come back" not in daemon.stderr()[known:]
    assert "continue to serve" not in daemon.stderr()[known:]


async def test_a_given_up_engine_returns_when_a_restart_is_requested(tmp_path: Path) -> None:
    few = ("--replicas", "2", "--engine-restart-limit", "1", "--admin-api-key", "secret", "--num-pages", "400")
    with running(tmp_path, *few) as daemon:
        kept, given_up = daemon.children("weft.engine.process")
        os.kill(given_up, signal.SIGKILL)
        (next_one,) = await asyncio.to_thread(others, daemon, {kept, given_up})
        os.kill(next_one, signal.SIGKILL)
        await asyncio.to_thread(daemon.wait_for_log, "the other engines continue to serve")
        async with client(daemon) as http:
            assert sorted(await states(http)) == ["dead", "serving"]
            (failure,) = await failures(http)
            assert "SIGKILL" in failure["message"]
            assert time.time() - 240 < failure["at"] <= time.time()
            last = (await states(http)).index("serving")
            for requested, status in (({"engines": [last]}, 409), ({}, 202)):
                response = await http.post("/admin/engines/restart", json=requested, headers=ADMIN)
                assert response.status_code == status, response.text
            await asyncio.to_thread(daemon.wait_for_log, "serves again after", 2)
            await until(lambda: both_serve(http))
            assert await failures(http) == [failure], "an end that was asked for is none"
            assert len(daemon.children("weft.engine.process")) == 2


async def failures(http: httpx.AsyncClient) -> list[dict[str, Any]]:
    engines = (await http.get("/admin/engines", headers=ADMIN)).json()["engines"]
    return [engine["last_failure"] for engine in engines if "last_failure" in engine]


async def both_serve(http: httpx.AsyncClient) -> bool:
    return await states(http) == ["serving"] * 2


def others(daemon: Daemon, known: set[int]) -> set[int]:
    """Engine processes that have started since, once there are any."""
    end = time.monotonic() + 240
    while not (found := set(daemon.children("weft.engine.process")) - known):
        assert time.monotonic() < end
        time.sleep(0.02)
    return found
