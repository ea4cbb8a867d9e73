"""Sleep and waking of models, with fake engines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from math import inf

import pytest

from weft.server.daemon import sleep_manager
from weft.server.daemon.control import Interrupt
from weft.server.daemon.sleep_manager import SleepManager
from weft.server.daemon.wake_policy import WakePolicy
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import ENTERED, WAITING, SharedState, SleepState

pytestmark = pytest.mark.asyncio

NAMES = ["a", "b", "c"]


@pytest.fixture(autouse=True)
def no_client_returns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sleep_manager, "RETURN_SECONDS", 0.0)


class Engine:
    """Sleeps and wakes when the test allows it."""

    def __init__(self, *, awake: bool) -> None:
        self.given_up = False
        self.level = 0 if awake else 2
        self.lets = asyncio.Event()
        self.lets.set()
        self.wakes = True
        self.least_level = 1

    async def sleep(self, level: int) -> int:
        self.level = max(self.level, level, self.least_level)
        return self.level

    async def wake(self) -> bool:
        await self.lets.wait()
        if self.wakes:
            self.level = 0
        return self.wakes


class Daemon:
    def __init__(self, shares: list[float], most: int | None, patience: float) -> None:
        policy = WakePolicy(shares, most)
        count = len(shares)
        self.shared_state = SharedState(2, engines=count, models=count)
        self.metrics = Metrics(self.shared_state, 0, models={name: [i] for i, name in enumerate(NAMES[:count])})
        self.engines = [Engine(awake=state is SleepState.AWAKE) for state in policy.sleep_states]
        self.messages: list[Interrupt] = []
        self.manager = SleepManager(
            policy,
            NAMES,
            [[i] for i in range(count)],
            [[engine] for engine in self.engines],
            self.shared_state,
            self.metrics,
            patience=patience,
            serves=lambda _: True,
            broadcast=self._broadcast,
        )

    def _broadcast(self, message: Interrupt) -> None:
        self.messages.append(message)
        assert message.model is not None
        self.shared_state.load[1, message.model, ENTERED] = 0  # its answers end

    @property
    def sleep_state(self) -> list[SleepState]:
        return [SleepState(int(state)) for state in self.shared_state.sleep_states]

    def opens(self, model: int, count: int = 1) -> None:
        """Requests that are admitted."""
        self.shared_state.load[1, model, ENTERED] = count


@asynccontextmanager
async def daemon(shares: list[float], most: int | None = None, patience: float = 60) -> AsyncIterator[Daemon]:
    made = Daemon(shares, most, patience)
    made.manager.begin()
    work = asyncio.create_task(made.manager.run())
    try:
        yield made
        assert made.sleep_state == made.manager.policy.sleep_states
        made.manager.policy.check()
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(240):
        while not condition():
            await asyncio.sleep(0.005)


async def waiting_in_vain(made: Daemon) -> asyncio.Task[str]:
    """Return a wake of model 0, for which model 1 does not sleep yet."""
    back = asyncio.create_task(made.manager.wake(0))
    await until(lambda: 0 in made.manager.policy.wanted)
    for _ in range(5):
        await asyncio.sleep(0.03)
        assert made.sleep_state[1] is SleepState.AWAKE
    return back


async def test_the_least_recently_used_model_sleeps_for_a_requested_one() -> None:
    async with daemon([0.5, 0.5, 0.5]) as made:
        made.shared_state.used[:] = [2.0, 1.0, 0.0]
        assert await made.manager.wake(2) == ""
        assert made.sleep_state == [SleepState.AWAKE, SleepState.ASLEEP, SleepState.AWAKE]
        assert [engine.level for engine in made.engines] == [0, 1, 0]
        assert await made.manager.wake(1) == ""
        assert made.sleep_state == [SleepState.ASLEEP, SleepState.AWAKE, SleepState.AWAKE]
        text = made.metrics.render().decode()
        assert 'weft_model_state{model_name="a",state="asleep"} 1.0' in text
        asleep = [f'weft_engine_asleep{{engine="{i}"}} {sleeps}' for i, sleeps in enumerate((1.0, 0.0, 0.0))]
        assert set(asleep) <= set(text.splitlines())
        assert 'weft_model_sleeps_total{model_name="b"} 1.0' in text
        assert 'weft_model_wakes_total{model_name="b"} 1.0' in text


async def test_it_sleeps_once_its_requests_have_ended_and_accepts_no_more() -> None:
    async with daemon([1.0, 1.0]) as made:
        made.opens(0)
        waking = asyncio.create_task(made.manager.wake(1))
        await until(lambda: made.sleep_state[0] is SleepState.FALLING_ASLEEP)
        assert made.engines[0].level == 0
        made.opens(0, 0)
        assert await waking == ""
        assert not made.messages


async def test_a_paused_model_keeps_its_memory_until_an_operator_resumes_it() -> None:
    async with daemon([1.0, 1.0]) as made:
        made.opens(0)
        pausing = asyncio.create_task(made.manager.sleep(0, 0, 60))
        await until(lambda: made.sleep_state[0] is SleepState.FALLING_ASLEEP)
        made.opens(0, 0)
        assert await pausing == ""
        assert made.sleep_state == [SleepState.PAUSED, SleepState.ASLEEP]
        assert made.engines[0].level == 0
        assert not made.messages
        waiting = [asyncio.create_task(made.manager.wake(model)) for model in (0, 1)]
        await asyncio.sleep(0.1)
        assert not any(task.done() for task in waiting)
        assert made.sleep_state == [SleepState.PAUSED, SleepState.ASLEEP]
        assert await made.manager.sleep(0, 0, None) == ""
        assert await made.manager.wake(0, operator=True) == ""
        assert await asyncio.gather(*waiting) == ["", ""]  # then the other model gets its memory


async def test_a_pause_interrupts_requests_that_outlast_it() -> None:
    async with daemon([1.0]) as made:
        made.opens(0)
        assert await made.manager.sleep(0, 0, 0) == ""
        assert made.messages == [Interrupt(0)]
        assert made.sleep_state == [SleepState.PAUSED]
        assert await made.manager.sleep(0, 1, 0) == ""
        assert made.sleep_state == [SleepState.ASLEEP]
        assert await made.manager.sleep(0, 0, 0) == "a is asleep"
        assert await made.manager.wake(0, operator=True) == ""


async def test_an_operator_who_resumes_during_a_pause_ends_it() -> None:
    async with daemon([1.0]) as made:
        made.opens(0)
        pausing = asyncio.create_task(made.manager.sleep(0, 0, 60))
        await until(lambda: made.sleep_state[0] is SleepState.FALLING_ASLEEP)
        resuming = asyncio.create_task(made.manager.wake(0, operator=True))
        await asyncio.sleep(0.05)
        made.opens(0, 0)
        assert await asyncio.gather(pausing, resuming) == ["", ""]
        assert made.sleep_state == [SleepState.AWAKE]


async def test_no_request_is_ended_for_another_model() -> None:
    async with daemon([1.0, 1.0], patience=0) as made:
        made.opens(0)
        assert await made.manager.wake(1) == "a has requests that take longer than --drain-timeout"
        assert made.sleep_state == [SleepState.AWAKE, SleepState.ASLEEP]
        assert not made.messages
        made.opens(0, 0)
        assert await made.manager.wake(1) == ""


async def test_long_requests_get_twice_as_long_each_time_until_their_model_sleeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with daemon([1.0, 1.0], patience=30) as made:
        waits: list[float] = []

        async def idle(model: int, seconds: float) -> bool:
            waits.append(seconds)
            if seconds == inf:
                made.opens(model, 0)
            return not made.shared_state.load[:, model, ENTERED].any()

        monkeypatch.setattr(made.manager, "_idle", idle)
        for _ in range(5):
            made.opens(0)
            assert await made.manager.wake(1) == "a has requests that take longer than --drain-timeout"
        assert await made.manager.wake(1) == ""
        assert await made.manager.wake(0) == ""
        assert waits == [30, 60, 120, 240, 480, inf, 30]


async def test_a_model_without_requests_sleeps_rather_than_one_with_some() -> None:
    async with daemon([0.5, 0.5, 0.5]) as made:
        made.shared_state.used[:] = [1.0, 2.0, 0.0]
        made.opens(0)
        assert await made.manager.wake(2) == ""
        assert made.sleep_state == [SleepState.AWAKE, SleepState.ASLEEP, SleepState.AWAKE]


async def test_a_model_that_wakes_after_its_clients_were_refused_stays_awake_until_they_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(sleep_manager, "RETURN_SECONDS", 1e9)
    async with daemon([1.0, 1.0]) as made:
        assert await made.manager.wake(1) == ""
        back = await waiting_in_vain(made)
        made.shared_state.used[1] = time.monotonic()  # one has returned
        assert await back == ""
        made.shared_state.load[1, 1, WAITING] = 1
        waking = asyncio.create_task(made.manager.wake(1))
        await until(lambda: made.sleep_state[1] is SleepState.AWAKE or 1 in made.manager.policy.wanted)
        made.shared_state.used[0] = time.monotonic()
        assert await waking == ""
        made.shared_state.load[1, 1, WAITING] = 0
        assert await made.manager.wake(0) == "", "a request waited, so it has had its turn"


async def test_a_model_that_dies_while_it_falls_asleep_harms_no_other_if_its_clients_keep_their_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with daemon([0.5, 0.5, 1.0]) as made, asyncio.timeout(60):
        late = asyncio.Event()

        async def idle(model: int, _: float) -> bool:
            if model == 0:
                await late.wait()
            return model != 0

        monkeypatch.setattr(made.manager, "_idle", idle)
        waking = asyncio.create_task(made.manager.wake(2))
        await until(lambda: made.sleep_state[0] is SleepState.FALLING_ASLEEP)
        made.manager.died(0)
        late.set()
        assert await waking == ""
        await until(lambda: not made.manager._work)
        assert made.sleep_state == [SleepState.DEAD, SleepState.ASLEEP, SleepState.AWAKE]
        assert await made.manager.wake(1) == ""


async def test_a_model_wakes_once_an_operator_has_put_it_to_deeper_sleep() -> None:
    async with daemon([1.0]) as made:
        assert await made.manager.sleep(0, 1, 0) == ""
        begun, ends, woken = asyncio.Event(), asyncio.Event(), asyncio.Event()

        class Slow(Engine):
            async def sleep(self, level: int) -> int:
                begun.set()
                await ends.wait()
                return await super().sleep(level)

            async def wake(self) -> bool:
                woken.set()
                return await super().wake()

        engine = Slow(awake=False)
        made.manager._engines = [[engine]]  # type: ignore[list-item]
        deeper = asyncio.create_task(made.manager.sleep(0, 2, 0))
        await begun.wait()
        waking = asyncio.create_task(made.manager.wake(0))
        await until(lambda: made.sleep_state != [SleepState.ASLEEP])
        await asyncio.sleep(0.05)
        assert not woken.is_set()
        ends.set()
        assert await asyncio.gather(deeper, waking) == ["", ""]
        assert engine.level == 0


async def test_an_operator_ends_requests_after_the_given_time() -> None:
    async with daemon([0.5, 0.5]) as made:
        made.opens(0, 3)
        assert await made.manager.sleep(0, 2, 0.0) == ""
        assert [message.model for message in made.messages] == [0]
        assert (made.sleep_state[0], made.engines[0].level) == (SleepState.ASLEEP, 2)
        assert await made.manager.sleep(0, 1, None) == ""  # it does
        assert await made.manager.wake(0) == ""
        assert made.engines[0].level == 0


async def test_a_sleeping_model_can_be_put_to_a_deeper_sleep() -> None:
    async with daemon([1.0]) as made:
        assert await made.manager.sleep(0, 1, None) == ""
        assert made.engines[0].level == 1
        assert await made.manager.sleep(0, 2, None) == ""
        assert made.engines[0].level == 2


async def test_a_model_that_cannot_wake_stays_asleep_and_its_requests_fail() -> None:
    async with daemon([1.0, 1.0]) as made:
        made.engines[1].wakes = False
        assert await made.manager.wake(1) == "b could not be woken"
        assert made.sleep_state == [SleepState.ASLEEP, SleepState.ASLEEP]
        assert await made.manager.wake(0) == ""
        made.engines[1].wakes = True
        assert await made.manager.wake(1) == ""


async def test_a_dead_model_leaves_its_memory_to_others() -> None:
    async with daemon([1.0, 1.0]) as made:
        made.engines[1].lets.clear()
        waking = asyncio.create_task(made.manager.wake(1))
        await until(lambda: made.sleep_state[1] is SleepState.WAKING)
        assert await made.manager.sleep(1, 1, None) == "b is waking"
        made.manager.died(1)
        assert await waking == "b has failed and is not restarted; restart the daemon"
        made.engines[1].lets.set()
        assert await made.manager.wake(0) == ""
        assert await made.manager.wake(1) == "b has failed and is not restarted; restart the daemon"
        assert made.sleep_state == [SleepState.AWAKE, SleepState.DEAD]


async def test_waiting_requests_enter_before_the_model_sleeps_again() -> None:
    async with daemon([1.0, 1.0]) as made:
        made.shared_state.load[1, 1, WAITING] = 1
        assert await made.manager.wake(1) == ""
        back = await waiting_in_vain(made)
        made.shared_state.load[1, 1, WAITING] = 0
        assert await back == ""


async def test_no_model_moves_before_the_daemon_has_started() -> None:
    made = Daemon([1.0, 1.0], None, 60)
    work = asyncio.create_task(made.manager.run())
    waking = asyncio.create_task(made.manager.wake(1))
    assert await made.manager.sleep(0, 1, None) == "the daemon is still starting"
    await until(lambda: 1 in made.manager.policy.wanted)
    assert made.sleep_state == [SleepState.AWAKE, SleepState.ASLEEP]
    made.manager.begin()
    assert await waking == ""
    work.cancel()
    await asyncio.gather(work, return_exceptions=True)


async def test_an_error_ends_the_sleep_manager_and_all_waits() -> None:
    made = Daemon([1.0, 1.0], None, 60)

    async def breaks(_: int) -> int:
        raise ZeroDivisionError

    made.engines[0].sleep = breaks  # type: ignore[method-assign]
    made.manager.begin()
    waking = asyncio.create_task(made.manager.wake(1))
    with pytest.raises(ZeroDivisionError):
        await made.manager.run()
    waking.cancel()
