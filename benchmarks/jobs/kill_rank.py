"""Kills each rank of a daemon under load: when clients get their end, and whether daemon and GPUs recover.

    python benchmarks/jobs/kill_rank.py RANKS OPTIONS OF SERVE...

For each rank, last first: start `STREAMS` streams (100), kill the rank, measure the time until the last stream ends
(with an answer, an error event or a closed connection) and until `/ready` is 200 again. Finally send SIGTERM and print
the exit status and the GPU memory in use. The exit status is 1 if a client waited longer than `LIMIT` (2 s), a stream
closed without an error event, or the daemon did not serve again.
"""

from __future__ import annotations

import asyncio
import collections
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import aiohttp
from children import children, command_line
from free_port import free_port
from kill_engine import engines

STREAMS = int(os.environ.get("STREAMS", "100"))
LIMIT = 2.0
SILENT = "closed without an error event"
READY = float(os.environ.get("READY_SECONDS", "150"))


def processes(daemon: int, ranks: int) -> list[int]:
    """Process ids by rank: the engine is rank 0; the command lines of its children name their ranks."""
    found: dict[int, int] = {}
    for pid in engines(daemon):
        for other in children(pid):
            words = command_line(other)
            if "weft.engine.ranks.process" in words:
                found[0] = pid
                found[int(words[words.index("weft.engine.ranks.process") + 1])] = other
    if len(found) != ranks:
        raise SystemExit(f"expected {ranks} ranks, found {found}")
    return [found[rank] for rank in range(ranks)]


async def stream(
    session: aiohttp.ClientSession, url: str, model: str, number: int, began: asyncio.Semaphore
) -> tuple[float, str]:
    """When the stream ended, and how."""
    body = {"model": model, "prompt": f"{number} + {number} =", "max_tokens": 1500, "ignore_eos": True, "stream": True}
    how = SILENT
    try:
        async with session.post(f"{url}/v1/completions", json=body) as answer:
            if answer.status != 200:
                return time.monotonic(), f"status {answer.status}"
            begun = False
            async for line in answer.content:
                if not line.startswith(b"data:"):
                    continue
                if not begun:
                    begun = True
                    began.release()
                if line.strip() == b"data: [DONE]":
                    how = "done" if how != "an error event" else how
                elif b'"error"' in line[:40]:
                    how = "an error event"
    except aiohttp.ClientError as error:
        how = type(error).__name__
    return time.monotonic(), how


async def under_load(url: str, pid: int) -> tuple[float, collections.Counter[str]]:
    """Seconds from the kill to the last stream's end, and how streams ended."""
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as session:
        async with session.get(f"{url}/v1/models") as answer:
            model = (await answer.json())["data"][0]["id"]
        began = asyncio.Semaphore(0)
        tasks = [asyncio.create_task(stream(session, url, model, n, began)) for n in range(STREAMS)]
        for _ in range(STREAMS // 2):
            await asyncio.wait_for(began.acquire(), 60)
        await asyncio.sleep(0.5)
        killed = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        ends = await asyncio.gather(*tasks)
    return max(end for end, _ in ends) - killed, collections.Counter(how for _, how in ends)


async def ready(url: str, seconds: float, daemon: subprocess.Popen[bytes]) -> float | None:
    begun = time.monotonic()
    async with aiohttp.ClientSession() as session:
        while time.monotonic() - begun < seconds and daemon.poll() is None:
            try:
                async with session.get(f"{url}/ready") as answer:
                    if answer.status == 200:
                        return time.monotonic() - begun
            except aiohttp.ClientError:
                pass
            await asyncio.sleep(0.1)
    return None


def memory() -> str:
    if not shutil.which("nvidia-smi"):
        return "no GPU"
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"]
    return " ".join(subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n"))


def main() -> None:
    ranks, options = int(sys.argv[1]), sys.argv[2:]
    port = free_port()
    url, out, bad = f"http://127.0.0.1:{port}", Path(os.environ["OUT"]), False
    command = [sys.executable, "-m", "weft.server", "serve", "--port", str(port), "--tensor-parallel-size", str(ranks)]
    with (out / "serve.log").open("wb") as log:
        daemon = subprocess.Popen([*command, *options], stdout=log, stderr=log, stdin=subprocess.DEVNULL)
    rows = []
    try:
        took = asyncio.run(ready(url, READY, daemon))
        if took is None:
            raise SystemExit(f"not ready:\n{(out / 'serve.log').read_text()[-3000:]}")
        print(f"ready after {took:.1f} s; memory {memory()}", flush=True)
        for rank in reversed(range(ranks)):
            pid = processes(daemon.pid, ranks)[rank]
            last, how = asyncio.run(under_load(url, pid))
            again = asyncio.run(ready(url, READY, daemon))
            rows.append({"rank": rank, "last_end_s": last, "ends": dict(how), "ready_again_s": again})
            print(f"rank {rank}: {STREAMS} streams, the last ended after {last:.2f} s {dict(how)}; ready again "
                  f"after {again and round(again, 1)} s", flush=True)  # fmt: skip
            bad |= last > LIMIT or again is None or SILENT in how
            if again is None:
                break
        daemon.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        status = daemon.wait(30)
        print(f"SIGTERM: exit status {status} after {time.monotonic() - begun:.1f} s; memory {memory()}", flush=True)
    finally:
        daemon.kill()
        (out / "kills.json").write_text(json.dumps(rows, indent=1))
    sys.exit(bad)


if __name__ == "__main__":
    main()
