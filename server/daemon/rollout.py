"""`Rollout` restarts engines in sequence while the others serve."""

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
    """At most one rollout runs at a time. It drains each engine and replaces its process with one that reads the model
    files again. Engines that do not serve come first, including those that were given up. The rollout stops at an
    engine that does not come back; the remaining engines keep their processes."""

    def __init__(
        self, supervisors: Mapping[int, EngineSupervisor], models: Sequence[Sequence[int]], shared_state: SharedState,
        patience: float, serves: Callable[[int], bool],
    ) -> None:  # fmt: skip
        """`models`: the engines of each model. `serves`: whether all API processes are attached to an engine.

        `patience`: seconds for an engine's open requests to finish. After that, requests without any output are
        retried on another engine and the others end with an error."""
        self._supervisors = supervisors
        self._siblings = {engine: [e for e in engines if e != engine] for engines in models for engine in engines}
        """The other engines of each engine's model."""
        self._shared_state = shared_state
        self._patience = patience
        self._serves = serves
        self._work: asyncio.Task[None] | None = None
        self._stopped = False

    def begin(self, engines: Sequence[int]) -> str:
        """Restart these engines, all if empty. Returns an empty string, or why it is refused."""
        several = [engine for engine, others in self._siblings.items() if others]
        if self._stopped:
            return "the daemon has been asked to end"
        chosen = list(dict.fromkeys(engines)) or several or list(self._supervisors)
        if unknown := [engine for engine in chosen if engine not in self._supervisors]:
            return f"there is no engine {unknown[0]}"
        if any(self._supervisors[engine].asleep for engine in chosen):
            return "its model sleeps: waking it from level 2 reads the files again"
        chosen.sort(key=self._serves)
        running = {engine for engine, supervisor in self._supervisors.items() if not supervisor.given_up}
        for engine in chosen:
            if not running.intersection(self._siblings[engine]):
                return "the only engine cannot be restarted without downtime; start another daemon with --handover"
            running.add(engine)
        if self._work is not None and not self._work.done():
            return "engines are already being restarted"
        self._work = asyncio.create_task(self._run(chosen))
        return ""

    def stop(self) -> None:
        """Restart no further engine, because the daemon ends. Idempotent."""
        self._stopped = True
        if self._work is not None and self._work.cancel():
            logger.info("engine restarts stopped: the daemon is ending")

    async def _run(self, engines: Sequence[int]) -> None:
        for engine in engines:
            while not any(self._serves(other) for other in self._siblings[engine]):
                if all(self._supervisors[other].given_up for other in self._siblings[engine]):
                    logger.error("engine restarts stopped: engine %d is the last one", engine)
                    return
                await asyncio.sleep(POLL_SECONDS)
            begun = time.monotonic()
            self._close(engine, True)
            try:
                load = self._shared_state.engine_load[:, engine]  # 0 once no request waits for it
                while (cut := load.sum()) and time.monotonic() < begun + self._patience:
                    await asyncio.sleep(POLL_SECONDS)
                logger.info("restarting engine %d%s", engine, " with open requests" if cut else "")
                back = await self._supervisors[engine].restart()
            finally:
                self._close(engine, False)
            if not back:
                logger.error("engine restarts stopped: engine %d did not come back", engine)
                return
            logger.info("engine %d serves again after %.1f s", engine, time.monotonic() - begun)

    def _close(self, engine: int, closed: bool) -> None:
        with self._shared_state.lock():  # routing holds this lock, so that later requests see the change
            self._shared_state.closed[engine] = closed
