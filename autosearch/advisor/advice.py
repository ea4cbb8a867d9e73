"""`Advice`: the conclusions from a curve, and the configuration to serve with."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import yaml

from weft import unwritable
from weft.autosearch.advisor.curve import Curve, check_measures
from weft.autosearch.advisor.optimal_batch import ENGINE_SHARE, Aim, Solution, engine_objectives, solve
from weft.autosearch.advisor.predicted_rate import predicted_rate
from weft.autosearch.advisor.rate_search import MISS_FACTOR, MeasuredRate, knee, measured_rate
from weft.autosearch.advisor.replicas import ReplicaAdvice, advise_replicas
from weft.engine.config import Objective
from weft.engine.errors import ConfigError


class Advice(NamedTuple):
    curve: Curve
    objectives: tuple[Objective, ...]
    epsilon: float
    aim: Aim
    solution: Solution
    replicas: ReplicaAdvice | None  # None if no slot limit fits.
    rate: float
    """Requests per second that meet the objectives, while 15 % more do not; 0 if no rate does."""
    measured: MeasuredRate | None  # The result of runs at rates; None if the rate was simulated on the curve.
    notes: tuple[str, ...]


def advise(
    curve: Curve, objectives: Sequence[Objective], epsilon: float, aim: Aim, outputs: np.ndarray | None = None
) -> Advice:
    """Derive the advice. outputs `[k]`: output tokens of requests; None: the mean for all. Raises `ConfigError`."""
    check_measures(objectives)
    solution = solve(curve, engine_objectives(objectives), epsilon, aim)
    if solution.best is None:
        notes = (*_notes(curve), *_share_notes(objectives))
        return Advice(curve, tuple(objectives), epsilon, aim, solution, None, 0.0, None, notes)
    drawn = np.array([curve.output]) if outputs is None else outputs
    bound = solution.best.point.bound
    runs = curve.runs(bound, objectives)
    found, (kept, missed) = measured_rate(runs), knee(runs)
    if found is not None:
        rate = found.rate
    else:  # limited by the runs so far
        rate = min(predicted_rate(curve, bound, objectives, drawn), missed / MISS_FACTOR, kept or math.inf)
    replicas = advise_replicas(curve, solution.best)
    notes = (*_notes(curve), *_objective_notes(objectives))
    return Advice(curve, tuple(objectives), epsilon, aim, solution, replicas, rate, found, notes)


def _share_notes(objectives: Sequence[Objective]) -> tuple[str, ...]:
    itl = ", ".join(str(o) for o in objectives if o.measure == "itl")
    return (
        (f"the engine may use {ENGINE_SHARE:.0%} of {itl}; the rest is reserved for the way to the client",)
        if itl
        else ()
    )


def _notes(curve: Curve) -> tuple[str, ...]:
    m, notes = curve.machine, []
    if m.no_joules and not m.joules:
        notes.append(f"joules are unavailable: {m.no_joules}")
    if m.no_activity:
        notes.append(f"memory and SM activity is unavailable: {m.no_activity}")
    return tuple(notes)


def _objective_notes(objectives: Sequence[Objective]) -> tuple[str, ...]:
    notes = []
    if objectives and all(o.measure == "itl" for o in objectives):
        notes.append(
            "the slot limit meets itl objectives at any rate, but above the advised rate the queue grows; add a ttft "
            "objective to limit the wait"
        )
    if any(o.measure == "ttft" for o in objectives):
        notes.append("ttft in the table excludes the wait for a slot; the advised rate includes it")
    return tuple(notes)


def configuration(advice: Advice, given: Mapping[str, Any]) -> str:
    """Return YAML for `weft serve --config`. given: engine options of the measurements.

    Raises `ConfigError` if there is nothing to advise."""
    best, replicas = advice.solution.best, advice.replicas
    if best is None or replicas is None:
        raise ConfigError(advice.solution.why_not)
    point, curve = best.point, advice.curve
    values = {name.replace("_", "-"): value for name, value in given.items()} | {"max-num-seqs": point.bound}
    if replicas.replicas > 1:
        values["replicas"] = replicas.replicas
    if curve.machine.device == "cpu" and not {"num_pages", "kv_cache_gib"} & given.keys():
        # A CPU's default pool follows the slot limit, which was higher for the measurements.
        values["num-pages"] = max(replicas.needed_pages, curve.machine.pages // replicas.replicas) + 1
    lines = [
        f"# weft advise, {curve.model}, workload {curve.workload}, {curve.machine.name}",
        f"# {point.batch:.1f} requests ran at this limit: {best.throughput:,.0f} tokens/s, "
        f"itl p99 {point.itl.at(99.0) * 1e3:.3g} ms",
        f"# objectives: {', '.join(map(str, advice.objectives)) or 'none'}; maximum requests per second: "
        f"{advice.rate:.3g}",
        f"# replicas: {replicas.replicas} ({replicas.reason})",
        f"# num-pages: {replicas.needed_pages + 1} would suffice for this limit; the other pages cache prefixes",
    ]
    return "\n".join(lines) + "\n" + yaml.safe_dump(values, sort_keys=False)


def write(text: str, path: Path) -> None:
    """Raises `ConfigError`."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(unwritable(path, error)) from None
