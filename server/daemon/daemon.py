"""The daemon: starts engines and API processes, watches them, drains on SIGTERM, and ends with them."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import time
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.wire.beat import Beats, Watch
from weft.engine.wire.blank import gpus
from weft.engine.wire.child import has_ended
from weft.engine.wire.cores import nodes_here
from weft.engine.wire.shelf import Shelf
from weft.engine.wire.spawn import EngineProcess
from weft.engine.wire.stacks import own_stacks
from weft.server.config import ServeConfig
from weft.server.daemon.announce import announce
from weft.server.daemon.api_process import ApiProcess, Place
from weft.server.daemon.common_folder import CommonFolder
from weft.server.daemon.control import (
    Answer,
    Drain,
    EngineDown,
    Failed,
    HandOver,
    Idle,
    Interrupt,
    Ready,
    Reload,
    Renew,
    Sleep,
    Stop,
    Together,
    ToWorker,
    Wake,
)
from weft.server.daemon.dormitory import Dormitory
from weft.server.daemon.engine_keeper import STOP_SECONDS, EngineKeeper
from weft.server.daemon.front import Front
from weft.server.daemon.introductions import Introductions
from weft.server.daemon.placement import described, place, shares_weights
from weft.server.daemon.restarts import Restarts
from weft.server.daemon.rollout import Rollout
from weft.server.daemon.rota import Rota
from weft.server.daemon.signals import handle
from weft.server.daemon.watchman import Charge, Watchman
from weft.server.logs import configure, count_dropped
from weft.server.observe.board import Board, Rest
from weft.server.observe.metrics import Metrics
from weft.server.replicas.replicas import level

FAREWELL = 1.0
"""seconds that last answers get to leave"""
API_RESTART_SECONDS = (0.5, 5.0)
"""from the end of an API process that lived less than SHORT_LIFE seconds to the next one's start: first, and most"""
SHORT_LIFE = 5.0
FRUITLESS_LIVES = 3
"""so many API processes in a row that ended before they served: another one will not help"""

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


def _common_folder(config: ServeConfig) -> CommonFolder | None:
    """For the responses that several API processes store, where no other folder is named. Raises `ConfigError`."""
    if config.api_workers == 1 or config.responses_dir is not None or not config.responses_max_mib:
        return None
    try:
        return CommonFolder()
    except OSError as error:
        why = f"API processes have no folder in common: {error.strerror or error}"
        raise ConfigError(f"{why}; set TMPDIR to another directory, or --responses-dir") from None


