"""Processes that are ending: a killed one keeps its exit status to itself until all of its memory is given back.

That takes seconds where the memory is a GPU's or pinned: 1 to 2 s for four H200s' 126 GiB each. Nothing that it owed
will come any more, so whoever waits for it is told as soon as the kernel has begun; whoever wants its memory waits.
"""

from __future__ import annotations

import os
import select
import subprocess
from collections.abc import Callable

LOOK_MS = 100
"""between two looks"""
GRACE_SECONDS = 0.3
"""in which most processes get to their end, which tells more: an exit status"""
_ENDING = 0x4 | 0x8 | 0x200
"""PF_EXITING, PF_POSTCOREDUMP and PF_DUMPCORE of include/linux/sched.h, of the field `flags` of proc(5)"""


def is_exiting(pid: int) -> bool:
    """Whether a process will not run again. True of one that is not there."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # the name, the second field, may hold spaces and brackets
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return True
    except OSError:
        return False
    return len(fields) > 6 and bool(int(fields[6]) & _ENDING)


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
