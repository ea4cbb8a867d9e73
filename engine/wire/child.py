"""Child processes of the daemon: their setup, and a check whether one has ended.

`python -m weft.engine.wire.child PARENT MODULE ARGUMENTS` sets the process up before it runs MODULE. Imports take
seconds, during which a stopped process would outlive its parent.
"""

from __future__ import annotations

import ctypes
import faulthandler
import gc
import os
import runpy
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from weft.engine.wire.open_files import raise_limit

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)  # loaded in advance, because it is used after a fork
IGNORED = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGALRM)
"""Signals that would end a process and that the daemon's processes ignore."""
RANK = "weft.engine.ranks.process"  # module of an engine's follower ranks
STACKS_SIGNAL = signal.SIGUSR2  # signal that requests the stacks of a child's threads (see `stacks.py`)


@contextmanager
def stacks_signal_blocked() -> Iterator[None]:
    """Block `STACKS_SIGNAL` while a child is started, so that only the child's waiting thread receives it. Libraries
    start threads on import, before any code of the child could block the signal."""
    blocked = STACKS_SIGNAL in signal.pthread_sigmask(signal.SIG_BLOCK, [STACKS_SIGNAL])
    try:
        yield
    finally:
        if not blocked:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [STACKS_SIGNAL])


def end_with_parent(parent: int | None = None, signum: int = signal.SIGKILL) -> None:
    """Have the kernel send this process `signum` when the thread that started it ends. Safe between fork and exec.
    `parent` is the process id of the parent: if it has ended already, this process exits."""
    _libc.prctl(PR_SET_PDEATHSIG, signum)
    if parent is not None and os.getppid() != parent:
        os._exit(1)


def command(parent: int, module: str, *arguments: object) -> tuple[str, ...]:
    """Return the command line of a child that calls `settle` first. `parent` is as in `settle`, 0 for None."""
    return (sys.executable, "-P", "-m", "weft.engine.wire.child", *map(str, (parent, module, *arguments)))


def settle(parent: int | None) -> None:
    """Set up a child: it ends with its parent even when it hangs, ignores signals to the process group, which the
    daemon handles, and raises its limit of open files. `parent` is the process id of the daemon: if it has ended
    already, this process exits. Pass None if the child notices the end of its parent in another way."""
    if parent is not None:
        end_with_parent(parent)
    raise_limit()
    for signum in (signal.SIGINT, *IGNORED):
        signal.signal(signum, signal.SIG_IGN)
    # Not SIG_IGN, which programs started by this process would inherit: they could not be ended then.
    for signum in (signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, lambda *_: None)
    with suppress(AttributeError, OSError, ValueError):  # no stderr
        faulthandler.enable(sys.stderr)


def pin_to(cpus: Sequence[int]) -> None:
    """Run all threads of this process, including later ones, on these cores; on any if `cpus` is empty."""
    for thread in os.listdir("/proc/self/task") if cpus else ():
        with suppress(OSError):  # the thread has ended, or these cores are unavailable
            os.sched_setaffinity(int(thread), cpus)


def has_ended(pid: int) -> bool:
    """Return whether a process is gone or a zombie. False if unknown, for example if no descriptor is left."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False


def main() -> None:
    gc.disable()  # Imports create no garbage; the modules enable it afterwards.
    parent, module, *arguments = sys.argv[1:]
    settle(int(parent) or None)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
