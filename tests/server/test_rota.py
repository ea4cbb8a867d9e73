"""Which models are awake: random orders of wishes, ends of sleep and waking, and deaths."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.server.daemon.rota import Fall, Rise, Rota
from weft.server.observe.board import Rest


class RotaMachine(RuleBasedStateMachine):
    """Whoever carries moves out is played by the rules: each move ends some time, well or not."""

    rota: Rota

    @initialize(
        shares=st.lists(st.sampled_from([0.25, 0.3, 0.4, 0.5, 0.6, 1.0]), min_size=3, max_size=5),
        most=st.none() | st.integers(1, 3),
        used=st.permutations([0.0, 1.0, 2.0, 3.0, 4.0]),
    )
    def begin(self, shares: list[float], most: int | None, used: list[float]) -> None:
        self.shares, self.most = shares, most
        self.rota = Rota(shares, most)
        assert self.rota.rest[0] is Rest.AWAKE  # the first one always fits
        self.used = used[: len(shares)]
        self.clock = 5.0
        self.automatic: set[int] = set()
        """models that fall for others"""

    def _any(self, data: Any, *rests: Rest) -> int | None:
        there = [m for m, rest in enumerate(self.rota.rest) if rest in rests]
        return data.draw(st.sampled_from(there)) if there else None

    @rule(data=st.data())
    def is_asked_something(self, data: Any) -> None:
        if (model := self._any(data, Rest.AWAKE)) is not None:
            self.clock += 1
            self.used[model] = self.clock

    @rule(data=st.data())
    def is_wanted(self, data: Any) -> None:
        if (model := self._any(data, *set(Rest) - {Rest.AWAKE})) is not None:
            self.rota.want(model)
            self._move([])

    @rule(data=st.data())
    def is_ordered_to_sleep(self, data: Any) -> None:
        if (model := self._any(data, *Rest)) is not None:
            was = self.rota.rest[model]
            assert self.rota.order(model) == (was is Rest.AWAKE)

    @rule(data=st.data())
    def moves(self, data: Any) -> None:
        awake = [m for m, rest in enumerate(self.rota.rest) if rest is Rest.AWAKE]
        self._move(data.draw(st.lists(st.sampled_from(awake), unique=True)) if awake else [])

    def _move(self, expected: list[int]) -> None:
        """What begins is what should."""
        awake = [m for m, rest in enumerate(self.rota.rest) if rest is Rest.AWAKE]
        before = list(self.rota.rest)
        for move in self.rota.moves(self.used, expected):
            if isinstance(move, Rise):
                assert before[move.model] is Rest.ASLEEP
                continue
            assert move.model not in expected
            assert before[move.model] is Rest.AWAKE
            others = [m for m in awake if self.rota.rest[m] is Rest.AWAKE and m not in expected]
            assert all(self.used[move.model] <= self.used[m] for m in others), "not the least recently used"
            self.automatic.add(move.model)

    @rule(data=st.data(), stays=st.booleans())
    def a_fall_ends(self, data: Any, stays: bool) -> None:
        if (model := self._any(data, Rest.FALLING_ASLEEP)) is None:
            return
        if stays and model in self.automatic:
            loser = self.rota.stayed(model)
            assert loser is None or loser not in self.rota.wanted
        else:
            self.rota.slept(model)
        self.automatic.discard(model)

    @rule(data=st.data(), well=st.booleans())
    def a_rise_ends(self, data: Any, well: bool) -> None:
        if (model := self._any(data, Rest.WAKING)) is None:
            return
        if well:
            self.rota.woke(model)
        else:
            self.rota.slept(model)
            self.rota.forgo(model)

    @rule(data=st.data(), now=st.sampled_from([False] * 7 + [True]))
    def one_dies(self, data: Any, now: bool) -> None:
        if now and (model := self._any(data, Rest.AWAKE, Rest.ASLEEP, Rest.WAKING, Rest.FALLING_ASLEEP)) is not None:
            self.rota.died(model)
            self.automatic.discard(model)

    @invariant()
    def what_is_awake_fits(self) -> None:
        if hasattr(self, "rota"):
            self.rota.check()

    @precondition(lambda self: hasattr(self, "rota"))
    @rule()
    def whoever_is_wanted_wakes(self) -> None:
        """With nobody in the way, and every move that begins ending well."""
        wanted = list(self.rota.wanted)
        woken = []
        for _ in range(20 * len(self.shares)):
            self._move([])
            for model, rest in enumerate(self.rota.rest):
                if rest is Rest.FALLING_ASLEEP:
                    self.rota.slept(model)
                    self.automatic.discard(model)
                elif rest is Rest.WAKING:
                    self.rota.woke(model)
                    woken.append(model)
                    self.clock += 1
                    self.used[model] = self.clock
            self.rota.check()
        assert not self.rota.wanted
        assert set(wanted) <= set(woken) | {m for m in wanted if self.rota.rest[m] is Rest.AWAKE}


TestRota = RotaMachine.TestCase
TestRota.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_models_that_fit_together_are_awake_from_the_start() -> None:
    rota = Rota([0.6, 0.5, 0.4])
    assert rota.rest == [Rest.AWAKE, Rest.ASLEEP, Rest.AWAKE]
    assert Rota([1 / 3] * 3).rest == [Rest.AWAKE] * 3
    assert Rota([0.1] * 3, most=2).rest == [Rest.AWAKE, Rest.AWAKE, Rest.ASLEEP]


def test_who_asks_first_gets_the_room_that_is_made_for_it() -> None:
    rota = Rota([0.5, 0.5, 1.0, 0.5])
    assert rota.order(1)
    rota.slept(1)
    rota.want(2)
    rota.want(3)  # would fit at once
    assert rota.moves([1.0, 0.0, 0.0, 0.0]) == [Fall(0)]
    assert rota.moves([1.0, 0.0, 0.0, 0.0]) == []
    rota.slept(0)
    assert rota.moves([1.0, 0.0, 0.0, 0.0]) == [Rise(2)]


@pytest.mark.parametrize("expected", [[], [0]])
def test_a_model_that_requests_are_about_to_enter_sleeps_for_nobody(expected: list[int]) -> None:
    rota = Rota([1.0, 1.0])
    rota.want(1)
    assert rota.moves([0.0, 0.0], expected) == ([] if expected else [Fall(0)])
