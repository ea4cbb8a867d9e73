"""`Streams`: the open requests of one client. It submits requests, delivers tokens, and reports the engine's end."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from operator import itemgetter
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from weft.engine.errors import EngineDead
from weft.engine.wire import messages
from weft.engine.wire.sampling import SamplingParams

SLICE = 64
"""Rows delivered at once. Each may take a system call, so hundreds would block the event loop."""


class Delta(NamedTuple):
    """What a stream received since the last read."""

    token_ids: list[int]
    logprobs: list[messages.TokenLogprobs]  # one per token if requested, else empty
    finish: messages.Finish
    started: messages.Started | None  # set in the delta with the first token
    prompt_logprobs: list[messages.TokenLogprobs]
    error: str | None
    pooled: bytes | None = None  # as in `Outputs`


class Sink(Protocol):
    """Takes a stream's tokens at once. Methods return False, without side effects, if `read` must deliver them."""

    def __call__(self, token: int, entry: messages.TokenLogprobs | None, /) -> bool: ...

    def several(self, tokens: list[int], entries: list[messages.TokenLogprobs], /) -> bool:
        """Take the tokens of one iteration together. `entries` is empty without log-probabilities."""
        ...


class TokenStream:
    """The tokens of one open request. Read until a delta has `finish`, or call `abort()` if the client has gone.
    `read()` raises `EngineDead` when the engine process ends."""

    def __init__(self, streams: Streams, handle: int) -> None:
        self.handle, self._streams = handle, streams
        self._tokens: list[int] = []
        self._logprobs: list[messages.TokenLogprobs] = []
        self._prompt_logprobs: list[messages.TokenLogprobs] = []
        self._started: messages.Started | None = None
        self._finish = messages.Finish.RUNNING
        self._error: str | None = None
        self._pooled: bytes | None = None
        self._dead: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pending = False
        self.closed = False
        self.predicted = (0, 0)  # draft tokens of the request's prediction: accepted, rejected
        self.joules = 0.0  # joules charged so far, for a metered request
        self.sink: Sink | None = None
        """Takes the tokens of each iteration except the first and the last while `read` waits."""

    @property
    def waiting(self) -> bool:
        """Whether `read` waits and nothing is pending."""
        return self._waiter is not None and not self._pending

    def wake(self) -> None:
        """Let `read` return, with an empty delta if there is nothing new."""
        self._pending = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> Delta:
        """Wait for news and return it. Tokens that have accumulated are returned together."""
        while not self._pending:
            if self._dead is not None:
                raise EngineDead(self._dead)
            self._waiter = self._streams.loop.create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._pending = False
        if not self._tokens and self._finish is messages.Finish.RUNNING and self._dead is not None:
            raise EngineDead(self._dead)
        delta = Delta(
            self._tokens, self._logprobs, self._finish, self._started, self._prompt_logprobs, self._error, self._pooled
        )
        self._tokens, self._logprobs, self._prompt_logprobs, self._started = [], [], [], None
        return delta

    def abort(self) -> None:
        """Drop the request in the engine. Idempotent; nothing more is delivered."""
        if not self.closed:
            self._streams._forget(self.handle)
            self._streams._send(messages.AbortRequests([self.handle]))
            self.closed = True


