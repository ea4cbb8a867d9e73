"""docs/tour.md names functions that exist, in the files that it names."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = re.findall(r"^\| \d+ \| `([\w.]+)` \| `([\w/.]+)` \|", (ROOT / "docs/tour.md").read_text(), re.M)
NAMED = re.findall(r"`([A-Z]\w+\.\w+)` in `([\w/]+\.py)`", (ROOT / "docs/tour.md").read_text().replace("\n  ", " "))


def functions(file: Path) -> set[str]:
    found = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.ClassDef):
            found |= {
                f"{node.name}.{f.name}" for f in node.body if isinstance(f, ast.FunctionDef | ast.AsyncFunctionDef)
            }
    return found


@pytest.mark.parametrize(("function", "file"), [*ROWS, *NAMED])
def test_each_stop_of_the_tour_exists(function: str, file: str) -> None:
    assert function in functions(ROOT / file)


def test_the_tour_has_twelve_stops() -> None:
    assert len(ROWS) == 12
    assert len(NAMED) == 2
