"""The daemon: starts the engine process and the API processes, watches them, drains on SIGTERM, and ends with them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from weft.engine.errors import ConfigError, WeftError
from weft.engine.wire.beat import ENGINE, Beats, Watch
from weft.engine.wire.client import EngineClient
from weft.engine.wire.messages import EngineReady, EngineStats
from weft.engine.wire.private_socket import PrivateSocket
from weft.engine.wire.spawn import EngineProcess
from weft.server.config import ServeConfig
from weft.server.daemon.announce import announce
from weft.server.daemon.api_process import ApiProcess, Place
from weft.server.daemon.control import (
    Drain,
    EngineDown,
    EngineUp,
    Failed,
    HandOver,
    Idle,
    Interrupt,
    Ready,
    Reload,
    Stop,
    ToWorker,
)
from weft.server.daemon.front import Front
from weft.server.daemon.restarts import Restarts
from weft.server.daemon.signals import handle, own_stacks
from weft.server.daemon.watchman import Charge, Watchman
from weft.server.logs import configure, count_dropped
from weft.server.observe.board import Board
from weft.server.observe.metrics import Metrics
from weft.server.observe.totals import plus

FAREWELL = 1.0
"""seconds that last answers get to leave"""
STOP_SECONDS = 5.0
"""that a process gets to end when asked"""
RESTART_SECONDS = (1.0, 30.0)
"""between an engine's end and the next one's start: at first, and at most"""
API_RESTART_SECONDS = (0.5, 5.0)
"""the same for an API process that lived less than SHORT_LIFE seconds"""
SHORT_LIFE = 5.0
FRUITLESS_LIVES = 3
"""so many API processes in a row that ended before they served: another one will not help"""
ATTACH_SECONDS = 120.0
"""that an API process may take to serve once there is an engine that is ready"""

Process = TypeVar("Process")

logger = logging.getLogger("weft")


def run(config: ServeConfig) -> int:
    """Serve until a signal or the engine's end. Returns the exit code: 0 after a signal, 2 for a bad option, else 1."""
    configure(config)
    try:
        return asyncio.run(_run(config))
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


async def _run(config: ServeConfig) -> int:
    return await Daemon(config).run()


