"""Writes rows for benchmarks/results/tensor-parallel-70b.json: `rank_rows.py RANKS WHOLE.JSON`.

WHOLE.JSON is a report of `weft bench offline`. A row has the workload, total tokens/s, tokens/s per GPU, the share of
the optimum, watts of all GPUs and tokens per joule; what the report lacks, as on a CPU, is empty. The rows are printed
and written next to it, as rows.json.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def runs(report: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The workloads of a report, and their figures."""
    yield report["workload"], report
    for name, value in report.items():
        if name.startswith("then ") and isinstance(value, dict):
            yield name.removeprefix("then "), value


def named(workload: str) -> str:
    """`1024:512:1000` as the results page has it; distributions as they are."""
    parts = workload.split(":")
    return "{} / {} x {}".format(*parts) if len(parts) == 3 else workload


def rows(ranks: int, report: dict[str, Any]) -> list[list[Any]]:
    found, optimum = [], report.get("optimum_tokens_per_second")
    for workload, figures in runs(report):
        total, watts, per_joule = (
            figures["total_tokens_per_second"],
            figures.get("watts"),
            figures.get("tokens_per_joule"),
        )
        found.append([
            f"{ranks}, {named(workload)}", round(total), round(total / ranks),
            "" if optimum is None else round(total / optimum, 3), "" if watts is None else round(watts),
            "" if per_joule is None else f"{per_joule:.2f}",
        ])  # fmt: skip
    return found


if __name__ == "__main__":
    file = Path(sys.argv[2])
    made = rows(int(sys.argv[1]), json.loads(file.read_text()))
    lines = ",\n ".join(json.dumps(row) for row in made)
    file.with_name("rows.json").write_text(f"[{lines}]\n")
    print(lines, flush=True)
