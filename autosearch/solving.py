"""`Solving`: stages I and II for the loads of a search, each in its share of the time that is left."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from weft.autosearch.bench_protocol import Load
from weft.autosearch.budget import Budget
from weft.autosearch.machine import Machine
from weft.autosearch.stages import KeptStages, Stages, predict
from weft.autosearch.structure import described

SHARE, SHARE_MEASURED = 0.8, 0.5
"""of a search's time that the solver may have, without and with a GPU to measure on"""


class Solving:
    """Of one search. What is in `kept` is not solved again; what is found is added to it."""

    def __init__(
        self, machine: Machine, budget: Budget, kept: KeptStages, loads: int, *, measured: bool, workers: int
    ) -> None:
        """loads: how many there will be, about. measured: a GPU takes the rest of the time. workers: loads at once."""
        self._machine, self._budget, self._kept = machine, budget, kept
        self._measured, self.workers = measured, workers
        self._share = SHARE_MEASURED if measured else SHARE
        self._loads = self._unsolved = loads
        self._behind: dict[str, float] = {}
        """loads that the solver looks at now, and the share of each that is behind it"""
        self._telling = threading.Lock()

    def stages(self, name: str, load: Load) -> Stages:
        """The serial plan alone, once the search has ended."""
        self.solve([(name, load)])
        found = self._kept.stages.get(self._key(name, load))
        return Stages(self._machine.serial_ms(load), float("inf"), []) if found is None else found

    def solve(self, loads: Sequence[tuple[str, Load]]) -> None:
        """Stages for these, so far as there are none: as many at once as there are workers. None once it has ended."""
        wanted = {key: load for name, load in loads if (key := self._key(name, load)) not in self._kept.stages}
        if not wanted or self._budget.ended():
            return
        at_once = min(self.workers, len(wanted))
        if at_once == 1:
            for key, load in wanted.items():
                self._solve_one(key, load, 1)
            return
        with ThreadPoolExecutor(at_once) as pool:  # the solver lets other threads run
            for done in [pool.submit(self._solve_one, key, load, at_once) for key, load in wanted.items()]:
                done.result()

    def _solve_one(self, key: str, load: Load, at_once: int) -> None:
        if self._budget.ended():
            return
        # As much of what is left now as the loads to come have of what is to come: whatever took longer than it was
        # to, as kernels do that are compiled, takes from solving and measuring alike.
        each, rounds = self._share * at_once / self._loads, max(1, -(-self._unsolved // at_once))
        seconds = self._budget.left * each / (each * rounds + 1 - self._share)

        def about(text: str, within: float) -> None:
            with self._telling:
                self._behind[key] = within
                behind = self._loads - self._unsolved + sum(self._behind.values())
                solved = 0.0 if self._measured else self._share * min(1.0, behind / self._loads)
                self._budget.tell(f"{key}: {text}", solved)  # who measures as well uses all of the time

        found = predict(self._machine, load, about, seconds, self._budget.clock, self._budget.ended)
        with self._telling:
            self._kept.stages[key] = found
            self._behind.pop(key, None)
            self._unsolved = max(0, self._unsolved - 1)
            if not self._budget.ended():  # what was cut short is not for the next search
                self._kept.keep(self._kept.stages)

    def _key(self, name: str, load: Load) -> str:
        collectives = f"{described(self._machine.spec)}: " if self._machine.spec.sums else ""
        return f"{collectives}{name}, {load.tokens} tokens"
