"""`EngineProcess`: the engine process from the side of the daemon: starts it, knows its end, ends it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from weft.engine.config import EngineConfig
from weft.engine.wire.child import RANK
from weft.engine.wire.exiting import GRACE_SECONDS, how_ended, kill_and_hold, wait_for_all, wait_for_end
from weft.engine.wire.heartbeat import ENGINE, Heartbeats
from weft.engine.wire.preloaded import PreloadedProcess
from weft.engine.wire.private_socket import PrivateSocket
from weft.engine.wire.stacks import Stacks
from weft.engine.wire.weight_exchange import WeightExchange

LAST_WORDS_SECONDS = 0.05
UNKNOWN_END = "the engine ended (its memory is being released)"
"""why it ended, while nobody knows better"""


class EngineProcess:
    """A running engine process. Create with `await EngineProcess.start(config)`; clients connect to `address`."""

    def __init__(
        self,
        preloaded: PreloadedProcess,
        socket: PrivateSocket,
        stacks: Stacks,
        *,
        owns_socket: bool,
        ranks: Callable[[], list[int]] = list,
    ) -> None:
        """ranks: the processes of its further ranks, by now."""
        self.address = socket.address
        self.stacks = stacks
        self._process, self._stdin = preloaded.process, preloaded.socket
        self._socket = socket
        self._owns_socket = owns_socket
        self._stopping = False
        self._why = ""
        self._ranks = ranks
        self._code: int | None = None
        """as `subprocess` gives it, once its memory is given back"""
        self._gone = asyncio.Event()
        """so is that of its ranks"""
        self._ending = asyncio.Event()
        """it will not run again"""
        self._ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls,
        config: EngineConfig,
        socket: PrivateSocket | None = None,
        heartbeats: Heartbeats | None = None,
        exchange: WeightExchange | None = None,
    ) -> EngineProcess:
        """Spawn it. Returns at once; a client's `wait_ready` waits for the model to be loaded.

        `socket`: where it listens, one of its own by default. `heartbeats`: where it shows that it lives, in the row of its
        number. `exchange`: of the weights that it shares. Raises `ConfigError` where no socket can be made, `OSError`
        where no process can be started.
        """
        owns_socket = socket is None
        socket = socket or PrivateSocket()
        row = ENGINE + config.share.engine
        heartbeats = heartbeats or Heartbeats(row + 1)
        stacks = Stacks()
        heartbeats.of(row).begin("starting", heartbeats.start_timeout)
        preloaded = PreloadedProcess.take(config.share.gpu)
        heartbeats.of(row).begin("starting", heartbeats.start_timeout, preloaded.process.pid)
        # It ends when its stdin closes: it cannot outlive this process.
        fds = (socket.fd, heartbeats.fd, stacks.fd, *(exchange.fds if exchange is not None else ()))
        preloaded.tell(config.model_dump_json().encode(), fds)

        def ranks() -> list[int]:
            return [heartbeats.rank(row, rank).pid for rank in heartbeats.ranks(row)]

        return cls(preloaded, socket, stacks, owns_socket=owns_socket, ranks=ranks)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def stopping(self) -> bool:
        """It was asked to end."""
        return self._stopping

    async def wait_dead(self) -> str:
        """Wait until the process has ended and its last messages had time to arrive; tells why it ended. Its memory may
        not be given back yet."""
        return await asyncio.shield(self._ended)

    async def wait_gone(self) -> str:
        """Wait until the memory of the process and of its ranks has been given back, too; tells how it ended."""
        await self._gone.wait()
        return self._how()

    def _how(self) -> str:
        assert self._code is not None
        return f"the engine ended ({how_ended(self._code)})"

    async def _wait(self) -> str:
        self._watch()
        await self._ending.wait()
        await asyncio.sleep(LAST_WORDS_SECONDS)
        if self._stopping:
            return "the engine was stopped"
        if self._why:
            return self._why
        if self._code is None:
            return UNKNOWN_END
        return self._how()

    def _watch(self) -> None:
        """See the process end. A thread waits: asyncio knows only processes it has started."""
        loop, process = asyncio.get_running_loop(), self._process
        held: list[int] = []

        def ended(code: int) -> None:
            self._code = code
            self._ending.set()

        def ending() -> None:
            # The kernel ends ranks with their parent, but only once that one's memory is given back.
            held.extend(kill_and_hold(self._ranks(), self._is_rank))
            loop.call_soon_threadsafe(self._ending.set)

        def wait() -> None:
            with suppress(RuntimeError):  # the loop has closed: nobody asks any more
                wait_for_end(process, ending)
                held.extend(kill_and_hold(self._ranks(), self._is_rank))
                loop.call_soon_threadsafe(ended, process.wait())
                wait_for_all(held)
                loop.call_soon_threadsafe(self._gone.set)

        threading.Thread(target=wait, name="weft-engine-end", daemon=True).start()

    def _is_rank(self, pid: int) -> bool:
        """Of this engine: the number of one that has ended may be another process's by now. Raises `OSError`."""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return (str(self.pid).encode(), RANK.encode()) in pairwise(words)

    def kill(self, why: str = "") -> None:
        """`why`: what `wait_dead` then tells, in place of the signal."""
        if self._process.returncode is None:
            self._why = self._why or why
            self._process.kill()
            # A driver may hold it where it does not even begin to end: nothing comes from it all the same.
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._ending.set)

    async def stop(self, timeout: float = 5.0) -> None:
        """End it: ask by closing its stdin, kill after `timeout` seconds. Behind it its memory is free."""
        self._stopping = True
        self._stdin.close()
        try:
            await asyncio.wait_for(self.wait_dead(), timeout)
        except TimeoutError:
            self.kill()
            await self.wait_dead()
        await self.wait_gone()
        if self._owns_socket:
            self._socket.close()
