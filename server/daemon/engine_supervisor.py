"""`EngineSupervisor`: one engine of the daemon: its process, and the one after that."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Coroutine, Iterator
from typing import Any, Protocol

from weft.engine.config import EngineConfig
from weft.engine.wire.client import EngineClient
from weft.engine.wire.heartbeat import ENGINE, Heartbeats
from weft.engine.wire.messages import EngineReady, EngineStats
from weft.engine.wire.private_socket import PrivateSocket
from weft.engine.wire.shelf import Shelf
from weft.engine.wire.spawn import UNKNOWN_END, EngineProcess
from weft.server.daemon.control import EngineDown, EngineUp, Failure
from weft.server.daemon.restarts import Restarts
from weft.server.observe.metrics import Metrics
from weft.server.observe.totals import plus

STOP_SECONDS = 5.0
"""that a process gets to end when asked"""
RESTART_SECONDS = (1.0, 30.0)
"""between an engine's end and the next one's start: at first, and at most"""
POLL_SECONDS = 0.02
SOON = 1.0
"""seconds in which the memory of most engines is given back"""
FOREVER = 1e12
"""seconds that nobody expects a heartbeat"""

logger = logging.getLogger("weft")


class Owner(Protocol):
    """What a supervisor wants of the daemon."""

    metrics: Metrics
    heartbeats: Heartbeats
    numbers: Iterator[int]
    """of clients, over all engines"""

    @property
    def ending(self) -> bool: ...

    async def started(self, start: Coroutine[Any, Any, EngineProcess], /) -> EngineProcess:
        """The process, known to the daemon until it is in the supervisor's hands. Raises `OSError`."""
        ...

    def engine_begins(self, engine: int) -> None:
        """There is a process: introduce it to all API processes."""
        ...

    def engine_ready(self, engine: int) -> None: ...

    def engine_ended(self, engine: int, message: EngineDown) -> None: ...


