"""Both stages of the search (NanoFlow §4.1): pipelines for each load, and the choice of collectives.

`LoadSolver` splits the available time among the loads of a search. `StageStore` keeps results, so that a machine
without OR-Tools can continue from them.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

import msgspec

from weft import install_hint
from weft.autosearch.bench_protocol import Load
from weft.autosearch.machine import Machine
from weft.autosearch.pipeline_structure import Candidate, describe_collectives, transformations
from weft.autosearch.profile import Profile
from weft.autosearch.time_budget import TimeBudget
from weft.engine.errors import ConfigError
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Target

VERSION = 1  # Version of the `--stages` file.
EFFORT = 1.0  # Deterministic seconds per solver call.
GUEST_SMS = (20, 24, 32, 36, 48)  # SMs, of 132, that stage I reserves for attention.
PER_LEVEL = 4  # Structures per SM count that go on to stage II.
KEPT = 5  # Pipelines kept per load.
STRUCTURES_SHARE = 0.4  # Share of a load's time for stage I.
SHARE, SHARE_MEASURED = 0.8, 0.5
"""Share of the search time for the solver, without and with a GPU to measure on."""
Progress = Callable[[str, float], None]  # Receives the current step and the completed share of the load.


class StageResults(NamedTuple):
    """The results of both stages for one load. Times are for one layer."""

    serial_ms: float
    structure_ms: float  # Best period of stage I: no interference, every operation on all SMs.
    choices: list[Candidate]  # Different pipelines, shortest first.
    complete: bool = True  # False if the time ended the solver.


@dataclass
class StageStore:
    """Solver results of one search, by the keys of `LoadSolver`. `save` is called after each new result."""

    stages: dict[str, StageResults] = field(default_factory=dict)
    save: Callable[[dict[str, StageResults]], None] = lambda _: None


class StagesFile(msgspec.Struct, forbid_unknown_fields=True):
    """The `--stages` file: `StageStore.stages`, valid for one target and load."""

    target: Target
    load: Load
    stages: dict[str, StageResults]
    version: int = VERSION


def load_stages(path: Path, target: Target, load: Load) -> dict[str, StageResults]:
    """Return the results in a `--stages` file, or none if it does not exist. Raises `ConfigError`."""
    if not path.exists():
        return {}
    try:
        file = msgspec.json.decode(path.read_bytes(), type=StagesFile)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --stages {path}: {error}") from None
    if (file.version, file.target, file.load) != (VERSION, target, load):
        raise ConfigError(f"--stages {path} is for another GPU, model, workload or version: remove it")
    return file.stages


def save_stages(path: Path, target: Target, load: Load, stages: dict[str, StageResults]) -> None:
    """Write a `--stages` file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.part")
    temporary.write_bytes(msgspec.json.encode(StagesFile(target, load, dict(stages))))
    temporary.replace(path)


