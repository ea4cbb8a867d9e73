"""Which models are awake: random orders of requests, ends of sleep and waking, and exits."""

from __future__ import annotations

from random import Random
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from weft.server.daemon.sleep_manager import MAX_DOUBLED
from weft.server.daemon.wake_policy import SleepMove, WakeMove, WakePolicy
from weft.server.observe.shared_state import SleepState


class WakeMachine(RuleBasedStateMachine):
    """The rules act as the sleep manager: every move ends at some point, successfully or not."""

    policy: WakePolicy

    @initialize(
        shares=st.lists(st.sampled_from([0.25, 0.3, 0.4, 0.5, 0.6, 1.0]), min_size=3, max_size=5),
        most=st.none() | st.integers(1, 3),
        used=st.permutations([0.0, 1.0, 2.0, 3.0, 4.0]),
    )
    def begin(self, shares: list[float], most: int | None, used: list[float]) -> None:
        self.shares, self.most = shares, most
        self.policy = WakePolicy(shares, most)
        assert self.policy.sleep_states[0] is SleepState.AWAKE  # the first one always fits
        self.used = used[: len(shares)]
        self.clock = 5.0
        self.automatic: set[int] = set()
        """Models put to sleep for others."""

    def _any(self, data: Any, *states: SleepState) -> int | None:
        there = [m for m, state in enumerate(self.policy.sleep_states) if state in states]
        return data.draw(st.sampled_from(there)) if there else None

    @rule(data=st.data())
    def is_asked_something(self, data: Any) -> None:
        if (model := self._any(data, SleepState.AWAKE)) is not None:
            self.clock += 1
            self.used[model] = self.clock

    @rule(data=st.data())
    def is_wanted(self, data: Any) -> None:
        if (model := self._any(data, *set(SleepState) - {SleepState.AWAKE})) is not None:
            self.policy.request_wake(model)
            self._move([])

    @rule(data=st.data())
    def is_ordered_to_sleep(self, data: Any) -> None:
        if (model := self._any(data, *SleepState)) is not None:
            was = self.policy.sleep_states[model]
            assert self.policy.begin_sleep(model) == (was is SleepState.AWAKE)

    @rule(data=st.data())
    def moves(self, data: Any) -> None:
        awake = [m for m, state in enumerate(self.policy.sleep_states) if state is SleepState.AWAKE]
        self._move(data.draw(st.lists(st.sampled_from(awake), unique=True)) if awake else [])

    def _move(self, expected: list[int]) -> None:
        """What begins is what should."""
        awake = [m for m, state in enumerate(self.policy.sleep_states) if state is SleepState.AWAKE]
        before = list(self.policy.sleep_states)
        for move in self.policy.moves(self.used, expected):
            if isinstance(move, WakeMove):
                assert before[move.model] is SleepState.ASLEEP
                continue
            assert move.model not in expected
            assert before[move.model] is SleepState.AWAKE
            others = [m for m in awake if self.policy.sleep_states[m] is SleepState.AWAKE and m not in expected]
            assert all(self.used[move.model] <= self.used[m] for m in others), "not the least recently used"
            self.automatic.add(move.model)

    @rule(data=st.data(), stays=st.booleans())
    def a_sleep_move_ends(self, data: Any, stays: bool) -> None:
        if (model := self._any(data, SleepState.FALLING_ASLEEP)) is None:
            return
        if stays and model in self.automatic:
            loser = self.policy.sleep_cancelled(model)
            assert loser is None or loser not in self.policy.wanted
        else:
            self.policy.slept(model)
        self.automatic.discard(model)

    @rule(data=st.data(), well=st.booleans())
    def a_wake_move_ends(self, data: Any, well: bool) -> None:
        if (model := self._any(data, SleepState.WAKING)) is None:
            return
        if well:
            self.policy.woke(model)
        else:
            self.policy.slept(model)
            self.policy.cancel_wake(model)

    @rule(data=st.data(), now=st.sampled_from([False] * 7 + [True]))
    def one_dies(self, data: Any, now: bool) -> None:
        if (
            now
            and (
                model := self._any(
                    data, SleepState.AWAKE, SleepState.ASLEEP, SleepState.WAKING, SleepState.FALLING_ASLEEP
                )
            )
            is not None
        ):
            self.policy.died(model)
            self.automatic.discard(model)

    @invariant()
    def what_is_awake_fits(self) -> None:
        if hasattr(self, "policy"):
            self.policy.check()

    @precondition(lambda self: hasattr(self, "policy"))
    @rule()
    def every_requested_model_wakes(self) -> None:
        """Holds if nothing else blocks it and every started move ends well."""
        wanted = list(self.policy.wanted)
        woken = []
        for _ in range(20 * len(self.shares)):
            self._move([])
            for model, state in enumerate(self.policy.sleep_states):
                if state is SleepState.FALLING_ASLEEP:
                    self.policy.slept(model)
                    self.automatic.discard(model)
                elif state is SleepState.WAKING:
                    self.policy.woke(model)
                    woken.append(model)
                    self.clock += 1
                    self.used[model] = self.clock
            self.policy.check()
        assert not self.policy.wanted
        assert set(wanted) <= set(woken) | {m for m in wanted if self.policy.sleep_states[m] is SleepState.AWAKE}


