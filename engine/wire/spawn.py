"""`EngineProcess`: the engine process from the side of the daemon: starts it, knows its end, ends it."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process

from weft.engine.config import EngineConfig
from weft.engine.wire.private_dir import PrivateDir

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

    def __init__(self, process: Process, directory: PrivateDir, address: str) -> None:
        self.address = address
        self._process = process
        self._directory = directory
        self._stopping = False
        self._ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(cls, config: EngineConfig) -> EngineProcess:
        """Spawn it. Returns at once; a client's `wait_ready` waits for the model to be loaded."""
        directory = PrivateDir()
        address = f"ipc://{directory.path}/engine.sock"
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "weft.engine.process",
            address,
            stdin=PIPE,
            start_new_session=True,  # Ctrl-C reaches the daemon alone, which then drains
            env=environment(),
        )
        # It reads its configuration from stdin and ends when stdin closes: it cannot outlive this process.
        assert process.stdin is not None
        process.stdin.write(config.model_dump_json().encode() + b"\n")
        return cls(process, directory, address)

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
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"the engine ended ({how})"

    def kill(self) -> None:
        if self._process.returncode is None:
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
        self._directory.remove()
