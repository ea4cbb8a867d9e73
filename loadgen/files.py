"""Writes reports as JSON, CSV, JSON lines and HTML."""

from __future__ import annotations

import csv
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from weft import unwritable
from weft.loadgen import inferencex
from weft.loadgen.errors import LoadError
from weft.loadgen.measures import FORMULAS, PER_REQUEST
from weft.loadgen.run import Run
from weft.loadgen.slo import RULES
from weft.loadgen.sweep import Sweep

COLUMNS = (
    "index", "session", "turn", "due", "start", "first", "end", "input_tokens", "output_tokens", "prompt_tokens",
    "completion_tokens", "cached_tokens", "outcome", "status", "error",
)  # fmt: skip
RECORDED = ("index", "session", "turn", "start", "status", "error")


def write(
    paths: dict[str, Path], runs: Sequence[Run], sweeps: Sequence[Sweep], description: dict[str, Any],
    row: dict[str, Any] | None = None,
) -> None:  # fmt: skip
    """Write each kind of report that has a path: `json`, `csv`, `record`, `html`. Raises `LoadError`.

    row: if given, the JSON has InferenceX's format with these fields (see `inferencex.row`)."""
    for kind, path in paths.items():
        try:
            match kind:
                case "json":
                    data: Any = [inferencex.row(run, row) for run in runs] if row else report(runs, sweeps, description)
                    path.write_bytes(orjson.dumps(data, option=orjson.OPT_INDENT_2))
                case "csv":
                    _write_csv(path, runs)
                case "record":
                    _write_record(path, runs)
                case "html":
                    from weft.loadgen.page import page

                    path.write_text(page(runs, sweeps, description), encoding="utf-8")
        except OSError as error:
            raise LoadError(unwritable(path, error)) from None


def report(runs: Sequence[Run], sweeps: Sequence[Sweep], description: dict[str, Any]) -> dict[str, Any]:
    """Return the content of `--json`. Times are in seconds; non-finite numbers become null."""
    out = {
        "format": "weft-load-1",
        "workload": description,
        "machine": {"system": platform.platform(), "python": platform.python_version()},
        "formulas": FORMULAS | RULES,
        "runs": [run.summary() for run in runs],
    }
    if sweeps:
        out["sweeps"] = [
            {
                "server": sweep.name,
                "highest_rate_met": sweep.best,
                "lowest_rate_missed": sweep.missed,
                "ended": sweep.reason,
                "objectives": [str(objective) for objective in sweep.runs[0].options.objectives] if sweep.runs else [],
            }
            for sweep in sweeps
        ]
    return out


def _write_csv(path: Path, runs: Sequence[Run]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["server", "rate", *COLUMNS, *PER_REQUEST])
        for run in runs:
            measures = run.everything
            values = [getattr(measures, name) for name in PER_REQUEST]
            for i, record in enumerate(measures.records):
                cells = [getattr(record, name) for name in COLUMNS] + [float(column[i]) for column in values]
                writer.writerow([run.name, "" if run.rate is None else run.rate, *map(_cell, cells)])


def _cell(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    return "" if value != value else f"{value:.6f}"


def _write_record(path: Path, runs: Sequence[Run]) -> None:
    with path.open("wb") as file:
        for run in runs:
            for record in run.everything.records:
                row = {
                    "at": record.due,
                    "input_tokens": record.prompt_tokens if record.prompt_tokens > 0 else max(record.input_tokens, 1),
                    "output_tokens": record.output_tokens,
                    "server": run.name,
                    "rate": run.rate,
                    **{name: getattr(record, name) for name in RECORDED},
                    "outcome": record.outcome.value,
                    "received_tokens": record.received_tokens,
                    "ttft": record.first - record.start,
                    "e2e": record.end - record.start,
                    "itl": np.round(np.diff(np.asarray(record.times)), 6),
                }
                file.write(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n")
