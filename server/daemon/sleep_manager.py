"""`SleepManager`: puts models to sleep and wakes them, as `WakePolicy` decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any, Protocol

from weft.server.daemon.control import Interrupt
from weft.server.daemon.wake_policy import SleepMove, WakeMove, WakePolicy
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import ENTERED, WAITING, SharedState, SleepState

POLL_SECONDS = 0.02
LAST_ANSWERS = 5.0
"""seconds that requests which were told to end get to do so"""

logger = logging.getLogger("weft")


class Sleepable(Protocol):
    """An engine, as it goes to sleep and wakes."""

    given_up: bool

    async def sleep(self, level: int) -> int:
        """Give the memory back. Idempotent. Returns the level that was reached: 2 where 1 cannot be had."""
        ...

    async def wake(self) -> bool:
        """Be ready again. False where that could not be."""
        ...


class SleepManager:
    """Of each model: `names`, `engines` (their numbers) and `sleepers`."""

    def __init__(
        self,
        policy: WakePolicy,
        names: Sequence[str],
        engines: Sequence[Sequence[int]],
        sleepers: Sequence[Sequence[Sleepable]],
        shared_state: SharedState,
        metrics: Metrics,
        *,
        patience: float,
        serves: Callable[[int], bool],
        tell: Callable[[Interrupt], None],
    ) -> None:
        """`patience`: seconds for open requests. `serves`: all API processes are attached to an engine. `tell`: all."""
        self.policy = policy
        self._names, self._engines, self._sleepers = names, engines, sleepers
        self._shared_state, self._metrics = shared_state, metrics
        self._patience, self._serves, self._tell = patience, serves, tell
        self._waking: dict[int, list[asyncio.Future[str]]] = {}
        self._falling: dict[int, list[asyncio.Future[str]]] = {}
        """who waits, by model; gets why it was not done, or nothing"""
        self._work: set[asyncio.Task[None]] = set()
        self._news = asyncio.Event()
        self._begun = asyncio.Event()
        self._defect: BaseException | None = None
        for model, rest in enumerate(policy.sleep_states):
            shared_state.sleep_states[model] = rest

    def begin(self) -> None:
        """All that are to be awake at the start are. Nobody is moved before."""
        self._begun.set()

    async def run(self) -> None:
        """For ever."""
        try:
            await self._begun.wait()
            while True:
                for move in self.policy.moves(self._shared_state.used.tolist(), self._expected()):
                    self._begin(self._rise(move.model) if isinstance(move, WakeMove) else self._fall(move, 1, None))
                self._news.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS if self.policy.wanted else None):
                        await self._news.wait()
                if self._defect is not None:
                    raise self._defect  # who waits would wait for ever
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)

    def _expected(self) -> list[int]:
        """Models that requests have waited for."""
        return [m for m in range(self._shared_state.models) if self._shared_state.load[:, m, WAITING].any()]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        self._news.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect = error

    async def wake(self, model: int) -> str:
        """Wake it, in its turn. Returns nothing once it is awake, or why it is not."""
        match self.policy.sleep_states[model]:
            case SleepState.AWAKE:
                return ""
            case SleepState.DEAD:
                return f"{self._names[model]} has ended for good"
        self.policy.want(model)
        return await self._told(self._waking, model)

    async def sleep(self, model: int, level: int, seconds: float | None) -> str:
        """An operator's wish. Returns nothing once it sleeps, or why it does not."""
        name = self._names[model]
        if not self._begun.is_set():
            return "the daemon is still starting"
        if self.policy.sleep_states[model] is SleepState.ASLEEP:
            for sleeper in self._sleepers[model]:
                await sleeper.sleep(level)
            return ""
        if not self.policy.order(model):
            return f"{name} is {self.policy.sleep_states[model].word.replace('_', ' ')}"
        patience = self._patience if seconds is None else seconds
        self._begin(self._fall(SleepMove(model), level, patience))
        return await self._told(self._falling, model)

    async def _told(self, waiters: dict[int, list[asyncio.Future[str]]], model: int) -> str:
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiters.setdefault(model, []).append(waiter)
        self._news.set()
        return await waiter

    def _tell_who_waits(self, waiters: dict[int, list[asyncio.Future[str]]], model: int, why_not: str = "") -> None:
        for waiter in waiters.pop(model, ()):
            if not waiter.done():
                waiter.set_result(why_not)

    def died(self, model: int) -> None:
        """All its engines have been given up."""
        self.policy.died(model)
        self._show(model)
        for waiters in (self._waking, self._falling):
            self._tell_who_waits(waiters, model, f"{self._names[model]} has ended for good")
        self._news.set()

    def _show(self, model: int) -> None:
        with self._shared_state.lock():  # who lets requests in holds it: whoever comes later sees it
            self._shared_state.sleep_states[model] = self.policy.sleep_states[model]

    def _open(self, model: int) -> int:
        """Requests that were let in and have not ended."""
        return int(self._shared_state.load[:, model, ENTERED].sum())

    async def _idle(self, model: int, seconds: float) -> bool:
        """Wait for the end of its requests. False where some are left."""
        until = time.monotonic() + seconds
        while self._open(model) and time.monotonic() < until:
            await asyncio.sleep(POLL_SECONDS)
        return not self._open(model)

    async def _fall(self, move: SleepMove, level: int, patience: float | None) -> None:
        """`patience`: an operator's, in seconds, after which requests are ended; None: it is for another model, and
        nobody's request is ended for that."""
        model, name = move.model, self._names[move.model]
        self._show(model)
        begun = time.monotonic()
        if not await self._idle(model, self._patience if patience is None else patience):
            if patience is None:
                self._stay(model)
                return
            self._tell(Interrupt(model))
            await self._idle(model, LAST_ANSWERS)
        levels = [await sleeper.sleep(level) for sleeper in self._sleepers[model]]
        if self.policy.sleep_states[model] is SleepState.DEAD:
            return
        self.policy.slept(model)
        self._show(model)
        self._metrics.model_sleeps.labels(name).inc()
        logger.info("%s sleeps, at level %d, after %.1f s", name, max(levels), time.monotonic() - begun)
        self._tell_who_waits(self._falling, model)

    def _stay(self, model: int) -> None:
        loser = self.policy.stayed(model)
        self._show(model)
        why = f"{self._names[model]} has requests that take longer than --drain-timeout"
        logger.warning("%s: it stays awake", why)
        self._tell_who_waits(self._waking, model)
        if loser is not None:
            self._tell_who_waits(self._waking, loser, why)

    async def _rise(self, model: int) -> None:
        name, begun = self._names[model], time.monotonic()
        self._show(model)
        woken = await asyncio.gather(*(sleeper.wake() for sleeper in self._sleepers[model]))
        while any(woken) and not self._served(model) and self.policy.sleep_states[model] is SleepState.WAKING:
            await asyncio.sleep(POLL_SECONDS)
        if self.policy.sleep_states[model] is not SleepState.WAKING:
            return  # it has died, and who waits was told
        if not any(woken):
            for sleeper in self._sleepers[model]:
                await sleeper.sleep(2)
            self.policy.slept(model)
            self.policy.forgo(model)
            self._show(model)
            logger.error("%s could not be woken", name)
            self._tell_who_waits(self._waking, model, f"{name} could not be woken")
            return
        self._shared_state.used[model] = time.time()
        self.policy.woke(model)
        self._show(model)
        seconds = time.monotonic() - begun
        self._metrics.model_wakes.labels(name).inc()
        self._metrics.model_wake_seconds.observe(seconds)
        logger.info("%s is awake, after %.1f s", name, seconds)
        self._tell_who_waits(self._waking, model)

    def _served(self, model: int) -> bool:
        return any(self._serves(engine) for engine in self._engines[model])
