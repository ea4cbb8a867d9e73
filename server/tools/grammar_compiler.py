"""`GrammarCompiler`: lets the grammars that clients send be tried in a process that may be killed, and takes turns.

A grammar of sixty bytes can take minutes and gigabytes to compile, which no look at its text tells. So each is
compiled here first, by `grammar_child`, within a bound of CPU time and one of memory; the engine, which cannot stop
what it began, only gets those that passed, and compiles them again. There are two lanes, so that what is small never
waits behind what is not: everybody's first try is short, and who needs more has one later, one at a time. In each lane
clients take turns, and whoever is no longer waited for is let go of.
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

MEMORY_BYTES = 128 * 2**20
"""that a grammar may take while it is compiled"""

START_SECONDS = 60.0
"""that a request waits for the process at most, which reads the tokenizer first, also when it is started again"""

WAIT_SECONDS = 10.0
"""that it waits for its grammar then at most"""

MAX_WAITING = 64
"""grammars of one client that wait"""

KEPT_VERDICTS = 1024
RETRY_AFTER = 5

Observe = Callable[[str, float], None]
"""told of each grammar: what came of it (`observe.metrics.GRAMMAR_OUTCOMES`), and the CPU time it took"""


class Lane:
    """`seats` grammars at a time, each for `seconds` of CPU time; clients take turns."""

    def __init__(self, seats: int, seconds: float, nice: int = 0) -> None:
        self.seats = seats
        self.seconds = seconds
        self.nice = nice
        self.running: set[_Trial] = set()
        self._queues: OrderedDict[str, deque[_Trial]] = OrderedDict()

    def push(self, trial: _Trial) -> None:
        self._queues.setdefault(trial.client, deque()).append(trial)

    def take(self) -> _Trial | None:
        """The next one, if there is a seat for it."""
        if len(self.running) >= self.seats or not self._queues:
            return None
        client, queue = self._queues.popitem(last=False)
        trial = queue.popleft()
        if queue:
            self._queues[client] = queue  # behind the others
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
    """What is known of a grammar."""

    num_bytes: int
    refusal: str | None


class _Trial:
    """A grammar that is not known yet, and who waits for it."""

    def __init__(self, number: int, text: str, client: str) -> None:
        self.number = number
        self.text = text
        self.client = client
        self.done: asyncio.Future[Tried] = asyncio.get_running_loop().create_future()
        self.waiters = 0
        self.seconds = 0.0


class GrammarCompiler:
    """Lives on the event loop. Its process starts with the first grammar, and again when it was killed."""

    def __init__(
        self, tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: tuple[int, ...], observe: Observe
    ) -> None:
        """`tokenizer`: makes the text of a tokenizer.json."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = list(eos_token_ids)
        self._observe = observe
        self.memory_bytes = MEMORY_BYTES
        self.quick, self.slow = Lane(2, 0.1), Lane(1, 2.0, nice=10)
        self._known: OrderedDict[bytes, Tried] = OrderedDict()
        """by digest"""
        self._long: OrderedDict[bytes, None] = OrderedDict()
        """those that the first try was too short for, by digest: it is not tried again"""
        self._trials: dict[str, _Trial] = {}
        self._numbers: dict[int, _Trial] = {}
        self._next = 1
        self._process: Process | None = None
        self._ready = False
        """the process tries grammars"""
        self._bounds: set[asyncio.Timeout] = set()
        """of those who wait"""
        self._reading: asyncio.Task[None] | None = None
        self._closed = False

    def known(self, text: str) -> Tried | None:
        if (tried := self._known.get(key := _digest(text))) is not None:
            self._known.move_to_end(key)
        return tried

    async def prove(self, text: str, client: str) -> int:
        """The bytes that a grammar takes once compiled. Raises `RequestError` for one that cannot be used, `ApiError`
        503 when there is no time for it now. `client`: whose turn it is."""
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
            self._go_on()
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

    def _turn(self, ready: bool) -> None:
        """The process tries grammars from now on, or does no longer: the time of all who wait begins anew."""
        self._ready = ready
        for bound in self._bounds:
            if not bound.expired():
                bound.reschedule(asyncio.get_running_loop().time() + self._patience())

    def _busy(self) -> ApiError:
        self._observe("busy", 0.0)
        message = "The compilers of structured outputs and tool calls are busy."
        return unavailable(message, "grammar_compilers_busy", RETRY_AFTER)

    def _go_on(self) -> None:
        """Begin what there is a seat for."""
        for lane in (self.quick, self.slow):
            while (trial := lane.take()) is not None:
                self._numbers[trial.number] = trial
                self._send(self._job(trial))

    def _drop(self, trial: _Trial) -> None:
        """Nobody waits for it any more."""
        del self._trials[trial.text]
        self.quick.drop(trial)
        self.slow.drop(trial)
        if trial.number in self._numbers:
            self._send(Job(trial.number))  # its seat is free once it has ended
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
        self._go_on()

    def _settle(self, trial: _Trial, tried: Tried) -> None:
        self._known[_digest(trial.text)] = tried
        if len(self._known) > KEPT_VERDICTS:
            self._known.popitem(last=False)
        del self._trials[trial.text]
        trial.done.set_result(tried)

    # -- the process

    def _send(self, job: Job) -> None:
        if self._reading is None or self._reading.done():
            self._reading = asyncio.create_task(self._run())
        elif self._process is not None:
            self._write(job)

    def _write(self, *lines: msgspec.Struct) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        with suppress(ConnectionError, RuntimeError):  # it has just ended, which `_run` sees
            self._process.stdin.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))

    async def _run(self) -> None:
        """From the start of a process to its end."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-P",
            "-m",
            "weft.server.tools.grammar_child",
            stdin=PIPE,
            stdout=PIPE,
            start_new_session=True,
        )
        assert process.stdout is not None
        unusable = None
        try:
            text = await asyncio.to_thread(self._tokenizer)
            self._process = process  # from now on jobs are written as they come: behind the vocabulary
            self._write(Vocabulary(text, self._vocab_size, self._eos_token_ids, self.memory_bytes))
            del text
            self._write(*(self._job(trial) for trial in self._numbers.values()))
            while line := await process.stdout.readline():
                verdict = msgspec.json.decode(line, type=Verdict)
                if verdict.id == 0:
                    unusable = verdict.error
                    if unusable is None:
                        self._turn(True)
                else:
                    self._take(verdict)
        finally:
            self._process = None
            self._turn(False)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        if not self._closed:
            self._ended(unusable)

    def _job(self, trial: _Trial) -> Job:
        lane = self.quick if trial in self.quick.running else self.slow
        return Job(trial.number, trial.text, lane.seconds, lane.nice)

    def _ended(self, unusable: str | None) -> None:
        """The process has ended: so have all that it was at."""
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
