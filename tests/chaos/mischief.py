"""`Mischief`: faults injected into a daemon while it serves, in an order that a seed decides."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import threading
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path
from random import Random
from typing import IO

from adapters import ChaosAdapters
from broken_disk import FAULTS, BrokenDisk
from customers import Customers
from live import Daemon, children

IDLE_CLIENTS = 1300  # more than three API processes have descriptors for
PROBES = 60  # attempts to reach /health
ENGINE, API = "weft.engine.process", "weft.server.daemon.worker"
DECODERS = "weft.server.api.media.decode_child"


class Log:
    """Reads the daemon's stderr into a file, and pauses reading for a while."""

    def __init__(self, pipe: IO[bytes], file: Path) -> None:
        self._pipe, self._file = pipe, file
        self.reading = threading.Event()
        self.reading.set()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with self._file.open("wb", buffering=0) as file:
            while self.reading.wait() and (data := os.read(self._pipe.fileno(), 4096)):
                file.write(data)


class Clock:
    """The daemon's wall clock, in seconds ahead of this machine's."""

    def __init__(self, file: Path) -> None:
        self._file = file
        self.set(0)

    def set(self, seconds: int) -> None:
        with self._file.open("r+b" if self._file.exists() else "wb") as file:
            file.write(struct.pack("l", seconds))


