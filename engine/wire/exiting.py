"""Processes that are ending: a killed one keeps its exit status to itself until all of its memory is given back.

That takes seconds where the memory is a GPU's or pinned: 1 to 2 s for four H200s' 126 GiB each. Nothing that it owed
will come any more, so whoever waits for it is told as soon as the kernel has begun; whoever wants its memory waits.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
from collections.abc import Callable, Iterable

LOOK_MS = 100
"""between two looks"""
GRACE_SECONDS = 0.3
"""in which most processes get to their end, which tells more: an exit status"""
_ENDING = 0x4 | 0x8 | 0x200
"""PF_EXITING, PF_POSTCOREDUMP and PF_DUMPCORE of include/linux/sched.h, of the field `flags` of proc(5)"""
_SIGKILL = 1 << (signal.SIGKILL - 1)


def is_exiting(pid: int) -> bool:
    """Whether a process will not run again. False of one that cannot be seen, as where /proc hides some: whoever asks
    has a better way to learn that one is gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name, the second field, may hold spaces and brackets
            fields = file.read().rpartition(b")")[2].split()
        if len(fields) < 7:
            return False
        # In a driver's hands (D) it does not even begin, but it will never leave the kernel.
        return bool(int(fields[6]) & _ENDING) or (fields[0] == b"D" and _is_killed(pid))
    except OSError:
        return False


def _is_killed(pid: int) -> bool:
    with open(f"/proc/{pid}/status", "rb") as file:
        pending = [int(line.split()[1], 16) for line in file if line.startswith((b"SigPnd:", b"ShdPnd:"))]
    return any(signals & _SIGKILL for signals in pending)


def how_ended(code: int) -> str:
    """In words: the return code that `subprocess` gives."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"signal {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal has no name
        return f"signal {-code}"


def wait_for_end(process: subprocess.Popen[bytes], ending: Callable[[], object]) -> None:
    """Until a child has ended. ending: called once if it began to, and has not within `GRACE_SECONDS`."""
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # it has been waited for, or there is no descriptor left
        process.wait()
        return
    poll, told = select.poll(), False
    poll.register(pidfd, select.POLLIN)
    try:
        while not poll.poll(None if told else LOOK_MS):
            if is_exiting(process.pid) and not poll.poll(int(GRACE_SECONDS * 1e3)):
                told = True
                ending()
    finally:
        os.close(pidfd)


def kill_and_hold(pids: Iterable[int], is_one: Callable[[int], bool]) -> list[int]:
    """Kill processes that are nobody's children any more, where they are still those that are meant. Descriptors of
    them, for `wait_for_all`. is_one: asked once no other process can have the number."""
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
    """Until all of these processes have ended. Closes the descriptors."""
    for pidfd in held:
        poll = select.poll()
        poll.register(pidfd, select.POLLIN)
        poll.poll()
        os.close(pidfd)
