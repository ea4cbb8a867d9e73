"""The daemon starts and supervises engines and API processes, and drains on SIGTERM."""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import sys
import time
from collections.abc import Awaitable, Coroutine, Iterator
from contextlib import suppress
from typing import Any

from weft.engine.config import EngineConfig
from weft.engine.errors import ConfigError, WeftError
from weft.engine.images.rules import serves_images
from weft.engine.wire.child import has_ended
from weft.engine.wire.cores import nodes_here
from weft.engine.wire.heartbeat import Heartbeats, Watch
from weft.engine.wire.open_files import HOW, needed, raise_limit
from weft.engine.wire.pixels import PixelShelf
from weft.engine.wire.preloaded import gpus
from weft.engine.wire.spawn import EngineProcess
from weft.engine.wire.stacks import own_stacks
from weft.engine.wire.weight_exchange import WeightExchange
from weft.server.config import ServeConfig
from weft.server.daemon import control
from weft.server.daemon.announce import announce
from weft.server.daemon.api_process import ApiProcess
from weft.server.daemon.api_processes import ApiProcesses
from weft.server.daemon.engine_supervisor import STOP_SECONDS, EngineSupervisor, Process
from weft.server.daemon.front import Front
from weft.server.daemon.mps import Mps
from weft.server.daemon.orphans import Orphans
from weft.server.daemon.placement import described, place, shares_weights, with_pixels
from weft.server.daemon.rollout import Rollout
from weft.server.daemon.shared_folder import shared_folder
from weft.server.daemon.signals import handle
from weft.server.daemon.sleep_manager import SleepManager
from weft.server.daemon.wake_policy import WakePolicy
from weft.server.daemon.watchdog import Watchdog, WatchedProcess
from weft.server.logs import configure, count_dropped
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import SharedState, SleepState
from weft.server.replicas.replicas import credit_new_engine

FAREWELL_SECONDS = 1.0  # Seconds for the last responses to be sent.
HELD_SECONDS = 5.0
"""Seconds for a killed process to release its memory; after that a driver holds it, maybe forever."""

logger = logging.getLogger("weft")


def run(config: ServeConfig) -> int:
    """Serve until a signal or a failure. Returns the exit status: 0 after a signal, 2 for a bad option, else 1."""
    configure(config)
    try:
        _check_open_files(config)
        return asyncio.run(_run(config))
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1


def _check_open_files(config: ServeConfig) -> None:
    """Raise the limit of open files. Raises `ConfigError` if it stays too low for the daemon's processes."""
    allowed = raise_limit()
    ranks = sum(len(e) * m.tensor_parallel_size for e, m in zip(config.engine_numbers, config.each, strict=True))
    if allowed < (least := needed(ranks, config.api_workers)):
        raise ConfigError(
            f"the limit of {allowed:g} open files is too low: this daemon needs {least}, plus one per connection; "
            f"raise the hard limit ({HOW})"
        )


async def _run(config: ServeConfig) -> int:
    return await Daemon(config).run()