class Streams:
    """Base of clients, on one asyncio loop. A subclass implements `_send`, and calls `_deliver` and `mark_dead`."""

    def __init__(self, number: int) -> None:
        """`number` is unique among all clients that the engine ever has."""
        self.loop = asyncio.get_running_loop()
        self.stats = messages.EngineStats()
        self.dead: str | None = None  # why the engine has ended; None while it runs
        self.on_stats: Callable[[messages.EngineStats], None] | None = None
        self.adapters: dict[str, messages.AdapterNews] = {}  # the engine's last report by name
        self.on_adapter: Callable[[messages.AdapterNews], None] | None = None
        self.on_dead: Callable[[], None] | None = None  # called once, when the engine has ended
        self.on_open: Callable[[int], None] | None = None  # called with the number of open requests when it changes
        self._streams: dict[int, TokenStream] = {}
        self._next_handle = (number << messages.HANDLE_BITS) + 1

    def _send(self, message: messages.ToEngine) -> None:
        raise NotImplementedError

    @property
    def alive(self) -> bool:
        return self.dead is None

    @property
    def num_open(self) -> int:
        return len(self._streams)

    def submit(
        self, prompt_token_ids: Sequence[int] | npt.NDArray[np.int32], params: SamplingParams, *, priority: int = 0,
        cache_salt: str = "", leader: int = -1, tenant: int = 0, precedence: int = 0, metered: bool = False,
        retention: tuple[messages.Retention, ...] = (), names: tuple[bytes, ...] = (), adapter: str = "",
        segment: int = 0, images: tuple[messages.Image, ...] = (),
        prediction: Sequence[int] = (), max_drafts: int | None = None,
    ) -> TokenStream:  # fmt: skip
        """Queue one sequence. Options are as in `AddRequest`. Raises `EngineDead` if the engine has ended."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        handle = self._next_handle
        self._next_handle += 1
        stream = TokenStream(self, handle)
        self._streams[handle] = stream
        prompt = np.asarray(prompt_token_ids, np.int32).tobytes()
        request = messages.AddRequest(
            handle=handle, prompt_token_ids=prompt, params=params, priority=priority, cache_salt=cache_salt,
            leader=leader, tenant=tenant, precedence=precedence, metered=metered, retention=retention, names=names,
            adapter=adapter, segment=segment, images=images,
            prediction=np.asarray(prediction, np.int32).tobytes(),
            max_drafts=max_drafts,
        )  # fmt: skip
        self._send(request)
        self._report_open()
        return stream

    def prefetch(self, names: tuple[bytes, ...]) -> None:
        """Load the pages of a conversation before its next turn arrives."""
        self._send(messages.Prefetch(names))

    def load_adapter(self, name: str, path: str, digest: str = "") -> None:
        """Load a LoRA adapter. The engine reports with `on_adapter`."""
        self._send(messages.LoadAdapter(name, path, digest))

    def drop_adapter(self, name: str) -> None:
        """Forget the name of a LoRA adapter. The engine reports with `on_adapter`."""
        self._send(messages.DropAdapter(name))

    def reset_prefix_cache(self) -> None:
        self._send(messages.ResetPrefixCache())

    def profile(self, path: str, seconds: float) -> None:
        """Profile the engine. The trace appears at `path` once it is complete. Another call ends this profile early."""
        self._send(messages.Profile(path, seconds))

    def give_up(self, why: str) -> None:
        """End all open streams as if the engine had ended, although it may recover."""
        for stream in self._streams.values():
            stream._dead = why
            stream.wake()

    def mark_dead(self, why: str) -> None:
        """End all streams, because the engine has ended. Idempotent."""
        if self.dead is not None:
            return
        self.dead = why
        for stream in list(self._streams.values()):
            stream._dead = why
            stream.wake()
        self._streams.clear()
        self._report_open()
        if self.on_dead is not None:
            self.on_dead()

    def _report_open(self) -> None:
        if self.on_open is not None:
            self.on_open(len(self._streams))

    def _forget(self, handle: int) -> None:
        if self._streams.pop(handle, None) is not None:
            self._report_open()

    def _deliver(self, outputs: messages.Outputs) -> None:
        for _ in self._delivering(outputs):
            pass

    def _delivering(self, outputs: messages.Outputs) -> Iterator[None]:
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
        for handle, predicted in outputs.predicted.items():
            if (stream := streams.get(handle)) is not None:
                stream.predicted = predicted
        handles, tokens, finish = outputs.columns()
        logprobs = outputs.logprobs
        rows: Iterable[tuple[int, int, int]] = zip(handles.tolist(), tokens.tolist(), finish.tolist(), strict=True)
        if (handles[1:] == handles[:-1]).any():
            rows = self._last_rows(rows, logprobs)
        for i, (handle, token, reason) in enumerate(rows, start=1):
            if not i % SLICE:
                yield
            stream = streams.get(handle)
            if stream is None:
                continue  # aborted while the engine still computed it
            entry = logprobs[handle][-1] if logprobs and handle in logprobs else None
            if stream.sink is not None and not reason and stream.waiting and stream.sink(token, entry):
                continue
            if token >= 0:
                stream._tokens.append(token)
                if entry is not None:
                    stream._logprobs.append(entry)
            if reason:
                stream._finish = messages.Finish(reason)
                stream._error = outputs.errors.get(handle)
                stream._pooled = outputs.pooled.get(handle)
                stream.closed = True
                del streams[handle]
            stream.wake()
        if len(streams) != num_open:
            self._report_open()
        if self.on_stats is not None:
            self.on_stats(outputs.stats)

    def _last_rows(
        self, rows: Iterable[tuple[int, int, int]], logprobs: dict[int, list[messages.TokenLogprobs]]
    ) -> Iterator[tuple[int, int, int]]:
        """Deliver the tokens of requests with several, and yield the rows that remain: the last of each request."""
        for handle, group in groupby(rows, itemgetter(0)):
            *before, last = group
            stream = self._streams.get(handle)
            if before and stream is not None:
                tokens, entries = [token for _, token, _ in before], logprobs.get(handle, [])
                sink = stream.sink if not last[2] and stream.waiting else None
                if sink is not None and sink.several([*tokens, last[1]], entries):
                    continue
                stream._tokens += tokens
                stream._logprobs += entries[: len(tokens)]
                stream.wake()
            yield last
