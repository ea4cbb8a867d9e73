"""`EngineSupervisor` runs one engine of the daemon and restarts its process."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol, TypeVar

from msgspec.structs import replace

from weft.engine.config import EngineConfig
from weft.engine.wire.client import EngineClient
from weft.engine.wire.heartbeat import ENGINE, Heartbeats
from weft.engine.wire.messages import EngineReady, EngineStats
from weft.engine.wire.spawn import UNKNOWN_END, EngineProcess, PrivateSocket
from weft.engine.wire.weight_exchange import WeightExchange
from weft.server.daemon.control import EngineDown, EngineUp, Failure
from weft.server.daemon.restarts import Restarts
from weft.server.observe.metrics import Metrics
from weft.server.observe.totals import plus

STOP_SECONDS = 5.0  # Seconds for a process to end when asked.
RESTART_SECONDS = (1.0, 30.0)  # First and longest pause before a restart.
POLL_SECONDS = 0.02
RELEASE_SECONDS = 1.0  # Seconds within which most engines release their memory.
FOREVER = 1e12  # Seconds for stages in which no heartbeat is expected.

Process = TypeVar("Process")

logger = logging.getLogger("weft")


class Owner(Protocol):
    """The daemon, as supervisors of processes use it."""

    metrics: Metrics
    heartbeats: Heartbeats
    numbers: Iterator[int]  # Client numbers, unique over all engines.

    @property
    def ending(self) -> bool: ...

    async def started(self, start: Coroutine[Any, Any, Process], /) -> Process:
        """Start a process. The daemon tracks it until its supervisor has it. Raises `OSError`."""
        ...

    def engine_started(self, engine: int) -> None:
        """Connect a new process with all API processes."""
        ...

    def engine_ready(self, engine: int) -> None: ...

    def engine_ended(self, engine: int, message: EngineDown) -> None: ...


class EngineSupervisor:
    """Runs one engine: starts its process, restarts it, puts it to sleep and wakes it.

    Attributes:
    ready: the engine's `EngineReady` message; None while it is not ready.
    failure: the last failure of its processes.
    worked: whether a process has been ready, so that a later failure may be temporary.
    asleep: sleep level. 0: awake; 1: the process has released its memory; 2: there is no process."""

    def __init__(
        self, owner: Owner, config: EngineConfig, *, restart: bool, limit: int, several: bool, asleep: bool = False,
        exchange: WeightExchange | None = None,
    ) -> None:  # fmt: skip
        """`restart`: whether to restart a process that has ended, up to `limit` times within ten minutes.

        `several`: whether there are other engines. `asleep`: whether to start no process before `wake`.
        `exchange`: shared weights.
        """
        self.engine = config.share.engine
        self.name = f"engine {self.engine}" if several else "the engine"
        self.row = ENGINE + self.engine
        self.socket = PrivateSocket()
        self.process: EngineProcess | None = None
        self.ready: EngineReady | None = None
        self.failure: Failure | None = None
        self.worked = False
        self.given_up = False
        self.end_reported = asyncio.Event()  # Set once the reason for giving it up has been reported.
        self._owner = owner
        self._config = config
        self._exchange = exchange
        self._restart = restart
        self._restarts = Restarts(*RESTART_SECONDS, limit)
        self._control: EngineClient | None = None
        self._down: EngineDown | None = None  # the end of the last process, until another one runs
        self._totals = EngineStats()  # Totals of ended processes.
        self._restarting = False  # Whether the process is being replaced without a pause.
        self._ready_event = asyncio.Event()
        self._retry = asyncio.Event()
        self.asleep = 2 if asleep else 0
        self._process_wanted = asyncio.Event()  # Set while a process should be running.
        if not asleep:
            self._process_wanted.set()

    async def run(self) -> str:
        """Run and restart the process. Returns why it is not restarted; call it again after `wait_retry`."""
        owner = self._owner
        while True:
            if not self._process_wanted.is_set():
                owner.heartbeats.of(self.row).begin("asleep", FOREVER)
                await self._process_wanted.wait()
            why = await self._run()
            if self.process is None or not self.process.stopping:
                self.failure = Failure(why, int(time.time()))
            if self.asleep:
                if self._process_wanted.is_set():  # it ended by itself
                    logger.error("%s: it restarts when it is woken", why)
                    self.asleep = 2
                    self._process_wanted.clear()
                pause: float | None = 0.0
            else:
                pause, why = self._pause_after(why)
            self.given_up = pause is None  # set before clients receive the error
            self._down = EngineDown(why, restarting=pause is not None, engine=self.engine, failure=self.failure)
            owner.engine_ended(self.engine, self._down)
            if self._control is not None:  # waiting clients have been notified
                await self._control.drain()
                self._totals = plus(self._totals, self._control.stats)
            why = await self._wait_gone(why)
            self._down = replace(self._down, why=why, failure=self.failure)
            await self.stop()
            if pause is None:
                return why
            if pause and not owner.ending:
                logger.error("%s; restarting in %g s", why, pause)
                owner.metrics.engine_restarts.labels(str(self.engine)).inc()
                owner.heartbeats.of(self.row).begin(
                    "waiting to start another engine", pause + owner.heartbeats.start_timeout
                )
                await asyncio.sleep(pause)
            if owner.ending and not self.asleep:  # the daemon began to end meanwhile
                self.given_up = True
                return why

    async def _wait_gone(self, why: str) -> str:
        """Wait until the process is gone, however long that takes: two processes must never coexist. Returns `why` with
        an unknown end replaced by the exit status."""
        process = self.process
        if process is None:
            return why
        gone = asyncio.create_task(process.wait_gone())
        try:
            if not (await asyncio.wait((gone,), timeout=RELEASE_SECONDS))[0]:
                logger.log(logging.INFO if process.stopping else logging.ERROR, "%s; waiting for its memory", why)
                if not self._owner.heartbeats.of(self.row).condemned:  # no heartbeat is expected
                    self._owner.heartbeats.of(self.row).begin("releasing its memory", FOREVER, process.pid)
            how = await gone
        finally:
            gone.cancel()
        if self.failure is not None:
            self.failure = Failure(self.failure.why.replace(UNKNOWN_END, how), self.failure.at)
        return why.replace(UNKNOWN_END, how)

    def _pause_after(self, why: str) -> tuple[float | None, str]:
        """Return the pause before the restart (None for no restart), and why the process ended."""
        if self._restarting and not self._owner.ending:
            self._restarting = False
            return 0.0, why
        if not (self._restart and self.worked) or self._owner.ending:
            return None, why
        pause = self._restarts.next_pause()
        if pause is not None:
            return pause, why
        self._owner.metrics.restarts_given_up.inc()
        count = self._restarts.count
        return None, f"{why}; giving up after {count} restarts within ten minutes (--engine-restart-limit)"

    async def _run(self) -> str:
        """Run one process from start to end. Returns why it ended or could not start."""
        owner = self._owner
        start = EngineProcess.start(self._config, self.socket, owner.heartbeats, self._exchange)
        try:
            self.process = process = await owner.started(start)
        except OSError as error:
            return f"the engine process cannot be started: {error.strerror or error}"
        if not self._process_wanted.is_set():  # it was put to sleep meanwhile
            await process.stop(STOP_SECONDS)
            return "the engine was stopped"
        self._restarting = False  # this process also fulfills restarts requested while its predecessor ended
        self._control = control = EngineClient(process.address, next(owner.numbers))
        control.on_stats = lambda stats: owner.metrics.count_iteration(stats, self.engine)
        # Without this connection the process would be unsupervised. One that is being stopped ends by itself and keeps
        # its KV pages.
        control.reader.add_done_callback(lambda _: process.kill() if self.process is process else None)
        self._down = None
        owner.engine_started(self.engine)
        loading = asyncio.create_task(control.wait_ready())
        dead = asyncio.create_task(process.wait_dead())
        try:
            await asyncio.wait((loading, dead), return_when=asyncio.FIRST_COMPLETED)
            # A hung process is resumed to write its stacks, and may become ready before it is killed.
            if loading.done() and not owner.heartbeats.of(self.row).condemned:
                self.ready = loading.result()
                self.worked = True
                self._ready_event.set()
                owner.engine_ready(self.engine)
            await asyncio.wait((dead,))
            why = dead.result()
            control.mark_dead(why)
            return self._named(why)
        finally:
            loading.cancel()
            dead.cancel()
            self.ready = None
            self._ready_event.clear()

    def _named(self, why: str) -> str:
        return why if self.name == "the engine" or why.startswith(self.name) else f"{self.name}: {why}"

    def greeting(self, client: int) -> EngineUp | EngineDown | None:
        """Return the message for an API process that starts: it connects as this client, or learns why the last process
        ended. None if there has been no process."""
        if self._down is not None or self.process is None:
            return self._down
        return EngineUp(self.process.address, client, self._totals, self.engine, self.failure)

    def client_gone(self, client: int) -> None:
        """Handle the end of an API process."""
        if self._control is not None:
            self._control.client_gone(client)

    async def restart(self) -> bool:
        """Replace the process without a pause. Returns False if the new one fails; retries then follow as usual. The
        caller has drained the engine and made sure that another engine of the model is not given up."""
        if self.given_up:
            self._restarts.forget()
            self.given_up = False
            self.end_reported.clear()
            self._retry.set()
        was = self.process
        if was is not None:
            self._restarting = True
            self._ready_event.clear()
            await was.stop(STOP_SECONDS)
        while (process := self.process) is None or process is was:
            if self.given_up:
                return False
            await asyncio.sleep(POLL_SECONDS)
        up, dead = asyncio.create_task(self._ready_event.wait()), asyncio.create_task(process.wait_dead())
        try:
            await asyncio.wait((up, dead), return_when=asyncio.FIRST_COMPLETED)
            return up.done()
        finally:
            up.cancel()
            dead.cancel()

    async def wait_retry(self) -> None:
        """Wait until `restart` requests a process for an engine that was given up."""
        await self._retry.wait()
        self._retry.clear()

    async def sleep(self, level: int) -> int:
        """Release the memory. At level 1 the process stays; at level 2, or if level 1 is impossible, it ends.
        Idempotent. Returns the level reached."""
        if self.asleep >= level or self.given_up:
            return self.asleep or 2
        if level == 1 and self.ready is not None and self._control is not None:
            answer = await self._control.sleep()
            if answer.why_not:
                logger.info("%s cannot sleep at level 1 (%s); using level 2", self.name, answer.why_not)
            else:
                self.asleep = 1
                return 1
        self.asleep = 2
        self._process_wanted.clear()
        if self.process is not None:
            await self.process.stop(STOP_SECONDS)
        while self.process is not None and not self.given_up:  # until `run` has notified all clients
            await asyncio.sleep(POLL_SECONDS)
        if self._exchange is not None:  # the last engine to sleep frees the memory
            self._exchange.clear()
        return 2

    async def wake(self) -> bool:
        """Become ready again. Returns False on failure."""
        control, level, self.asleep = self._control, self.asleep, 0
        if level == 1 and control is not None:
            if not (await control.wake()).why_not:
                return True
            # The process has ended or is unusable; it is restarted as usual.
            if self.process is not None:
                self.process.kill("it could not be woken")
        self._process_wanted.set()
        while self.ready is None or (level == 1 and self._control is control):
            if self.given_up or self.asleep:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def stop(self) -> None:
        """Stop the process. Idempotent."""
        process, self.process = self.process, None
        control, self._control = self._control, None
        if control is not None:
            control.mark_dead(f"{self.name} was stopped")
            control.close()
        if process is not None:
            await process.stop(STOP_SECONDS)

    def close(self) -> None:
        self.socket.close()
