"""Loads of adapters end with the engines that they wait for."""

from __future__ import annotations

import asyncio

import pytest

from weft.engine.errors import EngineDead
from weft.engine.wire.messages import AdapterNews, ToEngine
from weft.engine.wire.streams import Streams
from weft.server.api.adapter_names import AdapterNames

PATIENCE = 60.0  # seconds; a load waits for 120


class SilentEngine(Streams):
    """It answers when the test says so."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.received: list[ToEngine] = []

    def _send(self, message: ToEngine) -> None:
        self.received.append(message)

    def report(self, news: AdapterNews) -> None:
        assert self.on_adapter is not None
        self.on_adapter(news)


def attached(count: int) -> tuple[AdapterNames, list[SilentEngine]]:
    names, engines = AdapterNames(None), [SilentEngine(i) for i in range(count)]
    for engine in engines:
        names.attach(engine)
    return names, engines


async def begun(names: AdapterNames, engines: list[SilentEngine]) -> asyncio.Task[str]:
    load = asyncio.create_task(names.load("mine", "/adapters/mine"))
    while not all(engine.received for engine in engines):
        await asyncio.sleep(0)
    return load


async def test_a_load_fails_as_soon_as_the_only_engine_has_ended() -> None:
    names, engines = attached(1)
    load = await begun(names, engines)
    engines[0].mark_dead("the engine ended (signal SIGKILL)")
    with pytest.raises(EngineDead, match="signal SIGKILL"):
        await asyncio.wait_for(load, PATIENCE)
    assert names.find("mine") is None
    with pytest.raises(EngineDead, match="there is no engine"):
        await asyncio.wait_for(names.unload("mine"), PATIENCE)


async def test_a_load_waits_only_for_the_engines_that_live() -> None:
    names, engines = attached(2)
    load = await begun(names, engines)
    engines[0].mark_dead("the engine ended")
    engines[1].report(AdapterNews("mine", digest="d", path="/adapters/mine"))
    assert await asyncio.wait_for(load, PATIENCE) == ""
    successor = SilentEngine(2)
    names.attach(successor)
    assert [type(message).__name__ for message in successor.received] == ["LoadAdapter"]


async def test_a_load_that_fails_in_a_living_engine_fails() -> None:
    names, engines = attached(2)
    load = await begun(names, engines)
    engines[1].report(AdapterNews("mine", path="/adapters/mine", error="no such file"))
    engines[0].mark_dead("the engine ended")
    assert await asyncio.wait_for(load, PATIENCE) == "no such file"


async def test_all_engines_may_end() -> None:
    names, engines = attached(2)
    load = await begun(names, engines)
    for engine in engines:
        engine.mark_dead("the engine ended")
    with pytest.raises(EngineDead, match="the engine ended"):
        await asyncio.wait_for(load, PATIENCE)
