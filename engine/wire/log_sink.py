"""`LogSink`: stderr and stdout that never block their writer, with a bounded queue and a writing thread.

A serving process must not block because nothing reads its log (a stopped `tee`, a full disk). Lines that do not fit
the queue are dropped and counted, and the count is logged after the next line that is written.
"""

from __future__ import annotations

import atexit
import io
import os
import select
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import TextIO

MAX_LINES = 10_000
MAX_BYTES = 2 * 2**20  # Bytes of queued lines. A single longer line is still queued on its own.
CHUNK = 64 * 1024  # maximum bytes per write: the size of a pipe
LAST_LINES_SECONDS = 1.0  # seconds to write the remaining lines when the process ends


def dropped_message(dropped: int) -> str:
    return f"weft: {dropped} log lines dropped: stderr was not read in time"


class LogSink(io.TextIOBase):
    """A text stream onto a file descriptor. Writing appends to a queue, from any thread or signal handler.

    Attributes:
        dropped: total of dropped lines.
        on_drop: called for each dropped line, under the lock.
        dropped_message: formats the line about a number of dropped lines."""

    encoding = "utf-8"
    errors = "backslashreplace"

    def __init__(self, fd: int, max_lines: int = MAX_LINES, max_bytes: int = MAX_BYTES) -> None:
        super().__init__()
        self.dropped = 0
        self.on_drop: Callable[[], None] | None = None
        self.dropped_message: Callable[[int], str] = dropped_message
        self._fd, self._max_lines, self._max_bytes = fd, max_lines, max_bytes
        self._changed = threading.Condition()  # an RLock: a signal handler may log while its thread is in here
        self._lines: deque[bytes] = deque()
        self._bytes = 0  # Bytes of `_lines`
        self._partial = ""  # text without a line end yet
        self._writing = False
        self._unreported = 0  # dropped lines that have not been reported
        self._thread: threading.Thread | None = None

    # -- the stream

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return self._fd

    def isatty(self) -> bool:
        try:
            return os.isatty(self._fd)
        except OSError:
            return False

    def write(self, text: str) -> int:
        with self._changed:
            *lines, self._partial = (self._partial + text).split("\n")
            for line in lines:
                self._put(line + "\n")
            if len(self._partial) > CHUNK:
                self.flush()
        return len(text)

    def flush(self) -> None:
        """Queue text without a line end too. Does not wait; `drain` does."""
        with self._changed:
            if self._partial:
                text, self._partial = self._partial, ""
                self._put(text)

    def drain(self, seconds: float = LAST_LINES_SECONDS) -> bool:
        """Wait up to `seconds` until everything has been written, and return whether it has."""
        self.flush()
        until = time.monotonic() + seconds
        with self._changed:
            while self._lines or self._writing:
                if not self._changed.wait(max(0.0, until - time.monotonic())) and time.monotonic() >= until:
                    return False
        return True

    # -- the queue

    def _put(self, line: str) -> None:
        data = line.encode(self.encoding, self.errors)
        if self._lines and (len(self._lines) >= self._max_lines or self._bytes + len(data) > self._max_bytes):
            self._drop(1)
            return
        self._lines.append(data)
        self._bytes += len(data)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=f"weft-log-{self._fd}", daemon=True)
            self._thread.start()
        self._changed.notify_all()

    def _drop(self, count: int) -> None:
        self.dropped += count
        self._unreported += count
        if self.on_drop is not None:
            for _ in range(count):
                self.on_drop()

    def _run(self) -> None:
        while True:
            lines = self._take()
            try:
                self._write_all(b"".join(lines))
            except OSError:  # a full disk, or a reader that has gone; later lines may be written
                with self._changed:
                    self._drop(len(lines))
            else:
                self._report_dropped()
            with self._changed:
                self._writing = False
                self._changed.notify_all()

    def _take(self) -> list[bytes]:
        """Return the next lines, up to a chunk."""
        with self._changed:
            while not self._lines:
                self._changed.wait()
            lines = [self._lines.popleft()]
            size = len(lines[0])
            while self._lines and size + len(self._lines[0]) <= CHUNK:
                lines.append(self._lines.popleft())
                size += len(lines[-1])
            self._bytes -= size
            self._writing = True
        return lines

    def _report_dropped(self) -> None:
        with self._changed:
            count, self._unreported = self._unreported, 0
        if count:
            try:
                self._write_all(f"{self.dropped_message(count)}\n".encode(self.encoding, self.errors))
            except OSError:
                with self._changed:
                    self._unreported += count

    def _write_all(self, data: bytes) -> None:
        """Write all data, blocking as long as the reader does. Raises `OSError`."""
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._fd, view[:CHUNK]) :]
            except BlockingIOError:  # the terminal was made non-blocking
                select.select([], [self._fd], [], 1.0)


def install() -> None:
    """Replace this process's stdout and stderr, unless they were replaced already."""
    open_standard_files()
    if _is_descriptor(sys.stdout, 1):
        sys.stdout = LogSink(1)
    if _is_descriptor(sys.stderr, 2):
        sys.stderr = LogSink(2)
    atexit.unregister(flush_lines)
    atexit.register(flush_lines)


def _is_descriptor(stream: TextIO | None, fd: int) -> bool:
    """Return whether `stream` is Python's own stream of a descriptor, or None because it was closed."""
    if stream is None:
        return True
    try:
        stream.flush()
        return stream.fileno() == fd and not isinstance(stream, LogSink)
    except (OSError, ValueError):
        return False


def dropped_lines() -> int:
    return sys.stderr.dropped if isinstance(sys.stderr, LogSink) else 0


def flush_lines() -> None:
    """Write the last lines before the process ends, for up to `LAST_LINES_SECONDS`."""
    until = time.monotonic() + LAST_LINES_SECONDS
    for stream in (sys.stderr, sys.stdout):
        if isinstance(stream, LogSink):
            stream.drain(max(0.0, until - time.monotonic()))


def open_standard_files() -> None:
    """Open stdin, stdout and stderr if they were closed. Otherwise a socket would get their number, and library output
    would go to a client."""
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(fd, True)
    os.close(fd)
