"""`Watchdog` checks the heartbeats of the daemon's processes and kills those that hang."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple

from weft.engine.wire.child import has_ended
from weft.engine.wire.heartbeat import Watch
from weft.engine.wire.spawn import EngineProcess
from weft.engine.wire.stacks import threads
from weft.server.daemon.api_process import ApiProcess
from weft.server.observe.counters import Cell

CHECK_SECONDS = 0.5
EXIT_SECONDS = 10.0  # Seconds after which a killed process that still exists is reported.

logger = logging.getLogger("weft")


class WatchedProcess(NamedTuple):
    """A process to watch."""

    name: str
    row: int
    process: EngineProcess | ApiProcess
    bound: float  # Maximum seconds without a heartbeat; 0 disables the check.
    hangs: Cell
    steps: bool = False
    """Whether it is an engine: its last batch is logged, and it may run briefly to write its stacks."""


class Watchdog:
    def __init__(self, watch: Watch, watched_processes: Callable[[], Iterable[WatchedProcess]]) -> None:
        """`watched_processes`: returns the current processes."""
        self._watch = watch
        self._watched_processes = watched_processes

    async def run(self) -> None:
        """Run until cancelled."""
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self._watch.look()
            late = []
            for watched in self._watched_processes():
                condemned = self._watch.heartbeats.of(watched.row).condemned
                age = self._watch.late(watched.row, watched.bound) if watched.bound and not condemned else None
                if age is not None:
                    late.append(self._end(watched, age))
            if late:
                ends = asyncio.gather(*late)
                while not (await asyncio.wait((ends,), timeout=CHECK_SECONDS))[0]:
                    self._watch.look()  # collecting stacks takes seconds, which must not look like a suspended machine
                ends.result()

    async def _end(self, watched: WatchedProcess, age: float) -> None:
        name, row, process, _, hangs, steps = watched
        if has_ended(process.pid):
            return  # its supervisor is about to notice
        heartbeats = self._watch.heartbeats
        last = f"; last batch: {step}" if steps and (step := heartbeats.last_step(row)) is not None else ""
        rank, pid = 0, process.pid
        if (silent := self._watch.silent_rank(row, watched.bound)) is not None:
            rank, age = silent
            name, pid = f"{name} (rank {rank})", heartbeats.rank(row, rank).pid
        doing = f" at {stage!r}" if (stage := heartbeats.stage(row, rank)) else ""
        # An API process must not run on: it would accept connections and then die.
        heartbeats.of(row).condemn()
        stacks = await process.stacks.final_stacks(pid, wake=steps)
        logger.error("%s hangs%s: no progress for %.0f s; it is killed%s\n%s", name, doing, age, last, stacks)
        hangs.inc()
        process.kill(f"{name} hung{doing}: no progress for {age:.0f} s")
        asyncio.get_running_loop().call_later(EXIT_SECONDS, self._check_ended, name, process.pid)

    @staticmethod
    def _check_ended(name: str, pid: int) -> None:
        """Log a killed process that a driver holds; only restarting the machine may help."""
        if os.path.exists(f"/proc/{pid}"):  # not `has_ended`: a thread other than the main thread may be held
            logger.error("%s was killed and does not end: the kernel holds it\n%s", name, threads(pid))
