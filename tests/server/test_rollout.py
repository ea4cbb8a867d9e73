"""`Rollout` on made-up supervisors: the order of restarts, refusals, and its end."""

from __future__ import annotations

import asyncio
import contextlib
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weft.server.daemon.engine_supervisor import EngineSupervisor
from weft.server.daemon.rollout import Rollout
from weft.server.observe.shared_state import SharedState


class Engines:
    """`count` engines, some of them given up. `broken`: engines that do not return."""

    def __init__(
        self, count: int, *, given_up: set[int], broken: frozenset[int] = frozenset(), patience: float = 0.0
    ) -> None:
        self.restarted: list[int] = []
        self._broken = broken
        self._supervisors = {
            i: SimpleNamespace(asleep=0, given_up=i in given_up, restart=lambda i=i: self._restart(i))
            for i in range(count)
        }
        supervisors = cast("dict[int, EngineSupervisor]", self._supervisors)
        self.rollout = Rollout(supervisors, [range(count)], SharedState(1, engines=count), patience, self._serves)

    def _serves(self, engine: int) -> bool:
        return not self._supervisors[engine].given_up

    async def _restart(self, engine: int) -> bool:
        self.restarted.append(engine)
        self._supervisors[engine].given_up = engine in self._broken
        return engine not in self._broken

    async def end(self) -> None:
        work = cast("asyncio.Task[Any]", self.rollout._work)
        await asyncio.wait_for(work, 240)


async def test_given_up_engines_are_restarted_first() -> None:
    engines = Engines(3, given_up={1})
    assert engines.rollout.begin([]) == ""
    await engines.end()
    assert engines.restarted == [1, 0, 2]


async def test_an_engine_that_does_not_return_ends_it_and_the_others_keep_serving() -> None:
    engines = Engines(3, given_up={1}, broken=frozenset({1}))
    assert engines.rollout.begin([]) == ""
    await engines.end()
    assert engines.restarted == [1]
    assert engines.rollout.begin([2]) == ""
    await engines.end()
    assert engines.restarted == [1, 2]


@pytest.mark.parametrize(("requested", "refused"), [([0], True), ([1], False), ([], False)])
async def test_the_last_engine_is_not_restarted(requested: list[int], refused: bool) -> None:
    engines = Engines(2, given_up={1})
    assert engines.rollout.begin(requested).startswith("the only engine cannot be restarted") == refused


async def test_it_ends_if_no_other_engine_will_serve() -> None:
    engines = Engines(2, given_up=set())
    assert engines.rollout.begin([0]) == ""
    engines._supervisors[1].given_up = True
    await engines.end()
    assert engines.restarted == []


async def test_it_ends_when_the_daemon_is_stopped() -> None:
    """An engine that waits for its open requests keeps them for as long as the daemon waits, and is not killed."""
    engines = Engines(2, given_up=set(), patience=240.0)
    shared_state = engines.rollout._shared_state
    shared_state.engine_load[0, 0] = 1
    assert engines.rollout.begin([]) == ""
    while not shared_state.closed[0]:
        await asyncio.sleep(0)
    engines.rollout.stop()
    with contextlib.suppress(asyncio.CancelledError):
        await engines.end()
    assert (engines.restarted, shared_state.closed.any()) == ([], False)
    assert engines.rollout.begin([]) == "the daemon has been asked to end"
