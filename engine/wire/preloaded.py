"""`PreloadedProcess`: an engine process without a configuration yet, which already imports what every engine needs.

Imports take seconds, and reading options some tenths of one, so `weft serve` starts one first of all. This module
itself imports nothing slow.
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
"""Limits of the caches in which ideep and oneDNN keep a compiled primitive per shape on a CPU. The defaults, a thousand
each, take hundreds of megabytes. Below some dozens of the second kind, recompilation doubles the processor time. They
are read when torch is loaded."""
MAX_REASON_BYTES = 1 << 16  # fits into the socket's buffer, so that nobody waits for the daemon to read it
VISIBLE = "CUDA_VISIBLE_DEVICES"
SYSTEMD = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID")
"""Variables meant for this process alone."""

_started: list[PreloadedProcess] = []  # at most one process, until it is taken


def environment() -> dict[str, str]:
    """Return the environment of the engine process: this process's, plus limits of its memory."""
    own = {name: value for name, value in os.environ.items() if name not in SYSTEMD}
    return {**PRIMITIVE_CACHES, **own, "PYTHONUNBUFFERED": "1"}


def gpus() -> list[str]:
    """Return the GPUs that this process may use, as in `CUDA_VISIBLE_DEVICES`, without a driver call."""
    named = os.environ.get(VISIBLE)
    if named is not None:
        return [name.strip() for name in named.split(",") if name.strip()]
    return [str(i) for i, _ in enumerate(Path("/dev").glob("nvidia[0-9]*"))]


class PreloadedProcess:
    """A running process, and this process's end of its stdin. Raises `OSError` if it cannot be started."""

    def __init__(self, gpu: str = "") -> None:
        """`gpu` is the only GPU that the process sees; all by default."""
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
        """Start one for the next `take`. Call it on the main thread: the process ends with the thread."""
        with suppress(OSError):  # `take` reports the error
            _started.append(cls())

    @classmethod
    def take(cls, gpu: str = "") -> PreloadedProcess:
        """Return the process that was started early if it runs and `gpu` is empty, else a new one. Raises `OSError`."""
        while _started:
            process = _started.pop()
            if process.process.poll() is None and not gpu:
                return process
            process.socket.close()
        return cls(gpu)

    def send_config(self, config: bytes, fds: Sequence[int]) -> None:
        """Send the configuration, one line, and descriptors."""
        with suppress(OSError):  # it has ended, which its watcher reports
            socket.send_fds(self.socket, [b"\n"], fds)
            self.socket.sendall(config + b"\n")


def receive_config(stdin: socket.socket, count: int) -> tuple[bytes, list[int]]:
    """In the process, receive the configuration and up to `count` descriptors; empty if the daemon has ended."""
    _, fds, _, _ = socket.recv_fds(stdin, 1, count)
    line = b""
    while not line.endswith(b"\n") and (part := stdin.recv(65536)):
        line += part
    return line, fds


def report_failure(stdin: socket.socket, why: str) -> None:
    """In the process, report why it fails, before it ends. Every client learns the reason from the daemon: one that
    connects late could not receive it from here."""
    with suppress(OSError):  # the daemon has ended
        stdin.sendall(why.encode("utf-8", "replace")[:MAX_REASON_BYTES])


def reported_failure(process: socket.socket) -> str:
    """Return what a process that has ended reported with `report_failure`; empty if nothing."""
    why = b""
    with suppress(OSError):  # nothing more, or the socket is closed
        while part := process.recv(MAX_REASON_BYTES, socket.MSG_DONTWAIT):
            why += part
    return why.decode("utf-8", "replace")
