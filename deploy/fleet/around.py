"""What stands around an engine: HTTP, text, routing and sockets, measured at a daemon that has nothing else to do."""

from __future__ import annotations

import asyncio

import numpy as np

from weft.deploy.fleet.profile import Features, IterationProfile
from weft.engine.errors import ConfigError
from weft.loadgen.client import Client, Target
from weft.loadgen.connection import Address
from weft.loadgen.errors import LoadError
from weft.loadgen.preflight import prepare
from weft.loadgen.prompts import PromptMaker
from weft.loadgen.record import Record

REQUESTS = 40
PROMPT_TOKENS = 32
OUTPUT_TOKENS = 4
"""some of a demo's first tokens are no text yet"""
ANSWER_SHARE = 0.25
"""of that time, on the way back: a client cannot tell the two apart"""


def measure(url: str, profile: IterationProfile) -> tuple[float, float]:
    """Milliseconds of a request's way to the engine, and of a token's back: what the median time to the first token
    has beyond the iteration that computes it. Raises `ConfigError`."""
    maker = PromptMaker("ids", 1)
    target = Target("", Address.parse(url), "", False, None, {}, {}, 60.0, True)
    try:
        ready = asyncio.run(prepare(target, maker))
        seconds = asyncio.run(_ask(ready.target, maker))
    except LoadError as error:
        raise ConfigError(f"--server {url}: {error}") from None
    iteration = profile.seconds(Features(PROMPT_TOKENS, 0, 0, PROMPT_TOKENS * (PROMPT_TOKENS + 1) // 2, 1))
    around = max(0.0, 1e3 * (seconds - iteration) - profile.gap_ms - profile.host_ms)
    return around * (1 - ANSWER_SHARE), around * ANSWER_SHARE


async def _ask(target: Target, maker: PromptMaker) -> float:
    """Median seconds to the first token of short requests, one after the other."""
    loop = asyncio.get_running_loop()
    client = Client(target, loop.time())
    taken = []
    for i in range(REQUESTS):
        record = Record(i, 0.0, PROMPT_TOKENS, OUTPUT_TOKENS)
        await client.send(record, target.body(maker.prompt(i, PROMPT_TOKENS), OUTPUT_TOKENS))
        if not record.ok:
            raise LoadError(record.error or f"status {record.status}")
        taken.append(record.first - record.start)
        await asyncio.sleep(0.02)
    client.close()
    return float(np.median(taken))
