"""`GrammarCompiler` checks clients' grammars in a process that may be killed, and shares it fairly between clients.

A grammar of sixty bytes can take minutes and gigabytes to compile, which its text does not show. So `grammar_child`
compiles each one first, within limits of CPU time and memory. The engine cannot stop a compilation; it only gets
grammars that passed, and compiles them again. Two lanes keep small grammars from waiting for large ones: the first
attempt is short, and a grammar that needs more gets one longer attempt, one at a time. In each lane, clients take
turns. A grammar is dropped once no request waits for it.
"""

from __future__ import annotations

import asyncio
import hashlib
import sys
from asyncio.subprocess import PIPE, Process
from collections import OrderedDict, deque
from collections.abc import Callable
from contextlib import suppress
from typing import NamedTuple

import msgspec

from weft.engine.errors import RequestError
from weft.server.errors import ApiError, unavailable
from weft.server.tools.grammar_child import Job, Verdict, Vocabulary

MEMORY_BYTES = 128 * 2**20  # Memory limit for compiling a grammar.
START_SECONDS = 60.0
"""Maximum seconds that a request waits for the process to start and read the tokenizer."""
WAIT_SECONDS = 10.0  # Maximum seconds that it then waits for its grammar.
MAX_WAITING = 64  # Waiting grammars per client.
KEPT_VERDICTS = 1024
RETRY_AFTER = 5

Observe = Callable[[str, float], None]
"""Called for each grammar with its outcome (`observe.metrics.GRAMMAR_OUTCOMES`) and CPU seconds."""


class Lane:
    """Compiles `slots` grammars at a time, each within `seconds` of CPU time. Clients take turns."""

    def __init__(self, slots: int, seconds: float, nice: int = 0) -> None:
        self.slots = slots
        self.seconds = seconds
        self.nice = nice
        self.running: set[_Trial] = set()
        self._queues: OrderedDict[str, deque[_Trial]] = OrderedDict()

    def push(self, trial: _Trial) -> None:
        self._queues.setdefault(trial.client, deque()).append(trial)

    def take(self) -> _Trial | None:
        """Return the next grammar if a slot is free."""
        if len(self.running) >= self.slots or not self._queues:
            return None
        client, queue = self._queues.popitem(last=False)
        trial = queue.popleft()
        if queue:
            self._queues[client] = queue  # after the other clients
        self.running.add(trial)
        return trial

    def drop(self, trial: _Trial) -> None:
        queue = self._queues.get(trial.client)
        if queue is not None and trial in queue:
            queue.remove(trial)
            if not queue:
                del self._queues[trial.client]

    def waiting(self, client: str) -> int:
        return len(self._queues.get(client, ()))


class Tried(NamedTuple):
    """The result for a grammar."""

    num_bytes: int
    refusal: str | None


class _Trial:
    """A grammar without a result, and its waiting requests."""

    def __init__(self, number: int, text: str, client: str) -> None:
        self.number = number
        self.text = text
        self.client = client
        self.done: asyncio.Future[Tried] = asyncio.get_running_loop().create_future()
        self.waiters = 0
        self.seconds = 0.0