TestRota = WakeMachine.TestCase
TestRota.settings = settings(max_examples=40, stateful_step_count=25, deadline=None, derandomize=True)


def test_models_that_fit_together_are_awake_from_the_start() -> None:
    policy = WakePolicy([0.6, 0.5, 0.4])
    assert policy.sleep_states == [SleepState.AWAKE, SleepState.ASLEEP, SleepState.AWAKE]
    assert WakePolicy([1 / 3] * 3).sleep_states == [SleepState.AWAKE] * 3
    assert WakePolicy([0.1] * 3, most=2).sleep_states == [SleepState.AWAKE, SleepState.AWAKE, SleepState.ASLEEP]


def test_the_first_request_gets_the_memory_freed_for_it() -> None:
    policy = WakePolicy([0.5, 0.5, 1.0, 0.5])
    assert policy.begin_sleep(1)
    policy.slept(1)
    policy.request_wake(2)
    policy.request_wake(3)  # would fit at once
    assert policy.moves([1.0, 0.0, 0.0, 0.0]) == [SleepMove(0)]
    assert policy.moves([1.0, 0.0, 0.0, 0.0]) == []
    policy.slept(0)
    assert policy.moves([1.0, 0.0, 0.0, 0.0]) == [WakeMove(2)]


@pytest.mark.parametrize("expected", [[], [0]])
def test_a_model_about_to_receive_requests_is_not_put_to_sleep(expected: list[int]) -> None:
    policy = WakePolicy([1.0, 1.0])
    policy.request_wake(1)
    assert policy.moves([0.0, 0.0], expected) == ([] if expected else [SleepMove(0)])


def test_a_model_that_only_a_paused_one_keeps_asleep_blocks_no_other() -> None:
    policy = WakePolicy([0.5, 0.5, 1.0, 0.5])
    assert policy.begin_sleep(0)
    policy.paused(0)
    policy.request_wake(2)
    assert policy.moves([0.0] * 4) == [], "no model sleeps in vain"
    policy.request_wake(3)
    assert policy.moves([0.0] * 4) == [SleepMove(1)]
    policy.slept(1)
    assert policy.moves([0.0] * 4) == [WakeMove(3)]
    policy.woke(3)
    policy.resumed(0)
    assert policy.moves([0.0] * 4) == [SleepMove(0), SleepMove(3)]


