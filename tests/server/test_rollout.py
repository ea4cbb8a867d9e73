"""`Rollout` on made-up supervisors: whose turn it is, what is refused, when it ends."""

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
    """So many, of which some have been given up; `broken`: they do not come back."""

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


async def test_who_was_given_up_is_tried_anew_and_first() -> None:
    engines = Engines(3, given_up={1})
    assert engines.rollout.begin([]) == ""
    await engines.end()
    assert engines.restarted == [1, 0, 2]


async def test_one_that_does_not_come_back_ends_it_and_the_rest_serve_on() -> None:
    engines = Engines(3, given_up={1}, broken=frozenset({1}))
    assert engines.rollout.begin([]) == ""
    await engines.end()
    assert engines.restarted == [1]
    assert engines.rollout.begin([2]) == ""
    await engines.end()
    assert engines.restarted == [1, 2]


@pytest.mark.parametrize(("asked", "refused"), [([0], True), ([1], False), ([], False)])
async def test_the_last_one_is_not_taken_away(asked: list[int], refused: bool) -> None:
    engines = Engines(2, given_up={1})
    assert engines.rollout.begin(asked).startswith("the only engine cannot be restarted") == refused


async def test_it_ends_where_nobody_else_will_serve() -> None:
    engines = Engines(2, given_up=set())
    assert engines.rollout.begin([0]) == ""
    engines._supervisors[1].given_up = True
    await engines.end()
    assert engines.restarted == []


async def test_it_ends_when_the_daemon_is_asked_to() -> None:
    """An engine that waits for its open requests keeps them for as long as the daemon waits, and is not ended."""
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
