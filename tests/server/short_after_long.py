"""Sends ten short prompts after twenty long ones, over HTTP, with and without a share for the shortest.

Run it by hand (`python tests/server/short_after_long.py --rounds 3`); it asserts nothing. The requests alternate
between two daemons with the demo model, one for each share, so that other work on the machine slows both.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import NamedTuple

import httpx

sys.path.insert(0, str(Path(__file__).parent))
from live import Daemon, running

LONG, SHORT = 1900, 20
LIMITS = httpx.Limits(max_connections=None)


class Round(NamedTuple):
    alone_ms: list[float]
    """ms to the first token of the short ones, during decodes of the long ones"""
    after_ms: list[float]
    """ms of those that arrive half a second after the long ones"""
    seconds: float
    """seconds for the long ones and the short ones after them"""
    cpu_seconds: float
    """CPU seconds of the engine for these"""


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / 100


async def first_token(http: httpx.AsyncClient, prompt: list[int], output: int, begun: asyncio.Event | None) -> float:
    """Send the prompt and read the whole answer. Returns the milliseconds to its first event."""
    body = {"prompt": prompt, "max_tokens": output, "ignore_eos": True, "stream": True, "temperature": 0}
    start, first = time.monotonic(), 0.0
    async with http.stream("POST", "/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if line.startswith("data:") and not first:  # not the comments that keep a waiting stream alive
                first = time.monotonic() - start
                if begun is not None:
                    begun.set()
    return 1000 * first


async def one_round(daemon: Daemon, seed: int, output: int) -> Round:
    chance = random.Random(seed)

    def send(length: int, tokens: int, begun: asyncio.Event | None = None) -> asyncio.Task[float]:
        return asyncio.create_task(first_token(http, chance.choices(range(10, 200), k=length), tokens, begun))

    async with httpx.AsyncClient(base_url=daemon.url, timeout=600, limits=LIMITS) as http:
        begun = [asyncio.Event() for _ in range(20)]
        long = [send(LONG, 3 * output, event) for event in begun]
        for event in begun:
            await event.wait()
        alone = await asyncio.gather(*(send(SHORT, 8) for _ in range(10)))
        await asyncio.gather(*long)
        start, used = time.monotonic(), cpu_seconds(daemon.engine_pid)
        long = [send(LONG, output) for _ in range(20)]
        await asyncio.sleep(0.5)
        after_long = await asyncio.gather(*(send(SHORT, 8) for _ in range(10)))
        await asyncio.gather(*long)
        return Round(alone, after_long, time.monotonic() - start, cpu_seconds(daemon.engine_pid) - used)


def spread(values: list[float], digits: int = 0) -> str:
    return f"{median(values):,.{digits}f} ({min(values):,.{digits}f}-{max(values):,.{digits}f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3, help="of each share [3]")
    parser.add_argument("--output", type=int, default=40, help="tokens that each long prompt is answered with [40]")
    arguments = parser.parse_args()
    rounds: dict[float, list[Round]] = {0.0: [], 0.25: []}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / str(share) for share in rounds]
        for path in paths:
            path.mkdir()
        with (
            running(paths[0], "--fair-prefill-share", "0", "--no-prefix-caching") as without,
            running(paths[1], "--fair-prefill-share", "0.25", "--no-prefix-caching") as with_share,
        ):
            for k in range(arguments.rounds):
                for share in (0.25, 0.0) if k % 2 else (0.0, 0.25):
                    made = asyncio.run(one_round(with_share if share else without, k, arguments.output))
                    rounds[share].append(made)
                    ttft = f"{median(made.alone_ms):,.0f} ms alone, {median(made.after_ms):,.0f} ms after"
                    used = f"{made.seconds:.1f} s, {made.cpu_seconds:.2f} CPU s"
                    print(f"round {k}, share {share}: {ttft}, {used}", flush=True)
    print("medians (least-most): ms of each round's median, seconds of each round")
    for share, made_all in rounds.items():
        alone = spread([median(made.alone_ms) for made in made_all])
        after = spread([median(made.after_ms) for made in made_all])
        seconds = spread([made.seconds for made in made_all], 1)
        cpu = spread([made.cpu_seconds for made in made_all], 2)
        print(f"share {share}: alone {alone} ms, after {after} ms, all {seconds} s, engine {cpu} CPU s")


if __name__ == "__main__":
    main()