class Mischief:
    """store: the data file of the SSD store. A process is stopped for longer than its hang timeout, or for much
    less."""

    def __init__(
        self,
        daemon: Daemon,
        customers: Customers,
        store: Path,
        log: Log,
        clock: Clock,
        rng: Random,
        hang_seconds: float,
        disk: BrokenDisk | None,
        port: int,
        admin_port: int,
        adapters: ChaosAdapters,
    ) -> None:
        self._daemon, self._customers, self._store = daemon, customers, store
        self._log, self._clock, self._rng, self._hang_seconds = log, clock, rng, hang_seconds
        self._disk, self._port, self._admin_port = disk, port, admin_port
        self._adapters = adapters
        self.findings: list[str] = []
        self.done: Counter[str] = Counter()
        self._pending: set[asyncio.Task[None]] = set()
        kinds: dict[Callable[[], Awaitable[None]], int] = {
            self._kill_engine: 3, self._hang_engine: 1, self._pause_engine: 3, self._kill_api: 3, self._hang_api: 2,
            self._pause_api: 3, self._flip_bits: 8, self._overload: 3, self._stall_log: 2, self._jump_clock: 3,
            self._break_disk: 3 if disk is not None else 0, self._use_up_descriptors: 2, self._prefer: 3,
            self._change_adapters: 6, self._kill_decoders: 3,
        }  # fmt: skip
        self._kinds, self._weights = list(kinds), list(kinds.values())

    async def go_on(self, seconds: float, between: tuple[float, float]) -> None:
        end = asyncio.get_running_loop().time() + seconds
        while asyncio.get_running_loop().time() < end:
            (kind,) = self._rng.choices(self._kinds, self._weights)
            self.done[kind.__name__.strip("_").replace("_", " ")] += 1
            with suppress(ProcessLookupError, FileNotFoundError):
                await kind()
            await asyncio.sleep(self._rng.uniform(*between))

    async def calm(self) -> None:
        """End all faults that are still in progress."""
        await asyncio.gather(*self._pending, return_exceptions=True)
        self._log.reading.set()
        self._clock.set(0)
        if self._disk is not None:
            self._disk.work()

    def _one_of(self, module: str) -> int:
        """A process id. Raises `ProcessLookupError`."""
        if not (pids := self._daemon.children(module)):
            raise ProcessLookupError
        return self._rng.choice(sorted(pids))

    async def _kill_engine(self) -> None:
        os.kill(self._one_of(ENGINE), signal.SIGKILL)

    async def _kill_api(self) -> None:
        os.kill(self._one_of(API), signal.SIGKILL)

    async def _kill_decoders(self) -> None:
        """Kills the process of an API process that forks one for each image. Those end with it."""
        pids = [child for parent in self._daemon.children(API) for child in children(parent, DECODERS)]
        if not pids:
            raise ProcessLookupError
        os.kill(self._rng.choice(sorted(pids)), signal.SIGKILL)

    async def _hang_engine(self) -> None:
        """Stops it for good: the daemon has to detect it."""
        os.kill(self._one_of(ENGINE), signal.SIGSTOP)
        await asyncio.sleep(self._hang_seconds)

    async def _hang_api(self) -> None:
        os.kill(self._one_of(API), signal.SIGSTOP)

    async def _pause_engine(self) -> None:
        await self._pause(self._one_of(ENGINE))

    async def _pause_api(self) -> None:
        await self._pause(self._one_of(API))

    async def _pause(self, pid: int) -> None:
        os.kill(pid, signal.SIGSTOP)
        await asyncio.sleep(self._rng.uniform(0.1, 1.5))
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)

    async def _flip_bits(self) -> None:
        size = self._store.stat().st_size
        with self._store.open("r+b", buffering=0) as file:
            for _ in range(self._rng.randrange(1, 200)):
                at = self._rng.randrange(size)
                (byte,) = os.pread(file.fileno(), 1, at)
                os.pwrite(file.fileno(), bytes((byte ^ 1 << self._rng.randrange(8),)), at)

    async def _overload(self) -> None:
        self._begin(self._customers.burst(self._rng.randrange(60, 200)))

    async def _stall_log(self) -> None:
        self._log.reading.clear()

        async def read_again() -> None:
            await asyncio.sleep(self._rng.uniform(5, 20))
            self._log.reading.set()

        self._begin(read_again())

    async def _jump_clock(self) -> None:
        self._clock.set(self._rng.choice((0, 3600, -3600, 86400, -86400, 31 * 365 * 86400)))

    async def _break_disk(self) -> None:
        """The disk fails, or takes its time, for a while."""
        assert self._disk is not None
        if self._rng.random() < 0.3:
            self._disk.hang(self._rng.randrange(100, 3000))
        else:
            self._disk.fail(self._rng.choice(list(FAULTS.values())))
        await asyncio.sleep(self._rng.uniform(0.2, 8))
        self._disk.work()

    async def _use_up_descriptors(self) -> None:
        """Idle clients hold more connections than the daemon has descriptors. Probes are answered nevertheless, by a
        process that does not hang."""
        idle = []
        for _ in range(IDLE_CLIENTS):
            with suppress(OSError):
                idle.append(await asyncio.open_connection("127.0.0.1", self._port))
        try:
            for port in (self._admin_port, self._port):
                for _ in range(PROBES):
                    if await self._probe(port):
                        break
                    await asyncio.sleep(0.5)
                else:
                    self.findings.append(f"/health was not answered on port {port} with {len(idle)} idle connections")
        finally:
            for _, writer in idle:
                writer.close()

    async def _probe(self, port: int) -> bool:
        with suppress(OSError, TimeoutError):
            async with asyncio.timeout(self._hang_seconds):
                reader, writer = await asyncio.open_connection("127.0.0.1", port)
                try:
                    writer.write(b"GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n")
                    return (await reader.read()).startswith((b"HTTP/1.1 200", b"HTTP/1.1 503"))
                finally:
                    writer.close()
        return False

    async def _prefer(self) -> None:
        """Clients that want to be served before or after all others."""
        self._begin(self._customers.burst(self._rng.randrange(20, 80), priority=self._rng.choice((-1000, -1, 1, 1000))))

    async def _change_adapters(self) -> None:
        async def change() -> None:
            self.done[f"adapter {await self._adapters.change(self._port, self._customers.ledger)}"] += 1

        self._begin(change())

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._pending.add(task)
        task.add_done_callback(self._pending.discard)
