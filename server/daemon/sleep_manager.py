"""`SleepManager` puts models to sleep and wakes them, as `WakePolicy` decides."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from math import inf
from typing import Any

from weft.server.daemon.control import Interrupt
from weft.server.daemon.engine_supervisor import EngineSupervisor
from weft.server.daemon.wake_policy import SleepMove, WakeMove, WakePolicy
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import ENTERED, WAITING, SharedState, SleepState

POLL_SECONDS = 0.02
LAST_ANSWERS = 5.0  # Seconds that interrupted requests get to end.
MAX_DOUBLED = (
    4  # Times that a model's requests get twice as long to end, for it to sleep for another. Then they all end.
)
RETURN_SECONDS = (
    15.0  # Seconds that a model stays awake for clients that were refused meanwhile: more than Retry-After.
)

logger = logging.getLogger("weft")


class SleepManager:
    """Moves models between sleep states. Per model: its name, its engine numbers and its engines."""

    def __init__(
        self, policy: WakePolicy, names: Sequence[str], engine_numbers: Sequence[Sequence[int]],
        engines: Sequence[Sequence[EngineSupervisor]], shared_state: SharedState, metrics: Metrics, *, patience: float,
        serves: Callable[[int], bool], broadcast: Callable[[Interrupt], None],
    ) -> None:  # fmt: skip
        """`patience`: seconds for open requests to finish. `serves`: whether all API processes are attached to an
        engine. `broadcast`: sends a message to all API processes."""
        self.policy = policy
        self._names, self._engine_numbers, self._engines = names, engine_numbers, engines
        self._shared_state, self._metrics = shared_state, metrics
        self._patience, self._serves, self._broadcast = patience, serves, broadcast
        self._waking: dict[int, list[asyncio.Future[str]]] = {}
        self._falling_asleep: dict[int, list[asyncio.Future[str]]] = {}
        """Waiters by model. Each receives an empty string, or the reason for a failure."""
        self._outlasted: Counter[int] = Counter()  # by model: times that its requests took too long for it to sleep
        self._woke: dict[int, float] = {}
        """When a model woke for which no request waited any more. It has no request yet."""
        self._deepening = [asyncio.Lock() for _ in names]
        """Held while an operator moves a sleeping model to level 2."""
        self._work: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._begun = asyncio.Event()
        self._defect: BaseException | None = None
        for model, state in enumerate(policy.sleep_states):
            shared_state.sleep_states[model] = state

    def begin(self) -> None:
        """Allow moves. Called once all models that are initially awake serve."""
        self._begun.set()

    async def run(self) -> None:
        """Run until cancelled."""
        try:
            await self._begun.wait()
            while True:
                for move in self.policy.moves(self._shared_state.used.tolist(), self._expected(), self._busy()):
                    self._begin(self._wake(move.model) if isinstance(move, WakeMove) else self._sleep(move, 1, None))
                self._changed.clear()
                with suppress(TimeoutError):
                    async with asyncio.timeout(POLL_SECONDS if self.policy.wanted else None):
                        await self._changed.wait()
                if self._defect is not None:
                    raise self._defect  # otherwise waiters would wait forever
        finally:
            for task in self._work:
                task.cancel()
            await asyncio.gather(*self._work, return_exceptions=True)

    def _expected(self) -> list[int]:
        """Return the models that requests are waiting for, or will soon try again."""
        waiting = {m for m in range(self._shared_state.models) if self._shared_state.load[:, m, WAITING].any()}
        for model, woke in list(self._woke.items()):
            if self._shared_state.used[model] != woke or time.monotonic() - woke > RETURN_SECONDS:
                del self._woke[model]
        return [*waiting.union(self._woke)]

    def _busy(self) -> list[int]:
        """Return the models with open requests."""
        return [m for m in range(self._shared_state.models) if self._shared_state.load[:, m, ENTERED].any()]

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._work.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._work.discard(task)
        self._changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            self._defect = error

    async def wake(self, model: int, *, operator: bool = False) -> str:
        """Queue a model for waking. Returns an empty string once it is awake, or the reason why it is not. A paused
        model waits for an `operator`."""
        if (
            operator
            and self.policy.sleep_states[model] is SleepState.FALLING_ASLEEP
            and self._falling_asleep.get(model)
        ):
            await self._outcome(self._falling_asleep, model)
        match self.policy.sleep_states[model]:
            case SleepState.AWAKE:
                return ""
            case SleepState.PAUSED if operator:
                self.policy.resumed(model)
                self._publish(model)
                logger.info("%s is resumed", self._names[model])
                self._resolve(self._waking, model)
                return ""
            case SleepState.DEAD:
                return self._dead(model)
        self.policy.request_wake(model)
        return await self._outcome(self._waking, model)

    async def sleep(self, model: int, level: int, seconds: float | None) -> str:
        """Put a model to sleep for an operator, or only pause it at level 0. Returns an empty string once it sleeps, or
        why it does not."""
        name = self._names[model]
        if not self._begun.is_set():
            return "the daemon is still starting"
        if not level and self.policy.sleep_states[model] is SleepState.PAUSED:
            return ""
        if level and self.policy.sleep_states[model] is SleepState.ASLEEP:
            async with self._deepening[model]:
                for engine in self._engines[model]:
                    await engine.sleep(level)
            return ""
        if not self.policy.begin_sleep(model):
            return f"{name} is {self.policy.sleep_states[model].word.replace('_', ' ')}"
        patience = self._patience if seconds is None else seconds
        self._begin(self._sleep(SleepMove(model), level, patience))
        return await self._outcome(self._falling_asleep, model)

    async def _outcome(self, waiters: dict[int, list[asyncio.Future[str]]], model: int) -> str:
        waiter: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        waiters.setdefault(model, []).append(waiter)
        self._changed.set()
        return await waiter

    def _resolve(self, waiters: dict[int, list[asyncio.Future[str]]], model: int, why_not: str = "") -> None:
        for waiter in waiters.pop(model, ()):
            if not waiter.done():
                waiter.set_result(why_not)

    def died(self, model: int) -> None:
        """Mark a model as dead after all its engines have been given up."""
        self.policy.died(model)
        self._publish(model)
        for waiters in (self._waking, self._falling_asleep):
            self._resolve(waiters, model, self._dead(model))
        self._changed.set()

    def _dead(self, model: int) -> str:
        return f"{self._names[model]} has failed and is not restarted; restart the daemon"

    def _publish(self, model: int) -> None:
        with self._shared_state.lock():  # requests enter under this lock, so that later ones see the new state
            self._shared_state.sleep_states[model] = self.policy.sleep_states[model]

    async def _idle(self, model: int, seconds: float) -> bool:
        """Wait for a model's admitted requests to end. Returns False if some are left."""
        until = time.monotonic() + seconds
        while (left := self._shared_state.load[:, model, ENTERED].sum()) and time.monotonic() < until:
            await asyncio.sleep(POLL_SECONDS)
        return not left

    async def _sleep(self, move: SleepMove, level: int, patience: float | None) -> None:
        """`patience`: seconds until open requests are interrupted; None to keep the model awake instead, after twice as
        long each time in a row. The sixth time it waits until all have ended, however long that takes. So long requests
        do not keep others' models asleep for ever."""
        model, name = move.model, self._names[move.model]
        self._publish(model)
        begun, outlasted = time.monotonic(), self._outlasted[model]
        doubled = inf if outlasted > MAX_DOUBLED else self._patience * 2**outlasted
        if not await self._idle(model, doubled if patience is None else patience):
            if patience is None:
                if self.policy.sleep_states[model] is not SleepState.DEAD:
                    self._cancel_sleep(model)
                return
            self._broadcast(Interrupt(model))
            await self._idle(model, LAST_ANSWERS)
        if not level and self.policy.sleep_states[model] is not SleepState.DEAD:
            self.policy.paused(model)
            self._publish(model)
            logger.info("%s is paused after %.1f s", name, time.monotonic() - begun)
            self._resolve(self._falling_asleep, model)
            return
        levels = [await engine.sleep(level) for engine in self._engines[model]]
        if self.policy.sleep_states[model] is SleepState.DEAD:
            return
        self.policy.slept(model)
        del self._outlasted[model]
        self._publish(model)
        self._metrics.model_sleeps.labels(name).inc()
        logger.info("%s sleeps at level %d after %.1f s", name, max(levels), time.monotonic() - begun)
        self._resolve(self._falling_asleep, model)

    def _cancel_sleep(self, model: int) -> None:
        self._outlasted[model] += 1
        loser = self.policy.sleep_cancelled(model)
        self._publish(model)
        why = f"{self._names[model]} has requests that take longer than --drain-timeout"
        logger.warning("%s: it stays awake", why)
        self._resolve(self._waking, model)
        if loser is not None:
            self._resolve(self._waking, loser, why)

    async def _wake(self, model: int) -> None:
        name, begun = self._names[model], time.monotonic()
        self._publish(model)
        async with self._deepening[model]:  # or an engine would be stopped while it wakes
            pass
        woken = await asyncio.gather(*(engine.wake() for engine in self._engines[model]))
        serves, engines = self._serves, self._engine_numbers[model]
        while any(woken) and not any(map(serves, engines)) and self.policy.sleep_states[model] is SleepState.WAKING:
            await asyncio.sleep(POLL_SECONDS)
        if self.policy.sleep_states[model] is not SleepState.WAKING:
            return  # it died, and `died` has resolved the waiters
        if not any(woken):
            for engine in self._engines[model]:
                await engine.sleep(2)
            self.policy.slept(model)
            self.policy.cancel_wake(model)
            self._publish(model)
            logger.error("%s could not be woken", name)
            self._resolve(self._waking, model, f"{name} could not be woken")
            return
        self._shared_state.used[model] = woke = time.monotonic()
        if not self._shared_state.load[:, model, WAITING].any():
            self._woke[model] = woke
        self.policy.woke(model)
        self._publish(model)
        seconds = time.monotonic() - begun
        self._metrics.model_wakes.labels(name).inc()
        self._metrics.model_wake_seconds.observe(seconds)
        logger.info("%s is awake after %.1f s", name, seconds)
        self._resolve(self._waking, model)
