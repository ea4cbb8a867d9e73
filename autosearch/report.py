"""The report of a search: predicted and measured times, interference, the optimum of Equation 5, provenance."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.autosearch import cost_model
from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.formula_profile import SOURCES
from weft.autosearch.interference import Row
from weft.autosearch.pipeline_structure import every_operation
from weft.autosearch.profile import Profile
from weft.engine.model.operations import Resource, Role
from weft.engine.model.spec import ModelSpec
from weft.engine.plans.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console


class Line(NamedTuple):
    """A row of the report: one stage for one load."""

    load: str
    stage: str
    predicted_ms: float | None
    measured: Timing | None


class Result(NamedTuple):
    plan: Plan
    lines: list[Line]
    exchange: dict[Resource, list[Row]]  # R -> P by bottleneck resource; R is the exact share of the SMs.
    table_3: dict[Resource, list[tuple[float, float]]]
    """R -> P as in the paper; R is the loss of the concurrent GEMM."""
    accepted: tuple[str, ...]
    dropped: tuple[str, ...]  # Pipelines that lost when they were measured again.
    seconds: float
    measured: bool
    load: Load
    notes: tuple[str, ...] = ()  # Final lines: choice of collectives, optimum, provenance.
    source: str = "a recorded profile"
    unfinished: tuple[Path, ...] = ()  # Files from which an interrupted search continues.


def fastest_gemm_flops(profile: Profile, spec: ModelSpec) -> float:
    """FLOP/s of the fastest GEMM in the profile, on one GPU. spec: of one rank."""
    operations = every_operation(spec)
    gemms = [o.name for o in operations.values() if o.role in (Role.PROJECTION, Role.EXPERTS)]
    return max(operations[p.operation].flops * p.work / p.ms * 1e3 for p in profile.points if p.operation in gemms)


def optimum(profile: Profile, spec: ModelSpec, whole: ModelSpec) -> tuple[float, str]:
    """Return the optimal tokens/s per GPU (Equation 5) and its report line. spec: of one rank; whole: of all ranks."""
    flops, gpus = fastest_gemm_flops(profile, spec), spec.shard_of.ranks
    best = cost_model.optimal_throughput(flops, whole.active_parameters)
    kind = "modeled" if profile.modelled else "measured"
    text = f"optimal throughput (Equation 5) {best:,.0f} tokens/s/GPU"
    if gpus > 1:
        text += f", {gpus * best:,.0f} on {gpus} GPUs"
    return best, f"{text}, at the {flops / 1e12:,.0f} TFLOP/s of the fastest {kind} GEMM"


def share_of_optimum(name: str, tokens: int, layer_ms: float, spec: ModelSpec, best: float) -> str:
    """Report line: throughput of an iteration, without embedding and sampling, as a share of the optimum `best`."""
    rate = tokens / (layer_ms / 1e3 * spec.num_layers) / spec.shard_of.ranks
    return f"{name}: {rate:,.0f} tokens/s/GPU in the layers alone, {rate / best:.0%} of the optimum"


def provenance(profile: Profile) -> list[str]:
    """Report which features were measured and which were modeled. Empty if all were measured."""
    if not profile.modelled:
        return []
    measured = [name for name in profile.features if name not in profile.modelled]
    return [
        f"MODELED, NOT MEASURED ({profile.target.gpu}): {', '.join(profile.modelled)}",
        f"measured: {', '.join(measured) or 'nothing of this model, and no pair of operations'}",
        *(f"basis of the formulas: {text}" for text in SOURCES),
    ]


def report(result: Result, console: Console) -> None:
    """Print predicted and measured times for each load and stage, the interference and the notes."""
    from rich.table import Table

    title = f"one layer, {result.plan.target.gpu}, {result.plan.workload}, {result.seconds:.0f} s of search"
    table = Table(title=title, title_justify="left")
    for name in ("load", "stage", "predicted ms", "measured ms", "W", "MHz", "J", "gain"):
        table.add_column(name, justify="left" if name in ("load", "stage") else "right")
    serial = {line.load: line for line in result.lines if line.stage == "serial"}
    for line in result.lines:
        base = serial.get(line.load)
        gain = None
        if base is not None and line.measured is not None and base.measured is not None:
            gain = base.measured.ms / line.measured.ms
        elif base is not None and not result.measured and line.predicted_ms and base.predicted_ms:
            gain = base.predicted_ms / line.predicted_ms
        own = line.measured
        table.add_row(
            line.load, line.stage, _shown(line.predicted_ms), _shown(own and own.ms), _shown(own and own.watts, 0),
            _shown(own and own.mhz, 0), _shown(own and own.joules), _shown(gain),
        )  # fmt: skip
    console.print(table)
    for resource, rows in result.exchange.items():
        kept = ", ".join(f"{r.share:.2f} -> {r.performance:.2f} ±{r.spread * r.performance:.2f}" for r in rows)
        console.print(f"share of the SMs -> share of solo speed, {resource.value}: {kept}", highlight=False)
    for resource, pairs in result.table_3.items():
        text = ", ".join(f"{r:.2f} -> {p:.2f}" for r, p in pairs)
        console.print(f"loss of the GEMM -> share of solo speed, {resource.value}: {text}", highlight=False)
    if not result.exchange:
        console.print("No pair of operations was measured: the predictions ignore interference.")
    if not result.measured:
        console.print(f"Nothing was measured: these are predictions from {result.source}.")
    changes = [f"refinement: {text}" for text in result.accepted] + [f"dropped: {text}" for text in result.dropped]
    for text in (*changes, *result.notes):
        console.print(text, highlight=False)


def _shown(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