def test_long_requests_refuse_the_model_that_waited_for_them_not_one_that_a_paused_model_blocks() -> None:
    policy = WakePolicy([0.5, 0.5, 1.0, 0.5])
    assert policy.begin_sleep(0)
    policy.paused(0)
    policy.request_wake(2)
    policy.request_wake(3)
    assert policy.moves([0.0] * 4) == [SleepMove(1)]
    assert policy.sleep_cancelled(1) == 3
    assert list(policy.wanted) == [2]


def test_a_model_that_is_resumed_leaves_the_line() -> None:
    policy = WakePolicy([1.0, 1.0])
    assert policy.begin_sleep(0)
    policy.request_wake(1)
    policy.request_wake(0)
    policy.paused(0)
    policy.resumed(0)
    assert policy.moves([0.0] * 2) == [SleepMove(0)]
    policy.slept(0)
    assert policy.moves([0.0] * 2) == [WakeMove(1)]
    policy.woke(1)
    assert policy.moves([0.0] * 2) == [], "no request waits for the first model"


def test_a_model_that_stays_asleep_for_long_requests_keeps_its_place_in_line() -> None:
    policy = WakePolicy([1.0, 1.0, 1.0])
    policy.request_wake(2)
    policy.request_wake(1)
    assert policy.moves([0.0] * 3) == [SleepMove(0)]
    assert policy.sleep_cancelled(0) == 2
    policy.request_wake(2)
    assert list(policy.wanted) == [2, 1]


def test_a_model_that_cannot_be_woken_goes_to_the_end_of_the_line() -> None:
    policy = WakePolicy([1.0, 1.0, 1.0])
    assert policy.begin_sleep(0)
    policy.slept(0)
    policy.request_wake(2)
    policy.request_wake(1)
    assert policy.moves([0.0] * 3) == [WakeMove(2)]
    policy.slept(2)
    policy.cancel_wake(2)
    policy.request_wake(2)
    assert list(policy.wanted) == [1, 2]


class Turns:
    """Requests wait for every model that sleeps, at every moment. Sleep fails as often as it may."""

    def __init__(self, rng: Random) -> None:
        shares = [rng.choice([0.25, 0.3, 0.4, 0.5, 0.6, 1.0]) for _ in range(rng.randrange(2, 6))]
        self.policy = WakePolicy([1.0, *shares], rng.choice([None, 1, 2, 3]))
        self.rng, self.models = rng, range(len(shares) + 1)
        self.outlasted = [0] * len(self.models)
        self.turns: dict[int, list[int]] = {}
        """By model that is asleep: the models that woke since its first request."""

    def step(self) -> None:
        policy, rng = self.policy, self.rng
        for model in self.models:
            if policy.sleep_states[model] in (SleepState.ASLEEP, SleepState.FALLING_ASLEEP):
                policy.request_wake(model)
            if policy.sleep_states[model] is SleepState.ASLEEP:
                self.turns.setdefault(model, [])
        used = [rng.random() for _ in self.models]
        for move in policy.moves(used, (), [m for m in self.models if rng.random() < 0.5]):
            if isinstance(move, WakeMove):
                del self.turns[move.model]
                for others in self.turns.values():
                    others.append(move.model)
        policy.check()
        for others in self.turns.values():
            assert len(set(others)) == len(others), "another one has had two turns"
        moving = [m for m in self.models if policy.sleep_states[m] in (SleepState.FALLING_ASLEEP, SleepState.WAKING)]
        assert moving, "nothing moves, and requests wait"
        self._end(rng.choice(moving))

    def _end(self, model: int) -> None:
        if self.policy.sleep_states[model] is SleepState.WAKING:
            self.policy.woke(model)
        elif self.outlasted[model] <= MAX_DOUBLED and self.rng.random() < 0.5:
            self.outlasted[model] += 1
            self.policy.sleep_cancelled(model)
        else:
            self.outlasted[model] = 0
            self.policy.slept(model)


@pytest.mark.parametrize("seed", range(20))
def test_before_a_model_wakes_each_other_one_has_at_most_one_turn(seed: int) -> None:
    turns = Turns(Random(seed))
    for _ in range(150):
        turns.step()