class Daemon:
    """Row 0 of the shared state belongs to the daemon, row i + 1 to its i-th API process."""

    def __init__(self, config: ServeConfig) -> None:
        """Take the port. Raises `ConfigError` if the operator must change something."""
        self._begun = time.monotonic()
        self._folder = shared_folder(config)
        if self._folder is not None:
            config = config.model_copy(update={"responses_dir": self._folder.name})
        self._config = config
        self._front = Front(config)
        configs = place(config, gpus(), os.sched_getaffinity(0), nodes_here())
        self._mps = Mps() if config.mps and configs[0].share.gpu else None
        if config.mps and self._mps is None:
            logger.warning("--mps has no effect on a CPU")
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
        self.pixels = PixelShelf.make() if any(serves_images(each.model_path) for each in self._models) else None
        if self.pixels is not None:
            configs = [with_pixels(each, self.pixels) for each in configs]
        self._engines = self._supervisors(configs, asleep)
        self._api = ApiProcesses(self, config, self._front, self._shared_state, self._engines)
        self._first = set(self._engines) - asleep  # Engines that are awake at the start.
        self._sleep_manager = SleepManager(
            policy,
            names,
            self._numbers,
            [[self._engines[engine] for engine in engines] for engines in self._numbers],
            self._shared_state,
            self.metrics,
            patience=config.drain_timeout,
            serves=self._api.serves,
            broadcast=self._api.broadcast,
        )
        self._rollout = Rollout(
            self._engines, self._numbers, self._shared_state, config.drain_timeout, self._api.serves
        )
        self._starting: set[asyncio.Task[Any]] = set()  # Processes that are starting and not yet in any table.
        self._answering: set[asyncio.Task[None]] = set()
        """Questions of API processes that are not answered yet."""
        self.announced = False
        self._chat = False
        self._stop_requested = asyncio.Event()
        self._stop_now = asyncio.Event()
        self._signalled = False
        self._reloading: asyncio.Task[None] | None = None
        self._reload_again = False
        self.handed_over = False
        self._failure: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def _supervisors(self, configs: list[EngineConfig], asleep: set[int]) -> dict[int, EngineSupervisor]:
        """Create the supervisors by engine. `asleep`: engines that sleep at the start."""
        config, several = self._config, len(configs) > 1
        if several:
            for each in configs:
                logger.info("%s", described(each))
        # One per device, for its replicas. It is never closed; it ends with this process.
        shelves = [WeightExchange() for _ in range(len(configs) // config.replicas)] if shares_weights(config) else []
        return {
            i: EngineSupervisor(
                self,
                each,
                restart=config.restart_engine,
                limit=config.engine_restart_limit,
                several=several,
                asleep=i in asleep,
                exchange=shelves[i // config.replicas] if shelves else None,
            )
            for i, each in enumerate(configs)
        }

    async def run(self) -> int:
        handle(self._on_signal, self._on_hang_up, self._log_stacks)
        watchdog = Watchdog(Watch(self.heartbeats), self._watched_processes)
        if self._mps is not None:
            await self._mps.start()
        work = [self._run_engine(supervisor) for supervisor in self._engines.values()]
        work += [self._api.keep(i) for i in range(self._config.api_workers)]
        work += [self._sleep_manager.run(), self._front.notifier.watch(), watchdog.run(), Orphans().run()]
        if self._mps is not None:
            work.append(self._mps.watch())
        supervisors = list(map(self._begin, work))
        try:
            await self._wait_any(self._stop_requested.wait())
            self._stop_requested.set()
            self._front.notifier.stopping("ending")
            # With several engines, one may serve before the others do.
            if (self.announced or self._api.num_attached) and not self._failure.done():
                await self._drain()
                # If the last requests ended because their engine did, the reason is about to be reported.
                ended = [engine for engine in self._engines.values() if engine.given_up or self._end_unreported(engine)]
                await self._wait_reported(ended)
            if self._failure.done():
                print(f"weft: {self._failure.result()}", file=sys.stderr, flush=True)
                self._api.end(control.Drain())
                await self._wait_idle(FAREWELL_SECONDS)
                await self._interrupt()
        finally:
            self._rollout.stop()
            if self._reloading is not None:
                self._reloading.cancel()
            for supervisor in (*supervisors, *self._answering):
                supervisor.cancel()
            await asyncio.gather(*supervisors, *self._answering, return_exceptions=True)
            await self._stop_all()
        return 1 if self._failure.done() else 0

    async def _wait_reported(self, ended: list[EngineSupervisor]) -> None:
        """Wait, up to `HELD_SECONDS`, until the supervisors have reported why these engines ended. They report once an
        engine's memory is released."""
        if not ended:
            return
        reported = asyncio.gather(*(engine.end_reported.wait() for engine in ended))
        await self._wait_any(reported, self._stop_now.wait(), timeout=HELD_SECONDS)
        unreported = [engine for engine in ended if not engine.end_reported.is_set()]
        if unreported and all(each.given_up or each in unreported for each in self._engines.values()):
            failure = unreported[0].failure
            self.fail(f"{unreported[0].name} ended" if failure is None else failure.why)

    async def _stop_all(self) -> None:
        """Close the port, so that new connections are refused at once, then stop the engines."""
        self._front.close()
        stopping = [asyncio.create_task(process.stop(STOP_SECONDS)) for process in self._api.running.values()]
        started = await asyncio.gather(*self._starting, return_exceptions=True)
        known = [*self._api.running.values(), *(supervisor.process for supervisor in self._engines.values())]
        # The tasks that started the others were cancelled meanwhile.
        lost = [each for each in started if isinstance(each, ApiProcess | EngineProcess) and each not in known]
        stopping += [asyncio.create_task(process.stop(STOP_SECONDS)) for process in lost]
        if stopping:
            await asyncio.wait(stopping, timeout=FAREWELL_SECONDS)
        stopping += [asyncio.create_task(supervisor.stop()) for supervisor in self._engines.values()]
        seconds = STOP_SECONDS + (0.0 if self._stop_now.is_set() else HELD_SECONDS)
        stopped, held = await asyncio.wait(stopping, timeout=seconds)
        for task in stopped:
            task.result()
        if held:  # a driver holds it: waiting longer does not help
            print("weft: a killed process does not end: the kernel holds it", file=sys.stderr, flush=True)
            self.fail("a process does not end")
        for supervisor in self._engines.values():
            supervisor.close()
        if self._mps is not None:
            await self._mps.stop()
        if self._folder is not None:
            self._folder.cleanup()
        if self.pixels is not None:
            self.pixels.close()

    async def started(self, start: Coroutine[Any, Any, Process]) -> Process:
        """Start a process so that `_stop_all` finds it even if the caller is cancelled."""
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
        """Yield the processes that must send heartbeats."""
        config, metrics = self._config, self.metrics
        for engine, supervisor in self._engines.items():
            if supervisor.process is not None:
                hangs = metrics.engine_hangs.labels(str(engine))
                yield WatchedProcess(
                    supervisor.name, supervisor.row, supervisor.process, config.hang_timeout, hangs, steps=True
                )
        yield from self._api.watched_processes()

    def _end_unreported(self, supervisor: EngineSupervisor) -> bool:
        """Return whether an engine has ended or is being killed, but its supervisor has not noticed yet."""
        process = supervisor.process
        if process is None or supervisor.asleep:
            return False
        return self.heartbeats.of(supervisor.row).condemned or has_ended(process.pid)

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
            self._stop_now.set()
        self._signalled = True
        self._stop_requested.set()

    def _on_successor(self) -> None:
        self.handed_over = True
        self._stop_requested.set()

    def _on_hang_up(self) -> None:
        if self._reloading is None:
            self._reloading = asyncio.create_task(self._reload())
        else:
            self._reload_again = True

    async def _reload(self) -> None:
        """Reload keys and certificate, and again if a signal arrived meanwhile."""
        try:
            self._reload_again = True
            while self._reload_again:
                self._reload_again = False
                if await self._front.reload():
                    keys = [key.hex() for key in self._front.keys]
                    self._api.broadcast(control.Reload(keys, self._front.best_priorities))
        finally:
            self._reloading = None

    def _log_stacks(self) -> None:
        logger.warning("SIGQUIT: the daemon\n%s", own_stacks())
        self._logging = asyncio.create_task(self._log_stacks_of_children())  # a reference protects it from collection

    async def _log_stacks_of_children(self) -> None:
        for watched in list(self._watched_processes()):
            stacks = await watched.process.stacks.capture(watched.process.pid)
            logger.warning("SIGQUIT: %s\n%s", watched.name, stacks)

    # -- `engine_supervisor.Owner`

    @property
    def ending(self) -> bool:
        return self._stop_requested.is_set()

    async def _run_engine(self, supervisor: EngineSupervisor) -> None:
        while True:
            try:
                why = await supervisor.run()
                if not (self.announced or self.ending) or all(other.given_up for other in self._engines.values()):
                    self.fail(why)
                    return
                logger.error("%s; the other engines continue to serve", why)
            finally:
                supervisor.end_reported.set()
            if self.ending:
                return
            model = self._model_of(supervisor.engine)
            if all(self._engines[engine].given_up for engine in self._numbers[model]):
                self._sleep_manager.died(model)
                return
            await supervisor.wait_retry()

    def _model_of(self, engine: int) -> int:
        return next(model for model, engines in enumerate(self._numbers) if engine in engines)

    def engine_started(self, engine: int) -> None:
        self._api.engine_started(engine)

    def engine_ready(self, engine: int) -> None:
        credit_new_engine(self._shared_state, engine, self._numbers[self._model_of(engine)])
        self._announce_once()
        self._front.still_serving()
        self._api.engine_ready(engine)

    def engine_ended(self, engine: int, message: control.EngineDown) -> None:
        self._api.engine_ended(engine, message)
        if message.restarting:
            self._front.notifier.status(f"{message.why}; restarting")

    # -- `api_processes.Owner`

    def api_ready(self, *, chat: bool) -> None:
        self._chat = self._chat or chat
        self._announce_once()

    def asked(self, process: ApiProcess, question: control.Question) -> None:
        match question:
            case control.RestartEngines():
                process.send(control.Answer(question.ask, self._rollout.begin(question.engines)))
            case control.WakeModel():
                woken = self._sleep_manager.wake(question.model, operator=question.operator)
                self._answer(process, question.ask, woken)
            case control.SleepModel():
                asked = self._sleep_manager.sleep(question.model, question.level, question.seconds)
                self._answer(process, question.ask, asked)

    def _answer(self, process: ApiProcess, ask: int, work: Coroutine[Any, Any, str]) -> None:
        """Send the outcome to an API process once it is known."""

        async def answer() -> None:
            process.send(control.Answer(ask, await work))

        task = asyncio.create_task(answer())
        self._answering.add(task)
        task.add_done_callback(self._answering.discard)

    def _announce_once(self) -> None:
        """Announce the daemon once everything serves."""
        all_attached = self._api.num_attached == self._config.api_workers * len(self._first)
        readies = [ready for engine in sorted(self._first) if (ready := self._engines[engine].ready) is not None]
        if not self.announced and len(readies) == len(self._first) and all_attached and not self.ending:
            self.announced = True
            self._sleep_manager.begin()
            seconds = time.monotonic() - self._begun
            front = self._front
            announce(
                self._config, front.address, readies, seconds, chat=self._chat, key=bool(front.keys),
                admin=front.admin_address,
            )  # fmt: skip
            self._front.serving(self._on_successor)

    # -- shutdown

    async def _drain(self) -> None:
        """Let open requests finish within --drain-timeout, then interrupt the rest."""
        until = time.monotonic() + self._config.drain_timeout
        self._rollout.stop()
        if self.handed_over:
            logger.info("another daemon has the port; ending after the open requests")
            self._api.end(control.HandOver())
            self._front.close()
            await self._wait_idle_or_stop(until)
        else:
            logger.info("draining; another Ctrl-C or SIGTERM ends at once")
        if self._failure.done():
            return
        self._api.end(control.Drain())
        await self._wait_idle_or_stop(until)
        if not self._failure.done():
            await self._interrupt()

    async def _interrupt(self) -> None:
        """Interrupt the requests that are still open on running engines."""
        if not self._api.idle.is_set() and self._api.num_attached:
            self._api.broadcast(control.Interrupt())
            await self._wait_idle(FAREWELL_SECONDS)

    async def _wait_idle_or_stop(self, until: float) -> None:
        """`until`: a time of `time.monotonic()`."""
        timeout = max(0.0, until - time.monotonic())
        await self._wait_any(self._api.idle.wait(), self._stop_now.wait(), timeout=timeout)

    async def _wait_idle(self, timeout: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._api.idle.wait(), timeout)

    async def _wait_any(self, *events: Awaitable[Any], timeout: float | None = None) -> None:
        """Wait for one of these events, for a failure, or for `timeout` seconds."""
        waiting = [asyncio.ensure_future(event) for event in events]
        await asyncio.wait((*waiting, self._failure), timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for each in waiting:
            each.cancel()
