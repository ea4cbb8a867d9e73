"""What stands around an engine, and what engines cost each other, measured at a daemon that has nothing else to do.

Alone, one stream tells the time between its tokens and to the first one; what these have beyond the profile's
iterations stands around the engine. Where a CPU's engines share cores, streams on more and more of them tell how much
longer both take beside others: with all that works for a stream, load generator included.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from weft.deploy.fleet.profile import Features, IterationProfile, Limits, SideBySide
from weft.engine.errors import ConfigError
from weft.loadgen.client import Client, Target
from weft.loadgen.connection import Address, ConnectionBroken
from weft.loadgen.errors import LoadError
from weft.loadgen.preflight import get, prepare
from weft.loadgen.prompts import PromptMaker
from weft.loadgen.record import Record

PROMPT_TOKENS = 32
LONG_PROMPT_TOKENS = 128
"""for how long prompts take beside others: long enough that the kernel treats their engine as one that never sleeps"""
STREAM_TOKENS = 64
FIRST_TOKENS = 4
"""of a request whose first token is timed: some of a demo's are no text yet"""
STREAMS, FIRSTS = 1, 6
"""at least so many are timed"""
SECONDS = 4.0
"""for each of the figures"""
PAUSE_SECONDS = 0.1
"""requests are seldom one behind the other: who handles them has slept"""
ANSWER_SHARE = 0.25
"""of what stands around a first token, on the way back: a client cannot tell the two apart"""


class Around(NamedTuple):
    """Times in milliseconds: of a request's way to the engine, of a token's back, between two iterations."""

    request_ms: float
    answer_ms: float
    gap_ms: float
    side_by_side: SideBySide | None

    def put_into(self, profile: IterationProfile) -> IterationProfile:
        return msgspec.structs.replace(profile, **self._asdict())


class Seen(NamedTuple):
    """Mean seconds. `first`: to the first token of a short request, alone. By the number of engines that compute, from
    one: `between` one token and the next; `prompts`: to the first token of a longer request that comes to the last of
    these engines while the others have a stream each."""

    first: float
    between: tuple[float, ...]
    prompts: tuple[float, ...] = ()


def measure(url: str, profile: IterationProfile) -> Around:
    """Raises `ConfigError`."""
    return derive(watch(url, profile.limits, shared=profile.threads > 0), profile)


def watch(url: str, limits: Limits, *, shared: bool, seconds: float = SECONDS) -> Seen:
    """limits: of the engines. shared: they compute on cores that all share, so it matters how many do. seconds: for
    each of the figures. Raises `ConfigError`."""
    try:
        return asyncio.run(_watch(url, shared=shared, long_prompt=_long(limits), seconds=seconds))
    except LoadError as error:
        raise ConfigError(f"--server {url}: {error}") from None
    except (OSError, ConnectionBroken, msgspec.DecodeError) as error:
        raise ConfigError(f"--server {url}: {error or type(error).__name__}") from None


def derive(seen: Seen, profile: IterationProfile) -> Around:
    """From what was seen to what a profile has."""
    decode = profile.seconds(Features(1, 1, PROMPT_TOKENS + STREAM_TOKENS // 2, 0, 0))
    gap_ms = max(0.0, 1e3 * (seen.between[0] - decode))

    def beyond(first: float, tokens: int) -> float:
        prefill = profile.seconds(Features(tokens, 0, 0, tokens * (tokens + 1) // 2, 1))
        return 1e3 * (first - prefill) - gap_ms - profile.host_ms

    around = [beyond(seen.first, PROMPT_TOKENS)]
    if seen.prompts:
        around.append(beyond(seen.prompts[0], _long(profile.limits)))
    around_ms = max(0.0, float(np.mean(around)))
    side_by_side = None
    if len(seen.between) > 1:
        cores = len(os.sched_getaffinity(0))
        side_by_side = SideBySide(cores, _slowdown(seen.between), _slowdown(seen.prompts))
    return Around(around_ms * (1 - ANSWER_SHARE), around_ms * ANSWER_SHARE, gap_ms, side_by_side)


def mean(runs: Sequence[Seen]) -> Seen:
    """Of runs at the same daemon."""
    between, prompts = (np.mean([run[i] for run in runs], axis=0) for i in (1, 2))
    return Seen(float(np.mean([run.first for run in runs])), tuple(between.tolist()), tuple(prompts.tolist()))


def _long(limits: Limits) -> int:
    """Tokens of a longer prompt that one iteration computes."""
    return min(LONG_PROMPT_TOKENS, limits.max_num_batched_tokens)


def _slowdown(seconds: Sequence[float]) -> tuple[float, ...]:
    """More beside it make none faster."""
    slower = np.maximum.accumulate(np.array(seconds) / seconds[0])
    return tuple(float(x) for x in slower)


async def _watch(url: str, *, shared: bool, long_prompt: int, seconds: float) -> Seen:
    maker = PromptMaker("ids", time.time_ns())  # an engine may still have the pages of an earlier watch
    target = Target("", Address.parse(url), "", False, None, {}, {}, 60.0, True)
    target = (await prepare(target, maker)).target
    engines = await _engines(target.address) if shared else 1
    loop = asyncio.get_running_loop()
    client = Client(target, loop.time())
    asked = 0

    async def ask(prompt_tokens: int, output_tokens: int) -> Record | None:
        """None: all its tokens together were no text."""
        nonlocal asked
        asked += 1
        record = Record(asked, 0.0, prompt_tokens, output_tokens)
        await client.send(record, target.body(maker.prompt(asked, prompt_tokens), output_tokens))
        if record.status == 200 and record.completion_tokens == output_tokens and not record.times:
            return None
        if not record.ok:
            raise LoadError(record.error or f"status {record.status}")
        return record

    async def first(prompt_tokens: int) -> float:
        taken: list[float] = []
        end = loop.time() + seconds
        while len(taken) < FIRSTS or loop.time() < end:
            record = await ask(prompt_tokens, FIRST_TOKENS)
            if record is not None:
                taken.append(record.first - record.start)
            await asyncio.sleep(PAUSE_SECONDS)
        return float(np.mean(taken))

    async def between(streams: int) -> float:
        taken: list[float] = []
        end = loop.time() + seconds
        while len(taken) < STREAMS * streams or loop.time() < end:
            records = await asyncio.gather(*(ask(PROMPT_TOKENS, STREAM_TOKENS) for _ in range(streams)))
            taken += [(r.end - r.first) / (r.completion_tokens - 1) for r in records if r is not None]
            await asyncio.sleep(PAUSE_SECONDS)
        return float(np.mean(taken))

    async def stream(after: float) -> None:
        """One after the other."""
        await asyncio.sleep(after)
        while True:
            await ask(PROMPT_TOKENS, STREAM_TOKENS)

    async def prompts(streams: int) -> float:
        # Each begins a little later than the one before, or their prompts would always be computed together.
        beside = [asyncio.create_task(stream(0.1 * i)) for i in range(streams)]
        await asyncio.sleep(0.1 * streams)
        try:
            return await first(long_prompt)
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

    alone = await first(PROMPT_TOKENS)
    times = [await between(streams) for streams in range(1, engines + 1)]
    slowed = [await prompts(streams) for streams in range(engines)] if engines > 1 else []
    client.close()
    return Seen(alone, tuple(times), tuple(slowed))


async def _engines(address: Address) -> int:
    """How many the daemon has."""
    status, body = await get(address, "/health", {})
    if status != 200:
        raise LoadError(f"/health says {status}")
    return max(1, len(msgspec.json.decode(body).get("engines", ())))
