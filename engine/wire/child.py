"""A child process of the daemon: what it does before anything else, and how the daemon looks into it."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

PR_SET_PDEATHSIG = 1
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""signals that would end a process, and mean nothing to those of a daemon"""
ASK_SECONDS = 2.0
"""that a process gets to write its stacks"""
ASK_POLL = 0.05
STACKS_BYTES = 256 * 1024
"""of stacks at most that are read"""


def settle(parent: int | None) -> None:
    """In the child: it ends with its parent, even when it hangs; signals for the whole group are the daemon's to
    understand.

    `parent`: process id of the daemon. Ends the process when that one has gone already. None: it learns of its parent's
    end in another way.
    """
    if parent is not None:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os._exit(1)  # it died before the kernel was told
    for signum in (signal.SIGINT, *IGNORED):
        signal.signal(signum, signal.SIG_IGN)
    # Not SIG_IGN: that would be inherited by programs this process starts, which then could not be ended.
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, _leave_it_to_the_daemon)
    with suppress(AttributeError, OSError, ValueError):  # no stderr
        faulthandler.enable(sys.stderr)


def write_stacks_to(stacks_fd: int) -> None:
    """In the child: it writes its stacks there when asked."""
    faulthandler.register(signal.SIGUSR1, stacks_fd, all_threads=True, chain=False)


def _leave_it_to_the_daemon(_signum: int, _frame: FrameType | None) -> None:
    pass


def keep_to(cpus: Sequence[int]) -> None:
    """In the child: all threads, and those to come, run on these cores; on any for none."""
    for thread in os.listdir("/proc/self/task") if cpus else ():
        with suppress(OSError):  # it has ended, or the system gives none of these: it takes what there is
            os.sched_setaffinity(int(thread), cpus)


class Stacks:
    """Where a child writes its stacks: anonymous memory, so that it works when pipes are full."""

    def __init__(self) -> None:
        self.fd = os.memfd_create("weft-stacks")

    async def ask(self, pid: int, *, wake: bool) -> str:
        """What the threads of a process are doing: for the kernel, and for Python as far as the process can still say.

        `wake`: one that was stopped is continued, for it cannot say anything else.
        """
        os.lseek(self.fd, 0, os.SEEK_SET)  # of the process too: it has inherited this descriptor
        os.ftruncate(self.fd, 0)
        kernel = threads(pid)
        stopped = " T " in kernel
        asked = (wake or not stopped) and _catches(pid, signal.SIGUSR1)
        if asked:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGUSR1)
                if stopped:
                    os.kill(pid, signal.SIGCONT)
            await self._written()
        python = os.pread(self.fd, STACKS_BYTES, 0).decode("utf-8", "replace").rstrip()
        if not python:
            why = "the process does not answer" if asked else "the process is stopped, or has just begun"
            python = f"no Python stacks: {why}"
        return f"threads (name, state, where in the kernel):\n{kernel}\n{python}"

    async def _written(self) -> None:
        """Wait until something is there and nothing more comes."""
        size, waited = 0, 0.0
        while waited < ASK_SECONDS:
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


def _catches(pid: int, signum: int) -> bool:
    """Whether a process has a handler for a signal, which would end it otherwise."""
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def has_ended(pid: int) -> bool:
    """There is no such process, or nobody has taken note of its end yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
