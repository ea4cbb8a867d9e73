"""`Front`: the API process of a simulated fleet: the real bounds on waiting work, the real router, retries, records."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from weft.deploy.fleet.clock import Clock, Processor, evenly
from weft.deploy.fleet.engine import EngineOptions, SimulatedEngine, SimulatedOutputs, SimulatedRequest
from weft.deploy.fleet.profile import IterationProfile
from weft.engine.errors import EngineDead
from weft.engine.wire.messages import EngineStats, Finish
from weft.loadgen.record import Outcome, Record
from weft.server.api.admission import Admission
from weft.server.api.generate import RETRIES
from weft.server.errors import ApiError
from weft.server.observe.counters import Counter, Store
from weft.server.observe.shared_state import SharedState
from weft.server.replicas.replicas import PromptPages, Replicas, Ticket, level
from weft.server.replicas.router import POLICY, Policy

ROW = 1
"""of the shared state: the first one is the daemon's"""


class _Client:
    """What `Replicas` and `Admission` ask of an engine's connection."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.alive = True
        self.stats = EngineStats()
        self.open: set[int] = set()
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_open: Callable[[int], None] | None = None

    @property
    def num_open(self) -> int:
        return len(self.open)

    def tell_open(self) -> None:
        if self.on_open is not None:
            self.on_open(len(self.open))


@dataclass(slots=True)
class _Sequence:
    record: Record
    prompt: npt.NDArray[np.int32]
    output_tokens: int
    look: PromptPages
    ticket: Ticket
    on_end: Callable[[list[int]], None]
    said: list[int]
    silent: int
    """tokens before the first that is text"""
    lives: int = 1
    started: bool = False


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """`known`: requests say how long their answers will be."""

    engines: int
    known: bool = True
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    policy: Policy = POLICY


class Front:
    """Attributes:
    all_engines: those that ended included, with their number.
    """

    def __init__(
        self,
        clock: Clock,
        processor: Processor,
        profile: IterationProfile,
        engine: EngineOptions,
        options: FrontOptions,
        seed: int = 0,
    ) -> None:
        self.options = options
        self._lucks = evenly(random.Random(seed).random())
        self.retried = 0
        self._clock = clock
        self._processor = processor
        self._profile = profile
        self._engine = engine
        self._shared_state = SharedState(2, engines=options.engines)
        self.replicas = Replicas(self._shared_state, ROW, policy=options.policy)
        rejected = Counter(Store(self._shared_state, ROW), "rejected", "", code=("queue_full", "queue_tokens_full"))
        self._admission = Admission(
            self.replicas,
            self._shared_state,
            ROW,
            rejected,
            max_requests=options.max_queued_requests,
            max_tokens=options.max_queued_tokens,
        )
        self.all_engines: list[tuple[int, SimulatedEngine]] = []
        self._clients: dict[int, _Client] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._handles = 0
        for number in range(options.engines):
            self.begin(number)

    # -- engines come and go

    def begin(self, number: int) -> None:
        """An engine is ready, with nothing in its pages."""

        def heard(heard: SimulatedOutputs) -> None:
            # Its engine computes already what comes next.
            seconds = self._profile.answer_ms / 1e3
            self._processor.start(seconds, lambda: self._hear(client, heard), prompt=True, counts=False)

        engine = SimulatedEngine(self._clock, self._processor, self._profile, self._engine, heard)
        client = self._clients[number] = _Client(engine)
        self.all_engines.append((number, engine))
        connection: Any = client
        self.replicas.attach(number, connection, engine.ready(), lambda _stats: None)

    def begin_again(self, number: int) -> None:
        self.begin(number)
        level(self._shared_state, number)

    def kill(self, number: int) -> None:
        """An engine ends, with all that it had."""
        client = self._clients[number]
        client.engine.kill()
        client.alive = False
        self.replicas.detach(number)
        lost, client.open = sorted(client.open), set()
        client.tell_open()
        for handle in lost:
            self._begin_again(self._sequences.pop(handle))

    def _begin_again(self, sequence: _Sequence) -> None:
        """As `Generation._restart`: once, and only what the client has had nothing of."""
        self._prefilled(sequence)
        sequence.ticket.end()
        if sequence.lives > RETRIES or sequence.said:
            self._fail(sequence, Outcome.BROKEN, "the engine has ended")
            return
        try:
            with self._shared_state.lock():
                sequence.ticket = self.replicas.route(sequence.look, self._limit(sequence))
        except EngineDead as error:
            self._fail(sequence, Outcome.OVERLOADED, str(error))
            return
        sequence.lives += 1
        sequence.started = False
        self.retried += 1
        self._submit(sequence)

    # -- requests

    def ask(
        self,
        record: Record,
        prompt: npt.NDArray[np.int32],
        output_tokens: int,
        on_end: Callable[[list[int]], None] = lambda _said: None,
    ) -> None:
        """A client sends this now. `on_end` gets the tokens of the answer, as far as they came."""
        record.start = self._clock.now
        record.prompt_tokens = len(prompt)
        seconds = self._profile.request_ms / 1e3
        self._processor.start(seconds, lambda: self._admit(record, prompt, output_tokens, on_end), prompt=True)

    def _admit(
        self, record: Record, prompt: npt.NDArray[np.int32], output_tokens: int, on_end: Callable[[list[int]], None]
    ) -> None:
        look = self.replicas.prompt_pages(prompt, "")  # type: ignore[arg-type]  # it makes an array of it
        try:
            with self._admission.admit(1, len(prompt)):
                ticket = self.replicas.route(look, output_tokens if self.options.known else None)
        except (ApiError, EngineDead) as error:
            record.outcome, record.error = Outcome.OVERLOADED, str(error) or "refused"
            on_end([])
            return
        self._submit(_Sequence(record, prompt, output_tokens, look, ticket, on_end, [], self._silent(output_tokens)))

    def _silent(self, output_tokens: int) -> int:
        seen = sorted(self._profile.silent)
        return min(seen[int(next(self._lucks) * len(seen))], output_tokens - 1) if seen else 0

    def _limit(self, sequence: _Sequence) -> int | None:
        return sequence.output_tokens if self.options.known else None

    def _submit(self, sequence: _Sequence) -> None:
        self._handles += 1
        handle = self._handles
        client = self._clients[sequence.ticket.replica.engine]
        self._sequences[handle] = sequence
        self._admission.prefill_tokens += len(sequence.prompt)
        client.open.add(handle)
        client.tell_open()
        client.engine.send(SimulatedRequest(handle, sequence.prompt, sequence.output_tokens, self.options.known))

    def _hear(self, client: _Client, heard: SimulatedOutputs) -> None:
        if not client.alive:
            return
        client.stats = heard.stats
        num_open = len(client.open)
        ends: list[_Sequence] = []
        for handle, token, finish in zip(heard.handles, heard.tokens, heard.finish, strict=True):
            sequence = self._sequences[handle]
            record = sequence.record
            if token >= 0:
                sequence.said.append(token)
                if len(sequence.said) > sequence.silent:
                    record.times.append(self._clock.now)
                    record.first = record.times[0]
            if handle in heard.started:
                record.cached_tokens = heard.started[handle]
                self._prefilled(sequence)
            if finish:
                record.end = self._clock.now
                client.open.discard(handle)
                del self._sequences[handle]
                self._prefilled(sequence)
                sequence.ticket.end()
                record.completion_tokens = len(sequence.said)
                refused = finish == Finish.REFUSED
                record.outcome = Outcome.REFUSED if refused else Outcome.OK
                ends.append(sequence)
        if len(client.open) != num_open:
            client.tell_open()
        if client.on_stats is not None:
            client.on_stats(heard.stats)
        for sequence in ends:
            sequence.on_end(sequence.said)

    def _prefilled(self, sequence: _Sequence) -> None:
        if not sequence.started:
            sequence.started = True
            sequence.ticket.started()
            self._admission.prefill_tokens -= len(sequence.prompt)

    def _fail(self, sequence: _Sequence, outcome: Outcome, why: str) -> None:
        sequence.record.outcome, sequence.record.error = outcome, why
        sequence.record.completion_tokens = len(sequence.said)
        sequence.on_end(sequence.said)
