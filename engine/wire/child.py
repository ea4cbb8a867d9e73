"""A child process of the daemon: what it does before anything else, and whether it has ended.

Run as `python -m weft.engine.wire.child PARENT MODULE ARGUMENTS` it settles before it imports what MODULE needs: that
takes seconds, in which a process that is stopped would be left behind by a parent that ends.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from weft.engine.wire.open_files import raise_limit

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # where a process is forked there is no time to look for it
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""signals that would end a process, and mean nothing to those of a daemon"""
RANK = "weft.engine.ranks.process"
"""the module that the further ranks of an engine run"""
STACKS_SIGNAL = signal.SIGUSR2
"""asks for the stacks of a child's threads (`stacks`)"""


@contextmanager
def stacks_signal_blocked() -> Iterator[None]:
    """Around the start of a child: none of its threads takes `STACKS_SIGNAL` from the one that waits for it.

    Libraries begin threads where they are imported, before any code of the child could hold them back.
    """
    held = STACKS_SIGNAL in signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])
    try:
        yield
    finally:
        if not held:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS_SIGNAL])


def end_with_parent(parent: int | None = None, signum: int = signal.SIGKILL) -> None:
    """In the child, also between fork and exec: the kernel sends it this signal when the thread that started it ends.

    `parent`: process id. Ends the process when that one has gone already, which the kernel does not tell.
    """
    _libc.prctl(PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def command(parent: int, module: str, *arguments: object) -> tuple[str, ...]:
    """Of a child that settles first. parent: as of `settle`; 0 for None."""
    return (sys.executable, "-P", "-m", "weft.engine.wire.child", *map(str, (parent, module, *arguments)))


def settle(parent: int | None) -> None:
    """In the child: it ends with its parent, even when it hangs; signals for the whole group are the daemon's to
    understand; it may open as many files as it can be allowed, for a connection is one.

    `parent`: process id of the daemon. Ends the process when that one has gone already. None: it learns of its parent's
    end in another way.
    """
    if parent is not None:
        end_with_parent(parent)
    raise_limit()
    for signum in (signal.SIGINT, *IGNORED):
        signal.signal(signum, signal.SIG_IGN)
    # Not SIG_IGN: that would be inherited by programs this process starts, which then could not be ended.
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, _leave_it_to_the_daemon)
    with suppress(AttributeError, OSError, ValueError):  # no stderr
        faulthandler.enable(sys.stderr)


def _leave_it_to_the_daemon(_signum: int, _frame: FrameType | None) -> None:
    pass


def pin_to(cpus: Sequence[int]) -> None:
    """In the child: all threads, and those to come, run on these cores; on any for none."""
    for thread in os.listdir("/proc/self/task") if cpus else ():
        with suppress(OSError):  # it has ended, or the system gives none of these: it takes what there is
            os.sched_setaffinity(int(thread), cpus)


def has_ended(pid: int) -> bool:
    """There is no such process, or nobody has taken note of its end yet. False where that cannot be seen, as by a
    process that has no descriptor left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def main() -> None:
    parent, module, *arguments = sys.argv[1:]
    settle(int(parent) or None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
