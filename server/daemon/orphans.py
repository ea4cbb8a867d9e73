"""`Orphans`: processes that a container's first process inherits, and must take note of when they end.

Where an engine is killed, its ranks and compilers become children of process 1. An init that reaps them is not in every
image: without one the daemon is process 1 itself, and each of them would keep its number for as long as it runs.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import suppress

SECONDS = 10.0
"""between two looks: whoever waits for a child of the daemon's own does so at once"""


class Orphans:
    """Takes note of children that were found ended at two looks: nobody waits for them."""

    def __init__(self) -> None:
        self._ended: set[int] = set()

    async def run(self) -> None:
        if os.getpid() != 1:  # another process inherits them
            return
        while True:
            await asyncio.sleep(SECONDS)
            with suppress(OSError):  # no descriptor is left: another time
                self.look()

    def look(self) -> list[int]:
        """Process ids of those that are gone with it."""
        now = set(_ended_children())
        gone = []
        for pid in now & self._ended:
            with suppress(ChildProcessError):  # somebody has waited for it just now
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
            # the name, the second field, may hold spaces and brackets
            state, parent = file.read().rpartition(b")")[2].split()[:2]
            if state == b"Z" and parent == own:
                yield int(entry.name)
