"""Every process stays within the announced memory, and steady-state memory does not grow.

WEFT_ENDURANCE_REQUESTS=20000 (`make endurance`) sends that many; only then is there a steady state.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import pytest_asyncio
from live import Daemon, running

REQUESTS = int(os.environ.get("WEFT_ENDURANCE_REQUESTS", "300"))
LONG = 5000
"""requests from which memory is in a steady state: half of them warm every cache up"""
CLIENTS = 24
MIB = 2**20
ROOM = 24 * MIB
"""MiB that a process may still grow by, in addition to a twentieth, because allocators vary"""
SAMPLES = 20
PROCESS_MIB = 200
"""MiB of a process without a model"""
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300 + REQUESTS)]


@pytest_asyncio.fixture
async def daemon(tmp_path: Path) -> AsyncIterator[Daemon]:
    options = ("--api-workers", "2", "--num-pages", "300", "--dtype", "bfloat16", "--log-level", "warning")
    with running(tmp_path, *options, "--max-num-seqs", "32", "--host-kv-gib", "0.05") as daemon:
        yield daemon


def rss(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def resources(pid: int) -> tuple[int, int]:
    """Open files and threads."""
    return len(list(Path(f"/proc/{pid}/fd").iterdir())), len(list(Path(f"/proc/{pid}/task").iterdir()))


Kind = Callable[[httpx.AsyncClient, random.Random], Awaitable[None]]


async def completion(client: httpx.AsyncClient, **body: object) -> dict[str, object]:
    answer = await client.post(COMPLETIONS, json={"temperature": 0, **body})
    while answer.status_code == 503 and answer.json()["error"]["code"] == "grammar_compilers_busy":
        await asyncio.sleep(float(answer.headers["retry-after"]))  # two dozen clients, and others on the same cores
        answer = await client.post(COMPLETIONS, json={"temperature": 0, **body})
    assert answer.status_code == 200, answer.text
    result: dict[str, object] = answer.json()
    return result


async def a_sum(client: httpx.AsyncClient, rng: random.Random) -> None:
    a, b = rng.randrange(100), rng.randrange(100)
    answer = await client.post(CHAT, json={"messages": [{"role": "user", "content": f"What is {a} + {b}?"}]})
    assert answer.json()["choices"][0]["message"]["content"].strip(" .") == str(a + b)


async def a_stream(client: httpx.AsyncClient, rng: random.Random) -> None:
    body = {"prompt": words(rng, 5), "max_tokens": rng.randrange(1, 30), "stream": True, "seed": rng.randrange(99)}
    async with client.stream("POST", COMPLETIONS, json=body) as answer:
        lines = [line async for line in answer.aiter_lines()]
    assert "data: [DONE]" in lines


async def several(client: httpx.AsyncClient, rng: random.Random) -> None:
    await completion(client, prompt=words(rng, 8), n=3, temperature=0.8, max_tokens=rng.randrange(1, 12))


async def penalties(client: httpx.AsyncClient, rng: random.Random) -> None:
    options = {"repetition_penalty": 1.2, "presence_penalty": 0.5, "logit_bias": {"17": -5}, "logprobs": 5}
    await completion(client, prompt=words(rng, 12), max_tokens=rng.randrange(1, 12), **options)


async def a_grammar(client: httpx.AsyncClient, rng: random.Random) -> None:
    pattern = f"[a-{rng.choice('bcdefgh')}]{{1,{rng.randrange(2, 6)}}}"
    result = await completion(client, prompt=words(rng, 3), max_tokens=12, structured_outputs={"regex": pattern})
    assert re.fullmatch(pattern, result["choices"][0]["text"])  # type: ignore[index]


async def a_long_prompt(client: httpx.AsyncClient, rng: random.Random) -> None:
    await completion(client, prompt=words(rng, rng.randrange(50, 500)), max_tokens=4)


async def scored(client: httpx.AsyncClient, rng: random.Random) -> None:
    await completion(client, prompt=words(rng, rng.randrange(3, 40)), max_tokens=0, echo=True, logprobs=1)


async def leaves(client: httpx.AsyncClient, rng: random.Random) -> None:
    body = {"prompt": words(rng, 6), "max_tokens": 200, "stream": True, "ignore_eos": True}
    async with client.stream("POST", COMPLETIONS, json=body) as answer:
        async for _ in answer.aiter_lines():
            return


KINDS: tuple[Kind, ...] = (a_sum, a_stream, several, penalties, a_grammar, a_long_prompt, scored, leaves)


def words(rng: random.Random, count: int) -> str:
    return " ".join(rng.choice(("apple", "river", "seven", "blue", "what", "stone", "3", "41")) for _ in range(count))


async def test_memory_is_flat_and_within_the_announced_limit(daemon: Daemon) -> None:
    assert daemon.process.stdout is not None
    line = daemon.process.stdout.readline()
    pattern = r"memory: the engine takes up to ([0-9.]+) GiB \(.*\); ([0-9.]+) GiB of host memory.*\n"
    announced = re.fullmatch(pattern, line)
    assert announced, line
    budget = (float(announced[1]) + float(announced[2])) * 2**30
    pids = [daemon.process.pid, daemon.engine_pid, *daemon.children("weft.server.daemon.worker")]
    assert len(pids) == 4
    rng, left, sent = random.Random(5), iter(range(REQUESTS)), Counter[str]()
    sizes: list[list[int]] = []

    async def one_client(client: httpx.AsyncClient, own: random.Random) -> None:
        for i in left:
            kind = own.choice(KINDS)
            await kind(client, own)
            sent[kind.__name__] += 1
            if i % max(1, REQUESTS // SAMPLES) == 0:
                sizes.append([rss(pid) for pid in pids])

    async def all_clients() -> None:
        limits = httpx.Limits(max_connections=CLIENTS, max_keepalive_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=daemon.url, timeout=300, limits=limits) as client:
            await asyncio.gather(*(one_client(client, random.Random(rng.random())) for _ in range(CLIENTS)))

    await all_clients()
    sizes.append([rss(pid) for pid in pids])
    report = {"requests": dict(sent), "announced_mib": round(budget / MIB)}
    report |= {"rss_mib (daemon, engine, api, api)": [[round(size / MIB) for size in row] for row in sizes]}
    report |= {"files_and_threads": [resources(pid) for pid in pids]}
    print(json.dumps(report, indent=1))
    if path := os.environ.get("WEFT_ENDURANCE_REPORT"):
        Path(path).write_text(json.dumps(report))
    assert sent.total() == REQUESTS
    assert set(sent) == {kind.__name__ for kind in KINDS}
    for column, limit in enumerate((PROCESS_MIB * MIB, budget, PROCESS_MIB * MIB, PROCESS_MIB * MIB)):
        assert max(row[column] for row in sizes) <= limit, report
    if REQUESTS >= LONG:
        for column in range(len(pids)):
            middle = max(row[column] for row in sizes[: len(sizes) // 2])
            assert sizes[-1][column] <= 1.05 * middle + ROOM, report
    assert "Traceback" not in daemon.stderr()
