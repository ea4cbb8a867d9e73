"""The engine process: a thin loop around `Engine`, between its clients and the next iteration.

Started as `python -m weft.engine.process ADDRESS`, where to listen for clients, with an `EngineConfig` as one line of
JSON on stdin. It ends when stdin closes, so that it cannot outlive the daemon.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import zmq

from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.engine.progress import ProgressLines
from weft.engine.runner.compile_job import CompileJob
from weft.engine.wire.engine_socket import Clients
from weft.engine.wire.log_sink import install, last_lines
from weft.engine.wire.messages import (
    HANDLE_BITS,
    AbortRequests,
    AddRequest,
    ClientGone,
    EngineFailed,
    Hello,
    Outputs,
    Profile,
    ResetPrefixCache,
    ToEngine,
)

if TYPE_CHECKING:
    from weft.engine.engine import Engine
    from weft.engine.profiling import Profiling

IDLE_POLL_MS = 1000
HELLO_WAIT_MS = 1000
"""for the first client to be there, when there is bad news for it"""
FLUSH_POLL_MS = 100
"""with KV tiers: an idle loop also takes in transfers that have ended, and notices the end of stdin in time"""
FLUSH_PATIENCE_SECONDS = 4.5
"""less than the daemon waits for this process to end"""


class _Ending(threading.Thread):
    """Ends the process when the daemon closes stdin, by choice or by dying.

    `patience` is how many seconds the loop then has to end by itself: an engine with KV tiers keeps what it can.
    """

    def __init__(self) -> None:
        super().__init__(name="weft-stdin", daemon=True)
        self.patience = 0.0
        self.begun = threading.Event()

    def run(self) -> None:
        while os.read(0, 4096):
            pass
        self.begun.set()
        time.sleep(self.patience)
        last_lines()
        os._exit(0)


class _Loop:
    """Takes the clients' messages, steps the engine, sends what it says."""

    def __init__(self, clients: Clients, ending: _Ending) -> None:
        self._clients = clients
        self._ending = ending
        self._open: dict[int, set[int]] = {}
        """handles by client"""
        self._profiling: Profiling | None = None

    def run(self, config: EngineConfig) -> int:
        compiling = CompileJob.begin(config)
        try:
            from weft.engine.engine import Engine  # torch is imported here, inside the reach of EngineFailed

            engine = Engine(config, ProgressLines(), compiling)
        except WeftError as error:
            return self._fail(str(error))
        except MemoryError:
            return self._fail("out of memory while loading the model")
        if engine.tiers is not None:
            self._ending.patience = FLUSH_PATIENCE_SECONDS
        while not self._ending.begun.is_set():
            for client, message in self._clients.receive(0 if engine.has_work else self._idle_poll_ms()):
                self._take(engine, client, message)
            if self._profiling is not None and self._profiling.due:
                self._end_profiling()
            outputs = engine.step()
            if outputs is not None:
                self._forget_finished(outputs)
                self._clients.send_outputs(outputs)
        engine.close()
        return 0

    def _idle_poll_ms(self) -> int:
        return FLUSH_POLL_MS if self._ending.patience else IDLE_POLL_MS

    def _take(self, engine: Engine, client: int, message: ToEngine) -> None:
        match message:
            case AddRequest() if client not in self._clients:
                pass  # what a client had sent can come after the news that it has gone
            case AddRequest():
                self._open.setdefault(client, set()).add(message.handle)
                engine.add_or_refuse(message)
            case AbortRequests():
                self._abort(engine, client, message.handles)
            case ResetPrefixCache():
                engine.reset_prefix_cache()
            case Profile():
                self._end_profiling()
                self._begin_profiling(message)
            case Hello():
                self._clients.send(client, engine.describe())
            case ClientGone():
                self._clients.forget(message.client)
                self._abort(engine, message.client, self._open.pop(message.client, ()))

    def _begin_profiling(self, message: Profile) -> None:
        from weft.engine.profiling import Profiling

        try:
            self._profiling = Profiling(Path(message.path), message.seconds)
        except RuntimeError:  # torch's, where it cannot: whoever asked waits in vain
            traceback.print_exc()

    def _end_profiling(self) -> None:
        profiling, self._profiling = self._profiling, None
        if profiling is not None:
            try:
                profiling.end()
            except (OSError, RuntimeError):
                traceback.print_exc()

    def _abort(self, engine: Engine, client: int, handles: Iterable[int]) -> None:
        for handle in handles:
            engine.abort(handle)
        self._open.get(client, set()).difference_update(handles)

    def _forget_finished(self, outputs: Outputs) -> None:
        handles, _, finish = outputs.columns()
        for handle in handles[np.flatnonzero(finish)].tolist():
            self._open.get(handle >> HANDLE_BITS, set()).discard(handle)

    def _fail(self, why: str) -> int:
        self._clients.receive(HELLO_WAIT_MS)
        self._clients.send_all(EngineFailed(why))
        return 1


def main() -> int:
    install()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides when to end
    config = EngineConfig.model_validate_json(sys.stdin.buffer.readline())
    ending = _Ending()
    ending.start()
    context = zmq.Context()
    clients = Clients(context, sys.argv[1])
    try:
        code = _Loop(clients, ending).run(config)
    except Exception:
        # A defect, not a user's mistake: the trace belongs in the log, the daemon tells every client.
        traceback.print_exc()
        code = 70
    clients.close()
    context.term()
    # The runner's thread may be inside torch: leave without waiting for it.
    last_lines()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