class Daemon:
    """Row 0 of the board is the daemon's own, row i + 1 that of its i-th API process."""

    def __init__(self, config: ServeConfig) -> None:
        """Takes the port. Raises `ConfigError` for what an operator can mend."""
        self._begun = time.monotonic()
        self._shared = _common_folder(config)
        """what API processes keep for one another"""
        if self._shared is not None:
            config = config.model_copy(update={"responses_dir": self._shared.name})
        self._config = config
        self._front = Front(config)
        configs = place(config, gpus(), os.sched_getaffinity(0), nodes_here())
        rows, engines = config.api_workers + 1, len(configs)
        self._models = config.each
        self._numbers = config.engine_numbers
        names = [each.model_names[0] for each in self._models]
        rota = Rota(config.memory_shares, config.max_awake_models)
        asleep = {e for m, rest in enumerate(rota.rest) if rest is Rest.ASLEEP for e in self._numbers[m]}
        self.beats = Beats(
            engines + config.api_workers, step_timeout=config.step_timeout, start_timeout=config.start_timeout
        )
        self._board = Board(rows, self._front.key_capacity, engines=engines, models=len(names))
        self.metrics = Metrics(self._board, 0, models=dict(zip(names, self._numbers, strict=True)))
        count_dropped(self.metrics.log_lines_dropped.labels().inc)
        self.numbers: Iterator[int] = itertools.count(1)
        self._engines = self._keepers(configs, asleep)
        self._api: dict[int, ApiProcess] = {}
        self._introductions = Introductions(self._engines, self._api)
        self._first = set(self._engines) - asleep
        """engines that are there at the start"""
        self._dormitory = Dormitory(
            rota,
            names,
            self._numbers,
            [[self._engines[engine] for engine in engines] for engines in self._numbers],
            self._board,
            self.metrics,
            patience=config.drain_timeout,
            serves=self._introductions.serves,
            tell=self._tell,
        )
        self._rollout = Rollout(
            self._engines, self._numbers, self._board, config.drain_timeout, self._introductions.serves
        )  # fmt: skip
        self._starting: set[asyncio.Task[Any]] = set()
        """processes that are being started, and are in no table yet"""
        self._answering: set[asyncio.Task[None]] = set()
        """what API processes have asked, and is not done yet"""
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

    def _keepers(self, configs: list[EngineConfig], asleep: set[int]) -> dict[int, EngineKeeper]:
        """By engine. asleep: those that are not there at the start."""
        config, several = self._config, len(configs) > 1
        if several:
            for each in configs:
                logger.info("%s", described(each))
        # One for the replicas of each device. It is never closed: it goes with this process.
        shelves = [Shelf() for _ in range(len(configs) // config.replicas)] if shares_weights(config) else []
        return {
            i: EngineKeeper(
                self,
                each,
                restart=config.restart_engine,
                limit=config.engine_restart_limit,
                several=several,
                asleep=i in asleep,
                shelf=shelves[i // config.replicas] if shelves else None,
            )
            for i, each in enumerate(configs)
        }

    async def run(self) -> int:
        handle(self._on_signal, self._reload, self._log_stacks)
        keepers = [self._begin(self._keep_engine(keeper)) for keeper in self._engines.values()]
        keepers += [self._begin(self._keep_api(i)) for i in range(self._config.api_workers)]
        keepers.append(self._begin(self._dormitory.run()))
        keepers.append(self._begin(self._front.notifier.watch()))
        keepers.append(self._begin(Watchman(Watch(self.beats), self._charges).run()))
        try:
            stop = asyncio.create_task(self._asked_to_stop.wait())
            await asyncio.wait((stop, self._failure), return_when=asyncio.FIRST_COMPLETED)
            self._asked_to_stop.set()
            self._front.notifier.stopping("ending")
            # Of several engines one may serve before all do.
            if (self._announced or self._introductions.num_attached) and not self._failure.done():
                await self._end_answers()
                # Where an engine's end was the end of the last answers, why is about to be told.
                ended = [engine for engine in self._engines.values() if engine.given_up or self._ends_untold(engine)]
                await asyncio.gather(*(engine.told.wait() for engine in ended))
            if self._failure.done():
                print(f"weft: {self._failure.result()}", file=sys.stderr, flush=True)
                self._tell_end(Drain())
                await self._wait_idle(FAREWELL)
                await self._interrupt()
            return 1 if self._failure.done() else 0
        finally:
            self._rollout.stop()
            for keeper in (*keepers, *self._answering):
                keeper.cancel()
            await asyncio.gather(*keepers, *self._answering, return_exceptions=True)
            await self._stop_all()

    async def _stop_all(self) -> None:
        """First the port is closed, so that whoever comes now is refused at once, then the engines end."""
        self._front.close()
        stopping = [asyncio.create_task(self._stop_api(process)) for process in self._api.values()]
        for started in await asyncio.gather(*self._starting, return_exceptions=True):
            # Whoever waited for it was cancelled meanwhile.
            if isinstance(started, ApiProcess) and started not in self._api.values():
                stopping.append(asyncio.create_task(self._stop_api(started)))
            elif isinstance(started, EngineProcess) and started not in [
                keeper.process for keeper in self._engines.values()
            ]:
                stopping.append(asyncio.create_task(started.stop(STOP_SECONDS)))
        if stopping:
            await asyncio.wait(stopping, timeout=FAREWELL)
        await asyncio.gather(*(keeper.stop() for keeper in self._engines.values()), *stopping)
        for keeper in self._engines.values():
            keeper.close()
        if self._shared is not None:
            self._shared.cleanup()

    async def started(self, start: Coroutine[Any, Any, Process]) -> Process:
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
        config, metrics = self._config, self.metrics
        for engine, keeper in self._engines.items():
            if keeper.process is not None:
                hangs = metrics.engine_hangs.labels(str(engine))
                yield Charge(keeper.name, keeper.row, keeper.process, config.hang_timeout, hangs, steps=True)
        for i, process in self._api.items():
            hangs = metrics.api_hangs.labels()
            yield Charge(f"API process {i}", self._beat_row(i), process, config.api_hang_timeout, hangs)

    def _ends_untold(self, keeper: EngineKeeper) -> bool:
        """The watchman ends it, or it has ended, and its keeper does not know yet: API processes may."""
        process = keeper.process
        if process is None or keeper.asleep:
            return False
        return self.beats.given_up(keeper.row) or has_ended(process.pid)

    def _beat_row(self, i: int) -> int:
        """Of an API process."""
        return len(self._engines) + i

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
        self._asking = asyncio.create_task(self._log_stacks_of_children())  # a task that nobody holds may vanish

    async def _log_stacks_of_children(self) -> None:
        for charge in list(self._charges()):
            stacks = await charge.process.stacks.ask(charge.process.pid)
            logger.warning("SIGQUIT: %s\n%s", charge.name, stacks)

    def _tell(self, message: ToWorker) -> None:
        for process in self._api.values():
            process.send(message)

    # -- the engines: what `engine_keeper.Owner` asks for

    @property
    def ending(self) -> bool:
        return self._asked_to_stop.is_set()

    async def _keep_engine(self, keeper: EngineKeeper) -> None:
        while True:
            try:
                why = await keeper.keep()
                if not (self._announced or self.ending) or all(other.given_up for other in self._engines.values()):
                    self._fail(why)
                    return
                logger.error("%s; the other engines serve on without it", why)
            finally:
                keeper.told.set()
            if self.ending:
                return
            model = self._model_of(keeper.engine)
            if all(self._engines[engine].given_up for engine in self._numbers[model]):
                self._dormitory.died(model)
                return
            await keeper.asked_again()

    def _model_of(self, engine: int) -> int:
        return next(model for model, engines in enumerate(self._numbers) if engine in engines)

    def engine_begins(self, engine: int) -> None:
        for i in self._api:
            self._introductions.introduce(i, engine, next(self.numbers))

    def engine_ready(self, engine: int) -> None:
        level(self._board, engine, self._numbers[self._model_of(engine)])
        self._announce_once()
        self._front.still_serving()
        for i in self._api:
            self._introductions.expect(i, engine)

    def engine_ended(self, engine: int, message: EngineDown) -> None:
        self._introductions.engine_ended(engine)
        self._tell(message)
        if message.restarting:
            self._front.notifier.status(f"{message.why}; another one starts")

    @property
    def _some_engine_ready(self) -> bool:
        return any(keeper.ready is not None for keeper in self._engines.values())

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
            self.metrics.api_restarts.inc()
            await asyncio.sleep(pause)
            if self._handed_over:
                return

    def _nobody_will_serve(self, i: int) -> bool:
        """The i-th API process has ended again, and no other one makes up for it."""
        if not self._announced:
            return self._fruitless[i] >= FRUITLESS_LIVES
        in_vain = self._some_engine_ready and not self._introductions.num_attached
        return in_vain and all(count >= FRUITLESS_LIVES for count in self._fruitless)

    async def _run_api(self, i: int) -> str:
        """One API process from start to end; tells how it ended."""
        front = self._front
        fds = [keeper.socket.path_fd for keeper in self._engines.values()]
        start = ApiProcess.start(
            self._config,
            front.keys,
            Place(i + 1, self._board, self.beats, self._beat_row(i), fds),
            front.listeners[i],
            certificate=front.certificate,
            taking_over=front.taking_over,
            hold=self._announced and self._some_engine_ready,
        )
        try:
            process = await self.started(start)
        except OSError as error:
            self._fruitless[i] += 1
            return f"cannot be started: {error.strerror or error}"
        self._api[i] = process
        self._fruitless[i] += 1
        for engine in self._engines:
            self._introductions.introduce(i, engine, next(self.numbers))
        if self._asked_to_stop.is_set():
            process.send(HandOver() if self._handed_over else Drain())
        async for message in process.messages():
            match message:
                case Ready():
                    self._introductions.attached(i, message.engine)
                    self._fruitless[i] = 0
                    if len(self._api) == self._config.api_workers and self._introductions.serves(message.engine):
                        self._tell(Together(message.engine))
                    self._announce_once(chat=message.chat)
                case Failed() if self._announced:
                    process.kill(message.message)
                case Failed():
                    self._fail(message.message)
                case Idle():
                    self._no_longer_busy(i)
                case Renew():
                    process.send(Answer(message.ask, self._rollout.begin(message.engines)))
                case Wake():
                    self._answer(process, message.ask, self._dormitory.wake(message.model))
                case Sleep():
                    asked = self._dormitory.sleep(message.model, message.level, message.seconds)
                    self._answer(process, message.ask, asked)
        how = await process.wait()
        del self._api[i]
        self._introductions.process_ended(i)
        self._no_longer_busy(i)
        self.metrics.process_lost(int(self._board.load[i + 1, :, 0].sum()), int(self._board.http[i + 1]))
        self._board.load[i + 1] = 0
        self._board.http[i + 1] = 0
        self._board.engine_load[i + 1] = 0
        return how

    def _answer(self, process: ApiProcess, ask: int, work: Coroutine[Any, Any, str]) -> None:
        """Tell an API process how it went, once it is known."""

        async def answer() -> None:
            process.send(Answer(ask, await work))

        task = asyncio.create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

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
        everyone = self._introductions.num_attached == self._config.api_workers * len(self._first)
        readies = [ready for engine in sorted(self._first) if (ready := self._engines[engine].ready) is not None]
        if not self._announced and len(readies) == len(self._first) and everyone and not self.ending:
            self._announced = True
            self._dormitory.begin()
            seconds = time.monotonic() - self._begun
            key = bool(self._front.keys)
            announce(self._config, self._front.address, readies, seconds, chat=self._chat, key=key)
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
        self._rollout.stop()
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
        if not self._failure.done():
            await self._interrupt()

    async def _interrupt(self) -> None:
        """End the answers that are still open, of engines that live."""
        if not self._idle.is_set() and self._introductions.num_attached:
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
