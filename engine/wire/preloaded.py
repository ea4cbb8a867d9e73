"""`PreloadedProcess`: an engine process that has not been told yet which engine it is: it imports what every engine needs.

Imports take seconds, and reading options some tenths of one: so `weft serve` begins one before it does anything else.
This module itself imports nothing that takes time.
"""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from weft.engine.wire.child import command, stacks_signal_blocked

PRIMITIVE_CACHES = {"LRU_CACHE_CAPACITY": "1", "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128"}
"""On a CPU ideep and oneDNN keep a compiled primitive for each shape they have met, a thousand each if let: hundreds of
megabytes that come with the traffic. Read when torch is loaded. With fewer than some dozens of the second kind they are
compiled again and again, at twice the processor time"""
VISIBLE = "CUDA_VISIBLE_DEVICES"
SYSTEMD = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""variables meant for this process alone"""

_begun: list[PreloadedProcess] = []
"""one at most, which nobody has taken yet"""


def environment() -> dict[str, str]:
    """Of the engine process: this one's, and what bounds its memory."""
    own = {name: value for name, value in os.environ.items() if name not in SYSTEMD}
    return {**PRIMITIVE_CACHES, **own, "PYTHONUNBUFFERED": "1"}


def gpus() -> list[str]:
    """The GPUs that this process may use, as `CUDA_VISIBLE_DEVICES` names them. Asks no driver."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


class PreloadedProcess:
    """A running process, and this process's end of its stdin. Raises `OSError` where none can be started."""

    def __init__(self, gpu: str = "") -> None:
        """`gpu`: the only one that it sees; all by default."""
        self.socket, theirs = socket.socketpair()
        with theirs:
            try:
                with stacks_signal_blocked():
                    self.process = subprocess.Popen(
                        command(os.getpid(), "weft.engine.process"),
                        stdin=theirs.fileno(),
                        start_new_session=True,  # Ctrl-C reaches the daemon alone, which then drains
                        env={**environment(), **({VISIBLE: gpu} if gpu else {})},
                    )
            except OSError:
                self.socket.close()
                raise

    @classmethod
    def begin(cls) -> None:
        """One for whoever takes it next. By the main thread, with whose end it ends."""
        with suppress(OSError):  # whoever needs it will tell
            _begun.append(cls())

    @classmethod
    def take(cls, gpu: str = "") -> PreloadedProcess:
        """The one that was begun, if it still lives and may see what it sees, else a new one. Raises `OSError`."""
        while _begun:
            blank = _begun.pop()
            if blank.process.poll() is None and not gpu:
                return blank
            blank.socket.close()
        return cls(gpu)

    def tell(self, config: bytes, fds: Sequence[int]) -> None:
        """Which engine it is: a configuration in one line, and the descriptors it is to have."""
        with suppress(OSError):  # it has ended, which who waits for that will see
            socket.send_fds(self.socket, [b"\n"], fds)
            self.socket.sendall(config + b"\n")


def told(stdin: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """In the process: its configuration and up to `count` descriptors; empty if the daemon has gone."""
    _, fds, _, _ = socket.recv_fds(stdin, 1, count)
    line = b""
    while not line.endswith(b"\n") and (part := stdin.recv(65536)):
        line += part
    return line, fds