class Daemon:
    """Row 0 of the board is the daemon's own, row i + 1 that of its i-th API process."""

    def __init__(self, config: ServeConfig) -> None:
        """Takes the port. Raises `ConfigError` for what an operator can mend."""
        self._begun = time.monotonic()
        self._config = config
        self._front = Front(config)
        self._socket = PrivateSocket()
        self._beats = Beats(
            config.api_workers + 1, step_timeout=config.step_timeout, start_timeout=config.start_timeout
        )
        self._board = Board(config.api_workers + 1, self._front.key_capacity)
        self._metrics = Metrics(self._board, 0)
        count_dropped(self._metrics.log_lines_dropped.labels().inc)
        self._numbers = itertools.count(1)
        """of clients, over all engines"""
        self._engine: EngineProcess | None = None
        self._control: EngineClient | None = None
        self._engine_ready: EngineReady | None = None
        self._totals = EngineStats()
        """of engines that have ended"""
        self._engine_worked = False
        """an engine has been ready: what ends from now on can be a passing trouble"""
        self._engine_restarts = Restarts(*RESTART_SECONDS, config.engine_restart_limit)
        self._starting: set[asyncio.Task[Any]] = set()
        """processes that are being started, and are in no table yet"""
        self._api: dict[int, ApiProcess] = {}
        self._clients: dict[int, int] = {}
        """the client's number by API process"""
        self._serving: set[int] = set()
        """API processes that are attached to the engine"""
        self._fruitless = [0] * config.api_workers
        """by API process: how many in a row ended before they served"""
        self._busy: set[int] = set()
        """draining API processes with open answers"""
        self._announced = False
        self._chat = False
        self._idle = asyncio.Event()
        self._asked_to_stop = asyncio.Event()
        self._asked_twice = asyncio.Event()
        self._signalled = False
        self._handed_over = False
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def run(self) -> int:
        handle(self._on_signal, self._reload, self._log_stacks)
        keepers = [self._begin(self._keep_engine())]
        keepers += [self._begin(self._keep_api(i)) for i in range(self._config.api_workers)]
        keepers.append(self._begin(self._front.notifier.watch()))
        keepers.append(self._begin(Watchman(Watch(self._beats), self._charges).run()))
        try:
            stop = asyncio.create_task(self._asked_to_stop.wait())
            await asyncio.wait((stop, self._failure), return_when=asyncio.FIRST_COMPLETED)
            self._asked_to_stop.set()
            self._front.notifier.stopping("ending")
            if self._announced and not self._failure.done():
                await self._end_answers()
            if self._failure.done():
                print(f"weft: {self._failure.result()}", file=sys.stderr, flush=True)
                self._tell_end(Drain())
                await self._wait_idle(FAREWELL)
            return 1 if self._failure.done() else 0
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._stop_all()

    async def _stop_all(self) -> None:
        """First the port is closed, so that whoever comes now is refused at once, then the engine ends."""
        self._front.close()
        stopping = [asyncio.create_task(self._stop_api(process)) for process in self._api.values()]
        for started in await asyncio.gather(*self._starting, return_exceptions=True):
            # Whoever waited for it was cancelled meanwhile.
            if isinstance(started, ApiProcess) and started not in self._api.values():
                stopping.append(asyncio.create_task(self._stop_api(started)))
            elif isinstance(started, EngineProcess) and started is not self._engine:
                stopping.append(asyncio.create_task(started.stop(STOP_SECONDS)))
        if stopping:
            await asyncio.wait(stopping, timeout=FAREWELL)
        await asyncio.gather(self._stop_engine(), *stopping)
        self._socket.close()

    async def _started(self, start: Coroutine[Any, Any, Process]) -> Process:
        """Start a process so that `_stop_all` knows of it, even when whoever waits for it is cancelled."""
        task = asyncio.create_task(start)
        self._starting.add(task)
        try:
            process = await asyncio.shield(task)
        except OSError:
            self._starting.discard(task)
            raise
        self._starting.discard(task)
        return process

    def _charges(self) -> Iterator[Charge]:
        """The processes that must show life."""
        config, metrics = self._config, self._metrics
        if self._engine is not None:
            yield Charge("the engine", ENGINE, self._engine, config.hang_timeout, metrics.engine_hangs)
        for i, process in self._api.items():
            yield Charge(f"API process {i}", i + 1, process, config.api_hang_timeout, metrics.api_hangs)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, WeftError):
                logger.error("the daemon failed", exc_info=error)
            self._fail(str(error))

    def _fail(self, why: str) -> None:
        if not self._failure.done():
            self._failure.set_result(why)

    def _on_signal(self) -> None:
        if self._signalled:
            self._asked_twice.set()
        self._signalled = True
        self._asked_to_stop.set()

    def _on_successor(self) -> None:
        self._handed_over = True
        self._asked_to_stop.set()

    def _reload(self) -> None:
        if self._front.reload():
            self._tell(Reload([key.hex() for key in self._front.keys]))

    def _log_stacks(self) -> None:
        logger.warning("SIGQUIT: the daemon\n%s", own_stacks())
        self._asking = asyncio.create_task(self._log_stacks_of_children())

    async def _log_stacks_of_children(self) -> None:
        for charge in list(self._charges()):
            stacks = await charge.process.stacks.ask(charge.process.pid, wake=False)
            logger.warning("SIGQUIT: %s\n%s", charge.name, stacks)

    def _tell(self, message: ToWorker) -> None:
        for process in self._api.values():
            process.send(message)

    # -- the engine

    async def _keep_engine(self) -> None:
        """Run an engine process, and another one after it if so configured."""
        while True:
            why = await self._run_engine()
            pause, why = self._pause_after(why)
            self._serving.clear()
            self._tell(EngineDown(why, restarting=pause is not None))
            await self._stop_engine()
            if pause is None:
                self._fail(why)
                return
            logger.error("%s; another one starts in %g s", why, pause)
            self._front.notifier.status(f"{why}; another one starts")
            self._metrics.engine_restarts.inc()
            waiting = "waiting to start another engine"
            self._beats.of(ENGINE).begin(waiting, pause + self._config.start_timeout)
            await asyncio.sleep(pause)

    def _pause_after(self, why: str) -> tuple[float | None, str]:
        """Seconds before another engine starts, None for no other one; and why the last one ended, completed."""
        if not (self._config.restart_engine and self._engine_worked) or self._asked_to_stop.is_set():
            return None, why
        pause = self._engine_restarts.next_pause()
        if pause is not None:
            return pause, why
        self._metrics.restarts_given_up.inc()
        count = self._engine_restarts.count
        return None, f"{why}; {count} others were started within ten minutes: that is enough (--engine-restart-limit)"

    async def _run_engine(self) -> str:
        """One engine process from start to end; tells why it ended, or why it could not start."""
        config = self._config.engine
        try:
            self._engine = engine = await self._started(EngineProcess.start(config, self._socket, self._beats))
        except OSError as error:
            return f"no engine process can be started: {error.strerror or error}"
        self._control = control = EngineClient(engine.address, next(self._numbers))
        control.on_stats = self._metrics.count_iteration
        # Nobody would know how it fares; an engine that is being stopped ends by itself, its KV pages kept.
        control.reader.add_done_callback(lambda _: engine.kill() if self._engine is engine else None)
        for i in self._api:
            self._introduce(i)
        loading = asyncio.create_task(control.wait_ready())
        dead = asyncio.create_task(engine.wait_dead())
        try:
            await asyncio.wait((loading, dead), return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                self._engine_ready = loading.result()
                self._engine_worked = True
                self._announce_once()
                self._front.still_serving()
                for i in self._api:
                    self._expect(i)
                await asyncio.wait((dead,))
            why = dead.result()
            control.mark_dead(why)
            self._totals = plus(self._totals, control.stats)
            return control.failure or why
        finally:
            loading.cancel()
            dead.cancel()
            self._engine_ready = None

    def _introduce(self, i: int) -> None:
        """Tell an API process where the engine is."""
        if self._engine is not None:
            self._clients[i] = number = next(self._numbers)
            self._api[i].send(EngineUp(self._engine.address, number, self._totals))
            if self._engine_ready is not None:
                self._expect(i)

    def _expect(self, i: int) -> None:
        """The engine is ready: an API process that does not serve soon is of no use."""
        number = self._clients[i]

        def check() -> None:
            if self._clients.get(i) == number and i in self._api and i not in self._serving and self._engine_ready:
                self._api[i].kill(f"not ready {ATTACH_SECONDS:g} s after the engine")

        asyncio.get_running_loop().call_later(ATTACH_SECONDS, check)

    async def _stop_engine(self) -> None:
        engine, self._engine = self._engine, None
        control, self._control = self._control, None
        if control is not None:
            control.mark_dead("the engine was stopped")
            control.close()
        if engine is not None:
            await engine.stop(STOP_SECONDS)

    # -- the API processes

    async def _keep_api(self, i: int) -> None:
        """Run the i-th API process, and another one after it."""
        restarts = Restarts(*API_RESTART_SECONDS)
        while True:
            begun = time.monotonic()
            how = await self._run_api(i)
            if self._asked_to_stop.is_set():
                for listener in self._front.listeners[i]:
                    listener.close()  # its connections are for the others now
                return
            if self._nobody_will_serve(i):
                self._fail(f"API processes end before they serve ({how})")
                return
            if time.monotonic() - begun < SHORT_LIFE:
                pause = restarts.next_pause() or 0.0
            else:
                restarts.forget()
                pause = 0.0
            logger.error("API process %d ended (%s); another one starts in %g s", i, how, pause)
            self._metrics.api_restarts.inc()
            await asyncio.sleep(pause)
            if self._handed_over:
                return

    def _nobody_will_serve(self, i: int) -> bool:
        """The i-th API process has ended again, and no other one makes up for it."""
        if not self._announced:
            return self._fruitless[i] >= FRUITLESS_LIVES
        in_vain = self._engine_ready is not None and not self._serving
        return in_vain and all(count >= FRUITLESS_LIVES for count in self._fruitless)

    async def _run_api(self, i: int) -> str:
        """One API process from start to end; tells how it ended."""
        front = self._front
        place = Place(row=i + 1, board=self._board, beats=self._beats, engine_fd=self._socket.path_fd)
        start = ApiProcess.start(
            self._config,
            front.keys,
            place,
            front.listeners[i],
            certificate=front.certificate,
            taking_over=front.taking_over,
            hold=self._announced and self._engine_ready is not None,
        )
        try:
            process = await self._started(start)
        except OSError as error:
            self._fruitless[i] += 1
            return f"cannot be started: {error.strerror or error}"
        self._api[i] = process
        self._fruitless[i] += 1
        self._introduce(i)
        if self._asked_to_stop.is_set():
            process.send(HandOver() if self._handed_over else Drain())
        async for message in process.messages():
            match message:
                case Ready():
                    self._serving.add(i)
                    self._fruitless[i] = 0
                    self._announce_once(chat=message.chat)
                case Failed() if self._announced:
                    process.kill(message.message)
                case Failed():
                    self._fail(message.message)
                case Idle():
                    self._no_longer_busy(i)
        how = await process.wait()
        del self._api[i]
        self._serving.discard(i)
        self._no_longer_busy(i)
        self._metrics.process_lost(*self._board.load[i + 1].tolist())
        self._board.load[i + 1] = 0
        if self._control is not None and i in self._clients:
            self._control.client_gone(self._clients[i])
        return how

    async def _stop_api(self, process: ApiProcess) -> None:
        process.send(Stop())
        try:
            await asyncio.wait_for(process.wait(), STOP_SECONDS)
        except TimeoutError:
            process.kill()
            await process.wait()

    def _announce_once(self, *, chat: bool | None = None) -> None:
        """Once everything serves. `chat`: the model has a chat template, as an API process tells."""
        self._chat = self._chat or bool(chat)
        everyone = len(self._serving) == self._config.api_workers
        if not self._announced and self._engine_ready is not None and everyone and not self._asked_to_stop.is_set():
            self._announced = True
            seconds = time.monotonic() - self._begun
            key = bool(self._front.keys)
            announce(self._config, self._front.address, self._engine_ready, seconds, chat=self._chat, key=key)
            self._front.serving(self._on_successor)

    # -- the end

    def _tell_end(self, message: Drain | HandOver) -> None:
        """`Idle` is the answer."""
        self._busy = set(self._api)
        self._idle.clear()
        self._tell(message)
        if not self._busy:
            self._idle.set()

    def _no_longer_busy(self, i: int) -> None:
        self._busy.discard(i)
        if not self._busy:
            self._idle.set()

    async def _end_answers(self) -> None:
        """Let open answers finish, in the time there is, then end those that did not."""
        until = time.monotonic() + self._config.drain_timeout
        if self._handed_over:
            logger.info("another daemon has the port; ending behind the answers on the connections there are")
            self._tell_end(HandOver())
            self._front.close()
            await self._wait_idle_or_asked(until)
        else:
            logger.info("draining; another Ctrl-C or SIGTERM ends at once")
        if self._failure.done():
            return
        self._tell_end(Drain())
        await self._wait_idle_or_asked(until)
        if not self._idle.is_set() and not self._failure.done():
            self._tell(Interrupt())
            await self._wait_idle(FAREWELL)

    async def _wait_idle_or_asked(self, until: float) -> None:
        """`until`: as `time.monotonic()`."""
        idle = asyncio.create_task(self._idle.wait())
        twice = asyncio.create_task(self._asked_twice.wait())
        timeout = max(0.0, until - time.monotonic())
        await asyncio.wait((idle, twice, self._failure), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        twice.cancel()
        idle.cancel()

    async def _wait_idle(self, timeout: float) -> None:
        waiting = asyncio.create_task(self._idle.wait())
        await asyncio.wait((waiting,), timeout=timeout)
        waiting.cancel()