class EngineSupervisor:
    """Attributes:
    ready: what the engine said when it was; None while it is not.
    failure: the last one of its processes.
    worked: one has been ready: what ends from now on can be a passing trouble.
    asleep: at which level (0: it is not): 1: the process has given its memory back; 2: there is no process.
    """

    def __init__(
        self, owner: Owner, config: EngineConfig, *, restart: bool, limit: int, several: bool, asleep: bool = False,
        shelf: Shelf | None = None,
    ) -> None:  # fmt: skip
        """`restart`: another process follows one that has ended, `limit` times within ten minutes.

        `several`: there are others. `asleep`: no process is started before `wake`. `shelf`: of the weights
        that it shares.
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
        self.told = asyncio.Event()
        """set once it has been told why it was given up"""
        self._owner = owner
        self._config = config
        self._shelf = shelf
        self._restart = restart
        self._restarts = Restarts(*RESTART_SECONDS, limit)
        self._control: EngineClient | None = None
        self._totals = EngineStats()
        """of processes that have ended"""
        self._restarting = False
        """the process is to be followed by another one at once"""
        self._up = asyncio.Event()
        self._again = asyncio.Event()
        self.asleep = 2 if asleep else 0
        self._wanted = asyncio.Event()
        """a process is to be there"""
        if not asleep:
            self._wanted.set()

    async def keep(self) -> str:
        """Run one process after another; tells why no other one follows. To be called again after `asked_again`."""
        owner = self._owner
        while True:
            if not self._wanted.is_set():
                owner.heartbeats.of(self.row).begin("asleep", FOREVER)
                await self._wanted.wait()
            why = await self._run()
            if self.process is None or not self.process.stopping:
                self.failure = Failure(why, int(time.time()))
            if self.asleep:
                if self._wanted.is_set():  # it was not asked to end
                    logger.error("%s: another one starts when it is woken", why)
                    self.asleep = 2
                    self._wanted.clear()
                pause: float | None = 0.0
            else:
                pause, why = self._pause_after(why)
            self.given_up = pause is None  # known before anybody's answer ends with it
            down = EngineDown(why, restarting=pause is not None, engine=self.engine, failure=self.failure)
            owner.engine_ended(self.engine, down)
            if self._control is not None:  # whoever waits has been told
                await self._control.last_words()
                self._totals = plus(self._totals, self._control.stats)
            why = await self._gone(why)
            await self.stop()
            if pause is None:
                return why
            if pause and not owner.ending:
                logger.error("%s; another one starts in %g s", why, pause)
                owner.metrics.engine_restarts.labels(str(self.engine)).inc()
                owner.heartbeats.of(self.row).begin(
                    "waiting to start another engine", pause + owner.heartbeats.start_timeout
                )
                await asyncio.sleep(pause)
            if owner.ending and not self.asleep:  # since its end
                self.given_up = True
                return why

    async def _gone(self, why: str) -> str:
        """No other one is started beside a process, were it never to be gone. Tells why it ended, by its exit status
        where there was none before."""
        process = self.process
        if process is None:
            return why
        gone = asyncio.create_task(process.wait_gone())
        try:
            if not (await asyncio.wait((gone,), timeout=SOON))[0]:
                logger.log(logging.INFO if process.stopping else logging.ERROR, "%s; its memory is waited for", why)
                if not self._owner.heartbeats.given_up(self.row):  # nor does anybody expect it to heartbeat
                    self._owner.heartbeats.of(self.row).begin("giving its memory back", FOREVER, process.pid)
            how = await gone
        finally:
            gone.cancel()
        if self.failure is not None:
            self.failure = Failure(self.failure.why.replace(UNKNOWN_END, how), self.failure.at)
        return why.replace(UNKNOWN_END, how)

    def _pause_after(self, why: str) -> tuple[float | None, str]:
        """Seconds before another process starts, None for no other one; and why the last one ended, completed."""
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
        return None, f"{why}; {count} others were started within ten minutes: that is enough (--engine-restart-limit)"

    async def _run(self) -> str:
        """One process from start to end; tells why it ended, or why it could not start."""
        owner = self._owner
        start = EngineProcess.start(self._config, self.socket, owner.heartbeats, self._shelf)
        try:
            self.process = process = await owner.started(start)
        except OSError as error:
            return f"no engine process can be started: {error.strerror or error}"
        if not self._wanted.is_set():  # it was put to sleep meanwhile
            await process.stop(STOP_SECONDS)
            return "the engine was stopped"
        self._restarting = False  # whoever asked while the one before it ended has this one
        self._control = control = EngineClient(process.address, next(owner.numbers))
        control.on_stats = lambda stats: owner.metrics.count_iteration(stats, self.engine)
        # Nobody would know how it fares; an engine that is being stopped ends by itself, its KV pages kept.
        control.reader.add_done_callback(lambda _: process.kill() if self.process is process else None)
        owner.engine_begins(self.engine)
        loading = asyncio.create_task(control.wait_ready())
        dead = asyncio.create_task(process.wait_dead())
        try:
            await asyncio.wait((loading, dead), return_when=asyncio.FIRST_COMPLETED)
            # One that hung is woken for its last words, and may get ready before it is killed.
            if loading.done() and not owner.heartbeats.given_up(self.row):
                self.ready = loading.result()
                self.worked = True
                self._up.set()
                owner.engine_ready(self.engine)
            await asyncio.wait((dead,))
            why = dead.result()
            control.mark_dead(why)
            return self._named(control.failure or why)
        finally:
            loading.cancel()
            dead.cancel()
            self.ready = None
            self._up.clear()

    def _named(self, why: str) -> str:
        return why if self.name == "the engine" or why.startswith(self.name) else f"{self.name}: {why}"

    def introduction(self, client: int) -> EngineUp | None:
        """For an API process that is to be this client; None while there is no process."""
        if self.process is None:
            return None
        return EngineUp(self.process.address, client, self._totals, self.engine, self.failure)

    def client_gone(self, client: int) -> None:
        """An API process has ended."""
        if self._control is not None:
            self._control.client_gone(client)

    async def restart_engines(self) -> bool:
        """Have the process followed by another one, without a pause. False when that could not start; it is tried
        again like any other. Whoever calls has seen to it that nobody is served there, and that others of the model are
        not given up."""
        if self.given_up:
            self._restarts.forget()
            self.given_up = False
            self.told.clear()
            self._again.set()
        was = self.process
        if was is not None:
            self._restarting = True
            self._up.clear()
            await was.stop(STOP_SECONDS)
        while (process := self.process) is None or process is was:
            if self.given_up:
                return False
            await asyncio.sleep(POLL_SECONDS)
        up, dead = asyncio.create_task(self._up.wait()), asyncio.create_task(process.wait_dead())
        try:
            await asyncio.wait((up, dead), return_when=asyncio.FIRST_COMPLETED)
            return up.done()
        finally:
            up.cancel()
            dead.cancel()

    async def asked_again(self) -> None:
        """Once `restart_engines` wants a process though the engine was given up."""
        await self._again.wait()
        self._again.clear()

    async def sleep(self, level: int) -> int:
        """Give its memory back. At level 1 the process stays; where it cannot (it says why, or has ended), and at level
        2, it ends. Idempotent. Returns the level reached."""
        if self.asleep >= level or self.given_up:
            return self.asleep or 2
        if level == 1 and self.ready is not None and self._control is not None:
            answer = await self._control.sleep()
            if answer.why_not:
                logger.info("%s cannot sleep at level 1 (%s): it ends", self.name, answer.why_not)
            else:
                self.asleep = 1
                return 1
        self.asleep = 2
        self._wanted.clear()
        if self.process is not None:
            await self.process.stop(STOP_SECONDS)
        while self.process is not None and not self.given_up:  # until `keep` has told everybody
            await asyncio.sleep(POLL_SECONDS)
        if self._shelf is not None:  # the memory goes with the last engine that sleeps
            self._shelf.clear()
        return 2

    async def wake(self) -> bool:
        """Be ready again; False where that could not be."""
        control, level, self.asleep = self._control, self.asleep, 0
        if level == 1 and control is not None:
            if not (await control.wake()).why_not:
                return True
            # It has ended, or is no use any more: another one follows as usual.
            if self.process is not None:
                self.process.kill("it could not be woken")
        self._wanted.set()
        while self.ready is None or (level == 1 and self._control is control):
            if self.given_up or self.asleep:
                return False
            await asyncio.sleep(POLL_SECONDS)
        return True

    async def stop(self) -> None:
        """End the process. Idempotent."""
        process, self.process = self.process, None
        control, self._control = self._control, None
        if control is not None:
            control.mark_dead(f"{self.name} was stopped")
            control.close()
        if process is not None:
            await process.stop(STOP_SECONDS)

    def close(self) -> None:
        self.socket.close()
