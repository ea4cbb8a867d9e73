"""Defines `Traffic`, which sends a load generator's workload, including conversations, to a simulated fleet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from weft.deploy.fleet.clock import Clock
from weft.deploy.fleet.front import Front
from weft.engine.errors import ConfigError
from weft.loadgen.record import Record
from weft.loadgen.workload import Planned, Workload

_TURN = 4
FIRST_USERS_SECONDS = 1.0  # Seconds over which users of a closed loop start.
FAILURE_PAUSE = 0.1

Tokens = npt.NDArray[np.int32]


class Traffic:
    """Like `loadgen.driver`, in virtual time. `context`: context length in tokens at which conversations end."""

    def __init__(self, clock: Clock, front: Front, workload: Workload, context: int) -> None:
        self.records: list[Record] = []
        self._clock, self._front, self._workload, self._context = clock, front, workload, context

    def begin(self) -> None:
        self._arrive(0)
        for user in range(self._workload.users):
            self._user(user, user, user / self._workload.users * FIRST_USERS_SECONDS, 0)

    def _arrive(self, index: int) -> None:
        if index >= len(self._workload):
            return
        planned = self._workload.planned(index)
        assert planned.at is not None

        def due() -> None:
            self._start(planned, lambda _ok: None)
            self._arrive(index + 1)

        self._clock.at(planned.at, due)

    def _user(self, user: int, index: int, due: float, turn: int) -> None:
        workload = self._workload
        if (workload.count is not None and index >= workload.count) or (
            workload.duration is not None and due >= workload.duration
        ):
            return

        def again(ok: bool) -> None:
            pause = 0.0 if ok else FAILURE_PAUSE
            at = self._clock.now + pause + workload.think(user, turn + 1)
            self._user(user, index + workload.users, at, turn + 1)

        self._clock.at(due, lambda: self._start(workload.planned(index), again))

    def _start(self, planned: Planned, on_end: Callable[[bool], None]) -> None:
        if self._workload.is_conversation:
            self._turn(planned, 0, np.zeros(0, np.int32), on_end)
            return
        content = self._workload.content(planned)
        if not isinstance(content, list) or (content and not isinstance(content[0], int)):
            raise ConfigError("a simulation needs lengths or token ids, not texts; omit --prompts-file")
        record = self._record(planned.index, planned.input_tokens, planned.output_tokens)
        prompt = np.asarray(content, np.int32)
        self._front.send(record, prompt, planned.output_tokens, lambda _answer: on_end(record.ok))

    def _turn(self, first: Planned, turn: int, history: Tokens, on_end: Callable[[bool], None]) -> None:
        workload, maker = self._workload, self._workload.maker
        inputs, outputs = workload.turn(first.index, turn)
        last = turn == int(workload.turns[first.index % len(workload.turns)])
        if last or (turn and len(history) + inputs + outputs > self._context):
            on_end(True)
            return
        if not turn and maker.shared:
            words = np.asarray(maker.prompt(first.index, inputs), np.int32)
        else:
            rng = np.random.default_rng((maker.seed, _TURN, first.index, turn))
            words = rng.integers(maker.low, maker.high, inputs).astype(np.int32)
        prompt = np.concatenate((history, words))

        def send() -> None:
            record = self._record(first.index, len(prompt), outputs)
            record.session, record.turn = first.index, turn

            def answered(answer: list[int]) -> None:
                if record.ok:
                    self._turn(first, turn + 1, np.concatenate((prompt, np.array(answer, np.int32))), on_end)
                else:
                    on_end(False)

            self._front.send(record, prompt, outputs, answered)

        self._clock.after(workload.think(first.index, turn) if turn else 0.0, send)

    def _record(self, index: int, inputs: int, outputs: int) -> Record:
        record = Record(index, self._clock.now, inputs, outputs)
        self.records.append(record)
        return record
