"""Measures, at an idle daemon, the time spent outside the engine, and how much engines slow each other down.

A single stream gives the time to the first token and between tokens. What exceeds the profile's iterations is overhead
outside the engine. If a CPU's engines share cores, streams on more and more engines give the slowdown of both times and
its spread. It includes everything that works for a stream, also the load generator.

Prompts have many lengths, as in a load: a CPU's first iteration of a size takes longer than its second.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import msgspec
import numpy as np

from weft.deploy.fleet.clock import evenly
from weft.deploy.fleet.profile import Features, Floats, IterationProfile, Limits, SideBySide
from weft.engine.errors import ConfigError
from weft.loadgen.client import Client, Target
from weft.loadgen.connection import Address, ConnectionBroken
from weft.loadgen.errors import LoadError
from weft.loadgen.preflight import get, prepare
from weft.loadgen.prompts import PromptMaker
from weft.loadgen.record import Record

PROMPT_TOKENS = (16, 240)
"""Shortest and longest prompt, if an iteration takes that many tokens."""
STREAM_TOKENS = 64
FIRST_TOKENS = 4
"""Output tokens of a request whose first token is timed: the demo's first tokens may have no text yet."""
STREAMS, FIRSTS = 1, 6
"""Minimum number of streams and of first tokens to time."""
SECONDS = 4.0
"""Seconds for each of the figures."""
PAUSE_SECONDS = 0.1
"""Pause between requests, so that the threads that handle them sleep, as they do under a normal load."""
ANSWER_SHARE = 0.25
"""Fraction of a first token's overhead after the engine. A client cannot measure the two directions separately."""
SHARES = 20
"""Number of equal shares of sorted times: a spread has the mean of each share."""


class Overhead(NamedTuple):
    """Milliseconds from a client to the engine, from the engine to a client, and between two iterations.

    `silent`: see `IterationProfile`.
    """

    request_ms: float
    answer_ms: float
    gap_ms: float
    side_by_side: SideBySide | None
    silent: tuple[int, ...] = ()

    def put_into(self, profile: IterationProfile) -> IterationProfile:
        return msgspec.structs.replace(profile, **self._asdict())


class Observations(NamedTuple):
    """Seconds, by the number of busy engines, from one."""

    between: tuple[tuple[float, ...], ...]
    """Time between two tokens: means of equal shares, ascending. Their mean is the mean over streams."""
    firsts: tuple[tuple[tuple[int, float], ...], ...]
    """Prompt tokens and time to the first token of requests to the last engine while the others have a stream each."""
    silent: tuple[int, ...] = ()
    """Tokens of each stream before its first token with text."""


def measure(url: str, profile: IterationProfile) -> Overhead:
    """Measure at the daemon at `url`. Raises `ConfigError`."""
    return derive(watch(url, profile.limits, shared=profile.threads > 0), profile)


def watch(url: str, limits: Limits, *, shared: bool, seconds: float = SECONDS) -> Observations:
    """Time streams and first tokens.

    limits: those of the engines. shared: whether the engines share cores. seconds: for each figure; first tokens get
    this time for every busy engine. Raises `ConfigError`.
    """
    try:
        return asyncio.run(_watch(url, shared=shared, lengths=_lengths(limits), seconds=seconds))
    except LoadError as error:
        raise ConfigError(f"--server {url}: {error}") from None
    except (OSError, ConnectionBroken, msgspec.DecodeError) as error:
        raise ConfigError(f"--server {url}: {error or type(error).__name__}") from None


