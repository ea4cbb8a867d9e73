"""An API process: serves HTTP on its listeners, with its own connection to each engine.

`wire.child` starts it with a file descriptor for stacks and a socket to the daemon as file descriptor 0. It ends when
that socket closes.
"""

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
from weft.engine.wire.log_sink import flush_lines
from weft.engine.wire.stacks import write_stacks_to
from weft.server.api.http_server import make_server
from weft.server.api.service import Phase, Service
from weft.server.config import ServeConfig
from weft.server.daemon import control
from weft.server.errors import ApiError
from weft.server.logs import configure, count_dropped
from weft.server.observe.shared_state import SharedState, SleepState
from weft.server.text.chat_template import read_chat_template
from weft.server.text.tokenizer import Tokenizer

IDLE_TICK = 0.02
FAREWELL_SECONDS = 1.0  # Seconds for the last responses to be sent.
HOLD_SECONDS = 15.0  # Maximum seconds that connections wait for a restarted process to serve.
HEARTBEAT_TICK = HEARTBEAT_SECONDS / 4
REPORT_SECONDS = 2 * HEARTBEAT_SECONDS  # Seconds after which the daemon would have reported an engine's end.
SUPERVISOR_SECONDS = 10.0  # Extra seconds after which the daemon would have killed a hung engine.
EXIT_DEFECT = 70  # Exit status after an unexpected exception.

logger = logging.getLogger("weft")


