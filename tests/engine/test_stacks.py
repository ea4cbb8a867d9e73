"""Stacks of a process: a process that is queried continues; one about to be killed can be made to print them."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from weft.engine.wire.child import stacks_signal_blocked
from weft.engine.wire.stacks import STACKS_BYTES, Stacks, threads

BEGIN = """
import ctypes, sys, threading, time
# as a library that is imported begins it, before anything of ours
threading.Thread(target=lambda: [time.sleep(0.01) for _ in iter(int, 1)], name="library", daemon=True).start()
from weft.engine.wire.child import settle
from weft.engine.wire.stacks import write_stacks_to
threading.Thread(target=lambda: [time.sleep(0.01) for _ in iter(int, 1)], name="other", daemon=True).start()
settle(None)
write_stacks_to(int(sys.argv[1]))
print("ready", flush=True)
"""
WAITS = "sys.stdin.readline()"
DEEP = """
def deep(n):
    return deep(n - 1) if n else sum(i for i in range(3))
while True:
    deep(50)
"""
KEEPS_THE_LOCK = """
sleep = ctypes.PyDLL(None).sleep
while True:  # a signal ends the sleep
    sleep(100_000)
"""
ENDLESS_NAMES = f"""
{"a" * 5000} = lambda n: {"a" * 5000}(n - 1) if n else (print("there", flush=True), sys.stdin.readline())
sys.setrecursionlimit(5000)
threading.current_thread().name = "b" * {STACKS_BYTES + 10}
{"a" * 5000}(300)
"""


@contextmanager
def child(stacks: Stacks, code: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-P", "-c", BEGIN + code, str(stacks.fd)]
    with stacks_signal_blocked():
        started = subprocess.Popen(command, stdin=-1, stdout=-1, text=True, pass_fds=(stacks.fd,))
    with started as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        try:
            yield process
        finally:
            process.kill()


def sleeps(thread: str) -> bool:
    """Checks its line of `threads`; not for a lock, which the kernel reports only as a futex."""
    _, _, state, *where = thread.split()
    return state == "S" and not any("futex" in place for place in where)


@pytest.mark.parametrize("last", [False, True])
async def test_a_waiting_process_reports_its_threads(last: bool) -> None:
    stacks = Stacks()
    with child(stacks, WAITS) as process:
        reported = await (stacks.final_stacks(process.pid, wake=False) if last else stacks.capture(process.pid))
        assert "thread MainThread:" in reported
        assert "thread other:" in reported
        assert f"  {process.pid} python" in reported
        assert process.poll() is None


async def test_a_busy_process_survives_any_number_of_queries() -> None:
    """A signal handler that read the frames of running threads once killed it after some."""
    stacks = Stacks()
    with child(stacks, DEEP) as process:
        for _ in range(100):
            os.kill(process.pid, signal.SIGUSR2)
        for _ in range(5):
            assert "thread MainThread:" in await stacks.capture(process.pid)
        assert process.poll() is None


async def test_a_process_that_holds_pythons_lock_reports_only_its_last_stack() -> None:
    stacks = Stacks()
    with child(stacks, KEEPS_THE_LOCK) as process:
        while not sleeps(threads(process.pid).splitlines()[0]):
            await asyncio.sleep(0.01)  # before that it does not hold the lock
        reported = await stacks.capture(process.pid)
        assert "no Python stacks: the process does not answer" in reported
        assert threads(process.pid).split()[0] in reported
        assert 'File "<string>", line' in await stacks.final_stacks(process.pid, wake=False)


async def test_a_stopped_process_reports_after_it_continues() -> None:
    stacks = Stacks()
    with child(stacks, WAITS) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        assert "the process is stopped" in await stacks.capture(process.pid)
        assert "the process is stopped" in await stacks.final_stacks(process.pid, wake=False)
        assert "thread MainThread:" in await stacks.final_stacks(process.pid, wake=True)


async def test_no_more_is_written_than_is_read() -> None:
    stacks = Stacks()
    with child(stacks, ENDLESS_NAMES) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "there\n"
        reported = await stacks.capture(process.pid)
        assert len(reported.encode()) < STACKS_BYTES + 2000
        assert os.fstat(stacks.fd).st_size == STACKS_BYTES


async def test_a_process_without_a_handler_is_not_queried() -> None:
    stacks = Stacks()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=-1) as process:
        assert "no Python stacks" in await stacks.final_stacks(process.pid, wake=True)
        assert process.poll() is None
        process.kill()
    assert "no Python stacks" in await stacks.capture(process.pid)