def derive(seen: Observations, profile: IterationProfile) -> Overhead:
    """The fields of a profile that follow from the observations."""
    context = sum(_range(profile.limits)) // 2 + STREAM_TOKENS // 2
    gap_ms = max(0.0, 1e3 * float(np.mean(seen.between[0]) - profile.seconds(Features(1, 1, context, 0, 0))))

    def explained(firsts: Sequence[tuple[int, float]]) -> tuple[Floats, Floats]:
        """Measured seconds, and the seconds that the profile explains."""
        tokens, seconds = zip(*firsts, strict=True)
        known = [profile.seconds(Features(n, 0, 0, n * (n + 1) // 2, 1)) for n in tokens]
        return np.array(seconds), np.array(known) + (gap_ms + profile.host_ms) / 1e3

    seconds, known = explained(seen.firsts[0])
    around = max(0.0, float(np.mean(seconds - known)))
    side_by_side = None
    if len(seen.between) > 1:
        slower = [s / (k + around) for s, k in map(explained, seen.firsts)]
        cores = len(os.sched_getaffinity(0))
        decodes = _slowdown([float(np.mean(shares)) for shares in seen.between])
        prompts = _slowdown([float(np.mean(ratios)) for ratios in slower])
        side_by_side = SideBySide(
            cores, decodes, prompts, tuple(map(_spread, seen.between, decodes)), tuple(map(_spread, slower, prompts))
        )
    return Overhead(1e3 * around * (1 - ANSWER_SHARE), 1e3 * around * ANSWER_SHARE, gap_ms, side_by_side, seen.silent)


def together(runs: Sequence[Observations]) -> Observations:
    """Combine runs at the same daemon."""
    between = np.mean([run.between for run in runs], axis=0)
    firsts = [sum(same, ()) for same in zip(*(run.firsts for run in runs), strict=True)]
    silent: tuple[int, ...] = sum((run.silent for run in runs), ())
    return Observations(tuple(tuple(shares) for shares in between.tolist()), tuple(firsts), silent)


def _range(limits: Limits) -> tuple[int, int]:
    """Tokens of the shortest and the longest prompt. One iteration computes the longest."""
    low, high = PROMPT_TOKENS
    high = max(1, min(high, limits.max_num_batched_tokens, limits.max_model_len - STREAM_TOKENS))
    return min(low, high), high


def _lengths(limits: Limits) -> Iterator[int]:
    """Lengths spread evenly over the range for any number of them, and different in every run."""
    low, high = _range(limits)
    return (low + int(x * (high + 1 - low)) for x in evenly(time.time() % 1))


def _slowdown(times: Sequence[float]) -> tuple[float, ...]:
    """Times relative to the first, never decreasing: more busy engines make none faster."""
    return tuple(float(x) for x in np.maximum.accumulate(np.array(times) / times[0]))


def _spread(values: Sequence[float] | Floats, slowdown: float) -> tuple[float, ...]:
    """The spread around 1. No time is less than without other engines: an early token followed a late one."""
    least = 1 / slowdown
    beyond = np.maximum(_shares(values) / np.mean(values) - least, 0.0)
    if not beyond.any():
        return (1.0,) * SHARES
    return tuple(float(x) for x in least + beyond * (1 - least) / beyond.mean())


def _shares(values: Sequence[float] | Floats) -> Floats:
    """Means of equal shares of the sorted values; their mean is that of the values. A share may hold a fraction of a
    value."""
    ordered = np.concatenate(([0.0], np.cumsum(np.sort(np.asarray(values, np.float64)))))
    ends = np.linspace(0, len(ordered) - 1, SHARES + 1)
    return np.diff(np.interp(ends, np.arange(len(ordered)), ordered)) * SHARES / (len(ordered) - 1)


async def _watch(url: str, *, shared: bool, lengths: Iterator[int], seconds: float) -> Observations:
    maker = PromptMaker("ids", time.time_ns())  # an engine may still have pages of an earlier run
    target = Target("", Address.parse(url), "", False, None, {}, {}, 60.0, True)
    target = (await prepare(target, maker)).target
    engines = await _engines(target.address) if shared else 1
    watcher = _Watcher(target, maker, lengths, seconds)
    times = [await watcher.between(streams) for streams in range(1, engines + 1)]
    slowed = [await watcher.prompts(streams) for streams in range(engines)]
    watcher.close()
    return Observations(tuple(times), tuple(slowed), tuple(watcher.silent))


class _Watcher:
    """Sends requests to a daemon and times the answers. seconds: for each of the figures."""

    def __init__(self, target: Target, maker: PromptMaker, lengths: Iterator[int], seconds: float) -> None:
        self._target, self._maker, self._lengths, self._seconds = target, maker, lengths, seconds
        self._clock = asyncio.get_running_loop().time
        self._client = Client(target, self._clock())
        self._asked = 0
        self.silent: list[int] = []
        """Tokens of each stream before its first token with text."""

    async def between(self, streams: int) -> tuple[float, ...]:
        """See `Observations.between`, with `streams` concurrent streams."""
        means: list[float] = []
        gaps: list[float] = []
        end = self._clock() + self._seconds
        while len(means) < STREAMS * streams or self._clock() < end:
            for r in await asyncio.gather(*(self._streamed() for _ in range(streams))):
                if r is not None:
                    means.append((r.end - r.first) / (r.completion_tokens - 1 - _silent(r)))
                    gaps += np.diff(r.times).tolist()
            await asyncio.sleep(PAUSE_SECONDS)
        return tuple(float(x) for x in _shares(gaps) * np.mean(means) / np.mean(gaps))

    async def prompts(self, streams: int) -> tuple[tuple[int, float], ...]:
        """See `Observations.firsts`, with `streams` concurrent streams."""
        # Streams start one after another; otherwise their prompts would always be computed together.
        tasks = [asyncio.create_task(self._stream(0.1 * i)) for i in range(streams)]
        await asyncio.sleep(0.1 * streams)
        try:
            return await self._firsts(self._seconds * (1 + streams))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def close(self) -> None:
        self._client.close()

    async def _firsts(self, seconds: float) -> tuple[tuple[int, float], ...]:
        taken: list[tuple[int, float]] = []
        end = self._clock() + seconds
        while len(taken) < FIRSTS or self._clock() < end:
            record = await self._ask(FIRST_TOKENS)
            if record is not None:
                taken.append((record.input_tokens, record.first - record.start))
            await asyncio.sleep(PAUSE_SECONDS)
        return tuple(taken)

    async def _stream(self, after: float) -> None:
        """Send streams one after another, from `after` seconds on."""
        await asyncio.sleep(after)
        while True:
            await self._streamed()

    async def _streamed(self) -> Record | None:
        record = await self._ask(STREAM_TOKENS)
        self.silent.append(_silent(record))
        return record

    async def _ask(self, output_tokens: int) -> Record | None:
        """Send one request. Returns None if none of its tokens had text."""
        self._asked += 1
        tokens = next(self._lengths)
        record = Record(self._asked, 0.0, tokens, output_tokens)
        await self._client.send(record, self._target.body(self._maker.prompt(record.index, tokens), output_tokens))
        if record.status == 200 and record.completion_tokens == output_tokens and not record.times:
            return None
        if not record.ok:
            raise LoadError(record.error or f"status {record.status}")
        return record


def _silent(stream: Record | None) -> int:
    """Tokens of an answer without text, mostly at its beginning. The last token may lack an event."""
    lacking = STREAM_TOKENS - (0 if stream is None else len(stream.times))
    return lacking if lacking > 1 else 0


async def _engines(address: Address) -> int:
    """The number of the daemon's engines."""
    status, body = await get(address, "/health", {})
    if status != 200:
        raise LoadError(f"/health says {status}")
    return max(1, len(msgspec.json.decode(body).get("engines", ())))