class Worker:
    """One API process, from `Start` to `Stop`."""

    def __init__(self, channel: control.Channel[control.ToWorker], start: control.Start) -> None:
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
        self._service = Service(config, shared_state, start.row, keys, start.best_priorities, self._watch)
        count_dropped(self._service.metrics.log_lines_dropped.labels().inc)
        self._service.local_hosts = start.local_hosts
        self._server = make_server(self._service)
        self._serving: asyncio.Task[None] | None = None
        self._taking_over = start.taking_over
        self._held = set(start.hold)  # Models that must be served before connections are accepted.
        self._listeners = [socket.socket(fileno=fd) for fd in start.listener_fds]
        self._server.admin_sockets = [each for each in self._listeners if each.fileno() == start.admin_fd]
        self._service_of = {engine: each for each in self._service.models for engine in each.engines}
        """The model's service by engine."""
        # One process per model logs the tokenizer's faults.
        self._logs_faults = set(range(shared_state.models)) if start.row == 1 else set()
        self._clients: dict[int, EngineClient] = {}  # Clients by engine.
        self._pending: dict[int, asyncio.Future[str]] = {}  # Questions to the daemon without an answer yet.
        self._questions = 0
        self._service.restart_engines = self._restart_engines
        self._service.wake = self._wake
        self._service.sleep = self._sleep
        self._tasks: set[asyncio.Future[None]] = set()

    async def run(self) -> None:
        self._begin(self._send_heartbeats())
        self._accept()
        asyncio.get_running_loop().call_later(HOLD_SECONDS, self._end_hold)
        self._tokenizers = [asyncio.create_task(self._load_tokenizer(each)) for each in self._service.models]
        async for message in self._channel.messages():
            if isinstance(message, control.Stop):
                break
            self._take(message)
        else:
            flush_lines()
            os._exit(1)  # the daemon has died, and nothing supervises this process
        for asked in self._pending.values():  # nothing else will answer them
            if not asked.done():
                asked.set_result("the server is shutting down")
        if self._serving is not None:
            self._server.should_exit = True
            await asyncio.wait((self._serving,), timeout=FAREWELL_SECONDS)
            self._server.force_exit = True
            await asyncio.gather(self._serving, return_exceptions=True)
        for client in self._clients.values():
            client.close()
        self._service.close()

    def _accept(self) -> None:
        """Accept connections, unless others serve models that this process does not serve yet. Idempotent."""
        models = self._service.models
        lacking = {
            each.model for each in models if each.phase is Phase.LOADING and each.sleep_state is SleepState.AWAKE
        }
        elsewhere = self._taking_over and (lacking or all(each.phase is not Phase.SERVING for each in models))
        if not (self._serving or elsewhere or lacking & self._held or self._service.handed_over):
            self._serving = asyncio.create_task(self._server.serve(sockets=self._listeners))

    def _end_hold(self) -> None:
        self._held.clear()
        self._accept()

    async def _send_heartbeats(self) -> None:
        """Send heartbeats from the event loop. Also give up lost engines, in case the daemon hangs, too."""
        while True:
            self._heartbeat()
            self._watch.look()
            for engine in [engine for engine in self._clients if self._abandoned(engine)]:
                self._clients[engine].give_up("the engine does not answer")
            await asyncio.sleep(HEARTBEAT_TICK)

    def _abandoned(self, engine: int) -> bool:
        """Return whether an engine has ended or hangs, and the daemon has failed to handle that in time."""
        watch, bound, row = self._watch, self._service.config.hang_timeout, ENGINE + engine
        if bound and watch.late(row, bound + SUPERVISOR_SECONDS) is not None:
            return True
        pid = watch.heartbeats.of(row).pid
        return watch.age(row) > REPORT_SECONDS and pid != 0 and has_ended(pid)

    def _take(self, message: control.ToWorker) -> None:
        service = self._service
        match message:
            case control.EngineUp():
                service.metrics.engines[message.engine].started(message.before)
                self._note(message)
                self._begin(self._serve(message))
            case control.EngineDown():
                self._engine_down(message)
            case control.Together():
                self._service_of[message.engine].engine_shared(message.engine)
            case control.Drain():
                for each in service.models:
                    if each.phase is not Phase.DEAD:
                        each.phase = Phase.DRAINING
                self._accept()  # so that clients get the error
                self._server.close_after_answers()
                self._begin(self._report_idle())
            case control.HandOver():
                service.handed_over = True
                self._server.stop_accepting()
                self._server.close_after_answers()
                self._begin(self._report_unconnected())
            case control.Reload():
                service.keys[:] = [bytes.fromhex(key) for key in message.keys]
                service.best_priorities[:] = message.best_priorities
                self._server.reread_certificate()
            case control.Answer():
                if not (asked := self._pending.pop(message.ask)).done():  # the caller may have been cancelled
                    asked.set_result(message.refusal)
            case control.Interrupt(model=int(model)):
                error = ApiError(503, "The model goes to sleep.", code="model_asleep", retry_after=10)
                service.models[model].interrupt_model(error, "sleep")
            case control.Interrupt():
                error = ApiError(503, "The server is shutting down.", code="draining", retry_after=10)
                service.interrupt_all(error, "drain")

    def _begin(self, work: Awaitable[None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Future[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            # A defect: end the process, so that the daemon restarts it.
            sys.excepthook(type(error), error, error.__traceback__)
            flush_lines()
            os._exit(EXIT_DEFECT)

    async def _load_tokenizer(self, service: Service) -> Tokenizer:
        config = service.config

        def load() -> Tokenizer:
            template = None if config.chat_template is None else read_chat_template(config.chat_template)
            return Tokenizer.load(config.tokenizer_path, template)

        tokenizer = await service.offload(load)
        if config.uses_demo_tokenizer:
            tokenizer.name_unknown_ids()
        return tokenizer

    async def _serve(self, engine: control.EngineUp) -> None:
        """Connect to an engine and serve once it is ready."""
        service = self._service_of[engine.engine]
        several = len(service.engines) > 1
        self._clients[engine.engine] = client = EngineClient(engine.address, engine.client, pages=several)
        self._begin(client.reader)
        try:
            tokenizer = await self._tokenizers[service.model]
            ready = await client.wait_ready()
        except WeftError as error:
            if client.alive:
                self._channel.send(control.Failed(str(error)))
            return
        tokenizer.hide(ready.eos_token_ids)
        if service.model in self._logs_faults:
            self._logs_faults.discard(service.model)
            for fault in tokenizer.faults(ready.vocab_size):
                logger.warning("%s", fault)
        # While this process accepts no connections, or its model is waking, no request has to wait for the others.
        alone = self._serving is not None and service.config.api_workers > 1 and service.sleep_state is SleepState.AWAKE
        service.attach(client, ready, tokenizer, engine.engine, alone=alone)
        gc.unfreeze()  # free clients of ended engines
        gc.collect()
        gc.freeze()  # current objects stay; keep later collections from scanning them
        self._accept()
        self._channel.send(control.Ready(tokenizer.can_chat, engine.engine))

    def _note(self, message: control.EngineUp | control.EngineDown) -> None:
        if (failure := message.failure) is not None:
            self._service_of[message.engine].failures[message.engine] = {"message": failure.why, "at": failure.at}

    def _engine_down(self, message: control.EngineDown) -> None:
        self._note(message)
        self._service_of[message.engine].engine_died(message.engine, restarting=message.restarting)
        self._held.discard(self._service_of[message.engine].model)
        self._accept()  # so that clients get the error
        if (client := self._clients.pop(message.engine, None)) is not None:
            client.mark_dead(message.why)
            client.close()

    async def _restart_engines(self, engines: Sequence[int]) -> str:
        """Restart these engines, all if empty. Returns an empty string, or why it is refused."""
        return await self._ask(lambda ask: control.RestartEngines(ask, list(engines)))

    async def _wake(self, model: int, operator: bool = False) -> str:
        return await self._ask(lambda ask: control.WakeModel(ask, model, operator))

    async def _sleep(self, model: int, level: int, seconds: float | None) -> str:
        return await self._ask(lambda ask: control.SleepModel(ask, model, level, seconds))

    async def _ask(self, message: Callable[[int], control.Question]) -> str:
        """Send a question to the daemon. `message`: creates it from its number."""
        answer = asyncio.get_running_loop().create_future()
        self._questions += 1
        self._pending[self._questions] = answer
        self._channel.send(message(self._questions))
        return await answer

    async def _report_idle(self) -> None:
        while self._service.open:
            await asyncio.sleep(IDLE_TICK)
        self._channel.send(control.Idle())

    async def _report_unconnected(self) -> None:
        while self._service.open or self._server.num_connections:
            await asyncio.sleep(IDLE_TICK)
        self._channel.send(control.Idle())


async def _run(sock: socket.socket) -> None:
    channel = await control.Channel.of_worker(sock)
    start = await channel.first()
    assert isinstance(start, control.Start)
    await Worker(channel, start).run()


def main() -> None:
    gc.enable()
    gc.freeze()  # Later collections skip everything imported.
    write_stacks_to(int(sys.argv[1]))
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_run(socket.socket(fileno=0)))


if __name__ == "__main__":
    main()
