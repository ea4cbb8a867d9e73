"""Detection of processes that are ending: a killed process has no exit status until all of its memory is freed.

For GPU and pinned memory this takes seconds: 1 to 2 s for 126 GiB on each of four H200s. The process sends nothing
more, so its end is reported as soon as the kernel starts it. Only code that needs the memory waits for the rest.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterable

LOOK_MS = 100  # milliseconds between checks
GRACE_SECONDS = 0.3  # seconds in which most processes finish ending, so that their exit status can be reported
_ENDING = 0x4 | 0x8 | 0x200
"""PF_EXITING, PF_POSTCOREDUMP and PF_DUMPCORE of include/linux/sched.h, in the field `flags` of proc(5)."""
_SIGKILL = 1 << (signal.SIGKILL - 1)


def is_exiting(pid: int) -> bool:
    """Return whether a process will not run again. False for one that is not visible, for example if /proc hides it."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the second field, the name, may contain spaces and brackets
            fields = file.read().rpartition(b")")[2].split()
        if len(fields) < 7:
            return False
        # A killed process inside a driver (state D) has not started to end, but will never leave the kernel.
        return bool(int(fields[6]) & _ENDING) or (fields[0] == b"D" and _is_killed(pid))
    except OSError:
        return False


def _is_killed(pid: int) -> bool:
    with open(f"/proc/{pid}/status", "rb") as file:
        pending = [int(line.split()[1], 16) for line in file if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    return any(signals & _SIGKILL for signals in pending)


def how_ended(code: int) -> str:
    """Describe a return code of `subprocess`."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def wait_for_end(process: subprocess.Popen[bytes], ending: Callable[[], object]) -> None:
    """Wait for a child. `ending` is called once if it has started to end and takes longer than `GRACE_SECONDS`."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # it has been reaped, or no descriptor is left
        process.wait()
        return
    poll, reported = select.poll(), False
    poll.register(pidfd, select.POLLIN)
    try:
        while not poll.poll(None if reported else LOOK_MS):
            if is_exiting(process.pid) and not poll.poll(int(GRACE_SECONDS * 1e3)):
                reported = True
                ending()
    finally:
        os.close(pidfd)


def kill_and_hold(pids: Iterable[int], is_one: Callable[[int], bool]) -> list[int]:
    """Kill orphaned processes and return their descriptors for `wait_for_all`. `is_one` checks that a pid still is the
    intended process; it is called once the number cannot be reused."""
    held = []
    for pid in pids:
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:  # it has ended
            continue
        try:
            if meant := is_one(pid):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            meant = False
        if meant:
            held.append(pidfd)
        else:
            os.close(pidfd)
    return held


def wait_for_all(held: Iterable[int]) -> None:
    """Wait until all of these processes have ended, and close the descriptors."""
    for pidfd in held:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os.close(pidfd)
