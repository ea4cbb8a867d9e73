"""`ApiProcesses` runs and restarts the daemon's API processes and handles their messages."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterator, Mapping
from typing import Protocol

from weft.engine.wire.pixels import PixelShelf
from weft.server.config import ServeConfig
from weft.server.daemon import control, engine_supervisor
from weft.server.daemon.api_process import ApiProcess, Place
from weft.server.daemon.engine_supervisor import EngineSupervisor
from weft.server.daemon.front import Front
from weft.server.daemon.restarts import Restarts
from weft.server.daemon.watchdog import WatchedProcess
from weft.server.observe.shared_state import OPEN, SharedState

RESTART_SECONDS = (0.5, 5.0)
"""First and longest pause before a restart, if the process lived less than SHORT_LIFE seconds."""
SHORT_LIFE = 5.0
ATTACH_SECONDS = 120.0  # Seconds within which an API process must serve once an engine is ready.
MAX_FAILED_STARTS = 3
"""Consecutive API processes that may end before they serve; then the daemon gives up."""

logger = logging.getLogger("weft")


class Owner(engine_supervisor.Owner, Protocol):
    """The daemon, as API processes use it."""

    announced: bool  # Whether everything has served once.
    handed_over: bool  # Whether another daemon has taken over the port.
    pixels: PixelShelf | None  # The shelf for the pixels of images, if a model takes some.

    def api_ready(self, *, chat: bool) -> None:
        """Handle an API process that now serves with an engine. `chat`: the model has a chat template."""
        ...

    def asked(self, process: ApiProcess, question: control.Question) -> None:
        """Handle a question; an `Answer` follows."""
        ...

    def fail(self, why: str) -> None:
        """End the daemon."""
        ...


class ApiProcesses:
    """The i-th process uses row i + 1 of the shared state.

    Attributes:
    running: running processes by number.
    idle: set once each process has answered `end` with `Idle`, or has ended."""

    def __init__(
        self, owner: Owner, config: ServeConfig, front: Front, shared_state: SharedState, engines: Mapping[int,
        EngineSupervisor],
    ) -> None:  # fmt: skip
        self.running: dict[int, ApiProcess] = {}
        self.idle = asyncio.Event()
        self._owner = owner
        self._config = config
        self._front = front
        self._shared_state = shared_state
        self._engines = engines
        self._clients: dict[tuple[int, int], int] = {}  # Client numbers by API process and engine.
        self._attached: set[tuple[int, int]] = set()  # Pairs of an API process and an engine that serve.
        self._failed_starts = [0] * config.api_workers  # Consecutive starts that failed, by API process.
        self._busy: set[int] = set()  # Draining processes with open requests.

    async def keep(self, i: int) -> None:
        """Run the i-th API process and restart it when it ends."""
        owner = self._owner
        restarts = Restarts(*RESTART_SECONDS)
        while True:
            begun = time.monotonic()
            how = await self._run(i)
            if owner.pixels is not None:
                owner.pixels.discard_client(i + 1)
            if owner.ending:
                for listener in self._front.listeners[i]:
                    listener.close()  # new connections go to the other processes
                return
            if self._hopeless(i):
                owner.fail(f"API processes end before they serve ({how})")
                return
            if time.monotonic() - begun < SHORT_LIFE:
                pause = restarts.next_pause() or 0.0
            else:
                restarts.forget()
                pause = 0.0
            logger.error("API process %d ended (%s); restarting in %g s", i, how, pause)
            owner.metrics.api_restarts.inc()
            await asyncio.sleep(pause)
            if owner.handed_over:
                return

    def _hopeless(self, i: int) -> bool:
        """Return whether the daemon should give up: the i-th process keeps failing and no other process serves."""
        if not self._owner.announced:
            return self._failed_starts[i] >= MAX_FAILED_STARTS
        failing = min(self._failed_starts) >= MAX_FAILED_STARTS
        return bool(self._models_ready) and not self._attached and failing

    @property
    def _models_ready(self) -> list[int]:
        """Models with a ready engine."""
        ready = {engine for engine, supervisor in self._engines.items() if supervisor.ready is not None}
        return [model for model, engines in enumerate(self._config.engine_numbers) if not ready.isdisjoint(engines)]

    async def _run(self, i: int) -> str:
        """Run one API process from start to end, and return how it ended."""
        owner, front = self._owner, self._front
        fds = [supervisor.socket.path_fd for supervisor in self._engines.values()]
        start = ApiProcess.start(
            self._config,
            front.keys,
            front.best_priorities,
            Place(i + 1, self._shared_state, owner.heartbeats, self._heartbeat_row(i), fds),
            front.listeners[i],
            certificate=front.certificate,
            taking_over=front.taking_over,
            hold=self._models_ready if owner.announced else (),
        )
        try:
            process = await owner.started(start)
        except OSError as error:
            self._failed_starts[i] += 1
            return f"cannot be started: {error.strerror or error}"
        self.running[i] = process
        self._failed_starts[i] += 1
        for engine in self._engines:
            self._connect(i, engine)
        if owner.ending:
            process.send(control.HandOver() if owner.handed_over else control.Drain())
        async for message in process.messages():
            match message:
                case control.Ready():
                    self._attached.add((i, message.engine))
                    self._failed_starts[i] = 0
                    if len(self.running) == self._config.api_workers and self.serves(message.engine):
                        self.broadcast(control.Together(message.engine))
                    owner.api_ready(chat=message.chat)
                case control.Failed() if owner.announced:
                    process.kill(message.message)
                case control.Failed():
                    owner.fail(message.message)
                case control.Idle():
                    self._no_longer_busy(i)
                case control.RestartEngines() | control.WakeModel() | control.SleepModel():
                    owner.asked(process, message)
        how = await process.wait()
        del self.running[i]
        self._attached = {pair for pair in self._attached if pair[0] != i}
        for engine, supervisor in self._engines.items():
            if (i, engine) in self._clients:
                supervisor.client_gone(self._clients[i, engine])
        self._no_longer_busy(i)
        shared_state, row = self._shared_state, i + 1
        owner.metrics.process_lost(int(shared_state.load[row, :, OPEN].sum()), int(shared_state.http[row]))
        shared_state.load[row] = shared_state.http[row] = shared_state.engine_load[row] = 0
        return how

    def _heartbeat_row(self, i: int) -> int:
        return len(self._engines) + i

    def watched_processes(self) -> Iterator[WatchedProcess]:
        """Yield the processes that must send heartbeats."""
        for i, process in self.running.items():
            hangs = self._owner.metrics.api_hangs.labels()
            yield WatchedProcess(
                f"API process {i}", self._heartbeat_row(i), process, self._config.api_hang_timeout, hangs
            )

    @property
    def num_attached(self) -> int:
        """Number of pairs of an API process and an engine that serve."""
        return len(self._attached)

    def serves(self, engine: int) -> bool:
        """Return whether all API processes serve with this engine."""
        return bool(self.running) and all((i, engine) in self._attached for i in self.running)

    def broadcast(self, message: control.ToWorker) -> None:
        for process in self.running.values():
            process.send(message)

    def engine_started(self, engine: int) -> None:
        for i in self.running:
            self._connect(i, engine)

    def _connect(self, i: int, engine: int) -> None:
        """Send an engine's address to an API process, which becomes its client, or why there is no such process."""
        number, supervisor = next(self._owner.numbers), self._engines[engine]
        if (greeting := supervisor.greeting(number)) is None:
            return
        self.running[i].send(greeting)
        if isinstance(greeting, control.EngineUp):
            self._clients[i, engine] = number
            if supervisor.ready is not None:
                self._expect(i, engine)

    def _expect(self, i: int, engine: int) -> None:
        """Kill an API process that does not serve within `ATTACH_SECONDS` of an engine becoming ready."""
        number = self._clients[i, engine]

        def check() -> None:
            current = self._clients.get((i, engine)) == number and self._engines[engine].ready is not None
            if current and i in self.running and (i, engine) not in self._attached:
                self.running[i].kill(f"not ready {ATTACH_SECONDS:g} s after the engine")

        asyncio.get_running_loop().call_later(ATTACH_SECONDS, check)

    def engine_ready(self, engine: int) -> None:
        for i in self.running:
            self._expect(i, engine)

    def engine_ended(self, engine: int, message: control.EngineDown) -> None:
        self._attached = {pair for pair in self._attached if pair[1] != engine}
        self.broadcast(message)

    def end(self, message: control.Drain | control.HandOver) -> None:
        """Send `message` to all processes, which answer with `Idle`."""
        self._busy = set(self.running)
        self.idle.clear()
        self.broadcast(message)
        if not self._busy:
            self.idle.set()

    def _no_longer_busy(self, i: int) -> None:
        self._busy.discard(i)
        if not self._busy:
            self.idle.set()
