"""`Watchman`: looks at the beats of the daemon's processes, and ends those that hang."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Iterable
from typing import NamedTuple, Protocol

from weft.engine.wire.beat import Watch
from weft.engine.wire.child import has_ended
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


class Charge(NamedTuple):
    """A process to watch."""

    name: str
    row: int
    process: Killable
    bound: float
    """seconds without a beat; 0: it is not watched"""
    hangs: Cell
    steps: bool = False
    """an engine: it tells its last batch, and has nothing to lose by going on for a moment"""


class Watchman:
    def __init__(self, watch: Watch, charges: Callable[[], Iterable[Charge]]) -> None:
        """`charges`: those of this moment."""
        self._watch = watch
        self._charges = charges

    async def run(self) -> None:
        """For ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self._watch.look()
            late = []
            for charge in self._charges():
                given_up = self._watch.beats.given_up(charge.row)
                if charge.bound and not given_up and (age := self._watch.late(charge.row, charge.bound)) is not None:
                    late.append(self._end(charge, age))
            if late:
                ends = asyncio.gather(*late)
                while not (await asyncio.wait((ends,), timeout=LOOK_SECONDS))[0]:
                    self._watch.look()  # last words take seconds: it was not asleep meanwhile
                ends.result()

    async def _end(self, charge: Charge, age: float) -> None:
        name, row, process, _, hangs, steps = charge
        if has_ended(process.pid):
            return  # its keeper is about to know
        beats = self._watch.beats
        last = f"; last batch: {step}" if steps and (step := beats.last_step(row)) is not None else ""
        rank, pid = 0, process.pid
        if (silent := self._watch.silent_rank(row, charge.bound)) is not None:
            rank, age = silent
            name, pid = f"{name} (rank {rank})", beats.rank(row, rank).pid
        doing = f" at {stage!r}" if (stage := beats.stage(row, rank)) else ""
        # An API process that went on for a moment would take connections and die.
        beats.of(row).give_up()
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
