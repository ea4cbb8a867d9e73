"""`Stacks`: what the threads of a child process are doing, told to the daemon in memory that both have."""

from __future__ import annotations

import asyncio
import faulthandler
import os
import signal
import sys
import threading
from contextlib import suppress
from pathlib import Path
from types import FrameType

from weft.engine.wire.child import STACKS_SIGNAL

LAST_WORDS = signal.SIGUSR1
"""has the stacks written by its handler, whatever runs: frames that change meanwhile may end the process"""
ASK_SECONDS = 10.0
"""that a process gets to write its stacks"""
DOOMED_SECONDS = 2.0
"""that one gets which is to be killed"""
ASK_POLL = 0.05
STACKS_BYTES = 256 * 1024
"""of stacks at most that are written by who is asked, and read of all"""
END = b"\0"
"""of what a process writes when it is asked; behind it may be the rest of something longer"""


def own_stacks() -> str:
    """Of all threads of this process, the innermost call last. No source is read: the disk may be what hangs."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return "\n".join(
        "\n".join((f"thread {names.get(ident, ident)}:", *_calls(frame)))
        for ident, frame in sys._current_frames().items()
    )


def _calls(frame: FrameType | None) -> list[str]:
    calls = []
    while frame is not None:
        calls.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno}, in {frame.f_code.co_name}')
        frame = frame.f_back
    return calls[::-1]


def write_stacks_to(stacks_fd: int) -> None:
    """In a child that was started `stacks_signal_blocked`: it writes its stacks there when asked.

    A thread waits for the question and writes, holding the interpreter's lock: nothing happens to who is asked.
    """
    faulthandler.register(LAST_WORDS, stacks_fd, all_threads=True, chain=False)

    def write() -> None:
        while True:
            signal.sigwait([STACKS_SIGNAL])
            # One call, and nothing is emptied before it: whoever keeps Python's lock may take it again in between, and
            # last words that were written meanwhile would be lost.
            os.pwrite(stacks_fd, (own_stacks().encode("utf-8", "replace") + END)[:STACKS_BYTES], 0)

    threading.Thread(target=write, name="weft-stacks", daemon=True).start()


class Stacks:
    """Where a child writes its stacks: anonymous memory, so that it works when pipes are full."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("weft-stacks")

    async def ask(self, pid: int) -> str:
        """What the threads of a process are doing: for the kernel, and for Python as far as the process can say so.

        It goes on as it did. One that is stopped, or in which a thread does not let go of Python's lock, tells nothing.
        """
        kernel = threads(pid)
        if " T " in kernel:
            return _told(kernel, "", "the process is stopped")
        return _told(kernel, await self._answer(pid, STACKS_SIGNAL, ASK_SECONDS), "the process does not answer")

    async def final_stacks(self, pid: int, *, wake: bool) -> str:
        """As `ask`, of a process that is to be killed: it is made to tell when it does not do so by itself.

        `wake`: one that was stopped is continued, for it cannot say anything else.
        """
        kernel = threads(pid)
        if " T " in kernel and not wake:
            return _told(kernel, "", "the process is stopped")
        if not (python := await self._answer(pid, STACKS_SIGNAL, DOOMED_SECONDS, wake=wake)):
            python = await self._answer(pid, LAST_WORDS, DOOMED_SECONDS, wake=wake)
        return _told(kernel, python, "the process does not answer, or has just begun")

    async def _answer(self, pid: int, signum: int, seconds: float, *, wake: bool = False) -> str:
        os.lseek(self.fd, 0, os.SEEK_SET)  # of the process too: it has inherited this descriptor
        os.ftruncate(self.fd, 0)
        if _expects(pid, signum):
            with suppress(ProcessLookupError):
                os.kill(pid, signum)
                if wake:
                    os.kill(pid, signal.SIGCONT)
            await self._written(seconds)
        return os.pread(self.fd, STACKS_BYTES, 0).partition(END)[0].decode("utf-8", "replace").rstrip()

    async def _written(self, seconds: float) -> None:
        """Wait so long until something is there and nothing more comes."""
        size, waited = 0, 0.0
        while waited < seconds:
            await asyncio.sleep(ASK_POLL)
            waited += ASK_POLL
            now = os.fstat(self.fd).st_size
            if now and now == size:
                return
            size = now

    def __del__(self) -> None:
        os.close(self.fd)  # the watchman may still be reading what a process wrote that has ended


def threads(pid: int) -> str:
    """A line a thread: name, state, kernel function it waits in. Empty when the process has gone."""
    lines = []
    with suppress(OSError):
        for task in sorted(Path(f"/proc/{pid}/task").iterdir(), key=lambda path: int(path.name)):
            with suppress(OSError):
                name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
                lines.append(f"  {task.name} {name} {rest.split()[0]} {_wait_channel(task)}")
    return "\n".join(lines)


def _wait_channel(task: Path) -> str:
    with suppress(OSError):
        return (task / "wchan").read_text() or "-"
    return "-"


def _told(kernel: str, python: str, why: str) -> str:
    python = python or f"no Python stacks: {why}"
    return f"threads (name, state, where in the kernel):\n{kernel}\n{python}"


def _expects(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, or a thread that waits for it: it would end it otherwise."""
    expected = 0
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith(("SigCgt:", "SigBlk:")):
                expected |= int(line.split()[1], 16)
    return bool(expected >> (signum - 1) & 1)
