"""`EngineProcess`: the engine process from the side of the daemon: starts it, knows its end, ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

from weft.engine.config import EngineConfig
from weft.engine.wire.beat import ENGINE, Beats
from weft.engine.wire.child import Stacks
from weft.engine.wire.private_socket import PrivateSocket

LAST_WORDS_SECONDS = 0.05
PRIMITIVE_CACHES = {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""On a CPU ideep and oneDNN keep a compiled primitive for each shape they have met, a thousand each if let: hundreds of
megabytes that come with the traffic. Read when torch is loaded. With fewer than some dozens of the second kind they are
compiled again and again, at twice the processor time"""


def environment() -> dict[str, str]:
    """Of the engine process: this one's, and what bounds its memory."""
    return {**PRIMITIVE_CACHES, **os.environ, "PYTHONUNBUFFERED": "1"}


class EngineProcess:
    """A running engine process. Create with `await EngineProcess.start(config)`; clients connect to `address`."""

    def __init__(self, process: Process, socket: PrivateSocket, stacks: Stacks, *, owns_socket: bool) -> None:
        self.address = socket.address
        self.stacks = stacks
        self._process = process
        self._socket = socket
        self._owns_socket = owns_socket
        self._stopping = False
        self._why = ""
        self._ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls, config: EngineConfig, socket: PrivateSocket | None = None, beats: Beats | None = None
    ) -> EngineProcess:
        """Spawn it. Returns at once; a client's `wait_ready` waits for the model to be loaded.

        `socket`: where it listens, one of its own by default. `beats`: where it shows that it lives.
        Raises `ConfigError` where no socket can be made.
        """
        owns_socket = socket is None
        socket = socket or PrivateSocket()
        beats = beats or Beats()
        stacks = Stacks()
        fds = (socket.fd, beats.fd, stacks.fd)
        beats.of(ENGINE).begin("starting", beats.start_timeout)
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "weft.engine.process",
            str(os.getpid()),
            *map(str, fds),
            stdin=PIPE,
            pass_fds=fds,
            start_new_session=True,  # Ctrl-C reaches the daemon alone, which then drains
            env=environment(),
        )
        beats.of(ENGINE).begin("starting", beats.start_timeout, process.pid)
        # It reads its configuration from stdin and ends when stdin closes: it cannot outlive this process.
        assert process.stdin is not None
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        return cls(process, socket, stacks, owns_socket=owns_socket)

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_dead(self) -> str:
        """Wait until the process has ended and its last messages had time to arrive; tells why it ended."""
        return await asyncio.shield(self._ended)

    async def _wait(self) -> str:
        code = await self._process.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        if self._stopping:
            return "the engine was stopped"
        if self._why:
            return self._why
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"the engine ended ({how})"

    def kill(self, why: str = "") -> None:
        """`why`: what `wait_dead` then tells, in place of the signal."""
        if self._process.returncode is None:
            self._why = self._why or why
            self._process.kill()

    async def stop(self, timeout: float = 5.0) -> None:
        """End it: ask by closing its stdin, kill after `timeout` seconds."""
        self._stopping = True
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            await asyncio.wait_for(self.wait_dead(), timeout)
        except TimeoutError:
            self.kill()
            await self.wait_dead()
        if self._owns_socket:
            self._socket.close()
