"""What a search found, as tables: predicted against measured for each load and stage, and what sharing SMs costs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from weft.autosearch.bench_protocol import Load, Timing
from weft.autosearch.interference import Row
from weft.engine.model.operations import Resource
from weft.engine.plans.plan import Plan

if TYPE_CHECKING:
    from rich.console import Console


class Line(NamedTuple):
    """A row of the report: one load, one stage."""

    load: str
    stage: str
    predicted_ms: float | None
    measured: Timing | None


class Result(NamedTuple):
    plan: Plan
    lines: list[Line]
    exchange: dict[Resource, list[Row]]
    """R -> P by what a kernel is short of, R exactly its SMs"""
    table_3: dict[Resource, list[tuple[float, float]]]
    """R -> P as the paper has it, R what the product beside it loses"""
    accepted: tuple[str, ...]
    """what refinement changed"""
    dropped: tuple[str, ...]
    """pipelines that did not win when they were measured again"""
    seconds: float
    measured: bool
    load: Load
    """the dense batch"""
    notes: tuple[str, ...] = ()
    """printed last: the choice of collectives, the optimum, what was modelled"""
    source: str = "a recorded profile"
    unfinished: tuple[Path, ...] = ()
    """files that this search, had it been interrupted, would go on from"""


def report(result: Result, console: Console) -> None:
    """Predicted against measured for each load and stage, and what sharing SMs costs."""
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
        console.print(f"loss of the product -> share of solo speed, {resource.value}: {text}", highlight=False)
    if not result.exchange:
        console.print("No pair of operations was measured: the predictions leave out what overlap costs.")
    if not result.measured:
        console.print(f"Nothing here was measured: these are predictions from {result.source}.")
    for text in result.accepted:
        console.print(f"refinement: {text}", highlight=False)
    for text in result.dropped:
        console.print(f"dropped: {text}", highlight=False)
    for text in result.notes:
        console.print(text, highlight=False)


def _shown(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
