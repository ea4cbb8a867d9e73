"""`Orphans` reaps processes that a daemon inherits as process 1 of a container.

When an engine is killed, its ranks and compilers become children of process 1. In an image without an init, that is the
daemon; unless it reaps them, they stay as zombies.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress

SECONDS = 10.0  # Seconds between checks. The daemon waits for its own children immediately.


class Orphans:
    """Reaps children that were found ended at two consecutive checks, so that nothing else waits for them."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    async def run(self) -> None:
        if os.getpid() != 1:  # another process inherits orphans
            return
        while True:
            await asyncio.sleep(SECONDS)
            with suppress(OSError):  # no file descriptor is free: try again later
                self.reap()

    def reap(self) -> list[int]:
        """Return the process ids that were reaped."""
        now = set(_ended_children())
        gone = []
        for pid in now & self._ended:
            with suppress(ChildProcessError):  # it was just waited for elsewhere
                if os.waitpid(pid, os.WNOHANG)[0]:
                    gone.append(pid)
        self._ended = now.difference(gone)
        return gone


def _ended_children() -> Iterator[int]:
    own = str(os.getpid()).encode()
    for entry in os.scandir("/proc"):
        if not entry.name.isdigit():
            continue
        with suppress(OSError), open(f"{entry.path}/stat", "rb") as file:
            # the second field, the name, may contain spaces and parentheses
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state == b"Z" and parent == own:
                yield int(entry.name)
