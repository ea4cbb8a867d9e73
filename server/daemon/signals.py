"""Signal handlers of the daemon: SIGTERM and SIGINT end it, SIGHUP reloads keys and certificate, SIGQUIT logs stacks.

SIGUSR1, SIGUSR2 and SIGALRM, which would end the process by default, are ignored.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable

from weft.engine.wire.child import IGNORED


def handle(stop: Callable[[], None], reload: Callable[[], None], stacks: Callable[[], None]) -> None:
    """Install the handlers on the running loop. Closing the terminal ends a daemon that was started in it."""
    loop = asyncio.get_running_loop()
    kept = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN  # nohup
    terminal = _has_terminal() and not kept

    def hang_up() -> None:
        nonlocal terminal
        if not terminal or _has_terminal():
            reload()
        else:
            terminal = False  # the kernel and the shell both send SIGHUP
            stop()

    loop.add_signal_handler(signal.SIGTERM, stop)
    loop.add_signal_handler(signal.SIGINT, stop)
    loop.add_signal_handler(signal.SIGHUP, hang_up)
    loop.add_signal_handler(signal.SIGQUIT, stacks)
    for signum in IGNORED:
        signal.signal(signum, signal.SIG_IGN)  # inherited by processes started from now on


def _has_terminal() -> bool:
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        return False
    return True
