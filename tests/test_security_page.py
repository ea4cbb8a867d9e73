"""Each threat in SECURITY.md names a defense, where it is, and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "SECURITY.md").read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and not line.startswith("| threat ")
]


@pytest.mark.parametrize(("threat", "defense", "where", "tests"), ROWS, ids=[row[0] for row in ROWS])
def test_a_threat_has_a_defense_and_tests_that_exist(threat: str, defense: str, where: str, tests: str) -> None:
    assert threat
    assert defense.endswith(".")
    assert all((ROOT / path).is_file() for path in re.findall(r"`([^`]+)`", where))
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", tests)
    assert named
    assert len(named) == tests.count("`") / 2
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        functions = (ast.FunctionDef, ast.AsyncFunctionDef)
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, functions)}, path


def test_the_table_covers_every_kind_of_attacker() -> None:
    table = " ".join(row[0] for row in ROWS)
    assert len(ROWS) >= 15
    for kind in (
        "without a key",
        "sends too much",
        "DNS rebinding",
        "another site",
        "checkpoint",
        "disk",
        "another user",
    ):
        assert kind in table
