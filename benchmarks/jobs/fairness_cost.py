"""Measures what slots for a waiting key cost on a CPU: one key fills all slots for good, another one waits.

    python benchmarks/jobs/fairness_cost.py OUT

Engines in this process serve the demo model with 16 slots. The greedy key always has requests in the queue, and the
other one sends short ones, each `--pause` iterations after the answer to the last. The long answers begin together,
which is the worst case. In `never`, a key without a slot never gets one from another key. In `unkept`, a slot that was
yielded is not kept for the key's next request. The engines run in turns of some iterations, so that a busy machine
affects all alike. CPU time is that of the engine's two threads.

The answers that were given differ, and a token after a long context costs more. So `cost` divides the CPU time by what
the generated tokens cost at `never`'s prices, fitted to its iterations: a share of each iteration, and pages to read.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from weft.engine.config import EngineConfig
from weft.engine.engine import Engine
from weft.engine.wire.messages import AddRequest
from weft.engine.wire.sampling import SamplingParams

GREEDY, WAITING = 1, 2
SLOTS, SHORT_TOKENS, TURN = 16, 30, 8
PAGES = 1500


def never(engine: Engine) -> None:
    engine.scheduler.fairness.patience = 10**9


def unkept(engine: Engine) -> None:
    engine.scheduler._kept_slots.give = lambda *_: None  # type: ignore[method-assign]


VARIANTS: dict[str, Callable[[Engine], None]] = {"never": never, "unkept": unkept, "as is": lambda _: None}


class Run:
    """An engine and its clients. Time is counted in iterations."""

    def __init__(self, prepare: Callable[[Engine], None], long: int, pause: int, seed: int) -> None:
        config = EngineConfig(model="demo", max_num_seqs=SLOTS, num_pages=PAGES, cpu_threads=1, async_scheduling=False)
        self.engine, self._draw, self._long = Engine(config), random.Random(seed), long
        self._pause = pause
        prepare(self.engine)
        self.cpu = 0.0
        self.iterations = self.computed = 0
        self.waits: list[int] = []
        self.priced: list[tuple[int, int, float]] = []  # rows, pages and CPU seconds of each iteration without prompts
        self.tokens: list[int] = []  # the context of each generated token
        self._prompts: dict[int, int] = {}
        self._known: dict[int, int] = {}  # by handle: tokens that exist
        self._short, self._came, self._due = -1, 0, 0
        run = self.engine.runner.run  # type: ignore[attr-defined]

        def timed(batch: Any) -> Any:
            begin = time.thread_time()
            result = run(batch)
            took = time.thread_time() - begin
            self.cpu += took
            self.computed += batch.num_tokens
            if len(batch.query_len) == batch.num_decodes:
                pages = -(-batch.kv_len // config.page_size)
                self.priced.append((batch.num_decodes, int(pages.sum()), took))
            return result

        self.engine.runner.run = timed  # type: ignore[attr-defined]

    def step(self) -> None:
        while self.engine.scheduler.num_waiting < SLOTS:
            self._add(GREEDY, self._draw.randrange(20, 200), self._draw.randrange(2 * self._long // 3, self._long))
        if self._short not in self._known and self.iterations >= self._due:
            self._short, self._came = self._add(WAITING, 20, SHORT_TOKENS), self.iterations
        begin = time.thread_time()
        outputs = self.engine.step()
        self.cpu += time.thread_time() - begin
        self.iterations += 1
        if outputs is None:
            return
        for handle, token, reason in zip(*(c.tolist() for c in outputs.columns()), strict=True):
            if token >= 0:
                if handle == self._short and self._known[handle] == 20:
                    self.waits.append(self.iterations - self._came)
                self.tokens.append(self._known[handle])
                self._known[handle] += 1
            if reason:
                del self._known[handle]
                if handle == self._short:
                    self._due = self.iterations + self._pause

    def _add(self, tenant: int, prompt: int, output: int) -> int:
        handle = len(self._prompts)
        self._prompts[handle] = self._known[handle] = prompt
        ids = np.array(self._draw.choices(range(20, 400), k=prompt), np.int32)
        params = SamplingParams(max_tokens=output, ignore_eos=True, temperature=0.0)
        self.engine.add(AddRequest(handle=handle, prompt_token_ids=ids.tobytes(), params=params, tenant=tenant))
        return handle

    def result(self, row_seconds: float, page_seconds: float) -> dict[str, float]:
        pages = np.array(self.tokens) // self.engine.config.page_size + 1
        return {
            "cost": self.cpu / float((row_seconds + page_seconds * pages).sum()),
            "CPU seconds": self.cpu,
            "tokens per CPU second": len(self.tokens) / self.cpu,
            "generated": len(self.tokens),
            "computed": self.computed,
            "yields": self.engine.scheduler.fairness.yielded,
            "answers of the other key": len(self.waits),
            "wait, median": statistics.median(self.waits),
            "wait, most": max(self.waits),
        }


def prices(run: Run) -> tuple[float, float]:
    """Return CPU seconds of a row with all slots taken, and of a page."""
    rows, pages, seconds = np.array(run.priced).T
    full = rows == SLOTS
    fixed, page = np.polyfit(pages[full], seconds[full], 1)[::-1]
    return float(fixed) / SLOTS, float(page)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    parser.add_argument("--long", type=int, default=1500, help="most tokens of a long answer")
    parser.add_argument("--iterations", type=int, default=2000)
    parser.add_argument("--pause", type=int, default=0, help="iterations between requests of the other key")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    runs = {name: Run(prepare, arguments.long, arguments.pause, arguments.seed) for name, prepare in VARIANTS.items()}
    order = list(runs.values())
    for turn in range(arguments.iterations // TURN):
        for run in order if turn % 2 else reversed(order):
            for _ in range(TURN):
                run.step()
    row, page = prices(runs["never"])
    found = {name: run.result(row, page) for name, run in runs.items()}
    for name in found:
        found[name]["cost"] /= 1.0 if name == "never" else found["never"]["cost"]
    found["never"]["cost"] = 1.0
    result = {"row ms": row * 1e3, "page ms": page * 1e3, "iterations": arguments.iterations, "runs": found}
    arguments.out.write_text(json.dumps(result, indent=1))
    print(json.dumps(result, indent=1))
    for run in order:
        run.engine.close()


if __name__ == "__main__":
    main()
