"""An engine's supervisor while the memory of a killed engine is not freed yet."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from weft.engine.wire.heartbeat import Heartbeats
from weft.engine.wire.spawn import UNKNOWN_END, EngineProcess
from weft.server.daemon import engine_supervisor
from weft.server.daemon.control import EngineDown
from weft.server.daemon.engine_supervisor import EngineSupervisor


class Held:
    """An engine process that has been killed, unless it `lives`. It is `gone` once its memory is freed."""

    address, pid, stopping = "ipc:///nowhere", 4_000_000, False

    def __init__(self, *, lives: bool) -> None:
        self.gone = asyncio.Event()
        self._lives = lives

    async def wait_dead(self) -> str:
        if self._lives:
            await self.gone.wait()
        return UNKNOWN_END

    async def wait_gone(self) -> str:
        await self.gone.wait()
        return "the engine ended (signal SIGKILL)"

    async def stop(self, _seconds: float) -> None:
        await self.wait_gone()

    def kill(self, why: str = "") -> None:
        pass


class Owner:
    """A daemon that starts `processes` in sequence."""

    def __init__(self) -> None:
        self.processes: list[Held] = []
        self.reported: list[EngineDown] = []
        self.ending = False
        self.heartbeats = Heartbeats(1)
        self.numbers = itertools.count(1)
        cell = SimpleNamespace(inc=lambda: None)
        self.metrics: Any = SimpleNamespace(
            engine_restarts=SimpleNamespace(labels=lambda *_: cell), restarts_given_up=cell, count_iteration=print
        )

    async def started(self, start: Coroutine[Any, Any, Any], /) -> Any:
        start.close()
        self.processes.append(Held(lives=bool(self.processes)))
        return self.processes[-1]

    def engine_started(self, engine: int) -> None: ...

    def engine_ready(self, engine: int) -> None: ...

    def engine_ended(self, _engine: int, message: EngineDown) -> None:
        self.reported.append(message)


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> EngineSupervisor:
    monkeypatch.setattr(engine_supervisor, "RELEASE_SECONDS", 0.05)
    monkeypatch.setattr(engine_supervisor, "RESTART_SECONDS", (0.05, 0.05))

    async def start(*_: object) -> None: ...

    monkeypatch.setattr(EngineProcess, "start", start)
    config: Any = SimpleNamespace(share=SimpleNamespace(engine=0))
    supervisor = EngineSupervisor(Owner(), config, restart=True, limit=10, several=False)
    supervisor.worked = True
    return supervisor


async def until_it_waits(owner: Owner) -> None:
    async with asyncio.timeout(240):
        while owner.heartbeats.stage(0) != "releasing its memory":
            await asyncio.sleep(0.01)


async def test_no_engine_follows_if_the_daemon_starts_to_exit_while_memory_is_freed(
    supervisor: EngineSupervisor,
) -> None:
    owner: Any = supervisor._owner
    keeping = asyncio.create_task(supervisor.run())
    await until_it_waits(owner)
    assert owner.reported[0].restarting, "clients have been told already"
    owner.ending = True
    owner.processes[0].gone.set()
    assert await asyncio.wait_for(keeping, 240) == "the engine ended (signal SIGKILL)"
    assert supervisor.given_up
    assert len(owner.processes) == 1
    supervisor.close()


async def test_an_api_process_that_starts_late_gets_the_reason(supervisor: EngineSupervisor) -> None:
    supervisor.worked = False  # it could not start, so it is given up
    owner: Any = supervisor._owner
    keeping = asyncio.create_task(supervisor.run())
    await until_it_waits(owner)
    (reported,) = owner.reported
    assert supervisor.greeting(7) == reported, "its memory is held"
    owner.processes[0].gone.set()
    await asyncio.wait_for(keeping, 240)
    greeting = supervisor.greeting(7)
    assert isinstance(greeting, EngineDown)
    assert (greeting.why, greeting.restarting) == ("the engine ended (signal SIGKILL)", False)
    supervisor.close()


async def test_its_exit_is_reported_once_it_is_known(
    supervisor: EngineSupervisor, caplog: pytest.LogCaptureFixture
) -> None:
    owner: Any = supervisor._owner
    keeping = asyncio.create_task(supervisor.run())
    await until_it_waits(owner)
    assert f"{UNKNOWN_END}; waiting for its memory" in caplog.text
    owner.processes[0].gone.set()
    async with asyncio.timeout(240):
        while len(owner.processes) < 2:
            await asyncio.sleep(0.01)
    assert "the engine ended (signal SIGKILL); restarting in" in caplog.text
    assert supervisor.failure is not None
    assert supervisor.failure.why == "the engine ended (signal SIGKILL)"
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    owner.processes[-1].gone.set()
    await supervisor.stop()
    supervisor.close()


async def test_a_hung_engine_stays_given_up_for_probes_while_its_memory_is_held(supervisor: EngineSupervisor) -> None:
    owner: Any = supervisor._owner
    keeping = asyncio.create_task(supervisor.run())
    async with asyncio.timeout(240):
        while not owner.reported:
            owner.heartbeats.of(0).condemn()
            await asyncio.sleep(0)
    await asyncio.sleep(0.2)
    assert owner.heartbeats.of(0).condemned
    keeping.cancel()
    await asyncio.gather(keeping, return_exceptions=True)
    owner.processes[-1].gone.set()
    await supervisor.stop()
    supervisor.close()
