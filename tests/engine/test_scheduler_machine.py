"""Random orders of submit, step, finish, abort, preempt and cache reset, against a device made of plain lists.

The same orders run again over an index with keys of four bits, so that most keys collide with pages of other prompts.
"""

from __future__ import annotations

from collections import Counter, deque
from types import SimpleNamespace
from typing import ClassVar

import numpy as np
import pytest
from colliding import CollidingIndex
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from list_device import ListDevice, next_token
from machines import machine_settings

from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.memory.tiers import Tiers
from weft.engine.runner.iteration.batch import Batch, StepResult
from weft.engine.scheduling.admission import OutputLengths
from weft.engine.scheduling.build import Chunk
from weft.engine.scheduling.events import Events
from weft.engine.scheduling.fairness import MAX_OVERTAKEN, MAX_PREEMPTED, Fairness
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import SlotTable
from weft.engine.scheduling.states import StatePolicy
from weft.engine.wire.messages import Finish, Retention
from weft.engine.wire.sampling import SamplingParams

END = 1
PAGE_SIZE = 2
NUM_PAGES = 14
MAX_LEN = (NUM_PAGES - 1) * PAGE_SIZE
NUM_SLOTS = 5


class SchedulerMachine(RuleBasedStateMachine):
    requests = Bundle("requests")
    window: ClassVar[int | None] = None
    num_pages: ClassVar[int] = NUM_PAGES
    state_pages: ClassVar[int] = 0
    state_policy: ClassVar[StatePolicy] = StatePolicy()
    chunk_step: ClassVar[int] = 1
    replays: ClassVar[bool] = False

    def make_index(self) -> PrefixIndex:
        return PrefixIndex("m")

    def make_tiers(self, _pool: PagePool) -> Tiers | None:
        return None

    def __init__(self) -> None:
        super().__init__()
        self.device = ListDevice(self.num_pages, PAGE_SIZE, NUM_SLOTS, self.window)
        pool = PagePool(self.num_pages, PAGE_SIZE, self.make_index())
        slots = SlotTable(NUM_SLOTS, MAX_LEN, PAGE_SIZE, self.window, self.state_pages, replays=self.replays)
        self.scheduler = Scheduler(
            slots, pool, max_num_batched_tokens=6, prefix_caching=True, tiers=self.make_tiers(pool),
            fairness=Fairness(patience=2), chunk_step=self.chunk_step, state_policy=self.state_policy,
        )  # fmt: skip
        self.prefills = self.scheduler._prefills
        self.scheduler._prefills = SimpleNamespace(schedule=self._schedule_prefills)  # type: ignore[assignment]
        # Expect short outputs: admission errs, memory runs out, requests are preempted.
        self.scheduler.output_lengths = OutputLengths(mean=0.0, weight=1e9)
        self.launched: deque[Batch] = deque()
        self.computed: deque[StepResult] = deque()
        self.step_number = 0
        self.prompts: dict[int, tuple[list[int], int, int]] = {}
        self.requests_made: dict[int, Request] = {}
        self.output: dict[int, list[int]] = {}
        self.salts: dict[int, str] = {}
        self.finish: dict[int, Finish] = {}

    @rule(
        target=requests,
        prompt=st.lists(st.integers(2, 3), min_size=1, max_size=11),
        max_tokens=st.integers(1, 12),
        priority=st.integers(0, 1),
        salt=st.sampled_from(["", "t"]),
        stops=st.booleans(),
        tenant=st.integers(0, 2),
        precedence=st.sampled_from([0, 0, 1]),
    )
    def submit(
        self, prompt: list[int], max_tokens: int, priority: int, salt: str, stops: bool, tenant: int = 0,
        precedence: int = 0,
    ) -> int:  # fmt: skip
        return self._submit(prompt, max_tokens, priority, salt, stops, tenant=tenant, precedence=precedence)

    @rule(target=requests, leader=requests, max_tokens=st.integers(1, 12), priority=st.integers(0, 1))
    def submit_sibling(self, leader: int, max_tokens: int, priority: int) -> int:
        prompt, _, stop = self.prompts[leader]
        return self._submit(prompt, max_tokens, priority, "", stop == END, leader)

    def _submit(
        self,
        prompt: list[int],
        max_tokens: int,
        priority: int,
        salt: str,
        stops: bool,
        leader: int = -1,
        tenant: int = 0,
        retention: tuple[Retention, ...] = (),
        precedence: int = 0,
    ) -> int:
        handle = len(self.prompts)
        self.prompts[handle] = (prompt, max_tokens, END if stops else -1)
        self.output[handle] = []
        self.salts[handle] = salt
        request = self.requests_made[handle] = Request(
            handle=handle,
            token_ids=np.array(prompt, np.int32),
            prompt_len=len(prompt),
            params=SamplingParams(max_tokens=max_tokens),
            max_total_tokens=min(len(prompt) + max_tokens, MAX_LEN),
            priority=priority,
            order=handle,
            arrival=0.0,
            salt=salt,
            stop_ids=(END,) if stops else (),
            seed=handle,
            leader=leader,
            tenant=tenant,
            precedence=precedence,
            retention=retention,
            names=(str(handle).encode(),),
        )
        self.scheduler.add(request)
        return handle

    @rule()
    def schedule(self) -> None:
        if len(self.launched) + len(self.computed) < 3:
            self.step_number += 1
            batch = self.scheduler.schedule(self.step_number)
            if batch is None:
                self.step_number -= 1
                return
            assert 0 < batch.num_tokens <= self.scheduler.max_num_batched_tokens
            self.launched.append(batch)

    def _schedule_prefills(self, budget: int, _cut: None) -> list[Chunk]:
        """Calls the scheduler's method, then checks that no request could have used the remaining headroom.

        The check runs before the counters advance: with each token that a request has made the predicted peak of memory
        is lower, because the token's page is counted whole before and after.
        """
        scheduler = self.scheduler
        s, queue = scheduler.slots, scheduler._waiting
        chunks = self.prefills.schedule(budget)
        of_slot = dict(chunks)
        assert len(of_slot) == len(chunks), "two chunks of a prompt"
        if sum(of_slot.values()) == budget:
            return chunks
        for slot in s.prefilling().tolist():
            left = s.target[slot] - s.scheduled[slot]
            assert of_slot.get(slot) == left, "a prompt under way waits beside room for it"
        head = queue.head()
        if head is not None and s.num_open:
            assert scheduler._find_if_fits(head) is None, "the first in line waits beside room for it"
            if head.overtaken < MAX_OVERTAKEN:
                for request in queue.overtaking(head):
                    assert scheduler._find_if_fits(request) is None, "one that fits waits beside room for it"
        return chunks

    @rule()
    def device_works(self) -> None:
        if self.launched:
            self.computed.append(self.device.execute(self.launched.popleft()))

    @rule()
    def commit(self) -> None:
        if self.computed:
            self._take(self.scheduler.commit(self.computed.popleft()))

    @rule(handle=requests)
    def abort(self, handle: int) -> None:
        self.scheduler.abort(handle)
        self.scheduler.abort(handle)
        self._take(self.scheduler.idle_events())

    @precondition(lambda self: len(self.scheduler.slots.running()))
    @rule()
    def preempt(self) -> None:
        self.scheduler._preempt_one()

    @rule(fewer=st.integers(0, 9))
    def limit(self, fewer: int) -> None:
        """Fewer slots sometimes, otherwise all of them."""
        self.scheduler.limit_running(fewer - 6 if fewer > 6 else NUM_SLOTS)

    @rule(really=st.integers(0, 9))
    def reset_cache(self, really: int) -> None:
        if really == 7:
            self.scheduler.reset_cache()

    @invariant()
    def nothing_is_lost_or_shared(self) -> None:
        self.scheduler.check()

    @invariant()
    def launched_steps_own_what_they_touch(self) -> None:
        for batch in self.launched:
            touched = np.concatenate((batch.slot_mapping // PAGE_SIZE, batch.page_table[batch.page_table > 0]))
            if batch.states is not None:
                of_states = [batch.states.read, batch.states.write, batch.states.checkpoint_pages]
                of_states = [pages[pages > 0] for pages in of_states]
                touched = np.concatenate((touched, *of_states))
            assert (self.scheduler.pool.ref[touched] > 0).all(), "a page was freed under a launched step"

    @invariant()
    def no_request_is_overtaken_or_preempted_forever(self) -> None:
        for request in self.requests_made.values():
            assert request.overtaken <= MAX_OVERTAKEN
            assert request.preempted <= MAX_PREEMPTED

    def _take(self, events: Events) -> None:
        for handle, token, reason in zip(
            events.handles.tolist(), events.tokens.tolist(), events.finish.tolist(), strict=True
        ):
            assert handle not in self.finish, "an event after the terminal one"
            prompt, max_tokens, stop = self.prompts[handle]
            if token >= 0:
                out = self.output[handle]
                assert self.requests_made[handle].scheduled_at, "a token of a request that never began"
                expected_token = next_token(prompt + out, self.window, self.state_pages > 0)
                assert token == expected_token, "a token that the prompt does not explain"
                out.append(token)
                at_limit = len(prompt) + len(out) >= min(len(prompt) + max_tokens, MAX_LEN)
                expected = Finish.STOP if token == stop else Finish.LENGTH if at_limit else Finish.RUNNING
                assert reason == expected
            if reason:
                self.finish[handle] = Finish(reason)

    def end_transfers(self) -> bool:
        """Let copies and I/O end. Returns whether others follow."""
        return False

    def teardown(self) -> None:
        for _ in range(2000):
            self.schedule()
            self.device_works()
            if self.step_number % 2 or not self.launched:
                self.commit()
            self.scheduler.check()
            if not (self.end_transfers() or self.scheduler.num_requests or self.launched or self.computed):
                break
        self._take(self.scheduler.idle_events())
        assert set(self.finish) == set(self.prompts), "a request never ended"
        pool = self.scheduler.pool
        assert pool.num_held == 0
        assert pool.num_free + pool.num_cached == pool.capacity


class Collisions:
    """A part of a machine whose pages share few keys. `seen` adds up over all tried orders."""

    seen: ClassVar[Counter[str]]

    def make_index(self) -> PrefixIndex:
        self.index = CollidingIndex()
        return self.index

    def teardown(self) -> None:
        super().teardown()  # type: ignore[misc]
        self.seen.update(self.index.refused)

    @classmethod
    def check_collisions(cls) -> None:
        few = [kind for kind in ("published", "tokens", "parent", "salt") if cls.seen[kind] < 10]
        assert not few, f"hardly a collision in {few}: {cls.seen}"


class CollidingMachine(Collisions, SchedulerMachine):
    seen: ClassVar[Counter[str]] = Counter()


class WindowMachine(SchedulerMachine):
    """Every layer has a window: pages before it are freed while their request runs."""

    window: ClassVar[int | None] = 3
    given_back: ClassVar[int] = 0

    @invariant()
    def no_page_is_freed_too_early(self) -> None:
        s = self.scheduler.slots
        running = s.running()
        passed = np.maximum(s.confirmed[running] + 1 - 3, 0) // PAGE_SIZE
        # cached pages of the prefix are freed with the first commit
        assert (s.given_back[running] <= passed).all()
        type(self).given_back += int(s.given_back[running].sum())


class ReplayMachine(SchedulerMachine):
    """Decodes compute the answers of preempted requests again, and nobody uses the pages of an answer."""

    replays: ClassVar[bool] = True
    replayed: ClassVar[int] = 0

    @invariant()
    def no_chunk_contains_an_answer(self) -> None:
        s = self.scheduler.slots
        for batch in self.launched:
            live = s.epoch[batch.slots] == batch.epochs
            chunks = np.arange(len(batch.slots)) >= batch.num_decodes
            prompts = s.prompt_len[batch.slots]
            assert (batch.kv_len <= prompts)[live & chunks].all()
        running = s.running()
        assert (s.published[running] * PAGE_SIZE <= s.prompt_len[running]).all()

    def _schedule_prefills(self, budget: int, _cut: None) -> list[Chunk]:
        s = self.scheduler.slots
        decodes = s.decoding()
        type(self).replayed += int((s.scheduled[decodes] + 1 < s.known[decodes]).sum())
        return super()._schedule_prefills(budget, _cut)


class WindowReplayMachine(ReplayMachine):
    window: ClassVar[int | None] = 3


MACHINE_SETTINGS = machine_settings(120, 60, daily=40)
TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = MACHINE_SETTINGS


class TestCollidingMachine(CollidingMachine.TestCase):  # type: ignore[misc]
    settings = machine_settings(120, 60, daily=120)  # some collisions are rare

    def runTest(self) -> None:
        super().runTest()
        CollidingMachine.check_collisions()


class TestWindowMachine(WindowMachine.TestCase):  # type: ignore[misc]
    settings = MACHINE_SETTINGS

    def runTest(self) -> None:
        super().runTest()
        assert WindowMachine.given_back > 30


@pytest.mark.parametrize("machine", [ReplayMachine, pytest.param(WindowReplayMachine, marks=pytest.mark.nightly)])
def test_replays(machine: type[ReplayMachine]) -> None:
    run_state_machine_as_test(machine, settings=MACHINE_SETTINGS)
    assert machine.replayed > 20
