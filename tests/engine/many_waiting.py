"""Microseconds of `Scheduler.schedule` with a queue of constant length.

Run it by hand (`python tests/engine/many_waiting.py`); it asserts nothing. Prompts of one length show what the length
of the queue costs; among prompts of mixed lengths a longer queue has shorter ones, so that more of them run at once.
"""

from __future__ import annotations

import gc
import random
import time
from statistics import median
from typing import NamedTuple

import numpy as np

from weft.engine.memory.pages import PagePool
from weft.engine.memory.prefix_index import PrefixIndex
from weft.engine.runner.iteration.batch import StepResult
from weft.engine.scheduling.request import Request
from weft.engine.scheduling.scheduler import Scheduler
from weft.engine.scheduling.slots import SlotTable
from weft.engine.wire.sampling import SamplingParams

OUTPUT = 64
WARM, TIMED = 100, 400


class Case(NamedTuple):
    slots: int
    pages: int
    one_length: int
    lengths: tuple[int, int]


CASES = {
    "tokens": Case(256, 20_000, 900, (20, 1900)),
    "slots": Case(32, 20_000, 40, (20, 60)),
    "pages": Case(256, 400, 900, (20, 1900)),
}
"""by the scarce resource; 512 tokens an iteration, pages of 64"""


def run(case: Case, waiting: int, *, mixed: bool) -> tuple[float, float]:
    """Median microseconds of CPU time, and the mean number of running requests."""
    chance = random.Random(1)
    scheduler = Scheduler(
        SlotTable(case.slots, 2100, 64), PagePool(case.pages, 64, PrefixIndex("m")), max_num_batched_tokens=512,
        prefix_caching=False,
    )  # fmt: skip
    made, seconds, running = 0, [], []
    for step in range(WARM + TIMED):
        while scheduler.num_waiting < waiting:
            length = chance.randint(*case.lengths) if mixed else case.one_length
            scheduler.add(
                Request(
                    handle=made, token_ids=np.zeros(length, np.int32), prompt_len=length,
                    params=SamplingParams(max_tokens=OUTPUT), max_total_tokens=length + OUTPUT, priority=0, order=made,
                    arrival=0.0, salt="", stop_ids=(1,), seed=0,
                )
            )  # fmt: skip
            made += 1
        begun = time.thread_time()
        batch = scheduler.schedule(step + 1)
        seconds.append(time.thread_time() - begun)
        running.append(scheduler.num_running)
        if batch is not None:
            scheduler.commit(StepResult(batch, np.full(len(batch.sampled_rows), 7, np.int32), None, (), 0.0))
    return 1e6 * median(seconds[WARM:]), sum(running[WARM:]) / TIMED


def main() -> None:
    gc.disable()
    print("short of, prompts: microseconds (running) with 10, 100, 10,000 waiting; the best of three")
    for name, case in CASES.items():
        for mixed in (False, True):
            rows = [min(run(case, waiting, mixed=mixed) for _ in range(3)) for waiting in (10, 100, 10_000)]
            cells = " · ".join(f"{us:.0f} ({running:.0f})" for us, running in rows)
            print(f"{name}, {'mixed' if mixed else 'one length'}: {cells}", flush=True)


if __name__ == "__main__":
    main()
