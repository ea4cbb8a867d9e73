"""An engine without a model for `weft bench server`: it sends one token per tick to every open request.

Started as `python -m weft.tools.bench.server.engine LISTENER TICKS_PER_SECOND VOCAB_SIZE`. LISTENER
is the descriptor of a listening socket (`PrivateSocket`). It ends when stdin closes.
"""

from __future__ import annotations

import os
import sys
import threading
import time

import numpy as np
import zmq

from weft.engine.wire.engine_socket import Clients
from weft.engine.wire.messages import (
    HANDLE_BITS,
    AbortRequests,
    AddRequest,
    ClientGone,
    EngineReady,
    EngineStats,
    Finish,
    Hello,
    IterationStats,
    Outputs,
    SchedulerStats,
    Started,
    ToEngine,
    TokenLogprobs,
)

MAX_MODEL_LEN = 1 << 20
TOKENS = (72, 75)
"""Token ids that any vocabulary has, sent alternately. They are letters in vocabularies that begin with bytes."""


class StubEngine:
    def __init__(self, listener_fd: int, rate: float, vocab_size: int) -> None:
        self._clients = Clients(zmq.Context(), listener_fd)
        self._tick_seconds = 1 / rate
        self._vocab_size = vocab_size
        self._left: dict[int, int] = {}
        """Tokens still to send, by handle."""
        self._scored: dict[int, int] = {}
        """Log-probabilities per token, by handle, for requests that want them."""
        self._new: list[int] = []
        self._ticks = 0
        self._tokens = 0

    def run(self) -> None:
        due = time.monotonic()
        while True:
            due += self._tick_seconds
            while (left := due - time.monotonic()) > 0:
                for client, message in self._clients.receive(max(1, int(left * 1e3))):
                    self._take(client, message)
            self._tick()

    def _take(self, client: int, message: ToEngine) -> None:
        match message:
            case Hello():
                self._clients.send(client, self._describe())
            case AddRequest():
                self._left[message.handle] = message.params.max_tokens or MAX_MODEL_LEN
                self._new.append(message.handle)
                if message.params.logprobs is not None:
                    self._scored[message.handle] = message.params.logprobs
            case AbortRequests():
                for handle in message.handles:
                    self._left.pop(handle, None)
            case ClientGone():
                self._left = {h: n for h, n in self._left.items() if h >> HANDLE_BITS != message.client}

    def _tick(self) -> None:
        handles = list(self._left)
        self._ticks += 1
        self._tokens += len(handles)
        finish = np.full(len(handles), Finish.RUNNING, np.uint8)
        for i, handle in enumerate(handles):
            self._left[handle] -= 1
            if not self._left[handle]:
                del self._left[handle]
                finish[i] = Finish.LENGTH
        token = TOKENS[self._ticks % 2]
        scores = {k: _logprobs(token, k) for k in set(self._scored.values())}
        self._scored = {handle: k for handle, k in self._scored.items() if handle in self._left}
        started, self._new = [Started(h, 0, 0.0, 0.0) for h in self._new if h in self._left], []
        self._clients.send_outputs(
            Outputs(
                handles=np.array(handles, np.int64).tobytes(),
                tokens=np.full(len(handles), token, np.int32).tobytes(),
                finish=finish.tobytes(),
                started=started,
                logprobs={handle: [scores[k]] for handle, k in self._scored.items()},
                stats=EngineStats(
                    scheduler=SchedulerStats(running=len(self._left), generation_tokens=self._tokens),
                    iteration=IterationStats(tokens=len(handles), requests=len(handles)),
                    iterations=self._ticks,
                ),
            )
        )

    def _describe(self) -> EngineReady:
        return EngineReady(
            model_type="stub",
            num_parameters=0,
            dtype="none",
            device="none",
            vocab_size=self._vocab_size,
            max_model_len=MAX_MODEL_LEN,
            page_size=64,
            num_pages=1 << 20,
            max_num_seqs=1 << 20,
            max_num_batched_tokens=1 << 20,
            eos_token_ids=(),
            load_seconds=0.0,
        )


def _logprobs(token: int, k: int) -> TokenLogprobs:
    """Made-up log-probabilities in which `token` is the best."""
    best = range(token, token + k)
    return TokenLogprobs(1, (token, *best), (-0.5, *(-0.5 - i for i in range(k))))


def _end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=_end_with_stdin, daemon=True).start()
    StubEngine(int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])).run()
