"""The engine process: a loop that receives messages, steps the `Engine`, and sends its outputs.

`wire.child` starts it with a socket as stdin, on which an `EngineProcess` sends an `EngineConfig` and descriptors, and
receives why the engine failed (see `wire.preloaded`). It ends when stdin closes, and with the daemon.
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq
from msgspec.structs import replace

from weft.engine.config import EngineConfig
from weft.engine.errors import RankLost, WeftError
from weft.engine.model.encoders import serves_encoder
from weft.engine.progress import ProgressLines, notice, progress_text
from weft.engine.ranks.group import Ranks
from weft.engine.runner.device.compile_job import CompileJob
from weft.engine.runner.start.warm_start import WarmStart
from weft.engine.wire import messages
from weft.engine.wire.child import pin_to
from weft.engine.wire.engine_socket import Clients
from weft.engine.wire.heartbeat import ENGINE, HEARTBEAT_SECONDS, Heartbeat, Heartbeats
from weft.engine.wire.log_sink import flush_lines, install
from weft.engine.wire.preloaded import receive_config, report_failure
from weft.engine.wire.stacks import write_stacks_to
from weft.engine.wire.weight_exchange import COUNT as EXCHANGE_FDS
from weft.engine.wire.weight_exchange import WeightExchange

if TYPE_CHECKING:
    from weft.engine.encoders.engine import EncoderEngine
    from weft.engine.engine import Engine
    from weft.engine.profiling import Profiling

IDLE_POLL_MS = int(1000 * HEARTBEAT_SECONDS)
FLUSH_POLL_MS = 100
"""Idle poll with KV tiers: the loop must process finished transfers, and notice the end of stdin in time."""
FLUSH_PATIENCE_SECONDS = 4.5  # seconds to store pages at the end; less than the daemon waits for this process
PROFILE_SECONDS = 300.0  # maximum seconds to start or write a profile
NO_ADAPTERS = "LoRA adapters are off: start with --enable-lora"
COMPILE_SECONDS = 300.0  # maximum seconds to compile a kernel that the warm-up has not compiled

ENGINE_MODULES = ("weft.engine.engine",)
GPU_MODULES = ("weft.engine.runner.cuda.cuda_runner", "weft.kernels.tuning.quick_timer")
"""Modules that take seconds to import."""


class _Ending(threading.Thread):
    """Ends the process when stdin closes, because the daemon closed it or ended. `patience` is how many seconds the
    loop then has to end by itself, so that an engine with KV tiers can store pages."""

    def __init__(self) -> None:
        super().__init__(name="weft-stdin", daemon=True)
        self.patience = 0.0
        self.begun = threading.Event()

    def run(self) -> None:
        while os.read(0, 4096):
            pass
        self.begun.set()
        time.sleep(self.patience)
        flush_lines()
        os._exit(0)


class _MessageLoop:
    """Receives messages, steps the engine, sends outputs, and records a heartbeat per pass."""

    def __init__(
        self, clients: Clients, ending: _Ending, heartbeats: Heartbeats, row: int, headstart: WarmStart
    ) -> None:
        self._clients, self._ending, self._headstart = clients, ending, headstart
        self._heartbeats, self._row = heartbeats, row
        self._heartbeat = heartbeats.of(row)
        self._open: dict[int, set[int]] = {}  # open handles by client
        self._profiling: Profiling | None = None

    def run(self, config: EngineConfig, stacks_fd: int, exchange_fds: Sequence[int]) -> int:
        self._heartbeat.stage("importing", self._heartbeats.start_timeout)
        try:
            return self._serve(config, stacks_fd, WeightExchange.of(exchange_fds) if exchange_fds else None)
        except RankLost as error:
            return _fail(str(error))

    def _serve(self, config: EngineConfig, stacks_fd: int, exchange: WeightExchange | None) -> int:
        """Raises `RankLost`."""
        try:
            encodes = serves_encoder(config)
            # before other slow work, because the followers take as long to start
            ranks = Ranks.begin(config, self._heartbeats, self._row, stacks_fd, pin=True)
            if isinstance(ranks, Ranks):
                ranks.links.on_progress = self._heartbeat.still  # waiting for another rank is not a hang of this one
            compiling = CompileJob.unload() if encodes else CompileJob.begin(ranks.config)
            self._headstart.wait(ranks.check)
            from weft.engine.engine import Engine  # here, so that a failed import is reported
            from weft.engine.scheduling.features import StepHeartbeat

            lines = ProgressLines()

            def progress(phase: str, done: int, total: int) -> None:
                self._heartbeat.stage(progress_text(phase, done, total), self._heartbeats.start_timeout)
                lines(phase, done, total)

            engine: Engine | EncoderEngine
            if encodes:
                from weft.engine.encoders.engine import EncoderEngine

                engine = EncoderEngine(config, progress)
            else:
                engine = Engine(config, progress, compiling, ranks, exchange)
                notice(str(engine.ends))  # last, so that a failed start prints its error alone
            if isinstance(ranks, Ranks):
                ranks.links.on_progress = lambda: None  # from here on a separate thread runs the collectives
        except RankLost:
            raise
        except WeftError as error:
            return _fail(str(error))
        except MemoryError:
            return _fail("out of memory while loading the model")
        if engine.tiers is not None:
            self._ending.patience = FLUSH_PATIENCE_SECONDS
        engine.listeners.add(StepHeartbeat(self._heartbeat, self._heartbeats.step_timeout))
        _announce_compiles(self._heartbeat)
        while not self._ending.begun.is_set():
            self._heartbeat()
            engine.check()
            for client, message in self._clients.receive(0 if engine.has_work else self._idle_poll_ms(engine.pause)):
                self._take(engine, client, message)
            self._take_until(engine, engine.launch_at())
            if self._profiling is not None and self._profiling.due:
                self._end_profiling()
            outputs = engine.step() or (None if engine.has_work else engine.idle())
            if outputs is not None:
                self._forget_finished(outputs)
                self._clients.send_outputs(outputs)
            if engine.adapters is not None:
                for news in engine.adapters.take_news():
                    self._clients.send_all(news)
        self._heartbeat.stage("ending", FLUSH_PATIENCE_SECONDS)
        engine.close()
        return 0

    def _take_until(self, engine: Engine | EncoderEngine, at: float) -> None:
        """Process messages that arrive before `at`, rounded down to a millisecond."""
        while (wait_ms := int(1e3 * (at - time.monotonic()))) > 0 and not self._ending.begun.is_set():
            for client, message in self._clients.receive(wait_ms):
                self._take(engine, client, message)

    def _idle_poll_ms(self, pause: float | None) -> int:
        longest = FLUSH_POLL_MS if self._ending.patience else IDLE_POLL_MS
        return longest if pause is None else min(longest, int(1000 * pause))

    def _take(self, engine: Engine | EncoderEngine, client: int, message: messages.ToEngine) -> None:
        match message:
            case messages.AddRequest() if client not in self._clients:
                pass  # a message of a client can arrive after its `ClientGone`
            case messages.AddRequest():
                self._open.setdefault(client, set()).add(message.handle)
                engine.add_or_refuse(message)
            case messages.AbortRequests():
                self._abort(engine, client, message.handles)
            case messages.ResetPrefixCache():
                engine.reset_prefix_cache()
                self._clients.send_all(messages.Outputs(stats=engine.stats()))
            case messages.Prefetch():
                engine.prefetch(message.names)
            case messages.LoadAdapter() | messages.DropAdapter():
                self._change_adapters(engine, client, message)
            case messages.Profile():
                self._end_profiling()
                self._begin_profiling(message)
            case messages.Sleep() | messages.Wake():
                self._clients.send(client, self._sleep_or_wake(engine, message))
                self._clients.send_all(messages.Outputs(stats=engine.stats()))
            case messages.Hello():
                ready = engine.describe()
                self._clients.send(client, replace(ready, pages=engine.pages()) if message.pages else ready)
                for news in engine.adapters.all_news() if engine.adapters is not None else ():
                    self._clients.send(client, news)
            case messages.ClientGone():
                self._clients.forget(message.client)
                self._abort(engine, message.client, self._open.pop(message.client, ()))

    def _change_adapters(
        self, engine: Engine | EncoderEngine, client: int, message: messages.LoadAdapter | messages.DropAdapter
    ) -> None:
        adapters = engine.adapters
        if adapters is None:
            path = message.path if isinstance(message, messages.LoadAdapter) else ""
            self._clients.send(client, messages.AdapterNews(message.name, path=path, error=NO_ADAPTERS))
        elif isinstance(message, messages.LoadAdapter):
            adapters.load(message)
        else:
            adapters.drop(message.name)

    def _sleep_or_wake(
        self, engine: Engine | EncoderEngine, message: messages.Sleep | messages.Wake
    ) -> messages.SleepReply:
        """Before it sleeps, the engine aborts open requests: `Sleep` may arrive before the clients' aborts."""
        begun = time.monotonic()
        sleeps = isinstance(message, messages.Sleep)
        self._heartbeat.stage("falling asleep" if sleeps else "waking", self._heartbeats.start_timeout)
        if sleeps:
            for client, handles in list(self._open.items()):
                self._abort(engine, client, list(handles))
            while engine.has_work:
                if (outputs := engine.step()) is not None:
                    self._forget_finished(outputs)
                    self._clients.send_outputs(outputs)
        try:
            size = engine.sleep() if sleeps else engine.wake()
        except (WeftError, OSError) as error:
            return messages.SleepReply(why_not=str(error))
        finally:
            self._heartbeat()
        return messages.SleepReply(num_bytes=size, seconds=time.monotonic() - begun)

    def _begin_profiling(self, message: messages.Profile) -> None:
        from weft.engine.profiling import Profiling

        self._heartbeat.stage("beginning a profile", PROFILE_SECONDS)
        try:
            self._profiling = Profiling(Path(message.path), message.seconds)
        except RuntimeError:  # torch cannot profile; no trace will appear
            traceback.print_exc()

    def _end_profiling(self) -> None:
        profiling, self._profiling = self._profiling, None
        if profiling is not None:
            self._heartbeat.stage("writing a profile", PROFILE_SECONDS)
            try:
                profiling.end()
            except (OSError, RuntimeError):
                traceback.print_exc()

    def _abort(self, engine: Engine | EncoderEngine, client: int, handles: Iterable[int]) -> None:
        for handle in handles:
            engine.abort(handle)
        self._open.get(client, set()).difference_update(handles)

    def _forget_finished(self, outputs: messages.Outputs) -> None:
        handles, _, finish = outputs.columns()
        for handle in handles[np.flatnonzero(finish)].tolist():
            self._open.get(handle >> messages.HANDLE_BITS, set()).discard(handle)


