"""An API process: answers HTTP on its listener, from a connection of its own to the engine. Started by `wire.child`
with a file descriptor for its stacks, and a socket to the daemon on file descriptor 0; ends when that socket closes,
and with the daemon."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence

import uvloop

from weft.engine.errors import WeftError
from weft.engine.wire.child import has_ended
from weft.engine.wire.client import EngineClient
from weft.engine.wire.heartbeat import ENGINE, HEARTBEAT_SECONDS, Heartbeats, Watch
from weft.engine.wire.log_sink import last_lines
from weft.engine.wire.stacks import write_stacks_to
from weft.server.api.http_server import make_server
from weft.server.api.service import Phase, Service
from weft.server.config import ServeConfig
from weft.server.daemon.control import (
    Answer,
    Channel,
    Drain,
    EngineDown,
    EngineUp,
    Failed,
    HandOver,
    Idle,
    Interrupt,
    Ready,
    Reload,
    RestartEngines,
    SleepModel,
    Start,
    Stop,
    Together,
    ToWorker,
    WakeModel,
)
from weft.server.errors import ApiError
from weft.server.logs import configure, count_dropped
from weft.server.observe.shared_state import SharedState, SleepState
from weft.server.text.tokenizer import Tokenizer

IDLE_TICK = 0.02
FAREWELL = 1.0
"""seconds that last answers get to leave"""
HOLD_SECONDS = 15.0
"""that connections wait at most for a process that takes the place of another one"""
HEARTBEAT_TICK = HEARTBEAT_SECONDS / 4
TELL_SECONDS = 2 * HEARTBEAT_SECONDS
"""after which the daemon would have told of an engine's end"""
SUPERVISOR_SECONDS = 10.0
"""after which the daemon would have ended an engine that hangs"""
BROKEN = 70
"""exit status of a process that could not go on"""

logger = logging.getLogger("weft")


