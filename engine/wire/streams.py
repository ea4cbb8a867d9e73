"""The open requests of one client of the engine: submits them, hands each its tokens, tells all of the engine's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from weft.engine.errors import EngineDead
from weft.engine.wire.messages import (
    HANDLE_BITS,
    AbortRequests,
    AddRequest,
    EngineStats,
    Finish,
    Outputs,
    Prefetch,
    Profile,
    ResetPrefixCache,
    Retention,
    Started,
    ToEngine,
    TokenLogprobs,
)
from weft.engine.wire.sampling import SamplingParams

SLICE = 64
"""rows delivered at once: with a system call each, hundreds would hold up the event loop for long"""


class Delta(NamedTuple):
    """What a stream got since it was last read."""

    token_ids: list[int]
    logprobs: list[TokenLogprobs]
    """one per token when asked for, else empty"""
    finish: Finish
    started: Started | None
    """set in the delta that holds the first token"""
    prompt_logprobs: list[TokenLogprobs]
    error: str | None
    pooled: bytes | None = None
    """as in `Outputs`"""


class TokenStream:
    """The tokens of one open request. Iterate until a delta has `finish`; `abort()` when nobody listens any more.

    Raises `EngineDead` from `read()` when the engine process ends.
    """

    def __init__(self, streams: Streams, handle: int) -> None:
        self.handle = handle
        self._streams = streams
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._started: Started | None = None
        self._finish = Finish.RUNNING
        self._error: str | None = None
        self._pooled: bytes | None = None
        self._dead: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pending = False
        self.closed = False
        self.joules = 0.0
        """charged so far, of a metered request"""
        self.sink: Callable[[int, TokenLogprobs | None], bool] | None = None
        """offered each token but the first and the last one while `read` waits; what it takes is not read"""

    @property
    def waiting(self) -> bool:
        """Somebody is in `read`, and there is nothing for them yet."""
        return self._waiter is not None and not self._pending

    def wake(self) -> None:
        """Let `read` return, with nothing when there is nothing new."""
        self._pending = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> Delta:
        """Wait until there is something new; tokens that piled up come together."""
        while not self._pending:
            if self._dead is not None:
                raise EngineDead(self._dead)
            self._waiter = self._streams.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._pending = False
        if not self._tokens and self._finish is Finish.RUNNING and self._dead is not None:
            raise EngineDead(self._dead)
        delta = Delta(
            self._tokens, self._logprobs, self._finish, self._started, self._prompt_logprobs, self._error, self._pooled
        )
        self._tokens, self._logprobs, self._prompt_logprobs, self._started = [], [], [], None
        return delta

    def abort(self) -> None:
        """Tell the engine to drop the request. Idempotent; nothing more is delivered."""
        if not self.closed:
            self._streams._forget(self.handle)
            self._streams._send(AbortRequests([self.handle]))
            self.closed = True


class Streams:
    """Whoever derives from it brings `_send`, and calls `_deliver` and `mark_dead`. Lives on one asyncio loop."""

    def __init__(self, number: int) -> None:
        """`number`: the client's, of all clients that this engine has had."""
        self.loop = asyncio.get_running_loop()
        self.stats = EngineStats()
        self.dead: str | None = None
        """Why the engine is gone; None while it lives."""
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_open: Callable[[int], None] | None = None
        """told the number of open requests when it changes"""
        self._streams: dict[int, TokenStream] = {}
        self._next_handle = (number << HANDLE_BITS) + 1

    def _send(self, message: ToEngine) -> None:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        return self.dead is None

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def submit(
        self,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
        leader: int = -1,
        tenant: int = 0,
        metered: bool = False,
        retention: tuple[Retention, ...] = (),
        names: tuple[bytes, ...] = (),
    ) -> TokenStream:
        """Queue one sequence; options as in `AddRequest`. Raises `EngineDead` when there is no engine."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        handle = self._next_handle
        self._next_handle += 1
        stream = TokenStream(self, handle)
        self._streams[handle] = stream
        self._send(
            AddRequest(
                handle=handle,
                prompt_token_ids=np.asarray(prompt_token_ids, np.int32).tobytes(),
                params=params,
                priority=priority,
                cache_salt=cache_salt,
                leader=leader,
                tenant=tenant,
                metered=metered,
                retention=retention,
                names=names,
            )
        )
        self._tell_open()
        return stream

    def prefetch(self, names: tuple[bytes, ...]) -> None:
        """The next turn of this conversation is on its way."""
        self._send(Prefetch(names))

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    def profile(self, path: str, seconds: float) -> None:
        """Have the engine recorded. The trace is at `path` once it is whole; another call ends this one early."""
        self._send(Profile(path, seconds))

    def give_up(self, why: str) -> None:
        """All open streams end as if the engine had ended, though it may come back."""
        for stream in self._streams.values():
            stream._dead = why
            stream.wake()

    def mark_dead(self, why: str) -> None:
        """The engine has ended: so do all streams. Idempotent."""
        if self.dead is not None:
            return
        self.dead = why
        for stream in list(self._streams.values()):
            stream._dead = why
            stream.wake()
        self._streams.clear()
        self._tell_open()

    def _tell_open(self) -> None:
        if self.on_open is not None:
            self.on_open(len(self._streams))

    def _forget(self, handle: int) -> None:
        if self._streams.pop(handle, None) is not None:
            self._tell_open()

    def _deliver(self, outputs: Outputs) -> None:
        for _ in self._delivering(outputs):
            pass

    def _delivering(self, outputs: Outputs) -> Iterator[None]:
        """Deliver in slices, so that an event loop can do something else between them."""
        self.stats = outputs.stats
        streams = self._streams
        num_open = len(streams)
        for handle, parts in outputs.prompt_logprobs.items():
            if (stream := streams.get(handle)) is not None:
                stream._prompt_logprobs.extend(parts)
        for started in outputs.started:
            if (stream := streams.get(started.handle)) is not None:
                stream._started = started
        for handle, joules in outputs.joules.items():
            if (stream := streams.get(handle)) is not None:
                stream.joules = joules
        handles, tokens, finish = outputs.columns()
        logprobs = outputs.logprobs
        rows = zip(handles.tolist(), tokens.tolist(), finish.tolist(), strict=True)
        for i, (handle, token, reason) in enumerate(rows, start=1):
            if not i % SLICE:
                yield
            stream = streams.get(handle)
            if stream is None:
                continue  # aborted here while the engine was still at it
            entry = logprobs.get(handle) if logprobs else None
            if stream.sink is not None and not reason and stream.waiting and stream.sink(token, entry):
                continue
            if token >= 0:
                stream._tokens.append(token)
                if entry is not None:
                    stream._logprobs.append(entry)
            if reason:
                stream._finish = Finish(reason)
                stream._error = outputs.errors.get(handle)
                stream._pooled = outputs.pooled.get(handle)
                stream.closed = True
                del streams[handle]
            stream.wake()
        if len(streams) != num_open:
            self._tell_open()
        if self.on_stats is not None:
            self.on_stats(outputs.stats)
