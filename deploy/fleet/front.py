"""Defines `Front`, a simulated fleet's API process, with the real admission limits and router, retries and records."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
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
from weft.server.replicas.replicas import PromptPages, Replicas, Ticket, credit_new_engine
from weft.server.replicas.router import POLICY, Policy

ROW = 1  # Row of the shared state; row 0 belongs to the daemon.

OnEnd = Callable[[list[int]], None]


class _Client:
    """The part of an engine connection that `Replicas` and `Admission` use."""

    def __init__(self, engine: SimulatedEngine) -> None:
        self.engine = engine
        self.alive = True
        self.stats = EngineStats()
        self.open: set[int] = set()  # Handles of unanswered requests.
        self.on_stats: Callable[[EngineStats], None] | None = None
        self.on_open: Callable[[int], None] | None = None

    @property
    def num_open(self) -> int:
        return len(self.open)

    def report_open(self) -> None:
        if self.on_open is not None:
            self.on_open(len(self.open))


@dataclass(slots=True)
class _Sequence:
    record: Record
    prompt: npt.NDArray[np.int32]
    output_tokens: int
    pages: PromptPages
    ticket: Ticket
    on_end: OnEnd
    answer: list[int]
    silent: int  # Tokens before the first one with text.
    key: int
    attempts: int = 1
    started: bool = False


@dataclass(frozen=True, slots=True)
class Keys:
    """The API keys of requests. `turns`: the key of each request of a period, or of each user. `users`: 0 for an open
    loop."""

    turns: tuple[int, ...] = (0,)
    users: int = 0

    @classmethod
    def of(cls, shares: Sequence[int], users: int = 0) -> Keys:
        """Spread keys evenly by their shares."""
        total, given, turns = sum(shares), [0] * len(shares), []
        for n in range(1, total + 1):
            turns.append(max(range(len(shares)), key=lambda key: shares[key] * n - given[key] * total))
            given[turns[-1]] += 1
        return cls(tuple(turns), users)

    @property
    def count(self) -> int:
        return max(self.turns) + 1

    def key(self, index: int) -> int:
        """Return the key of request (or conversation) `index`."""
        return self.turns[(index % self.users if self.users else index) % len(self.turns)]


@dataclass(frozen=True, slots=True)
class FrontOptions:
    """`known`: requests specify their output length."""

    engines: int
    known: bool = True
    keys: Keys = Keys()
    max_queued_requests: int = 1024
    max_queued_tokens: int = 1_000_000
    policy: Policy = POLICY


class Front:
    """`all_engines`: all engines, including ended ones, with their numbers. `retried`: number of restarted requests."""

    def __init__(
        self, clock: Clock, processor: Processor, profile: IterationProfile, engine: EngineOptions,
        options: FrontOptions, seed: int = 0,
    ) -> None:  # fmt: skip
        self.retried = 0
        self._lucks = evenly(random.Random(seed).random())
        self._clock, self._processor, self._profile = clock, processor, profile
        self._engine, self._known, self._keys = engine, options.known, options.keys
        self._shared_state = SharedState(2, engines=options.engines)
        self.replicas = Replicas(self._shared_state, ROW, policy=options.policy)
        rejected = Counter(Store(self._shared_state, ROW), "rejected", "", code=("queue_full", "queue_tokens_full"))
        self._admission = Admission(
            self.replicas, self._shared_state, ROW, rejected,
            max_requests=options.max_queued_requests, max_tokens=options.max_queued_tokens,
        )  # fmt: skip
        self.all_engines: list[tuple[int, SimulatedEngine]] = []
        self._clients: dict[int, _Client] = {}
        self._sequences: dict[int, _Sequence] = {}
        self._handles = count(1)
        for number in range(options.engines):
            self.begin(number)

    # -- engine starts and failures

    def begin(self, number: int) -> None:
        """Attach a new engine with an empty cache."""

        def on_outputs(outputs: SimulatedOutputs) -> None:
            # The engine already computes the next iteration.
            seconds = self._profile.answer_ms / 1e3
            self._processor.start(seconds, lambda: self._receive(client, outputs), prompt=True, counts=False)

        engine = SimulatedEngine(self._clock, self._processor, self._profile, self._engine, on_outputs)
        client = self._clients[number] = _Client(engine)
        self.all_engines.append((number, engine))
        connection: Any = client
        self.replicas.attach(number, connection, engine.ready(), lambda _stats: None)

    def restart(self, number: int) -> None:
        self.begin(number)
        credit_new_engine(self._shared_state, number)

    def kill(self, number: int) -> None:
        """End an engine and retry its requests."""
        client = self._clients[number]
        client.engine.kill()
        client.alive = False
        self.replicas.detach(number)
        lost, client.open = sorted(client.open), set()
        client.report_open()
        for handle in lost:
            self._restart_sequence(self._sequences.pop(handle))

    def _restart_sequence(self, sequence: _Sequence) -> None:
        """Restart like `Generation._restart`: up to `RETRIES` times, and only if the client has received nothing."""
        self._prefilled(sequence)
        sequence.ticket.end()
        if sequence.attempts > RETRIES or sequence.answer:
            self._fail(sequence, Outcome.BROKEN, "the engine ended")
            return
        try:
            with self._shared_state.lock():
                sequence.ticket = self._route(sequence.pages, sequence.output_tokens)
        except EngineDead as error:
            self._fail(sequence, Outcome.OVERLOADED, str(error))
            return
        sequence.attempts += 1
        sequence.started = False
        self.retried += 1
        self._submit(sequence)

    # -- requests

    def send(self, record: Record, prompt: npt.NDArray[np.int32], output_tokens: int, on_end: OnEnd) -> None:
        """Send a client's request now. `on_end` gets the tokens received by the end."""
        record.start = self._clock.now
        record.prompt_tokens = len(prompt)
        seconds = self._profile.request_ms / 1e3
        self._processor.start(seconds, lambda: self._admit(record, prompt, output_tokens, on_end), prompt=True)

    def _admit(self, record: Record, prompt: npt.NDArray[np.int32], output_tokens: int, on_end: OnEnd) -> None:
        key = self._keys.key(record.index)
        pages = self.replicas.prompt_pages(prompt, self._salt(key))  # type: ignore[arg-type]  # it accepts any array
        try:
            with self._admission.admit(1, len(prompt)):
                ticket = self._route(pages, output_tokens)
        except (ApiError, EngineDead) as error:
            record.outcome, record.error = Outcome.OVERLOADED, str(error) or "rejected"
            on_end([])
            return
        seen = sorted(self._profile.silent)
        silent = min(seen[int(next(self._lucks) * len(seen))], output_tokens - 1) if seen else 0
        self._submit(_Sequence(record, prompt, output_tokens, pages, ticket, on_end, [], silent, key))

    def _salt(self, key: int) -> str:
        """Several keys share no prefixes, as by default."""
        return f"{key}:" if self._keys.count > 1 else ""

    def _route(self, pages: PromptPages, output_tokens: int) -> Ticket:
        return self.replicas.route(pages, output_tokens if self._known else None)

    def _submit(self, sequence: _Sequence) -> None:
        handle = next(self._handles)
        client = self._clients[sequence.ticket.replica.engine]
        self._sequences[handle] = sequence
        self._admission.prefill_tokens += len(sequence.prompt)
        client.open.add(handle)
        client.report_open()
        key, salt = sequence.key, self._salt(sequence.key)
        client.engine.send(SimulatedRequest(handle, sequence.prompt, sequence.output_tokens, self._known, key, salt))

    def _receive(self, client: _Client, outputs: SimulatedOutputs) -> None:
        if not client.alive:
            return
        client.stats = outputs.stats
        num_open = len(client.open)
        ends: list[_Sequence] = []
        for handle, token, finish in zip(outputs.handles, outputs.tokens, outputs.finish, strict=True):
            sequence = self._sequences[handle]
            record = sequence.record
            if token >= 0:
                sequence.answer.append(token)
                if len(sequence.answer) > sequence.silent:
                    record.times.append(self._clock.now)
                    record.first = record.times[0]
            if handle in outputs.started:
                record.cached_tokens = outputs.started[handle]
                self._prefilled(sequence)
            if finish:
                record.end = self._clock.now
                client.open.discard(handle)
                del self._sequences[handle]
                self._prefilled(sequence)
                sequence.ticket.end()
                record.completion_tokens = len(sequence.answer)
                record.outcome = Outcome.REFUSED if finish == Finish.REFUSED else Outcome.OK
                ends.append(sequence)
        if len(client.open) != num_open:
            client.report_open()
        if client.on_stats is not None:
            client.on_stats(outputs.stats)
        for sequence in ends:
            sequence.on_end(sequence.answer)

    def _prefilled(self, sequence: _Sequence) -> None:
        if not sequence.started:
            sequence.started = True
            sequence.ticket.started()
            self._admission.prefill_tokens -= len(sequence.prompt)

    def _fail(self, sequence: _Sequence, outcome: Outcome, why: str) -> None:
        sequence.record.outcome, sequence.record.error = outcome, why
        sequence.record.completion_tokens = len(sequence.answer)
        sequence.on_end(sequence.answer)