class GrammarCompiler:
    """Runs on the event loop. Its process starts with the first grammar and restarts after it was killed."""

    def __init__(
        self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: tuple[int, ...], observe: Observe
    ) -> None:
        """`tokenizer`: returns the text of a tokenizer.json."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._observe = observe
        self.memory_bytes = MEMORY_BYTES
        self.quick, self.slow = Lane(2, 0.1), Lane(1, 2.0, nice=10)
        self._known: OrderedDict[bytes, Tried] = OrderedDict()  # Results by digest.
        self._long: OrderedDict[bytes, None] = OrderedDict()
        """Digests of grammars that exceeded the first attempt's time; they skip it."""
        self._trials: dict[str, _Trial] = {}
        self._numbers: dict[int, _Trial] = {}
        self._next = 1
        self._process: Process | None = None
        self._ready = False  # Whether the process accepts grammars.
        self._bounds: set[asyncio.Timeout] = set()  # Timeouts of waiting requests.
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    def known(self, text: str) -> Tried | None:
        if (tried := self._known.get(key := _digest(text))) is not None:
            self._known.move_to_end(key)
        return tried

    async def verify(self, text: str, client: str) -> int:
        """Return the compiled size of a grammar in bytes. Raises `RequestError` for an unusable grammar, `ApiError` 503
        if the compilers are busy. `client`: whose turn the compilation uses."""
        tried = self.known(text) or await self._try(text, client)
        if tried.refusal is not None:
            raise RequestError(tried.refusal)
        return tried.num_bytes

    async def _try(self, text: str, client: str) -> Tried:
        trial = self._trials.get(text)
        if trial is None:
            if self.quick.waiting(client) + self.slow.waiting(client) >= MAX_WAITING:
                raise self._busy()
            trial = self._trials[text] = _Trial(self._next, text, client)
            self._next += 1
            (self.slow if _digest(text) in self._long else self.quick).push(trial)
            self._start_next()
        trial.waiters += 1
        try:
            async with asyncio.timeout(self._patience()) as bound:
                self._bounds.add(bound)
                return await asyncio.shield(trial.done)
        except TimeoutError:
            raise self._busy() from None
        finally:
            self._bounds.discard(bound)
            trial.waiters -= 1
            if not trial.waiters and not trial.done.done():
                self._drop(trial)

    def _patience(self) -> float:
        return WAIT_SECONDS if self._ready else START_SECONDS

    def _set_ready(self, ready: bool) -> None:
        """Record whether the process accepts grammars, and restart the timeouts of waiting requests."""
        self._ready = ready
        for bound in self._bounds:
            if not bound.expired():
                bound.reschedule(asyncio.get_running_loop().time() + self._patience())

    def _busy(self) -> ApiError:
        self._observe("busy", 0.0)
        message = "The compilers of structured outputs and tool calls are busy."
        return unavailable(message, "grammar_compilers_busy", RETRY_AFTER)

    def _start_next(self) -> None:
        """Start grammars while slots are free."""
        for lane in (self.quick, self.slow):
            while (trial := lane.take()) is not None:
                self._numbers[trial.number] = trial
                self._send(self._job(trial))

    def _drop(self, trial: _Trial) -> None:
        """Drop a grammar that no request waits for."""
        del self._trials[trial.text]
        self.quick.drop(trial)
        self.slow.drop(trial)
        if trial.number in self._numbers:
            self._send(Job(trial.number))  # its slot becomes free when it has ended
        self._observe("abandoned", trial.seconds)
        trial.done.cancel()

    def _take(self, verdict: Verdict) -> None:
        trial = self._numbers.pop(verdict.id, None)
        if trial is None:
            return
        first = trial in self.quick.running
        self.quick.running.discard(trial)
        self.slow.running.discard(trial)
        trial.seconds += verdict.seconds
        if trial.done.done():
            pass  # dropped
        elif first and verdict.over == "time":
            self._long[_digest(trial.text)] = None
            if len(self._long) > KEPT_VERDICTS:
                self._long.popitem(last=False)
            self.slow.push(trial)
        else:
            refusal = verdict.error
            if verdict.over == "time":
                refusal = f"it takes more than {self.slow.seconds:g} s to compile; make it simpler"
            elif verdict.over is not None:
                refusal = f"it takes more than {self.memory_bytes >> 20} MiB to compile; make it simpler"
            self._observe("too_large" if verdict.over else "invalid" if refusal else "compiled", trial.seconds)
            self._settle(trial, Tried(verdict.num_bytes, refusal))
        self._start_next()

    def _settle(self, trial: _Trial, tried: Tried) -> None:
        self._known[_digest(trial.text)] = tried
        if len(self._known) > KEPT_VERDICTS:
            self._known.popitem(last=False)
        del self._trials[trial.text]
        trial.done.set_result(tried)

    # -- process

    def _send(self, job: Job) -> None:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._run())
        elif self._process is not None:
            self._write(job)

    def _write(self, *lines: msgspec.Struct) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(ConnectionError, RuntimeError):  # it has just ended; `_run` handles that
            self._process.stdin.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    async def _run(self) -> None:
        """Run a process from start to end."""
        command = (sys.executable, "-P", "-m", "weft.server.tools.grammar_child")
        process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE, start_new_session=True)
        assert process.stdout is not None
        unusable = None
        try:
            text = await asyncio.to_thread(self._tokenizer)
            self._process = process  # later jobs are written directly, after the vocabulary
            self._write(Vocabulary(text, self._vocab_size, self._eos_token_ids, self.memory_bytes))
            del text
            self._write(*(self._job(trial) for trial in self._numbers.values()))
            while line := await process.stdout.readline():
                verdict = msgspec.json.decode(line, type=Verdict)
                if verdict.id == 0:
                    unusable = verdict.error
                    if unusable is None:
                        self._set_ready(True)
                else:
                    self._take(verdict)
        finally:
            self._process = None
            self._set_ready(False)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if not self._closed:
            self._ended(unusable)

    def _job(self, trial: _Trial) -> Job:
        lane = self.quick if trial in self.quick.running else self.slow
        return Job(trial.number, trial.text, lane.seconds, lane.nice)

    def _ended(self, unusable: str | None) -> None:
        """Fail the grammars of a process that has ended."""
        self._reading = None
        for trial in list(self._numbers.values()):
            if unusable is None and not trial.done.done():
                del self._trials[trial.text]
                trial.done.set_exception(self._busy())
            self._take(Verdict(trial.number, 0.0, error=f"grammars need the model's tokenizer: {unusable}"))

    def close(self) -> None:
        self._closed = True
        if self._reading is not None:
            self._reading.cancel()


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