class Worker:
    """One API process, from `Start` to `Stop`."""

    def __init__(self, channel: Channel[ToWorker], start: Start) -> None:
        self._channel = channel
        config = ServeConfig.model_validate_json(start.config)
        configure(config)
        keys = [bytes.fromhex(key) for key in start.keys]
        shared_state = SharedState(
            start.rows, fd=start.shared_state_fd, engines=config.num_engines, models=len(config.each)
        )
        heartbeats = Heartbeats(start.heartbeat_rows, start.heartbeats_fd)
        self._heartbeat = heartbeats.of(start.heartbeat_row)
        self._watch = Watch(heartbeats)
        self._service = Service(config, shared_state, start.row, keys, self._watch)
        count_dropped(self._service.metrics.log_lines_dropped.labels().inc)
        self._server = make_server(self._service)
        self._serving: asyncio.Task[None] | None = None
        self._taking_over = start.taking_over
        self._held = set(start.hold)
        """models without which no connection is taken"""
        self._listeners = [socket.socket(fileno=fd) for fd in start.listener_fds]
        self._of_engine = {engine: each for each in self._service.models for engine in each.engines}
        """the model's service by engine"""
        # Of each model one of the processes is enough.
        self._tells_faults = set(range(shared_state.models)) if start.row == 1 else set()
        self._clients: dict[int, EngineClient] = {}
        """by engine"""
        self._asked: dict[int, asyncio.Future[str]] = {}
        """of the daemon, and not answered yet"""
        self._questions = 0
        self._service.restart_engines = self._restart_engines
        self._service.wake = self._wake
        self._service.sleep = self._sleep
        self._tasks: set[asyncio.Future[None]] = set()

    async def run(self) -> None:
        self._begin(self._show_life())
        self._accept()
        asyncio.get_running_loop().call_later(HOLD_SECONDS, self._hold_no_longer)
        self._tokenizers = [asyncio.create_task(self._load_tokenizer(each)) for each in self._service.models]
        async for message in self._channel.messages():
            if isinstance(message, Stop):
                break
            self._take(message)
        else:
            last_lines()
            os._exit(1)  # the daemon has died: nobody would watch this process
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait((self._serving,), timeout=FAREWELL)
            self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        for client in self._clients.values():
            client.close()
        self._service.close()

    def _accept(self) -> None:
        """Take connections, unless others serve what this process does not serve yet. Idempotent."""
        models = self._service.models
        lacking = {
            each.model for each in models if each.phase is Phase.LOADING and each.sleep_state is SleepState.AWAKE
        }
        elsewhere = self._taking_over and (lacking or all(each.phase is not Phase.SERVING for each in models))
        if not (self._serving or elsewhere or lacking & self._held or self._service.handed_over):
            self._serving = asyncio.create_task(self._server.serve(sockets=self._listeners))

    def _hold_no_longer(self) -> None:
        self._held.clear()
        self._accept()

    async def _show_life(self) -> None:
        """Heartbeat from the event loop; and give up engines that nobody else would give up, should the daemon hang too."""
        while True:
            self._heartbeat()
            self._watch.look()
            for engine in [engine for engine in self._clients if self._abandoned(engine)]:
                self._clients[engine].give_up("the engine does not answer")
            await asyncio.sleep(HEARTBEAT_TICK)

    def _abandoned(self, engine: int) -> bool:
        """It has ended or hangs, and the daemon neither tells of it nor starts another one."""
        watch, bound, row = self._watch, self._service.config.hang_timeout, ENGINE + engine
        if bound and watch.late(row, bound + SUPERVISOR_SECONDS) is not None:
            return True
        pid = watch.heartbeats.pid(row)
        return watch.age(row) > TELL_SECONDS and pid != 0 and has_ended(pid)

    def _take(self, message: ToWorker) -> None:
        service = self._service
        match message:
            case EngineUp():
                service.metrics.engines[message.engine].begins(message.before)
                self._note(message)
                self._begin(self._serve(message))
            case EngineDown():
                self._engine_down(message)
            case Together():
                self._of_engine[message.engine].engine_shared(message.engine)
            case Drain():
                for each in service.models:
                    if each.phase is not Phase.DEAD:
                        each.phase = Phase.DRAINING
                self._accept()  # to say so
                self._server.close_after_answers()
                self._begin(self._tell_idle())
            case HandOver():
                service.handed_over = True
                self._server.stop_accepting()
                self._server.close_after_answers()
                self._begin(self._tell_alone())
            case Reload():
                service.keys[:] = [bytes.fromhex(key) for key in message.keys]
                self._server.reread_certificate()
            case Answer():
                if not (asked := self._asked.pop(message.ask)).done():  # who asked may have gone
                    asked.set_result(message.refusal)
            case Interrupt(model=int(model)):
                error = ApiError(503, "The model goes to sleep.", code="model_asleep", retry_after=10)
                service.models[model].interrupt_model(error, "sleep")
            case Interrupt():
                error = ApiError(503, "The server is shutting down.", code="draining", retry_after=10)
                service.interrupt_all(error, "drain")

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A defect. Whoever waits for this process is better served by another one.
            sys.excepthook(type(error), error, error.__traceback__)
            last_lines()
            os._exit(BROKEN)

    async def _load_tokenizer(self, service: Service) -> Tokenizer:
        config = service.config
        tokenizer = await service.offload(lambda: Tokenizer.load(config.tokenizer_path))
        if config.uses_demo_tokenizer:
            tokenizer.name_unknown()
        return tokenizer

    async def _serve(self, engine: EngineUp) -> None:
        """Connect to this engine and serve once it is ready."""
        service = self._of_engine[engine.engine]
        several = len(service.engines) > 1
        self._clients[engine.engine] = client = EngineClient(engine.address, engine.client, pages=several)
        self._begin(client.reader)
        try:
            tokenizer = await self._tokenizers[service.model]
            ready = await client.wait_ready()
        except WeftError as error:
            if client.alive:
                self._channel.send(Failed(str(error)))
            return
        tokenizer.hide(ready.eos_token_ids)
        if service.model in self._tells_faults:
            self._tells_faults.discard(service.model)
            for fault in tokenizer.faults(ready.vocab_size):
                logger.warning("%s", fault)
        # One that takes no connections yet has not told anybody to wait; who comes meanwhile stays in its queue. And
        # nobody gets at a model that wakes before all processes serve it.
        alone = self._serving is not None and service.config.api_workers > 1 and service.sleep_state is SleepState.AWAKE
        service.attach(client, ready, tokenizer, engine.engine, alone=alone)
        gc.unfreeze()  # clients of engines that have ended
        gc.collect()
        gc.freeze()  # what is there now stays: later collections need not look at it
        self._accept()
        self._channel.send(Ready(tokenizer.can_chat, engine.engine))

    def _note(self, message: EngineUp | EngineDown) -> None:
        if (failure := message.failure) is not None:
            told = {"message": failure.why, "at": failure.at}
            self._of_engine[message.engine].failures[message.engine] = told

    def _engine_down(self, message: EngineDown) -> None:
        self._note(message)
        self._of_engine[message.engine].engine_died(message.engine, restarting=message.restarting)
        self._held.discard(self._of_engine[message.engine].model)
        self._accept()  # to say so
        if (client := self._clients.pop(message.engine, None)) is not None:
            client.mark_dead(message.why)
            client.close()

    async def _restart_engines(self, engines: Sequence[int]) -> str:
        """Have the daemon start these engines anew, all for none; returns why it does not, or nothing."""
        return await self._ask(lambda ask: RestartEngines(ask, list(engines)))

    async def _wake(self, model: int) -> str:
        return await self._ask(lambda ask: WakeModel(ask, model))

    async def _sleep(self, model: int, level: int, seconds: float | None) -> str:
        return await self._ask(lambda ask: SleepModel(ask, model, level, seconds))

    async def _ask(self, message: Callable[[int], RestartEngines | WakeModel | SleepModel]) -> str:
        """Ask the daemon. `message`: of the question's number."""
        answer = asyncio.get_running_loop().create_future()
        self._questions += 1
        self._asked[self._questions] = answer
        self._channel.send(message(self._questions))
        return await answer

    async def _tell_idle(self) -> None:
        while self._service.open:
            await asyncio.sleep(IDLE_TICK)
        self._channel.send(Idle())

    async def _tell_alone(self) -> None:
        while self._service.open or self._server.num_connections:
            await asyncio.sleep(IDLE_TICK)
        self._channel.send(Idle())


async def _run(sock: socket.socket) -> None:
    channel = await Channel.of_worker(sock)
    start = await channel.first()
    assert isinstance(start, Start)
    await Worker(channel, start).run()


def main() -> None:
    write_stacks_to(int(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