def _fail(why: str) -> int:
    report_failure(socket.socket(fileno=os.dup(0)), why)
    return 1


def _announce_compiles(heartbeat: Heartbeat) -> None:
    """Announce kernels that the loop compiles, so that they do not look like a hang."""
    if "triton" not in sys.modules:
        return
    from triton.runtime.jit import JITFunction

    # Not Triton's hook, which needs all kernel arguments as JSON.
    compile: Callable[..., Any] | None = getattr(JITFunction, "_do_compile", None)
    if compile is None:
        return
    loop = threading.get_ident()

    def announced(function: Any, *arguments: Any, **options: Any) -> Any:
        if threading.get_ident() != loop:
            return compile(function, *arguments, **options)
        heartbeat.stage(f"compiling {getattr(function, '__name__', 'a kernel')}", COMPILE_SECONDS)
        try:
            return compile(function, *arguments, **options)
        finally:
            heartbeat()

    JITFunction._do_compile = announced


def main() -> int:
    install()
    headstart = WarmStart(ENGINE_MODULES, GPU_MODULES)
    CompileJob.preload()
    line, fds = receive_config(socket.socket(fileno=os.dup(0)), 3 + EXCHANGE_FDS)
    if not line:
        os._exit(0)  # the daemon needs no engine
    listener_fd, heartbeats_fd, stacks_fd, *exchange_fds = fds
    write_stacks_to(stacks_fd)
    config = EngineConfig.model_validate_json(line)
    pin_to(config.share.cpus)
    ending = _Ending()
    ending.start()
    headstart.use(config)
    context = zmq.Context()
    clients = Clients(context, listener_fd)
    try:
        row = ENGINE + config.share.engine
        code = _MessageLoop(clients, ending, Heartbeats(row + 1, heartbeats_fd), row, headstart).run(
            config, stacks_fd, exchange_fds
        )
    except Exception:
        # A bug, not a user error: log the traceback. The daemon reports the end to all clients.
        traceback.print_exc()
        code = 70
    clients.close()
    context.term()
    # Do not wait for the runner's thread, which may be inside torch.
    flush_lines()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
