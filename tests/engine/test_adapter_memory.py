"""`Adapters`: which adapters are in memory and which requests wait, under any order of loads, requests and ends."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from weft.engine.errors import ModelError
from weft.engine.model.adapter import Adapter
from weft.engine.scheduling.adapters import MAX_PASSED, STAY, Adapters
from weft.engine.scheduling.events import Outbox
from weft.engine.scheduling.fairness import PATIENCE
from weft.engine.scheduling.request import Request
from weft.engine.wire.messages import LoadAdapter
from weft.engine.wire.sampling import SamplingParams


class Jobs:
    """In place of the thread: jobs run when the test says so."""

    def __init__(self) -> None:
        self.waiting: list[Callable[[], None]] = []

    def submit(self, function: Callable[..., None], *arguments: Any) -> None:
        self.waiting.append(lambda: function(*arguments))

    def run(self, count: int = 1) -> None:
        for _ in range(min(count, len(self.waiting))):
            self.waiting.pop(0)()

    def shutdown(self, **_: Any) -> None:
        pass


class Fake:
    """Adapters whose content is a word in `files`, and the requests that were queued."""

    def __init__(self, most: int, kept: int = 0) -> None:
        self.reads = 0
        self.files: dict[str, str] = {}
        self.memory: dict[int, Adapter] = {}
        self.open: dict[int, Request] = {}
        self.outbox = Outbox()
        self.jobs = Jobs()
        counts = lambda: dict(Counter(request.adapter for request in self.open.values()))  # noqa: E731
        self.adapters = Adapters(self.read, self.memory, most, counts, self.queue, self.withdraw, self.outbox, kept)
        self.adapters._thread.shutdown()
        self.adapters._thread = cast(Any, self.jobs)
        self.handles = 0
        self.have_slot: Callable[[int], bool] = lambda handle: handle % 2 > 0

    def read(self, path: Path) -> tuple[str, Adapter]:
        content = self.files.get(str(path))
        self.reads += 1
        if content is None:
            raise ModelError(f"{path} has no adapter")
        return content, Adapter((), 1)

    def queue(self, request: Request) -> None:
        assert request.adapter in self.memory, "queued without its adapter"
        self.open[request.handle] = request

    def withdraw(self, adapter: int, running: bool) -> list[Request]:
        found = [r for r in self.open.values() if r.adapter == adapter and (running or not self.have_slot(r.handle))]
        for request in found:
            del self.open[request.handle]
        return found

    def load(self, name: str, content: str) -> None:
        self.files[f"/{name}"] = content
        self.adapters.load(LoadAdapter(name, f"/{name}"))

    def ask(self, digest: str, tenant: int = 0) -> int:
        self.handles += 1
        request = Request(
            handle=self.handles, token_ids=cast(Any, None), prompt_len=1, params=SamplingParams(), max_total_tokens=2,
            priority=0, order=self.handles, arrival=0.0, salt="", stop_ids=(), seed=0, tenant=tenant,
        )  # fmt: skip
        self.adapters.begin(request, digest)
        return self.handles

    def settle(self) -> None:
        """Run everything that can run."""
        for _ in range(100):
            self.jobs.run(100)
            self.adapters.on_schedule()
            if not self.jobs.waiting:
                return


def _loaded(most: int, *contents: str, kept: int = 0) -> Fake:
    fake = Fake(most, kept)
    for content in contents:
        fake.load(content, content)
    fake.settle()
    return fake


def test_the_least_recently_used_adapter_is_evicted() -> None:
    fake = _loaded(2, "a", "b")
    del fake.open[fake.ask("b")]
    del fake.open[fake.ask("a")]
    fake.load("c", "c")
    fake.settle()
    assert fake.ask("a") in fake.open
    assert fake.ask("c") in fake.open
    assert fake.ask("b") not in fake.open, "it must be read again, and both others are in use"


def test_an_adapter_in_use_is_not_evicted_and_others_wait_for_it() -> None:
    fake = _loaded(1, "a", "b")
    first = fake.ask("b")
    fake.settle()
    second = fake.ask("a")
    fake.settle()
    assert first in fake.open
    assert second not in fake.open
    del fake.open[first]
    fake.settle()
    assert second in fake.open


def test_an_adapter_that_waits_is_not_passed_forever() -> None:
    fake = _loaded(1, "a", "b")
    fake.ask("b")
    fake.settle()
    waiting = fake.ask("a")
    began = 0
    while fake.ask("b") in fake.open:
        began += 1
        assert began <= MAX_PASSED
    for handle in list(fake.open):
        del fake.open[handle]
    fake.settle()
    assert waiting in fake.open


def test_other_content_under_a_name_is_another_adapter() -> None:
    fake = _loaded(4, "a")
    old = fake.ask("a")
    fake.load("a", "new")
    fake.settle()
    new = fake.ask("new")
    assert fake.open[old].adapter != fake.open[new].adapter
    assert [news.digest for news in fake.adapters.all_news()] == ["new"]


def test_an_evicted_adapter_whose_files_have_changed_refuses_its_requests() -> None:
    fake = _loaded(1, "a", "b")
    fake.ask("b")
    fake.settle()
    handle = fake.ask("a")
    fake.files["/a"] = "other"
    fake.open.clear()
    fake.settle()
    assert handle not in fake.open
    ((refused, why, _),) = fake.outbox.refused
    assert refused == handle
    assert "have changed" in why


def test_an_evicted_adapter_that_is_kept_is_not_read_again() -> None:
    fake = _loaded(1, "a", "b", "c", kept=2)
    assert fake.reads == 3
    for name, reads in (("b", 3), ("c", 3), ("b", 3), ("a", 4), ("b", 4), ("c", 5)):
        fake.files["/b"] = "other"
        handle = fake.ask(name)
        fake.settle()
        assert (handle in fake.open, fake.reads) == (True, reads), name
        fake.open.clear()
    fake.adapters.drop("c")
    assert len(fake.adapters._kept) == 1, "nobody can ask for it"


def test_a_failed_load_is_reported_and_keeps_the_name() -> None:
    fake = _loaded(4, "a")
    fake.adapters.take_news()
    fake.adapters.load(LoadAdapter("a", "/none"))
    fake.settle()
    (news,) = fake.adapters.take_news()
    assert (news.name, news.digest, news.error) == ("a", "", "/none has no adapter")
    assert fake.ask("a") in fake.open


def test_a_reader_that_breaks_ends_the_load_with_an_error() -> None:
    fake = Fake(4)

    def broken(_path: Path) -> tuple[str, Adapter]:
        raise KeyError("surprise")

    fake.adapters._read = broken
    fake.load("a", "a")
    handle = fake.ask("a")
    fake.settle()
    (news,) = fake.adapters.take_news()
    assert "surprise" in news.error
    assert [refused for refused, _, _ in fake.outbox.refused] == [handle]
    assert fake.adapters.pause() is None


def test_loads_that_end_while_the_engine_waits_keep_their_order() -> None:
    fake = Fake(4)
    fake.load("a", "old")
    fake.load("a", "new")
    fake.files["/a"] = "old"
    fake.jobs.run()
    fake.files["/a"] = "new"
    fake.jobs.run()
    assert fake.adapters.on_blocked(1)
    fake.settle()
    assert [news.digest for news in fake.adapters.all_news()] == ["new"]


def test_a_request_that_arrives_before_its_adapter_waits_for_it() -> None:
    fake = Fake(4)
    fake.load("a", "a")
    early, unknown = fake.ask("a"), fake.ask("z")
    assert not fake.open
    fake.settle()
    assert early in fake.open
    assert [handle for handle, _, _ in fake.outbox.refused] == [unknown]
    assert fake.ask("z") not in fake.open
    assert len(fake.outbox.refused) == 2


def test_a_held_request_can_be_taken_back() -> None:
    fake = Fake(4)
    fake.load("a", "a")
    handle = fake.ask("a")
    taken = fake.adapters.take(handle)
    assert taken is not None
    assert taken.handle == handle
    assert fake.adapters.take(handle) is None
    fake.settle()
    assert not fake.open


def _iterations_until_begun(fake: Fake, handle: int, most: int) -> int:
    """Return after how many iterations a request begins, although no other one ends."""
    for iteration in range(most + 1):
        if handle in fake.open:
            return iteration
        fake.jobs.run(100)
        fake.adapters.on_schedule()
    raise AssertionError("it waits for longer than the bound")


def test_keys_take_turns_in_the_memory_for_adapters() -> None:
    """A key that wants many adapters lets another one have its turn after each."""
    names = "abcdefgh"
    fake = _loaded(1, *names, "z")
    for name in names:
        fake.ask(name, tenant=1)
    other = fake.ask("z", tenant=2)
    begun = 0
    while other not in fake.open:
        begun += len(fake.open)
        fake.open.clear()
        fake.settle()
    assert begun <= 2


def test_a_key_that_goes_through_many_adapters_evicts_its_own() -> None:
    fake = _loaded(3, "z", *"abcdef")

    def use(name: str, tenant: int) -> bool:
        """Return whether the adapter was in memory."""
        handle = fake.ask(name, tenant)
        there = handle in fake.open
        fake.settle()
        del fake.open[handle]
        return there

    use("z", 2)
    for name in 3 * "abcdef":
        assert not use(name, 1) or name in "ef"
    assert use("z", 2)


@pytest.mark.parametrize("running", [True, False])
def test_an_adapter_waits_for_no_longer_than_a_bound_for_requests_that_never_end(running: bool) -> None:
    """Those without a slot leave after some iterations, those with one after many more."""
    fake = _loaded(2, "a", "b", "z")
    kept = [fake.ask(name, tenant=1) for name in 3 * "ab"]
    fake.settle()
    assert len(fake.open) == 6
    fake.have_slot = lambda _: running
    most = PATIENCE + (STAY if running else 0) + 3
    assert _iterations_until_begun(fake, fake.ask("z", tenant=2), most) >= (most - 3 if running else PATIENCE - 1)
    assert len(fake.memory) == 2
    for handle in kept if running else ():  # those that had to leave have their turn again
        _iterations_until_begun(fake, handle, 2 * (PATIENCE + STAY + 3))


def test_an_adapter_opens_again_if_no_other_waits_for_its_memory() -> None:
    fake = _loaded(1, "a", "b")
    first = fake.ask("b")
    fake.settle()
    waiting = fake.ask("a")
    for _ in range(PATIENCE + 1):
        fake.settle()
    late = fake.ask("b")
    assert (first in fake.open, late in fake.open) == (True, False)
    assert fake.adapters.take(waiting) is not None
    fake.settle()
    assert late in fake.open


NAMES = st.sampled_from(["x", "y", "z"])
CONTENTS = st.sampled_from(["a", "b", "c", "d"])


class AdapterMachine(RuleBasedStateMachine):
    """Loads, drops, requests and ends in any order."""

    @initialize(most=st.integers(1, 3))
    def begin(self, most: int) -> None:
        self.most, self.fake = most, Fake(most)
        self.asked: set[int] = set()

    @rule(name=NAMES, content=CONTENTS)
    def load(self, name: str, content: str) -> None:
        self.fake.load(name, content)

    @rule(name=NAMES)
    def drop(self, name: str) -> None:
        self.fake.adapters.drop(name)

    @rule(content=CONTENTS, tenant=st.integers(0, 2))
    def ask(self, content: str, tenant: int) -> None:
        self.asked.add(self.fake.ask(content, tenant))

    @rule(which=st.integers(0, 20))
    def end(self, which: int) -> None:
        if self.fake.open:
            handle = sorted(self.fake.open)[which % len(self.fake.open)]
            del self.fake.open[handle]
            self.asked.discard(handle)

    @rule(which=st.integers(0, 20))
    def abort(self, which: int) -> None:
        held = sorted(self.asked - set(self.fake.open))
        if held and self.fake.adapters.take(held[which % len(held)]) is not None:
            self.asked.discard(held[which % len(held)])

    @rule(count=st.integers(0, 3))
    def run(self, count: int) -> None:
        self.fake.jobs.run(count)
        self.fake.adapters.on_schedule()

    @rule()
    def wait(self) -> None:
        """Each adapter that is waited for has its turn, although no request ends."""
        fake = self.fake
        fake.settle()
        held = {request.handle for known in fake.adapters._waiting for request in known.held}
        for _ in range((len(fake.adapters._waiting) + 1) * (PATIENCE + STAY + 4)):
            fake.jobs.run(100)
            fake.adapters.on_schedule()
            held -= set(fake.open) | {handle for handle, _, _ in fake.outbox.refused}
            if not held:
                return
        raise AssertionError("a request waits for longer than the bound")

    @invariant()
    def memory_holds_what_requests_use_and_no_more_than_allowed(self) -> None:
        fake = self.fake
        assert len(fake.memory) <= self.most
        assert {request.adapter for request in fake.open.values()} <= set(fake.memory)
        refused = {handle for handle, _, _ in fake.outbox.refused}
        held = self.asked - set(fake.open) - refused
        assert len(held) == fake.adapters.num_held, "a request is lost"

    def teardown(self) -> None:
        """Once requests end, every other one begins or is refused."""
        for _ in range(200):
            self.fake.settle()
            if not self.fake.adapters.num_held:
                break
            self.fake.open.clear()
            self.asked -= self.asked
        assert not self.fake.adapters.num_held


TestAdapterMachine = pytest.mark.hypothesis(AdapterMachine.TestCase)
