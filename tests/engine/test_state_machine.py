"""The scheduler machines with recurrent states: a state is a hash of all tokens, kept in two pages of the pool.

An answer depends on every token exactly once, through preemption, hits, tiers, a restart and cache resets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule
from list_device import fold
from test_scheduler_machine import MAX_LEN, PAGE_SIZE, Collisions, SchedulerMachine
from test_tier_machine import ListCopies, ListStore, TierMachine

from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import NOWHERE, PrefixEntry
from weft.engine.memory.tiers import Tiers
from weft.engine.scheduling.states import StatePolicy

STATE_PAGES = 2


class StateMachine(SchedulerMachine):
    state_pages: ClassVar[int] = STATE_PAGES
    num_pages: ClassVar[int] = 26
    seen: ClassVar[Counter[str]] = Counter()

    @rule(count=st.integers(1, 8), depth=st.integers(1, 3))
    def iterations_pass(self, count: int, depth: int) -> None:
        for _ in range(count):
            self.schedule()
            if len(self.launched) >= depth:
                self.device_works()
                self.commit()

    @rule(target=SchedulerMachine.requests, handle=SchedulerMachine.requests, more=st.integers(1, 6))
    def another_turn(self, handle: int, more: int) -> int:
        prompt, _, stop = self.prompts[handle]
        history = (prompt + self.output[handle])[: MAX_LEN - 9] + [2, 3, 2, 2, 3, 3][:more]
        return self.submit(history, 3, 0, self.salts[handle], stop >= 0)

    @invariant()
    def a_saved_state_is_that_of_its_page(self) -> None:
        """The state below an entry is the hash of all tokens up to the end of its page: no state is at another depth,
        of another prompt, or of a step that was not confirmed."""
        pool = self.scheduler.pool
        for entry in pool.index.entries():
            pieces = entry.state_pages(STATE_PAGES)
            if not pieces or entry.of_state or any(piece.page == NOWHERE for piece in pieces):
                continue
            chain: list[PrefixEntry] = []
            above: PrefixEntry | None = entry
            while above is not None:
                chain.append(above)
                above = above.parent
            state = 0
            for token in np.frombuffer(b"".join(e.tokens for e in reversed(chain)), np.int32).tolist():
                state = fold(state, token)
            assert self.device._state(np.array([piece.page for piece in pieces])) == state
            self.seen["saved"] += 1

    def teardown(self) -> None:
        super().teardown()
        for request in self.requests_made.values():
            self.seen["hits"] += request.cached_tokens > 0
            self.seen["stateless"] += request.stateless > 0
        self.seen["preempted"] += self.scheduler.preemptions


class CollidingStateMachine(Collisions, StateMachine):
    """Only states of chunks are saved, as with --batch-invariant."""

    state_policy: ClassVar[StatePolicy] = StatePolicy(exact=True)
    seen: ClassVar[Counter[str]] = Counter()


class StateWindowMachine(StateMachine):
    """All layers with K and V have a window, and others have states, which long prompts save on their way."""

    state_policy: ClassVar[StatePolicy] = StatePolicy(interval=2 * PAGE_SIZE)
    window: ClassVar[int | None] = 3
    seen: ClassVar[Counter[str]] = Counter()


class StateTierMachine(StateMachine, TierMachine):
    num_host: ClassVar[int] = 10
    num_extents: ClassVar[int] = 14
    seen: ClassVar[Counter[str]] = Counter()
    stored: ClassVar[ListStore | None] = None  # what another machine left on the SSD

    def make_tiers(self, pool: PagePool) -> Tiers | None:
        self.copies = ListCopies(self.device, self.num_host)
        self.store = ListStore(self.copies, self.num_extents, self.stored)
        self.worthwhile = 99
        tiers = self.tiers = Tiers(pool, self.copies, self.num_host, self.store)

        def worthwhile(_entries: Sequence[PrefixEntry], _pages: Any, _tokens: Any, states: dict[int, Any]) -> int:
            return max((count for count in states if count <= self.worthwhile), default=0)

        tiers.speeds.worthwhile = worthwhile  # type: ignore[method-assign, assignment]
        return tiers

    def teardown(self) -> None:
        super().teardown()
        if self.stored is None and self.store.extents:
            self.the_daemon_restarts()

    def the_daemon_restarts(self) -> None:
        machine = type(self)
        machine.stored = self.store
        try:
            again = machine()
            for handle, (prompt, _, stop) in self.prompts.items():
                again.submit((prompt + self.output[handle])[: MAX_LEN - 3], 2, 0, self.salts[handle], stop >= 0)
            again.teardown()
        finally:
            machine.stored = None
        self.seen["found after a restart"] += sum(r.hits.ssd > 0 for r in again.requests_made.values())


MACHINE_SETTINGS = settings(
    max_examples=40,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


class Checked:
    settings = MACHINE_SETTINGS
    machine: ClassVar[type[StateMachine]]
    others: ClassVar[tuple[str, ...]] = ()

    def runTest(self) -> None:
        super().runTest()  # type: ignore[misc]
        seen = self.machine.seen
        few = [kind for kind in ("saved", "hits", "stateless", "preempted", *self.others) if seen[kind] < 5]
        assert not few, f"hardly any {few}: {seen}"


class TestStateMachine(Checked, StateMachine.TestCase):  # type: ignore[misc]
    machine = StateMachine


class TestStateWindowMachine(Checked, StateWindowMachine.TestCase):  # type: ignore[misc]
    machine = StateWindowMachine


class TestCollidingStateMachine(Checked, CollidingStateMachine.TestCase):  # type: ignore[misc]
    machine = CollidingStateMachine


class TestStateTierMachine(Checked, StateTierMachine.TestCase):  # type: ignore[misc]
    machine = StateTierMachine
    others = ("found after a restart",)
