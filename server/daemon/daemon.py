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
from weft.engine.wire.blank import gpus
from weft.engine.wire.child import has_ended
from weft.engine.wire.cores import nodes_here
from weft.engine.wire.heartbeat import Heartbeats, Watch
from weft.engine.wire.open_files import HOW, needed, raise_limit
from weft.engine.wire.shelf import Shelf
from weft.engine.wire.spawn import EngineProcess
from weft.engine.wire.stacks import own_stacks
from weft.server.config import ServeConfig
from weft.server.daemon.announce import announce
from weft.server.daemon.api_process import ApiProcess
from weft.server.daemon.api_processes import ApiProcesses
from weft.server.daemon.control import (
    Answer,
    Drain,
    EngineDown,
    HandOver,
    Interrupt,
    Reload,
    RestartEngines,
    SleepModel,
    WakeModel,
)
from weft.server.daemon.engine_supervisor import STOP_SECONDS, EngineSupervisor
from weft.server.daemon.front import Front
from weft.server.daemon.orphans import Orphans
from weft.server.daemon.placement import described, place, shares_weights
from weft.server.daemon.rollout import Rollout
from weft.server.daemon.shared_folder import shared_folder
from weft.server.daemon.signals import handle
from weft.server.daemon.sleep_manager import SleepManager
from weft.server.daemon.wake_policy import WakePolicy
from weft.server.daemon.watchdog import Watchdog, WatchedProcess
from weft.server.logs import configure, count_dropped
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import SharedState, SleepState
from weft.server.replicas.replicas import level

FAREWELL = 1.0
HELD_SECONDS = 5.0
"""that a killed process gets until it is gone, its memory given back: then a driver holds it, maybe for ever"""
"""seconds that last answers get to leave"""

Process = TypeVar("Process")

logger = logging.getLogger("weft")


def run(config: ServeConfig) -> int:
    """Serve until a signal or the engine's end. Returns the exit code: 0 after a signal, 2 for a bad option, else 1."""
    configure(config)
    try:
        _check_open_files(config)
        return asyncio.run(_run(config))
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _check_open_files(config: ServeConfig) -> None:
    """Raise the limit, here as in each process of the daemon. Raises `ConfigError` where it stays too low for them."""
    allowed = raise_limit()
    ranks = sum(len(e) * m.tensor_parallel_size for e, m in zip(config.engine_numbers, config.each, strict=True))
    if allowed < (least := needed(ranks, config.api_workers)):
        raise ConfigError(
            f"only {allowed:g} files may be open at a time, and this daemon needs {least} beside connections: "
            f"raise the hard limit ({HOW})"
        )


async def _run(config: ServeConfig) -> int:
    return await Daemon(config).run()


