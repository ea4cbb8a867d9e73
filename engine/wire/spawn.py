"""`EngineProcess`: the daemon's handle of the engine process; `PrivateSocket`: where that process listens."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import tempfile
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import pairwise
from pathlib import Path

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError
from weft.engine.wire.child import RANK
from weft.engine.wire.exiting import GRACE_SECONDS, how_ended, kill_and_hold, wait_for_all, wait_for_end
from weft.engine.wire.heartbeat import ENGINE, Heartbeats
from weft.engine.wire.memory_kills import MemoryKills
from weft.engine.wire.preloaded import PreloadedProcess, reported_failure
from weft.engine.wire.stacks import Stacks
from weft.engine.wire.weight_exchange import WeightExchange

BACKLOG = 128
LAST_MESSAGES_SECONDS = 0.05  # seconds for the last messages of a process to arrive
UNKNOWN_END = "the engine ended (its memory is being released)"  # the reason reported until the exit status is known


class PrivateSocket:
    """The engine's listening socket, without a name. A Unix socket needs a name only while it is bound. The name is
    removed at once, so that no cleanup of temporary files can break it, a killed daemon leaves nothing behind, and
    no path is too long. Processes that hold `path_fd` connect through /proc. All engines of a daemon listen here,
    one after another.

    Attributes:
        fd: the listening socket, for the engine process.
        path_fd: a descriptor for clients, which must inherit it under the same number."""

    def __init__(self) -> None:
        """Raises `ConfigError` if no socket can be created."""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            directory = tempfile.mkdtemp(prefix="weft-")  # of mode 0700
            try:
                folder = os.open(directory, os.O_PATH | os.O_DIRECTORY)
                try:
                    path = f"/proc/self/fd/{folder}/engine"  # short for any directory
                    self._socket.bind(path)
                    self.path_fd = os.open(path, os.O_PATH)
                finally:
                    os.close(folder)
            finally:
                shutil.rmtree(directory, ignore_errors=True)
            self._socket.listen(BACKLOG)
            self._socket.setblocking(False)
        except OSError as error:
            self._socket.close()
            where = tempfile.tempdir or os.environ.get("TMPDIR") or "/tmp"
            raise ConfigError(
                f"cannot create a socket in {where}: {error.strerror or error}; set TMPDIR to another directory"
            ) from None
        self.fd = self._socket.fileno()

    @property
    def address(self) -> str:
        """Address for zmq, in this process and in those that have inherited `path_fd`."""
        return f"ipc:///proc/self/fd/{self.path_fd}"

    def close(self) -> None:
        """Idempotent."""
        if self._socket.fileno() >= 0:
            self._socket.close()
            os.close(self.path_fd)


class EngineProcess:
    """A running engine process, which it watches and ends. Create it with `await EngineProcess.start(config)`; clients
    connect to `address`."""

    def __init__(
        self, process: PreloadedProcess, socket: PrivateSocket, stacks: Stacks, *, owns_socket: bool,
        ranks: Callable[[], list[int]] = list,
    ) -> None:  # fmt: skip
        """`ranks` returns the process ids of its follower ranks."""
        self.address = socket.address
        self.stacks = stacks
        self._process, self._stdin = process.process, process.socket
        self._socket, self._owns_socket = socket, owns_socket
        self.stopping = False  # `stop` was called
        self._why = ""
        self._ranks = ranks
        self._memory_kills = MemoryKills()
        self._code: int | None = None  # return code of `subprocess`, once the process's memory is freed
        self._gone = asyncio.Event()  # set when the memory of its ranks is freed too
        self._ending = asyncio.Event()  # set when the process will not run again
        self._ended = asyncio.create_task(self._wait())

    @classmethod
    async def start(
        cls, config: EngineConfig, socket: PrivateSocket | None = None, heartbeats: Heartbeats | None = None,
        exchange: WeightExchange | None = None,
    ) -> EngineProcess:  # fmt: skip
        """Start it and return at once; a client's `wait_ready` waits for the model to be loaded. It listens on `socket`
        (default: a new one). It writes its heartbeats to the row of its number. `exchange` holds weights shared
        with other engines. Raises `ConfigError` if no socket can be created, `OSError` if no process can be started."""
        owns_socket = socket is None
        socket = socket or PrivateSocket()
        row = ENGINE + config.share.engine
        heartbeats = heartbeats or Heartbeats(row + 1)
        stacks = Stacks()
        heartbeats.of(row).begin("starting", heartbeats.start_timeout)
        process = PreloadedProcess.take(config.share.gpu)
        heartbeats.of(row).begin("starting", heartbeats.start_timeout, process.process.pid)
        # It ends when its stdin closes, so it cannot outlive this process.
        fds = (socket.fd, heartbeats.fd, stacks.fd, *(exchange.fds if exchange is not None else ()))
        process.send_config(config.model_dump_json().encode(), fds)

        return cls(
            process, socket, stacks, owns_socket=owns_socket,
            ranks=lambda: [heartbeats.rank(row, rank).pid for rank in heartbeats.ranks(row)],
        )  # fmt: skip

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait_dead(self) -> str:
        """Wait until the process has ended and its last messages had time to arrive. Returns why it ended: the
        reason that it reported, if any. Its memory may not be freed yet."""
        return await asyncio.shield(self._ended)

    async def wait_gone(self) -> str:
        """Wait until the memory of the process and of its ranks is freed too. Returns how it ended."""
        await self._gone.wait()
        return self._how()

    def _how(self) -> str:
        assert self._code is not None
        return f"the engine ended ({self._memory_kills.explain(how_ended(self._code))})"

    async def _wait(self) -> str:
        self._watch()
        await self._ending.wait()
        await asyncio.sleep(LAST_MESSAGES_SECONDS)
        if self.stopping:
            return "the engine was stopped"
        if reason := reported_failure(self._stdin) or self._why:
            return reason
        if self._code is None:
            return UNKNOWN_END
        return self._how()

    def _watch(self) -> None:
        """Wait for the process on a thread, because asyncio can only wait for processes it has started."""
        loop, process = asyncio.get_running_loop(), self._process
        held: list[int] = []

        def ended(code: int) -> None:
            self._code = code
            self._ending.set()

        def ending() -> None:
            # The kernel ends ranks with their parent, but only once the parent's memory is freed.
            held.extend(kill_and_hold(self._ranks(), self._is_rank))
            loop.call_soon_threadsafe(self._ending.set)

        def wait() -> None:
            with suppress(RuntimeError):  # the loop has closed
                wait_for_end(process, ending)
                held.extend(kill_and_hold(self._ranks(), self._is_rank))
                loop.call_soon_threadsafe(ended, process.wait())
                wait_for_all(held)
                loop.call_soon_threadsafe(self._gone.set)

        threading.Thread(target=wait, name="weft-engine-end", daemon=True).start()

    def _is_rank(self, pid: int) -> bool:
        """Return whether `pid` is a rank of this engine: pids of ended processes are reused. Raises `OSError`."""
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        return (str(self.pid).encode(), RANK.encode()) in pairwise(words)

    def kill(self, why: str = "") -> None:
        """Kill it. `wait_dead` then returns `why` instead of the signal."""
        if self._process.returncode is None:
            self._why = self._why or why
            self._process.kill()
            # A driver may block its end, but it sends nothing more.
            asyncio.get_running_loop().call_later(GRACE_SECONDS, self._ending.set)

    async def stop(self, timeout: float = 5.0) -> None:
        """End it by closing its stdin, and kill it after `timeout` seconds. Returns once its memory is free."""
        self.stopping = True
        self._stdin.close()
        try:
            await asyncio.wait_for(self.wait_dead(), timeout)
        except TimeoutError:
            self.kill()
            await self.wait_dead()
        await self.wait_gone()
        if self._owns_socket:
            self._socket.close()
