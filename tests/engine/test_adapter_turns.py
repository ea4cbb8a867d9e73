"""Keys, adapters and slots together: a key that uses many adapters gets no more than its share of the slots. Time is
counted in iterations."""

from __future__ import annotations

from collections import Counter
from itertools import cycle
from pathlib import Path
from typing import Any, cast

import pytest
from test_adapter_memory import Jobs
from test_fairness import Clock

from weft.engine.model.adapter import Adapter
from weft.engine.scheduling.adapters import STAY, Adapters
from weft.engine.scheduling.events import Outbox
from weft.engine.scheduling.fairness import PATIENCE
from weft.engine.scheduling.request import Request
from weft.engine.wire.messages import LoadAdapter

SLOTS = 8
GREEDY, OTHER = 1, 2


class Server(Clock):
    """A scheduler and the memory for adapters, without a device. An adapter's content is its name."""

    def __init__(self, most: int, names: str) -> None:
        super().__init__(0.25, slots=SLOTS, pages=20_000, prefix_caching=True)
        scheduler, self.outbox, self.jobs = self.scheduler, Outbox(), Jobs()
        self.memory: dict[int, Adapter] = {}
        self.adapters = Adapters(
            lambda path: (path.name, Adapter((), 1)), self.memory, most, scheduler.count_by_adapter, scheduler.add,
            scheduler.withdraw, self.outbox,
        )  # fmt: skip
        self.adapters._thread.shutdown()
        self.adapters._thread = cast(Any, self.jobs)
        self.served: Counter[int] = Counter()
        """Tokens of running requests in all iterations, by tenant."""
        for name in names:
            self.adapters.load(LoadAdapter(name, str(Path("/") / name)))
            self.jobs.run()
            self.adapters.on_schedule()

    def ask(self, adapter: str, output: int, tenant: int) -> Request:
        """`adapter`: none if empty."""
        request = self.made(20, output, tenant=tenant)
        if adapter:
            self.adapters.begin(request, adapter)
        else:
            self.scheduler.add(request)
        return request

    def step(self) -> bool:
        self.jobs.run(100)
        self.adapters.on_schedule()
        s = self.scheduler.slots
        self.served.update(s.tenant[s.running()].tolist())
        return super().step()

    def open(self, tenant: int) -> int:
        return sum(not r.ended and r.tenant == tenant for r in self.requests[-400:])


@pytest.mark.parametrize("most", [1, pytest.param(2, marks=pytest.mark.nightly), 4])
@pytest.mark.parametrize("adapter", ["z", pytest.param("", marks=pytest.mark.nightly)])
def test_a_key_with_many_adapters_gets_no_more_than_its_share_of_the_slots(most: int, adapter: str) -> None:
    server, names = Server(most, "abcdefghz"), cycle("abcdefgh")
    for _ in range(700):
        while server.open(GREEDY) < 3 * SLOTS:
            server.ask(next(names), 100, GREEDY)
        while server.open(OTHER) < 3 * SLOTS:
            server.ask(adapter, 100, OTHER)
        server.step()
    assert server.served[OTHER] >= 0.45 * server.served.total()
    assert server.served[GREEDY] >= 0.1 * server.served.total(), "its adapters have their turns too"
    assert not server.outbox.refused
    server.scheduler.check()


@pytest.mark.parametrize("most", [1, pytest.param(3, marks=pytest.mark.nightly)])
def test_a_key_with_one_request_at_a_time_waits_no_longer_than_the_bounds_of_memory_and_slots(most: int) -> None:
    """Another one fills all slots with long answers of eight adapters."""
    server, names = Server(most, "abcdefghz"), cycle("abcdefgh")
    last: Request | None = None
    came, answers = 0, 0
    for _ in range(900):
        while server.open(GREEDY) < 3 * SLOTS:
            server.ask(next(names), 1800, GREEDY)
        if server.iterations > STAY and (last is None or last.ended):
            answers += last is not None
            last, came = server.ask("z", 30, OTHER), server.iterations
        server.step()
        if last is not None and last.handle not in server.first:
            assert server.iterations - came <= PATIENCE + STAY + 3 * PATIENCE
    assert answers >= 2