class Daemon:
    """Row 0 of the shared state is the daemon's own, row i + 1 that of its i-th API process."""

    def __init__(self, config: ServeConfig) -> None:
        """Takes the port. Raises `ConfigError` for what an operator can mend."""
        self._begun = time.monotonic()
        self._shared = shared_folder(config)
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
        policy = WakePolicy(config.memory_shares, config.max_awake_models)
        asleep = {
            e for m, rest in enumerate(policy.sleep_states) if rest is SleepState.ASLEEP for e in self._numbers[m]
        }
        self.heartbeats = Heartbeats(
            engines + config.api_workers, step_timeout=config.step_timeout, start_timeout=config.start_timeout
        )
        self._shared_state = SharedState(rows, self._front.key_capacity, engines=engines, models=len(names))
        self.metrics = Metrics(self._shared_state, 0, models=dict(zip(names, self._numbers, strict=True)))
        count_dropped(self.metrics.log_lines_dropped.labels().inc)
        self.numbers: Iterator[int] = itertools.count(1)
        self._engines = self._supervisors(configs, asleep)
        self._api = ApiProcesses(self, config, self._front, self._shared_state, self._engines)
        self._first = set(self._engines) - asleep
        """engines that are there at the start"""
        self._sleep_manager = SleepManager(
            policy,
            names,
            self._numbers,
            [[self._engines[engine] for engine in engines] for engines in self._numbers],
            self._shared_state,
            self.metrics,
            patience=config.drain_timeout,
            serves=self._api.serves,
            broadcast=self._api.tell,
        )
        self._rollout = Rollout(
            self._engines, self._numbers, self._shared_state, config.drain_timeout, self._api.serves
        )
        self._starting: set[asyncio.Task[Any]] = set()
        """processes that are being started, and are in no table yet"""
        self._answering: set[asyncio.Task[None]] = set()
        """what API processes have asked, and is not done yet"""
        self.announced = False
        self._chat = False
        self._asked_to_stop = asyncio.Event()
        self._asked_twice = asyncio.Event()
        self._signalled = False
        self.handed_over = False
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _supervisors(self, configs: list[EngineConfig], asleep: set[int]) -> dict[int, EngineSupervisor]:
        """By engine. asleep: those that are not there at the start."""
        config, several = self._config, len(configs) > 1
        if several:
            for each in configs:
                logger.info("%s", described(each))
        # One for the replicas of each device. It is never closed: it goes with this process.
        shelves = [Shelf() for _ in range(len(configs) // config.replicas)] if shares_weights(config) else []
        return {
            i: EngineSupervisor(
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
        supervisors = [self._begin(self._run_engine(supervisor)) for supervisor in self._engines.values()]
        supervisors += [self._begin(self._api.keep(i)) for i in range(self._config.api_workers)]
        supervisors.append(self._begin(self._sleep_manager.run()))
        supervisors.append(self._begin(self._front.notifier.watch()))
        supervisors.append(self._begin(Watchdog(Watch(self.heartbeats), self._watched_processes).run()))
        supervisors.append(self._begin(Orphans().run()))
        try:
            stop = asyncio.create_task(self._asked_to_stop.wait())
            await asyncio.wait((stop, self._failure), return_when=asyncio.FIRST_COMPLETED)
            self._asked_to_stop.set()
            self._front.notifier.stopping("ending")
            # Of several engines one may serve before all do.
            if (self.announced or self._api.num_attached) and not self._failure.done():
                await self._end_answers()
                # Where an engine's end was the end of the last answers, why is about to be told.
                ended = [engine for engine in self._engines.values() if engine.given_up or self._ends_untold(engine)]
                await self._told(ended)
            if self._failure.done():
                print(f"weft: {self._failure.result()}", file=sys.stderr, flush=True)
                self._api.end(Drain())
                await self._wait_idle(FAREWELL)
                await self._interrupt()
        finally:
            self._rollout.stop()
            for supervisor in (*supervisors, *self._answering):
                supervisor.cancel()
            await asyncio.gather(*supervisors, *self._answering, return_exceptions=True)
            await self._stop_all()
        return 1 if self._failure.done() else 0

    async def _told(self, ended: list[EngineSupervisor]) -> None:
        """Until their supervisors have told why these engines ended, which is once their memory is given back; no longer
        than `HELD_SECONDS`, nor than somebody's patience."""
        if not ended:
            return
        told = asyncio.gather(*(engine.told.wait() for engine in ended))
        twice = asyncio.create_task(self._asked_twice.wait())
        await asyncio.wait((told, twice, self._failure), timeout=HELD_SECONDS, return_when=asyncio.FIRST_COMPLETED)
        untold = [engine for engine in ended if not engine.told.is_set()]
        told.cancel()
        twice.cancel()
        if untold and all(each.given_up or each in untold for each in self._engines.values()):
            failure = untold[0].failure
            self.fail(f"{untold[0].name} ended" if failure is None else failure.why)

    async def _stop_all(self) -> None:
        """First the port is closed, so that whoever comes now is refused at once, then the engines end."""
        self._front.close()
        stopping = [asyncio.create_task(process.stop(STOP_SECONDS)) for process in self._api.running.values()]
        started = await asyncio.gather(*self._starting, return_exceptions=True)
        known = [*self._api.running.values(), *(supervisor.process for supervisor in self._engines.values())]
        # Whoever waited for the others was cancelled meanwhile.
        lost = [each for each in started if isinstance(each, ApiProcess | EngineProcess) and each not in known]
        stopping += [asyncio.create_task(process.stop(STOP_SECONDS)) for process in lost]
        if stopping:
            await asyncio.wait(stopping, timeout=FAREWELL)
        stopping += [asyncio.create_task(supervisor.stop()) for supervisor in self._engines.values()]
        seconds = STOP_SECONDS + (0.0 if self._asked_twice.is_set() else HELD_SECONDS)
        stopped, held = await asyncio.wait(stopping, timeout=seconds)
        for task in stopped:
            task.result()
        if held:  # in a driver's hands: to wait for it any longer helps nobody
            print("weft: a process was killed and does not end: the kernel holds it", file=sys.stderr, flush=True)
            self.fail("a process does not end")
        for supervisor in self._engines.values():
            supervisor.close()
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

    def _watched_processes(self) -> Iterator[WatchedProcess]:
        """The processes that must show life."""
        config, metrics = self._config, self.metrics
        for engine, supervisor in self._engines.items():
            if supervisor.process is not None:
                hangs = metrics.engine_hangs.labels(str(engine))
                yield WatchedProcess(
                    supervisor.name, supervisor.row, supervisor.process, config.hang_timeout, hangs, steps=True
                )
        yield from self._api.watched_processes()

    def _ends_untold(self, supervisor: EngineSupervisor) -> bool:
        """The watchman ends it, or it has ended, and its supervisor does not know yet: API processes may."""
        process = supervisor.process
        if process is None or supervisor.asleep:
            return False
        return self.heartbeats.given_up(supervisor.row) or has_ended(process.pid)

    def _begin(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.create_task(work)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            if not isinstance(error, WeftError):
                logger.error("the daemon failed", exc_info=error)
            self.fail(str(error))

    def fail(self, why: str) -> None:
        if not self._failure.done():
            self._failure.set_result(why)

    def _on_signal(self) -> None:
        if self._signalled:
            self._asked_twice.set()
        self._signalled = True
        self._asked_to_stop.set()

    def _on_successor(self) -> None:
        self.handed_over = True
        self._asked_to_stop.set()

    def _reload(self) -> None:
        if self._front.reload():
            self._api.tell(Reload([key.hex() for key in self._front.keys]))

    def _log_stacks(self) -> None:
        logger.warning("SIGQUIT: the daemon\n%s", own_stacks())
        self._asking = asyncio.create_task(self._log_stacks_of_children())  # a task that nobody holds may vanish

    async def _log_stacks_of_children(self) -> None:
        for watched in list(self._watched_processes()):
            stacks = await watched.process.stacks.ask(watched.process.pid)
            logger.warning("SIGQUIT: %s\n%s", watched.name, stacks)

    # -- the engines: what `engine_keeper.Owner` asks for

    @property
    def ending(self) -> bool:
        return self._asked_to_stop.is_set()

    async def _run_engine(self, supervisor: EngineSupervisor) -> None:
        while True:
            try:
                why = await supervisor.keep()
                if not (self.announced or self.ending) or all(other.given_up for other in self._engines.values()):
                    self.fail(why)
                    return
                logger.error("%s; the other engines serve on without it", why)
            finally:
                supervisor.told.set()
            if self.ending:
                return
            model = self._model_of(supervisor.engine)
            if all(self._engines[engine].given_up for engine in self._numbers[model]):
                self._sleep_manager.died(model)
                return
            await supervisor.asked_again()

    def _model_of(self, engine: int) -> int:
        return next(model for model, engines in enumerate(self._numbers) if engine in engines)

    def engine_begins(self, engine: int) -> None:
        self._api.engine_begins(engine)

    def engine_ready(self, engine: int) -> None:
        level(self._shared_state, engine, self._numbers[self._model_of(engine)])
        self._announce_once()
        self._front.still_serving()
        self._api.engine_ready(engine)

    def engine_ended(self, engine: int, message: EngineDown) -> None:
        self._api.engine_ended(engine, message)
        if message.restarting:
            self._front.notifier.status(f"{message.why}; another one starts")

    # -- the API processes: what `api_processes.Owner` asks for

    def api_ready(self, *, chat: bool) -> None:
        self._chat = self._chat or chat
        self._announce_once()

    def asked(self, process: ApiProcess, question: RestartEngines | WakeModel | SleepModel) -> None:
        match question:
            case RestartEngines():
                process.send(Answer(question.ask, self._rollout.begin(question.engines)))
            case WakeModel():
                self._answer(process, question.ask, self._sleep_manager.wake(question.model))
            case SleepModel():
                asked = self._sleep_manager.sleep(question.model, question.level, question.seconds)
                self._answer(process, question.ask, asked)

    def _answer(self, process: ApiProcess, ask: int, work: Coroutine[Any, Any, str]) -> None:
        """Tell an API process how it went, once it is known."""

        async def answer() -> None:
            process.send(Answer(ask, await work))

        task = asyncio.create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _announce_once(self) -> None:
        """Once everything serves."""
        everyone = self._api.num_attached == self._config.api_workers * len(self._first)
        readies = [ready for engine in sorted(self._first) if (ready := self._engines[engine].ready) is not None]
        if not self.announced and len(readies) == len(self._first) and everyone and not self.ending:
            self.announced = True
            self._sleep_manager.begin()
            seconds = time.monotonic() - self._begun
            key = bool(self._front.keys)
            announce(self._config, self._front.address, readies, seconds, chat=self._chat, key=key)
            self._front.serving(self._on_successor)

    # -- the end

    async def _end_answers(self) -> None:
        """Let open answers finish, in the time there is, then end those that did not."""
        until = time.monotonic() + self._config.drain_timeout
        self._rollout.stop()
        if self.handed_over:
            logger.info("another daemon has the port; ending behind the answers on the connections there are")
            self._api.end(HandOver())
            self._front.close()
            await self._wait_idle_or_asked(until)
        else:
            logger.info("draining; another Ctrl-C or SIGTERM ends at once")
        if self._failure.done():
            return
        self._api.end(Drain())
        await self._wait_idle_or_asked(until)
        if not self._failure.done():
            await self._interrupt()

    async def _interrupt(self) -> None:
        """End the answers that are still open, of engines that live."""
        if not self._api.idle.is_set() and self._api.num_attached:
            self._api.tell(Interrupt())
            await self._wait_idle(FAREWELL)

    async def _wait_idle_or_asked(self, until: float) -> None:
        """`until`: as `time.monotonic()`."""
        idle = asyncio.create_task(self._api.idle.wait())
        twice = asyncio.create_task(self._asked_twice.wait())
        timeout = max(0.0, until - time.monotonic())
        await asyncio.wait((idle, twice, self._failure), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        twice.cancel()
        idle.cancel()

    async def _wait_idle(self, timeout: float) -> None:
        waiting = asyncio.create_task(self._api.idle.wait())
        await asyncio.wait((waiting,), timeout=timeout)
        waiting.cancel()
