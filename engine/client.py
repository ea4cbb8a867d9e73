"""The API side of the engine process: spawns it, submits requests, hands each its tokens, notices its death.

Everything here runs on one asyncio loop. No torch is imported.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import zmq
import zmq.asyncio

from weft.engine.config import EngineConfig
from weft.engine.errors import EngineDead, WeftError
from weft.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    EngineReady,
    EngineStats,
    Finish,
    Outputs,
    ResetPrefixCache,
    Started,
    ToEngine,
    TokenLogprobs,
    encoder,
    from_engine_decoder,
)
from weft.engine.sampling import SamplingParams

LAST_WORDS_SECONDS = 0.05


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


class TokenStream:
    """The tokens of one open request. Iterate until a delta has `finish`; `abort()` when nobody listens any more.

    Raises `EngineDead` from `read()` when the engine process ends.
    """

    def __init__(self, client: EngineClient, handle: int) -> None:
        self.handle = handle
        self._client = client
        self._tokens: list[int] = []
        self._logprobs: list[TokenLogprobs] = []
        self._prompt_logprobs: list[TokenLogprobs] = []
        self._started: Started | None = None
        self._finish = Finish.RUNNING
        self._error: str | None = None
        self._dead: str | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._pending = False
        self.closed = False

    def _wake(self) -> None:
        self._pending = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def read(self) -> Delta:
        """Wait until there is something new; tokens that piled up come together."""
        while not self._pending:
            if self._dead is not None:
                raise EngineDead(self._dead)
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        self._pending = False
        if not self._tokens and self._finish is Finish.RUNNING and self._dead is not None:
            raise EngineDead(self._dead)
        delta = Delta(self._tokens, self._logprobs, self._finish, self._started, self._prompt_logprobs, self._error)
        self._tokens, self._logprobs, self._prompt_logprobs, self._started = [], [], [], None
        return delta

    def abort(self) -> None:
        """Tell the engine to drop the request. Idempotent; nothing more is delivered."""
        if not self.closed:
            self._client._forget(self.handle)
            self._client._send(AbortRequests([self.handle]))
            self.closed = True


class EngineClient:
    """A running engine process. Create with `await EngineClient.start(config)`."""

    def __init__(self, config: EngineConfig) -> None:
        self.ready: EngineReady | None = None
        self.stats = EngineStats()
        self.dead: str | None = None
        """Why the engine is gone; None while it lives."""
        self.on_stats: Callable[[EngineStats], None] | None = None
        self._streams: dict[int, TokenStream] = {}
        self._next_handle = 1
        self._ready_event = asyncio.Event()
        self._dead_event = asyncio.Event()
        self._failure: str | None = None
        self._stopping = False
        self._loop = asyncio.get_running_loop()
        self._dir = Path(tempfile.mkdtemp(prefix="weft-"))  # mode 0700
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        address = f"ipc://{self._dir}/engine.sock"
        self._socket.bind(address)
        # The engine reads its configuration from stdin and ends when stdin closes: it cannot outlive this process.
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "weft.engine.process", address],
            stdin=subprocess.PIPE,
            start_new_session=True,  # Ctrl-C reaches the daemon alone, which then drains
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )
        assert self._process.stdin is not None
        self._process.stdin.write(config.model_dump_json().encode() + b"\n")
        self._process.stdin.flush()
        threading.Thread(target=self._watch, name="engine-watch", daemon=True).start()
        self._reader = asyncio.create_task(self._read_loop())

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineClient:
        """Spawn the engine process. Returns at once; `await wait_ready()` for the model to be loaded."""
        return cls(config)

    @property
    def alive(self) -> bool:
        return self.dead is None

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def num_open(self) -> int:
        return len(self._streams)

    async def wait_ready(self) -> EngineReady:
        """Wait for the model to be loaded. Raises `WeftError` when the engine could not start."""
        ready = asyncio.create_task(self._ready_event.wait())
        dead = asyncio.create_task(self._dead_event.wait())
        await asyncio.wait({ready, dead}, return_when=asyncio.FIRST_COMPLETED)
        ready.cancel()
        dead.cancel()
        if self.ready is None:
            raise WeftError(self._failure or self.dead or "the engine did not start")
        return self.ready

    async def wait_dead(self) -> str:
        """Wait until the engine process has ended, and tell why."""
        await self._dead_event.wait()
        assert self.dead is not None
        return self.dead

    def submit(
        self,
        prompt_token_ids: Sequence[int] | npt.NDArray[np.int32],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str = "",
    ) -> TokenStream:
        """Queue one sequence. Raises `EngineDead` when there is no engine."""
        if self.dead is not None:
            raise EngineDead(self.dead)
        handle = self._next_handle
        self._next_handle += 1
        stream = TokenStream(self, handle)
        self._streams[handle] = stream
        prompt = np.asarray(prompt_token_ids, np.int32).tobytes()
        self._send(
            AddRequest(
                handle=handle,
                prompt=prompt,
                params=params,
                priority=priority,
                cache_salt=cache_salt,
            )
        )
        return stream

    def reset_prefix_cache(self) -> None:
        self._send(ResetPrefixCache())

    def _send(self, message: ToEngine) -> None:
        if self.dead is None and not self._socket.closed:
            # PAIR without high-water marks: zmq takes the message at once, the future is already done.
            self._socket.send(encoder.encode(message))

    def _forget(self, handle: int) -> None:
        self._streams.pop(handle, None)

    def _watch(self) -> None:
        code = self._process.wait()
        with contextlib.suppress(RuntimeError):  # the loop is already closed: nobody is left to tell
            # Its last words may still be on their way through the socket.
            self._loop.call_soon_threadsafe(self._loop.call_later, LAST_WORDS_SECONDS, self._on_exit, code)

    def _on_exit(self, code: int) -> None:
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        self.dead = self._failure or ("the engine was stopped" if self._stopping else f"the engine ended ({how})")
        for stream in list(self._streams.values()):
            stream._dead = self.dead
            stream._wake()
        self._streams.clear()
        self._dead_event.set()

    async def _read_loop(self) -> None:
        try:
            await self._read_messages()
        except Exception:
            # Nobody would be answered any more: that is what a dead engine is.
            self._process.kill()
            raise

    async def _read_messages(self) -> None:
        while True:
            frame = await self._socket.recv()
            message = from_engine_decoder.decode(frame)
            match message:
                case Outputs():
                    self._deliver(message)
                case EngineReady():
                    self.ready = message
                    self._ready_event.set()
                case EngineFailed():
                    self._failure = message.message

    def _deliver(self, outputs: Outputs) -> None:
        self.stats = outputs.stats
        streams = self._streams
        for handle, parts in outputs.prompt_logprobs.items():
            if (stream := streams.get(handle)) is not None:
                stream._prompt_logprobs.extend(parts)
        for started in outputs.started:
            if (stream := streams.get(started.handle)) is not None:
                stream._started = started
        handles, tokens, finish = outputs.columns()
        for handle, token, reason in zip(handles.tolist(), tokens.tolist(), finish.tolist(), strict=True):
            stream = streams.get(handle)
            if stream is None:
                continue  # aborted here while the engine was still at it
            if token >= 0:
                stream._tokens.append(token)
                if outputs.logprobs and (logprobs := outputs.logprobs.get(handle)) is not None:
                    stream._logprobs.append(logprobs)
            if reason:
                stream._finish = Finish(reason)
                stream._error = outputs.errors.get(handle)
                stream.closed = True
                del streams[handle]
            stream._wake()
        if self.on_stats is not None:
            self.on_stats(outputs.stats)

    async def stop(self, timeout: float = 5.0) -> None:
        """End the engine process: ask by closing its stdin, kill after `timeout` seconds."""
        self._stopping = True
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            await asyncio.wait_for(self._dead_event.wait(), timeout)
        except TimeoutError:
            self._process.kill()
            await self._dead_event.wait()
        self._reader.cancel()
        self._socket.close(0)
        self._context.term()
        shutil.rmtree(self._dir, ignore_errors=True)
