"""What signals do to the daemon: SIGTERM and SIGINT end it, SIGHUP has it read keys and certificate again, SIGQUIT has
stacks logged, and SIGUSR1, SIGUSR2 and SIGALRM, whose default is to end a process, do nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from weft.engine.wire.child import IGNORED


def handle(stop: Callable[[], None], reload: Callable[[], None], stacks: Callable[[], None]) -> None:
    """On the running loop. A terminal that is closed ends a daemon that was started on it."""
    loop = asyncio.get_running_loop()
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    terminal = _has_terminal() and not kept

    def hang_up() -> None:
        nonlocal terminal
        if not terminal or _has_terminal():
            reload()
        else:
            terminal = False  # it is said twice, by the kernel and by the shell
            stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    loop.add_signal_handler(signal.SIGQUIT, stacks)
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)  # inherited by what is started from now on


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