def search_pipelines(
    machine: Machine, load: Load, progress: Progress = lambda *_: None, seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic, stop_requested: Callable[[], bool] = lambda: False,
) -> StageResults:  # fmt: skip
    """Run stages I and II for one load, about a second per structure. Deterministic if `seconds` suffice.

    At least one structure is searched, even if that takes longer than `seconds`. The search stops early once
    `stop_requested()` is true. Raises `ConfigError` if OR-Tools is not installed.
    """
    begun = clock()

    def left(share: float) -> float:
        return 0.0 if stop_requested() else begun + share * seconds - clock()

    try:
        from weft.autosearch import resource_assignment, structure_search
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ortools":
            raise
        raise ConfigError(f"the search needs OR-Tools: {install_hint('search')}") from None
    total = machine.num_sms
    step = resource_assignment.guest_levels(total)[0]
    levels = {max(step, round(n * total / 132 / step) * step) for n in GUEST_SMS}
    found: dict[bytes, structure_search.SolvedStructure] = {}
    structure_ms = float("inf")
    guests = (total, *sorted(n for n in levels if n < total))
    for i, guest_sms in enumerate(guests):
        if found and left(STRUCTURES_SHARE) <= 0:
            break
        progress(f"stage I with {guest_sms} SMs for attention", STRUCTURES_SHARE * i / len(guests))
        solved = structure_search.search(
            machine, load, guest_sms, EFFORT, seconds=left(STRUCTURES_SHARE), stop_requested=stop_requested
        )
        if guest_sms == total and solved:
            structure_ms = solved[0].ms
        for each in solved[:PER_LEVEL]:
            found.setdefault(msgspec.json.encode(each.period), each)
    complete = left(STRUCTURES_SHARE) > 0
    choices: list[Candidate] = []
    # interleaved, so that every level has had its best structure assigned if time runs out
    structures, stride = list(found.values()), max(1, -(-len(found) // len(guests)))
    for i, each in enumerate(each for first in range(stride) for each in structures[first::stride]):
        if choices and left(1.0) <= 0:
            break
        share = STRUCTURES_SHARE + (1 - STRUCTURES_SHARE) * i / len(found)
        progress(f"stage II, structure {i + 1} of {len(found)}", share)
        choices.append(resource_assignment.assign(machine, each.period, load, EFFORT, left(1.0), stop_requested))
    best = sorted(choices, key=lambda c: c.ms)[:KEPT]
    return StageResults(machine.serial_ms(load), structure_ms, best, complete and left(1.0) > 0)


class LoadSolver:
    """Runs both stages for the loads of one search. Loads in `store` are not solved again; new results are added."""

    def __init__(
        self, machine: Machine, budget: TimeBudget, store: StageStore, loads: int, *, measured: bool, workers: int
    ) -> None:
        """loads: approximate number. measured: measurements need the remaining time. workers: parallel loads."""
        self._machine, self._budget, self._store = machine, budget, store
        self._measured, self.workers = measured, workers
        self._share = SHARE_MEASURED if measured else SHARE
        self._loads = self._unsolved = loads
        self._done: dict[str, float] = {}  # Completed share of each load that is being solved.
        self._lock = threading.Lock()

    def results(self, name: str, load: Load) -> StageResults:
        """Solve the load if necessary. Returns the serial plan alone if the search has ended."""
        self.solve([(name, load)])
        found = self._store.stages.get(self._key(name, load))
        return StageResults(self._machine.serial_ms(load), float("inf"), []) if found is None else found

    def unfinished(self) -> list[str]:
        """Return the loads whose solver was ended by the time limit."""
        return [key for key, results in self._store.stages.items() if not results.complete]

    def solve(self, loads: Sequence[tuple[str, Load]]) -> None:
        """Solve all of these that have no results yet, in parallel. Does nothing once the search has ended."""
        wanted = {key: load for name, load in loads if (key := self._key(name, load)) not in self._store.stages}
        if not wanted or self._budget.stop_requested():
            return
        parallel = min(self.workers, len(wanted))
        if parallel == 1:
            for key, load in wanted.items():
                self._solve_one(key, load, 1)
            return
        with ThreadPoolExecutor(parallel) as pool:  # the solver releases the GIL
            for done in [pool.submit(self._solve_one, key, load, parallel) for key, load in wanted.items()]:
                done.result()

    def _solve_one(self, key: str, load: Load, parallel: int) -> None:
        if self._budget.stop_requested():
            return
        # Split the remaining time in the planned proportion of solving to measuring. A step that overran, such as
        # compiling kernels, thus costs both equally.
        each, turns = self._share * parallel / self._loads, max(1, -(-self._unsolved // parallel))
        seconds = self._budget.left * each / (each * turns + 1 - self._share)

        def report(text: str, within: float) -> None:
            with self._lock:
                self._done[key] = within
                done = self._loads - self._unsolved + sum(self._done.values())
                # a search that also measures uses all of its time, so time alone shows its progress
                solved = 0.0 if self._measured else self._share * min(1.0, done / self._loads)
                self._budget.report(f"{key}: {text}", solved)

        found = search_pipelines(self._machine, load, report, seconds, self._budget.clock, self._budget.stop_requested)
        with self._lock:
            self._store.stages[key] = found
            self._done.pop(key, None)
            self._unsolved = max(0, self._unsolved - 1)
            if not self._budget.stop_requested():  # an interrupted result must not reach the next search
                self._store.save(self._store.stages)

    def _key(self, name: str, load: Load) -> str:
        collectives = f"{describe_collectives(self._machine.spec)}: " if self._machine.spec.sums else ""
        return f"{collectives}{name}, {load.tokens} tokens"


class CollectiveChoice(NamedTuple):
    """One choice of collectives (the transformations of NanoFlow §4.1.2) and its results for one load."""

    spec: ModelSpec
    stages: StageResults

    @property
    def ms(self) -> float:
        """Time of one layer with the best pipeline or the serial plan, in ms."""
        return min([self.stages.serial_ms, *(c.ms for c in self.stages.choices)])

    @property
    def line(self) -> str:
        """Line of the report."""
        found = f"{self.stages.choices[0].ms:.3f}" if self.stages.choices else "-"
        return f"{describe_collectives(self.spec)}: serial {self.stages.serial_ms:.3f} ms, stage II {found} ms"


def compare_collectives(
    spec: ModelSpec, profile: Profile, load: Load, stages: MutableMapping[str, StageResults], progress: Progress,
    seconds: float, stop_requested: Callable[[], bool],
) -> list[CollectiveChoice]:  # fmt: skip
    """Return every choice of collectives in the profile, fastest first; of equals, the one with fewer operations.

    stages: results that exist already; new ones are added. seconds: for all choices together."""
    known = [v for v in transformations(spec) if {o.name for o in v.layer_operations()} <= set(profile.features)]
    if len(known) < 2:
        return [CollectiveChoice(v, StageResults(0.0, 0.0, [])) for v in known]
    found: list[CollectiveChoice] = []
    for i, variant in enumerate(known):
        key = f"{describe_collectives(variant)}: {load.tokens} tokens"
        if key not in stages:
            if found and stop_requested():
                break

            def report(text: str, within: float, i: int = i, key: str = key) -> None:
                progress(f"{key}: {text}", (i + within) / len(known))

            stages[key] = search_pipelines(
                Machine(profile, variant), load, report, seconds / len(known), stop_requested=stop_requested
            )  # fmt: skip
        found.append(CollectiveChoice(variant, stages[key]))
    return sorted(found, key=lambda c: (c.ms, len(list(c.spec.layer_operations()))))
