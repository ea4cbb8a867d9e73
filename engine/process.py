"""The engine process: a thin loop around `Engine`, between a socket and the next iteration.

Started as `python -m weft.engine.process ADDRESS` with an `EngineConfig` as one line of JSON on stdin. It ends when
stdin closes, so that it cannot outlive the daemon.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
import traceback

import zmq

from weft.engine.config import EngineConfig
from weft.engine.errors import WeftError
from weft.engine.messages import (
    AbortRequests,
    AddRequest,
    EngineFailed,
    FromEngine,
    ResetPrefixCache,
    ToEngine,
    encoder,
    to_engine_decoder,
)

IDLE_POLL_MS = 1000
LOADING_REPORT_SECONDS = 2.0


def _end_with_stdin() -> None:
    # Blocks in the kernel until the daemon closes its end, by choice or by dying.
    while os.read(0, 4096):
        pass
    os._exit(0)


class _Loading:
    """Says on stderr how far a load is that takes longer than a glance."""

    def __init__(self) -> None:
        self._said = time.monotonic()

    def __call__(self, done: int, layers: int) -> None:
        if time.monotonic() - self._said > LOADING_REPORT_SECONDS:
            self._said = time.monotonic()
            print(f"weft: loading, layer {done} of {layers}", file=sys.stderr)


class _Loop:
    """Takes messages off the socket, steps the engine, sends what it says."""

    def __init__(self, socket: zmq.Socket[bytes]) -> None:
        self._socket = socket

    def send(self, message: FromEngine) -> None:
        self._socket.send(encoder.encode(message))

    def run(self, config: EngineConfig) -> int:
        try:
            from weft.engine.engine import Engine  # torch is imported here, inside the reach of EngineFailed

            engine = Engine(config, _Loading())
        except WeftError as error:
            self.send(EngineFailed(str(error)))
            return 1
        except MemoryError:
            self.send(EngineFailed("out of memory while loading the model"))
            return 1
        self.send(engine.describe())
        while True:
            block = not engine.has_work
            for message in self._receive(block):
                match message:
                    case AddRequest():
                        engine.add_or_refuse(message)
                    case AbortRequests():
                        for handle in message.handles:
                            engine.abort(handle)
                    case ResetPrefixCache():
                        engine.reset_prefix_cache()
            outputs = engine.step()
            if outputs is not None:
                self.send(outputs)

    def _receive(self, block: bool) -> list[ToEngine]:
        messages: list[ToEngine] = []
        if block:
            self._socket.poll(IDLE_POLL_MS)
        while True:
            try:
                messages.append(to_engine_decoder.decode(self._socket.recv(zmq.NOBLOCK)))
            except zmq.Again:
                return messages


def main() -> int:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the daemon decides when to end
    config = EngineConfig.model_validate_json(sys.stdin.buffer.readline())
    threading.Thread(target=_end_with_stdin, name="stdin-watch", daemon=True).start()
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.setsockopt(zmq.SNDHWM, 0)
    socket.setsockopt(zmq.RCVHWM, 0)
    socket.setsockopt(zmq.LINGER, 1000)
    socket.connect(sys.argv[1])
    try:
        code = _Loop(socket).run(config)
    except Exception:
        # A defect, not a user's mistake: the trace belongs in the log, the daemon tells every client.
        traceback.print_exc()
        code = 70
    socket.close()
    context.term()
    # The runner's thread may be inside torch: leave without waiting for it.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    sys.exit(main())
