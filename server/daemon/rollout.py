"""`Rollout`: another process for engines, one after the other, while the rest serve."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence

from weft.server.daemon.engine_supervisor import EngineSupervisor
from weft.server.observe.shared_state import SharedState

POLL_SECONDS = 0.02

logger = logging.getLogger("weft")


class Rollout:
    """At most one at a time. Each engine gets no new work, ends what it has, ends, and is followed by one that reads
    the model's files anew; then it is the next one's turn. Those that do not serve come first; one that was given up
    is tried anew. One that does not come back ends the rollout: the others go on with what they have."""

    def __init__(
        self,
        supervisors: Mapping[int, EngineSupervisor],
        models: Sequence[Sequence[int]],
        shared_state: SharedState,
        patience: float,
        serves: Callable[[int], bool],
    ) -> None:
        """`models`: the engines of each. `serves`: whether all API processes are attached to an engine.

        `patience`: seconds for an engine's open requests. What is open then is begun again elsewhere, as far as its
        client has had nothing of it; the rest ends with an error.
        """
        self._supervisors = supervisors
        self._beside = {engine: [e for e in engines if e != engine] for engines in models for engine in engines}
        """the other engines of an engine's model"""
        self._shared_state = shared_state
        self._patience = patience
        self._serves = serves
        self._work: asyncio.Task[None] | None = None
        self._stopped = False

    def begin(self, engines: Sequence[int]) -> str:
        """Begin it for these engines, all for none. Returns why not, or nothing."""
        several = [engine for engine, others in self._beside.items() if others]
        if self._stopped:
            return "the daemon has been asked to end"
        chosen = list(dict.fromkeys(engines)) or several or list(self._supervisors)
        if unknown := [engine for engine in chosen if engine not in self._supervisors]:
            return f"there is no engine {unknown[0]}"
        if any(self._supervisors[engine].asleep for engine in chosen):
            return "its model sleeps: what wakes at level 2 reads the files anew"
        chosen.sort(key=self._serves)
        there = {engine for engine, supervisor in self._supervisors.items() if not supervisor.given_up}
        for engine in chosen:
            if not there.intersection(self._beside[engine]):
                return "there is one engine alone: nobody would serve meanwhile; start another daemon with --handover"
            there.add(engine)
        if self._work is not None and not self._work.done():
            return "engines are being restarted already"
        self._work = asyncio.create_task(self._run(chosen))
        return ""

    def stop(self) -> None:
        """The daemon has been asked to end: no other engine is taken from those that still answer. Idempotent."""
        self._stopped = True
        if self._work is not None and self._work.cancel():
            logger.info("the restart of engines ends here: the daemon has been asked to end")

    async def _run(self, engines: Sequence[int]) -> None:
        for engine in engines:
            while not any(self._serves(other) for other in self._beside[engine]):
                if all(self._supervisors[other].given_up for other in self._beside[engine]):
                    logger.error("engine %d is the last one: the restart of engines ends here", engine)
                    return
                await asyncio.sleep(POLL_SECONDS)
            begun = time.monotonic()
            self._close(engine, True)
            try:
                while (cut := self._open(engine)) and time.monotonic() < begun + self._patience:
                    await asyncio.sleep(POLL_SECONDS)
                logger.info("engine %d is restarted%s", engine, ", with requests open there" if cut else "")
                back = await self._supervisors[engine].restart_engines()
            finally:
                self._close(engine, False)
            if not back:
                logger.error("engine %d did not come back: the restart of engines ends here", engine)
                return
            logger.info("engine %d serves again after %.1f s", engine, time.monotonic() - begun)

    def _open(self, engine: int) -> int:
        """Tokens that are still to be computed there: none once nobody waits for it."""
        return int(self._shared_state.engine_load[:, engine].sum())

    def _close(self, engine: int, closed: bool) -> None:
        with self._shared_state.lock():  # who routes holds it: whatever comes later sees it
            self._shared_state.closed[engine] = closed
