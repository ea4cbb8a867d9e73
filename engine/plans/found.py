"""`FoundPlans`: the plans that engines have found themselves, in the cache folder, with the results of their trials.

A plan is a file like any other, named after its target. A second file next to it records the trials of its pipelines.
A missing or damaged file counts as none. Nothing here fails: without a usable folder there are no found plans.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path

import msgspec
from msgspec.structs import replace

from weft.engine.errors import ConfigError
from weft.engine.plans.plan import Period, Plan, Target, load_plan

FOLDER = "plans"
TRIALS = ".trials"  # Suffix of the file next to a plan.
MOST_BEGUN = 2
"""Trials that may begin without a regular end. An engine that dies in a trial twice does not try the plan again."""


class Verdict(msgspec.Struct, frozen=True):
    """The trial of one pipeline."""

    kept: bool
    gain: float  # Serial time over planned time.
    error: float = 0.0  # Standard error of its logarithm.
    pairs: int = 0


class Trials(msgspec.Struct, frozen=True):
    """The trials of a plan's pipelines, by the pipeline's number."""

    plan: str  # Digest of the plan file that was tried.
    begun: int = 0  # Trials that have begun and not ended regularly.
    verdicts: dict[int, Verdict] = {}


def _digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:16]


def stem(target: Target) -> str:
    """Return the name of the files for this target."""
    named = re.sub(r"[^A-Za-z0-9.]+", "-", "-".join((target.gpu, target.model, target.dtype))).strip("-").lower()
    return f"{named[:120]}-{_digest(msgspec.json.encode(target))}"


class FoundPlans:
    """The files for one target."""

    def __init__(self, cache: Path, target: Target) -> None:
        self.folder, self._target = cache / FOLDER, target
        self.file = self.folder / f"{stem(target)}.json"
        self._trials = self.file.with_suffix(TRIALS)

    def load(self) -> Plan | None:
        """Return the plan that a search found, without pipelines if the serial plan is best; None if there is none."""
        with contextlib.suppress(ConfigError, OSError):
            plan = load_plan(self.file)
            return plan if plan.target == self._target else None
        return None

    def trials(self) -> Trials:
        """Return the trials of the plan in the file."""
        return trials_of(self.file)

    def save(self, plan: Plan) -> None:
        """Write a plan, whose trials have not begun. Raises `OSError`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        part = self.file.with_suffix(f".{os.getpid()}.part")
        plan.save(part)
        part.replace(self.file)

    def record(self, trials: Trials) -> None:
        """Write the trials. Raises `OSError`."""
        part = self._trials.with_suffix(f".{os.getpid()}.trials-part")
        part.write_bytes(msgspec.json.encode(trials))
        part.replace(self._trials)


def trials_of(file: Path) -> Trials:
    """Return the trials of the plan in a file."""
    try:
        now = _digest(file.read_bytes())
    except OSError:
        return Trials("")
    with contextlib.suppress(OSError, msgspec.MsgspecError, ValueError):
        trials = msgspec.json.decode(file.with_suffix(TRIALS).read_bytes(), type=Trials)
        if trials.plan == now:
            return trials
    return Trials(now)


def kept_periods(plan: Plan, trials: Trials) -> tuple[Period, ...]:
    """Return the pipelines that have won their trial."""
    return tuple(p for i, p in enumerate(plan.periods) if (v := trials.verdicts.get(i)) is not None and v.kept)


def kept_plan(cache: Path, target: Target) -> Plan | None:
    """Return the found plan with the pipelines that have won; None if there are none."""
    found = FoundPlans(cache, target)
    plan = found.load()
    periods = () if plan is None else kept_periods(plan, found.trials())
    return replace(plan, periods=periods) if plan is not None and periods else None
