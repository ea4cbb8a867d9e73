"""`Advice`: everything that follows from a curve, and the configuration that says so."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from weft import unwritable
from weft.autosearch.advisor.curve import Curve, check_measures
from weft.autosearch.advisor.rate import predicted_rate
from weft.autosearch.advisor.rate_search import MORE, MeasuredRate, knee, measured
from weft.autosearch.advisor.replicas import ReplicaAdvice, advise_replicas
from weft.autosearch.advisor.solve import OWN, Aim, Solution, held, solve
from weft.engine.config import Objective
from weft.engine.errors import ConfigError


class Advice(NamedTuple):
    curve: Curve
    objectives: tuple[Objective, ...]
    epsilon: float
    aim: Aim
    solution: Solution
    replicas: ReplicaAdvice | None
    """None where no bound fits"""
    rate: float
    """requests a second at which the objectives hold, and 15 % more at which they do not; 0 where none does"""
    measured: MeasuredRate | None
    """what runs at rates said; None: the rate was played out on the curve"""
    notes: tuple[str, ...]


def advise(
    curve: Curve, objectives: Sequence[Objective], epsilon: float, aim: Aim, outputs: np.ndarray | None = None
) -> Advice:
    """outputs `[k]`: output tokens of requests; without, all are as long as the mean. Raises `ConfigError`."""
    check_measures(objectives)
    solution = solve(curve, held(objectives), epsilon, aim)
    if solution.best is None:
        notes = (*_notes(curve), *_of_the_engines_share(objectives))
        return Advice(curve, tuple(objectives), epsilon, aim, solution, None, 0.0, None, notes)
    drawn = np.array([curve.output]) if outputs is None else outputs
    bound = solution.best.point.bound
    runs = curve.runs(bound, objectives)
    found, (kept, missed) = measured(runs), knee(runs)
    if found is not None:
        rate = found.rate
    else:  # not without what runs have shown so far
        rate = min(predicted_rate(curve, bound, objectives, drawn), missed / MORE, kept or math.inf)
    replicas = advise_replicas(curve, solution.best)
    notes = (*_notes(curve), *_of_the_bound(objectives))
    return Advice(curve, tuple(objectives), epsilon, aim, solution, replicas, rate, found, notes)


def _of_the_engines_share(objectives: Sequence[Objective]) -> tuple[str, ...]:
    asked = [str(o) for o in objectives if o.measure == "itl"]
    return (f"a bound may take {OWN:.0%} of {', '.join(asked)}: the rest is the way's to the client",) if asked else ()


def _notes(curve: Curve) -> tuple[str, ...]:
    m, notes = curve.machine, []
    if m.no_joules and not m.joules:
        notes.append(f"no joules: {m.no_joules}")
    if m.no_activity:
        notes.append(f"no activity of memory and SMs: {m.no_activity}")
    return tuple(notes)


def _of_the_bound(objectives: Sequence[Objective]) -> tuple[str, ...]:
    notes = []
    if objectives and all(o.measure == "itl" for o in objectives):
        notes.append(
            "the bound keeps objectives of itl at any rate: beyond the advised one requests wait longer and longer; "
            "a ttft objective makes that count"
        )
    if any(o.measure == "ttft" for o in objectives):
        notes.append("ttft of a bound is without waiting for a seat; the advised rate takes the waiting in")
    return tuple(notes)


def configuration(advice: Advice, given: Mapping[str, Any]) -> str:
    """YAML for `weft serve --config`. `given`: the engine's options as they were for the measurements.

    Raises `ConfigError` where there is nothing to advise.
    """
    best, replicas = advice.solution.best, advice.replicas
    if best is None or replicas is None:
        raise ConfigError(advice.solution.why_not)
    point, curve = best.point, advice.curve
    values = {name.replace("_", "-"): value for name, value in given.items()} | {"max-num-seqs": point.bound}
    if replicas.replicas > 1:
        values["replicas"] = replicas.replicas
    if curve.machine.device == "cpu" and not {"num_pages", "kv_cache_gib"} & given.keys():
        # By itself a CPU's pool has pages for so many requests as may run, and more might when these were measured.
        values["num-pages"] = max(replicas.needed_pages, curve.machine.pages // replicas.replicas) + 1
    lines = [
        f"# weft advise, {curve.model}, workload {curve.workload}, {curve.machine.name}",
        f"# {point.batch:.1f} requests ran at this bound: {best.throughput:,.0f} tokens/s, "
        f"itl p99 {point.itl.at(99.0) * 1e3:.3g} ms",
        f"# objectives: {', '.join(map(str, advice.objectives)) or 'none'}; requests a second at most: "
        f"{advice.rate:.3g}",
        f"# replicas: {replicas.replicas} ({replicas.reason})",
        f"# num-pages: {replicas.needed_pages + 1} would do for this bound; the other pages keep prefixes",
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False)


def write(text: str, path: Path) -> None:
    """Raises `ConfigError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(unwritable(path, error)) from None
