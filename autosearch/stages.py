"""Stages I and II for one load: pipelines from a profile, and the file that keeps them for a machine without solver."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import msgspec

from weft import install_hint
from weft.autosearch.bench_protocol import Load
from weft.autosearch.machine import Machine
from weft.engine.errors import ConfigError
from weft.engine.plans.plan import Period, Target

if TYPE_CHECKING:
    from weft.autosearch import stage_one

VERSION = 1
"""of the file of `--stages`"""
EFFORT = 1.0
"""deterministic seconds of one call of the solver"""
GUEST_SMS = (20, 24, 32, 36, 48)
"""of 132: SMs that stage I plans for attention with"""
PER_LEVEL = 4
"""structures of each that stage II looks at"""
KEPT = 5
"""pipelines of one load"""
STRUCTURES_SHARE = 0.4
"""of the time of one load, for stage I"""
Progress = Callable[[str, float], None]
"""told what is done now, and the share of the load that is behind it"""


class Choice(NamedTuple):
    """A pipeline and its predicted period."""

    ms: float
    period: Period


class Stages(NamedTuple):
    """What the two stages found for one load."""

    serial_ms: float
    structure_ms: float
    """the best period of stage I: without interference, every operation on all SMs"""
    choices: list[Choice]
    """different pipelines, the shortest first"""


@dataclass
class KeptStages:
    """What the solver found in a search, and who keeps it: `keep` is called when there is more than before."""

    stages: dict[str, Stages] = field(default_factory=dict)
    """by load, as `Solving` names them"""
    keep: Callable[[dict[str, Stages]], None] = lambda _: None


class StagesFile(msgspec.Struct, forbid_unknown_fields=True):
    """Keeps what the solver found, so that a machine with a GPU and no solver can go on from there."""

    target: Target
    load: Load
    stages: dict[str, Stages]
    """as of `KeptStages`"""
    version: int = VERSION


def predict(
    machine: Machine, load: Load, progress: Progress = lambda *_: None, seconds: float = float("inf"),
    clock: Callable[[], float] = time.monotonic, ended: Callable[[], bool] = lambda: False,
) -> Stages:  # fmt: skip
    """Stages I and II for one load; a second or so per structure, the same every time that `seconds` suffice.

    seconds: at most, but for one structure, which is always looked at. ended: nobody waits for more than there is.
    Raises `ConfigError` when OR-tools is not installed.
    """
    begun = clock()

    def left(share: float) -> float:
        return 0.0 if ended() else begun + share * seconds - clock()

    try:
        from weft.autosearch import stage_one, stage_two
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "ortools":
            raise
        raise ConfigError(f"the search needs OR-tools: {install_hint('search')}") from None
    total = machine.num_sms
    step = stage_two.guest_levels(total)[0]
    levels = {max(step, round(n * total / 132 / step) * step) for n in GUEST_SMS}
    found: dict[bytes, stage_one.Solved] = {}
    bound = float("inf")
    guests = (total, *sorted(n for n in levels if n < total))
    for i, guest_sms in enumerate(guests):
        if found and left(STRUCTURES_SHARE) <= 0:
            break
        progress(f"stage I with {guest_sms} SMs for attention", STRUCTURES_SHARE * i / len(guests))
        solved = stage_one.search(machine, load, guest_sms, EFFORT, seconds=left(STRUCTURES_SHARE), ended=ended)
        if guest_sms == total and solved:
            bound = solved[0].ms
        for each in solved[:PER_LEVEL]:
            found.setdefault(msgspec.json.encode(each.period), each)
    choices: list[Choice] = []
    for i, each in enumerate(_by_turns(list(found.values()), len(guests))):
        if choices and left(1.0) <= 0:
            break
        share = STRUCTURES_SHARE + (1 - STRUCTURES_SHARE) * i / len(found)
        progress(f"stage II, structure {i + 1} of {len(found)}", share)
        choices.append(Choice(*stage_two.assign(machine, each.period, load, EFFORT, left(1.0), ended)))
    return Stages(machine.serial_ms(load), bound, sorted(choices, key=lambda c: c.ms)[:KEPT])


def _by_turns(found: list[stage_one.Solved], levels: int) -> list[stage_one.Solved]:
    """Where time ends the list, each level of stage I has had its best looked at first."""
    step = max(1, -(-len(found) // levels))
    return [found[i] for first in range(step) for i in range(first, len(found), step)]


def read_stages(path: Path, target: Target, load: Load) -> dict[str, Stages]:
    """What an earlier search kept; nothing when there is no such file. Raises `ConfigError`."""
    if not path.exists():
        return {}
    try:
        file = msgspec.json.decode(path.read_bytes(), type=StagesFile)
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read --stages {path}: {error}") from None
    if (file.version, file.target, file.load) != (VERSION, target, load):
        raise ConfigError(f"--stages {path} is of another GPU, model, workload or version: remove it")
    return file.stages


def keep_stages(path: Path, target: Target, load: Load, stages: dict[str, Stages]) -> None:
    """For `read_stages`."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    part.write_bytes(msgspec.json.encode(StagesFile(target, load, dict(stages))))
    part.replace(path)
