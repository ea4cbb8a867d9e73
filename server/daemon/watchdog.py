"""`Watchdog`: looks at the heartbeats of the daemon's processes, and ends those that hang."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from weft.engine.wire.child import has_ended
from weft.engine.wire.heartbeat import Watch
from weft.engine.wire.stacks import Stacks, threads
from weft.server.observe.counters import Cell

LOOK_SECONDS = 0.5
LAST_SECONDS = 10.0
"""within which a killed process is gone, unless the kernel holds it"""

logger = logging.getLogger("weft")


class Killable(Protocol):
    stacks: Stacks

    @property
    def pid(self) -> int: ...

    def kill(self, why: str = "") -> None: ...


class WatchedProcess(NamedTuple):
    """A process to watch."""

    name: str
    row: int
    process: Killable
    bound: float
    """seconds without a heartbeat; 0: it is not watched"""
    hangs: Cell
    steps: bool = False
    """an engine: it tells its last batch, and has nothing to lose by going on for a moment"""


class Watchdog:
    def __init__(self, watch: Watch, watched_processes: Callable[[], Iterable[WatchedProcess]]) -> None:
        """`watched_processes`: those of this moment."""
        self._watch = watch
        self._watched_processes = watched_processes

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._watch.look()
            late = []
            for watched in self._watched_processes():
                given_up = self._watch.heartbeats.given_up(watched.row)
                if watched.bound and not given_up and (age := self._watch.late(watched.row, watched.bound)) is not None:
                    late.append(self._end(watched, age))
            if late:
                ends = asyncio.gather(*late)
                while not (await asyncio.wait((ends,), timeout=LOOK_SECONDS))[0]:
                    self._watch.look()  # last words take seconds: it was not asleep meanwhile
                ends.result()

    async def _end(self, watched: WatchedProcess, age: float) -> None:
        name, row, process, _, hangs, steps = watched
        if has_ended(process.pid):
            return  # its supervisor is about to know
        heartbeats = self._watch.heartbeats
        last = f"; last batch: {step}" if steps and (step := heartbeats.last_step(row)) is not None else ""
        rank, pid = 0, process.pid
        if (silent := self._watch.silent_rank(row, watched.bound)) is not None:
            rank, age = silent
            name, pid = f"{name} (rank {rank})", heartbeats.rank(row, rank).pid
        doing = f" at {stage!r}" if (stage := heartbeats.stage(row, rank)) else ""
        # An API process that went on for a moment would take connections and die.
        heartbeats.of(row).give_up()
        stacks = await process.stacks.last_words(pid, wake=steps)
        logger.error("%s hangs%s: no progress for %.0f s; it is killed%s\n%s", name, doing, age, last, stacks)
        hangs.inc()
        process.kill(f"{name} hung{doing}: no progress for {age:.0f} s")
        asyncio.get_running_loop().call_later(LAST_SECONDS, self._check_ended, name, process.pid)

    @staticmethod
    def _check_ended(name: str, pid: int) -> None:
        """What a driver holds does not end when killed: nothing but a restart of the machine may help."""
        if os.path.exists(f"/proc/{pid}"):  # not `has_ended`: a thread beside the first may be held
            logger.error("%s was killed and does not end: the kernel holds it\n%s", name, threads(pid))
