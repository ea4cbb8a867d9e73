"""A process that compiles clients' grammars, each in a child process that may be killed.

Start it with `python -m weft.server.tools.grammar_child`. It reads lines of JSON from stdin: the vocabulary, then one
`Job` each; it writes a `Verdict` per grammar to stdout. It has one thread, so that it can fork: a child starts with the
vocabulary loaded and frees its memory when it ends.
"""

from __future__ import annotations

import os
import resource
import selectors
import signal
import sys
import threading
import time
from contextlib import suppress
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLTokenizer

from weft.engine.wire.child import end_with_parent
from weft.engine.wire.grammar_text import LIMITS, STACK_BYTES

MAX_REASON = 300  # Characters of an error message.

_PAGE = resource.getpagesize()


class Vocabulary(msgspec.Struct):
    """The first line on stdin."""

    tokenizer: str  # The text of a tokenizer.json.
    vocab_size: int
    eos_token_ids: list[int]
    memory_bytes: int  # Memory limit for compiling a grammar.


class Job(msgspec.Struct):
    """Compile a grammar within `seconds` of CPU time. Without a text: cancel the job with this id."""

    id: int
    text: str | None = None
    seconds: float = 0.0
    nice: int = 0  # Niceness of the child process.


class Verdict(msgspec.Struct):
    id: int  # The job's id; 0 for the initial verdict on whether grammars work at all.
    seconds: float  # CPU time used.
    num_bytes: int = 0  # Size of the compiled grammar.
    error: str | None = None  # Why the grammar is unusable for this model.
    over: str | None = None  # The exceeded limit: time or memory.


class _Running(NamedTuple):
    job: int
    pid: int
    result: int  # File descriptor of the result.


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    end_with_parent()
    lines = _Lines(0)
    vocabulary = msgspec.json.decode(lines.wait(), type=Vocabulary)
    try:
        eos = vocabulary.eos_token_ids or None
        tokenizer = LLTokenizer(vocabulary.tokenizer, n_vocab=vocabulary.vocab_size, eos_token=eos)
        _mask(LLMatcher(tokenizer, LLMatcher.grammar_from_regex("a")), vocabulary.vocab_size)  # warm up
    except Exception as error:  # the library has no exception type
        _write(Verdict(0, time.process_time(), error=" ".join(str(error).split())[:MAX_REASON]))
        return
    _write(Verdict(0, time.process_time()))
    decoder = msgspec.json.Decoder(Job)
    selector = selectors.DefaultSelector()
    selector.register(0, selectors.EVENT_READ)
    running: dict[int, _Running] = {}
    while not lines.ended:
        for line in lines.take():
            job = decoder.decode(line)
            if job.text is not None:
                child = running[job.id] = _fork(job, job.text, vocabulary, tokenizer)
                selector.register(child.result, selectors.EVENT_READ)
            elif job.id in running:
                with suppress(ProcessLookupError):
                    os.kill(running[job.id].pid, signal.SIGKILL)
        for key, _ in selector.select():
            if key.fd == 0:
                lines.read()
                continue
            child = next(child for child in running.values() if child.result == key.fd)
            selector.unregister(child.result)
            del running[child.job]
            _write(_verdict(child))


class _Lines:
    """Reads lines from a file descriptor."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._rest = b""
        self.ended = False

    def read(self) -> None:
        data = os.read(self._fd, 2**20)
        self.ended = not data
        self._rest += data

    def take(self) -> list[bytes]:
        """Return the complete lines."""
        *lines, self._rest = self._rest.split(b"\n")
        return lines

    def wait(self) -> bytes:
        """Wait for the first line, which is long."""
        parts: list[bytes] = []
        while b"\n" not in (data := os.read(self._fd, 2**20)):
            if not data:
                sys.exit(0)
            parts.append(data)
        line, _, self._rest = data.partition(b"\n")
        return b"".join([*parts, line])


def _write(verdict: Verdict) -> None:
    data = msgspec.json.encode(verdict) + b"\n"
    with suppress(BrokenPipeError):
        while data:
            data = data[os.write(1, data) :]


def _fork(job: Job, text: str, vocabulary: Vocabulary, tokenizer: LLTokenizer) -> _Running:
    result, writer = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(writer)
        return _Running(job.id, pid, result)
    try:
        end_with_parent(parent)  # an orphan would hold the parent's pipes open
        os.nice(job.nice)
        with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")  # the OOM killer should choose this process first
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide the library's abort message when it runs out of memory
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        limit = _memory()[0] + STACK_BYTES + vocabulary.memory_bytes
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        signal.setitimer(signal.ITIMER_PROF, job.seconds)  # its signal ends the process
        threading.stack_size(STACK_BYTES)
        thread = threading.Thread(target=_try, args=(job.id, text, vocabulary.vocab_size, tokenizer, writer))
        thread.start()
        thread.join()
    finally:
        os._exit(0)


def _try(job: int, text: str, vocab_size: int, tokenizer: LLTokenizer, writer: int) -> None:
    _, before = _memory()
    matcher = LLMatcher(tokenizer, text, log_level=0, limits=LIMITS)
    empty = not matcher.is_error() and not _mask(matcher, vocab_size).any()
    error = " ".join(matcher.get_error().split())[:MAX_REASON] if matcher.is_error() else None
    if error is None and empty:
        error = "it allows no token of this model"
    num_bytes = max(0, _memory()[1] - before)
    os.write(writer, msgspec.json.encode(Verdict(job, time.process_time(), num_bytes, error)))


def _mask(matcher: LLMatcher, vocab_size: int) -> npt.NDArray[np.int32]:
    mask = np.zeros(-(-vocab_size // 32), np.int32)
    matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    return mask


def _verdict(child: _Running) -> Verdict:
    """Return the verdict of a child that has ended."""
    data = os.read(child.result, 2**16)
    os.close(child.result)
    _, status, usage = os.wait4(child.pid, 0)
    if data:
        return msgspec.json.decode(data, type=Verdict)
    seconds = usage.ru_utime + usage.ru_stime
    over = "time" if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGPROF else "memory"
    return Verdict(child.job, seconds, over=over)


def _memory() -> tuple[int, int]:
    """Return bytes of virtual and of resident anonymous memory. File pages are shared and do not count as resident."""
    with open("/proc/self/statm", "rb") as file:
        virtual, resident, shared, *_ = map(int, file.read().split())
    return virtual * _PAGE, (resident - shared) * _PAGE


if __name__ == "__main__":
    main()
