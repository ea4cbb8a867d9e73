"""What stands around an engine, and what engines cost each other, measured at a daemon that has nothing else to do.

Alone, one stream tells the time between its tokens and to the first one; what these have beyond the profile's
iterations stands around the engine. Where a CPU's engines share cores, streams on more and more of them tell how much
longer both take beside others, and how differently: with all that works for a stream, load generator included.

Prompts have many lengths, as a load's have: a CPU's first iteration of so many tokens takes longer than its second.
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
"""the shortest and the longest, if an iteration takes that many"""
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
SHARES = 20
"""into which times are sorted: a spread has the mean of each"""


class Around(NamedTuple):
    """Times in milliseconds: of a request's way to the engine, of a token's back, between two iterations. `silent`: see
    `IterationProfile`."""

    request_ms: float
    answer_ms: float
    gap_ms: float
    side_by_side: SideBySide | None
    silent: tuple[int, ...] = ()

    def put_into(self, profile: IterationProfile) -> IterationProfile:
        return msgspec.structs.replace(profile, **self._asdict())


class Seen(NamedTuple):
    """Seconds, by the number of engines that compute, from one."""

    between: tuple[tuple[float, ...], ...]
    """one token and the next: means of equal shares, ascending; their mean is that of the streams"""
    firsts: tuple[tuple[tuple[int, float], ...], ...]
    """prompt tokens, and time to the first token, of requests that come to the last of these engines while the others
    have a stream each"""
    silent: tuple[int, ...] = ()
    """tokens of each stream before its first that is text"""


def measure(url: str, profile: IterationProfile) -> Around:
    """Raises `ConfigError`."""
    return derive(watch(url, profile.limits, shared=profile.threads > 0), profile)


def watch(url: str, limits: Limits, *, shared: bool, seconds: float = SECONDS) -> Seen:
    """limits: of the engines. shared: they compute on cores that all share, so it matters how many do. seconds: for
    each of the figures, for first tokens so long for each engine that computes. Raises `ConfigError`."""
    try:
        return asyncio.run(_watch(url, shared=shared, lengths=_lengths(limits), seconds=seconds))
    except LoadError as error:
        raise ConfigError(f"--server {url}: {error}") from None
    except (OSError, ConnectionBroken, msgspec.DecodeError) as error:
        raise ConfigError(f"--server {url}: {error or type(error).__name__}") from None


def derive(seen: Seen, profile: IterationProfile) -> Around:
    """From what was seen to what a profile has."""
    context = sum(_range(profile.limits)) // 2 + STREAM_TOKENS // 2
    gap_ms = max(0.0, 1e3 * float(np.mean(seen.between[0]) - profile.seconds(Features(1, 1, context, 0, 0))))

    def beside(firsts: Sequence[tuple[int, float]]) -> tuple[Floats, Floats]:
        """Seconds, and what of them the profile explains."""
        tokens, seconds = zip(*firsts, strict=True)
        known = [profile.seconds(Features(n, 0, 0, n * (n + 1) // 2, 1)) for n in tokens]
        return np.array(seconds), np.array(known) + (gap_ms + profile.host_ms) / 1e3

    seconds, known = beside(seen.firsts[0])
    around = max(0.0, float(np.mean(seconds - known)))
    side_by_side = None
    if len(seen.between) > 1:
        slower = [s / (k + around) for s, k in map(beside, seen.firsts)]
        cores = len(os.sched_getaffinity(0))
        decodes = _slowdown([float(np.mean(shares)) for shares in seen.between])
        prompts = _slowdown([float(np.mean(ratios)) for ratios in slower])
        side_by_side = SideBySide(
            cores,
            decodes,
            prompts,
            tuple(map(_spread, seen.between, decodes)),
            tuple(map(_spread, slower, prompts)),
        )
    return Around(1e3 * around * (1 - ANSWER_SHARE), 1e3 * around * ANSWER_SHARE, gap_ms, side_by_side, seen.silent)


def together(runs: Sequence[Seen]) -> Seen:
    """Of runs at the same daemon."""
    between = np.mean([run.between for run in runs], axis=0)
    firsts = [sum(same, ()) for same in zip(*(run.firsts for run in runs), strict=True)]
    silent: tuple[int, ...] = sum((run.silent for run in runs), ())
    return Seen(tuple(tuple(shares) for shares in between.tolist()), tuple(firsts), silent)


def _range(limits: Limits) -> tuple[int, int]:
    """Tokens of the shortest and the longest prompt; one iteration computes it."""
    low, high = PROMPT_TOKENS
    high = max(1, min(high, limits.max_num_batched_tokens, limits.max_model_len - STREAM_TOKENS))
    return min(low, high), high


def _lengths(limits: Limits) -> Iterator[int]:
    """Evenly over the range, however few are taken, and others in the next run."""
    low, high = _range(limits)
    return (low + int(x * (high + 1 - low)) for x in evenly(time.time() % 1))


def _slowdown(times: Sequence[float]) -> tuple[float, ...]:
    """More beside it make none faster."""
    return tuple(float(x) for x in np.maximum.accumulate(np.array(times) / times[0]))


def _spread(values: Sequence[float] | Floats, slowdown: float) -> tuple[float, ...]:
    """About one. Beside others nothing is quicker than alone: a token that came sooner was behind a late one."""
    least = 1 / slowdown
    beyond = np.maximum(_shares(values) / np.mean(values) - least, 0.0)
    if not beyond.any():
        return (1.0,) * SHARES
    return tuple(float(x) for x in least + beyond * (1 - least) / beyond.mean())


def _shares(values: Sequence[float] | Floats) -> Floats:
    """Means of equal shares of the sorted values; their mean is that of the values. A share may have part of a
    value."""
    ordered = np.concatenate(([0.0], np.cumsum(np.sort(np.asarray(values, np.float64)))))
    ends = np.linspace(0, len(ordered) - 1, SHARES + 1)
    return np.diff(np.interp(ends, np.arange(len(ordered)), ordered)) * SHARES / (len(ordered) - 1)


async def _watch(url: str, *, shared: bool, lengths: Iterator[int], seconds: float) -> Seen:
    maker = PromptMaker("ids", time.time_ns())  # an engine may still have the pages of an earlier watch
    target = Target("", Address.parse(url), "", False, None, {}, {}, 60.0, True)
    target = (await prepare(target, maker)).target
    engines = await _engines(target.address) if shared else 1
    watcher = _Watcher(target, maker, lengths, seconds)
    times = [await watcher.between(streams) for streams in range(1, engines + 1)]
    slowed = [await watcher.prompts(streams) for streams in range(engines)]
    watcher.close()
    return Seen(tuple(times), tuple(slowed), tuple(watcher.silent))


class _Watcher:
    """Asks a daemon, and times its answers. seconds: for each of the figures."""

    def __init__(self, target: Target, maker: PromptMaker, lengths: Iterator[int], seconds: float) -> None:
        self._target, self._maker, self._lengths, self._seconds = target, maker, lengths, seconds
        self._clock = asyncio.get_running_loop().time
        self._client = Client(target, self._clock())
        self._asked = 0
        self.silent: list[int] = []
        """tokens of each stream before its first that is text"""

    async def between(self, streams: int) -> tuple[float, ...]:
        """See `Seen`, while so many streams run beside each other."""
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
        """See `Seen.firsts`, beside so many streams."""
        # Each begins a little later than the one before, or their prompts would always be computed together.
        beside = [asyncio.create_task(self._stream(0.1 * i)) for i in range(streams)]
        await asyncio.sleep(0.1 * streams)
        try:
            return await self._firsts(self._seconds * (1 + streams))
        finally:
            for task in beside:
                task.cancel()
            await asyncio.gather(*beside, return_exceptions=True)

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
        """One after the other."""
        await asyncio.sleep(after)
        while True:
            await self._streamed()

    async def _streamed(self) -> Record | None:
        record = await self._ask(STREAM_TOKENS)
        self.silent.append(_silent(record))
        return record

    async def _ask(self, output_tokens: int) -> Record | None:
        """None: all its tokens together were no text."""
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
    """Tokens of an answer that came without text, most of them at its beginning; a last one may lack an event."""
    lacking = STREAM_TOKENS - (0 if stream is None else len(stream.times))
    return lacking if lacking > 1 else 0


async def _engines(address: Address) -> int:
    """How many the daemon has."""
    status, body = await get(address, "/health", {})
    if status != 200:
        raise LoadError(f"/health says {status}")
    return max(1, len(msgspec.json.decode(body).get("engines", ())))
