"""No two files of the kernels import each other, not even inside a function or for types alone."""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import weft.kernels

FOLDER = Path(weft.kernels.__file__).parent
PREFIX = "weft.kernels"


def imported(source: str) -> set[str]:
    """Names of this folder's files that a file imports anywhere."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update({node.module} if node.module != PREFIX else {f"{PREFIX}.{a.name}" for a in node.names})
    return {name.removeprefix(PREFIX + ".") for name in names if name.startswith(PREFIX + ".")}


def test_a_circle_would_be_seen() -> None:
    assert imported("def f():\n    from weft.kernels import flash\n") == {"flash"}
    assert imported("from weft.kernels.gemm import matmul\nimport weft.kernels.tuned\n") == {"gemm", "tuned"}


def test_there_is_no_circle() -> None:
    files = {file.stem: imported(file.read_text(encoding="utf-8")) for file in FOLDER.glob("*.py")}
    assert {"gemm_hopper", "attention_torch", "flash"} <= set().union(*files.values())
    order = list(TopologicalSorter(files).static_order())  # raises CycleError, which names the circle
    assert order.index("gemm_launch") < order.index("gemm_hopper") < order.index("gemm")
