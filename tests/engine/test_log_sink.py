"""Logging never blocks: lines without a reader are dropped, counted, and reported when the reader is back."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from weft.engine.wire.log_sink import LogSink, dropped_message


class Pipe:
    def __init__(self) -> None:
        self.reader, self.writer = os.pipe()

    def fill(self) -> None:
        """Fill the pipe with its capacity, which the reader has to read first."""
        size = fcntl.fcntl(self.writer, fcntl.F_GETPIPE_SZ)
        assert os.write(self.writer, b"." * size) == size

    def read(self, end: bytes) -> bytes:
        """Read everything up to a read that contains `end`."""
        data = b""
        while end not in data:
            data += os.read(self.reader, 2**20)
        return data


@pytest.fixture
def pipe() -> Iterator[Pipe]:
    pipe = Pipe()
    yield pipe
    os.close(pipe.reader)


def test_lines_arrive_whole_and_in_order(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer)
    print("one", 2, file=sink)
    sink.write("thr")
    sink.write("ee\nfour")
    sink.flush()
    assert sink.drain(240)
    assert os.read(pipe.reader, 1000) == b"one 2\nthree\nfour"
    assert sink.dropped == 0


def test_a_stalled_reader_loses_lines_and_costs_no_time(pipe: Pipe) -> None:
    counted = []
    sink = LogSink(pipe.writer, max_lines=50)
    sink.on_drop = lambda: counted.append(1)
    line = "x" * 1023 + "\n"
    pipe.fill()
    for _ in range(1000):  # a writer that waited would block here forever
        sink.write(line)
    assert not sink.drain(0.05)
    assert sink.dropped == len(counted) >= 1000 - 50 - 64
    dropped = sink.dropped
    text = pipe.read(b"dropped").decode()
    assert dropped_message(dropped) in text
    assert sink.drain(240)  # the queued lines fit the pipe, and the next line has space after them
    sink.write("after\n")
    text += pipe.read(b"after").decode()
    assert text.count("x" * 1023) + dropped == 1000
    assert text.count("dropped") == 1
    assert sink.dropped == dropped


def test_bytes_are_bounded_too_and_a_long_line_waits_alone(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer, max_bytes=1000)
    pipe.fill()
    sink.write("a\n")
    while sink._lines:  # until the thread blocks
        time.sleep(0.001)
    sink.write("b" * 2000 + "\n")
    sink.write("c\n")
    assert sink.dropped == 1
    threading.Thread(target=pipe.read, args=(b"dropped",), daemon=True).start()
    assert sink.drain(240)


def test_a_full_disk_loses_only_lines() -> None:
    fd = os.open("/dev/full", os.O_WRONLY)
    sink = LogSink(fd)
    sink.write("lost\n")
    assert sink.drain(240)
    assert sink.dropped == 1
    reader, writer = os.pipe()
    os.dup2(writer, fd)
    sink.write("kept\n")
    assert sink.drain(240)
    assert os.read(reader, 1000).decode() == f"kept\n{dropped_message(1)}\n"


def test_a_reader_that_exited_is_not_an_error(pipe: Pipe) -> None:
    os.close(pipe.reader)
    sink = LogSink(pipe.writer)
    sink.write("to nobody\n")
    assert sink.drain(240)
    assert sink.dropped == 1
    pipe.reader = os.open(os.devnull, os.O_RDONLY)


def test_logging_inside_its_own_lock_is_safe(pipe: Pipe) -> None:
    sink = LogSink(pipe.writer, max_lines=1)
    sink.on_drop = lambda: None
    with sink._changed:  # as in a signal handler
        sink.write("from a handler\n")
    assert sink.drain(240)


INSTALLED = """
import os, sys
from weft.engine.wire.log_sink import install, flush_lines
install()
for i in range(3):
    assert os.fstat(i)
{}
print("out"); print("err", file=sys.stderr)
flush_lines()
"""


def run(code: str, **streams: int) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run([sys.executable, "-P", "-c", INSTALLED.format(code)], timeout=240, check=False, **streams)


def test_the_last_lines_of_a_process_are_written() -> None:
    done = run("", stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert (done.returncode, done.stdout, done.stderr) == (0, b"out\n", b"err\n")


def test_a_traceback_is_written_through_it() -> None:
    done = run("1 / 0", stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert b"ZeroDivisionError" in done.stderr


def test_closed_streams_are_reopened_to_devnull() -> None:
    # Otherwise a socket would get their numbers.
    code = INSTALLED.format("assert os.open(os.devnull, os.O_RDONLY) > 2")
    done = subprocess.run(
        ["sh", "-c", 'exec "$0" -P -c "$1" <&- >&- 2>&-', sys.executable, code], timeout=240, check=False
    )
    assert done.returncode == 0


def test_a_stalled_reader_does_not_delay_the_exit() -> None:
    reader, writer = os.pipe()
    try:
        done = run('sys.stderr.write("x" * 10**6 + "\\n")', stderr=writer)
    finally:
        os.close(reader)
        os.close(writer)
    assert done.returncode == 0
