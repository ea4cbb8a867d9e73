"""`EngineProcess`: the engine process from the side of the daemon: starts it, knows its end, ends it."""

from __future__ import annotations

import asyncio
import signal
import threading
from contextlib import suppress

from weft.engine.config import EngineConfig
from weft.engine.wire.beat import ENGINE, Beats
from weft.engine.wire.blank import Blank
from weft.engine.wire.private_socket import PrivateSocket
from weft.engine.wire.shelf import Shelf
from weft.engine.wire.stacks import Stacks

LAST_WORDS_SECONDS = 0.05


class EngineProcess:
    """A running engine process. Create with `await EngineProcess.start(config)`; clients connect to `address`."""

    def __init__(self, blank: Blank, socket: PrivateSocket, stacks: Stacks, *, owns_socket: bool) -> None:
        self.address = socket.address
        self.stacks = stacks
        self._process, self._stdin = blank.process, blank.socket
        self._socket = socket
        self._owns_socket = owns_socket
        self._stopping = False
        self._why = ""
        self._ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        socket: PrivateSocket | None = None,
        beats: Beats | None = None,
        shelf: Shelf | None = None,
    ) -> EngineProcess:
        """Spawn it. Returns at once; a client's `wait_ready` waits for the model to be loaded.

        `socket`: where it listens, one of its own by default. `beats`: where it shows that it lives, in the row of its
        number. `shelf`: of the weights that it shares. Raises `ConfigError` where no socket can be made, `OSError`
        where no process can be started.
        """
        owns_socket = socket is None
        socket = socket or PrivateSocket()
        row = ENGINE + config.share.engine
        beats = beats or Beats(row + 1)
        stacks = Stacks()
        beats.of(row).begin("starting", beats.start_timeout)
        blank = Blank.take(config.share.gpu)
        beats.of(row).begin("starting", beats.start_timeout, blank.process.pid)
        # It ends when its stdin closes: it cannot outlive this process.
        fds = (socket.fd, beats.fd, stacks.fd, *(shelf.fds if shelf is not None else ()))
        blank.tell(config.model_dump_json().encode(), fds)
        return cls(blank, socket, stacks, owns_socket=owns_socket)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stopping(self) -> bool:
        """It was asked to end."""
        return self._stopping

    async def wait_dead(self) -> str:
        """Wait until the process has ended and its last messages had time to arrive; tells why it ended."""
        return await asyncio.shield(self._ended)

    async def _wait(self) -> str:
        code = await self._exit_status()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        if self._stopping:
            return "the engine was stopped"
        if self._why:
            return self._why
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        return f"the engine ended ({how})"

    async def _exit_status(self) -> int:
        """Of the process, once it has ended. A thread waits: asyncio knows only processes it has started."""
        loop = asyncio.get_running_loop()
        ended: asyncio.Future[int] = loop.create_future()

        def tell(code: int) -> None:
            if not ended.done():
                ended.set_result(code)

        def wait() -> None:
            code = self._process.wait()
            with suppress(RuntimeError):  # the loop has closed: nobody asks any more
                loop.call_soon_threadsafe(tell, code)

        threading.Thread(target=wait, name="weft-engine-end", daemon=True).start()
        return await ended

    def kill(self, why: str = "") -> None:
        """`why`: what `wait_dead` then tells, in place of the signal."""
        if self._process.returncode is None:
            self._why = self._why or why
            self._process.kill()

    async def stop(self, timeout: float = 5.0) -> None:
        """End it: ask by closing its stdin, kill after `timeout` seconds."""
        self._stopping = True
        self._stdin.close()
        try:
            await asyncio.wait_for(self.wait_dead(), timeout)
        except TimeoutError:
            self.kill()
            await self.wait_dead()
        if self._owns_socket:
            self._socket.close()
