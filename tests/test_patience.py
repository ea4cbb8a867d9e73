"""Tests wait long enough: a machine that pauses for some seconds fails none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FILES = [
    file
    for file in sorted(TESTS.rglob("*.py"))
    if file.relative_to(TESTS).parts[0] not in ("gpu", "chaos", "mutants")  # no change waits for these tests
]
ASKS = {f"httpx.{name}" for name in ("get", "post", "request", "stream", "Client", "AsyncClient")}
"""calls that give up after five seconds unless they get a timeout"""
WAITS = {"wait", "wait_for", "join", "communicate", "timeout", "settimeout", "result", "get"}
CLOCKS = {"monotonic", "perf_counter", "time"}
SHORTEST = 60
"""seconds that a test waits at least for an expected event"""
BRIEF = 3
"""seconds that a test waits at most for an event that must not happen"""


@cache
def parsed(file: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(file.read_text(encoding="utf-8"))))


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in parsed(file):
        if isinstance(node, ast.Call) and isinstance(node.func, (ast.Attribute, ast.Name)):
            yield ast.unparse(node.func), node


def seconds(name: str, call: ast.Call) -> Iterator[float]:
    """The seconds that this call waits, as far as they are written there."""
    given = [word.value for word in call.keywords if word.arg == "timeout"]
    if name.rpartition(".")[2] in WAITS - {"get"}:
        given += call.args[-1:]
    for value in given:
        if isinstance(value, ast.Constant) and isinstance(value.value, (int, float)):
            yield value.value


def is_elapsed(node: ast.AST, names: set[str]) -> bool:
    """Whether this is the time since something: a difference of clocks, or a variable of `names` that has one."""
    if isinstance(node, ast.Name):
        return node.id in names
    return isinstance(node, ast.BinOp) and isinstance(node.op, ast.Sub) and is_clock(node.left)


def is_clock(node: ast.AST) -> bool:
    return isinstance(node, ast.Call) and ast.unparse(node.func).rpartition(".")[2] in CLOCKS


def number(node: ast.AST) -> float | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, (int, float)) else None


def hurried(function: ast.AST) -> Iterator[tuple[int, str]]:
    """Deadlines that come too soon, and assertions that something took no longer than a while."""
    nodes = list(ast.walk(function))
    assigned = [n for n in nodes if isinstance(n, ast.Assign) and is_elapsed(n.value, set())]
    names = {target.id for n in assigned for target in n.targets if isinstance(target, ast.Name)}
    for node in nodes:
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add) and is_clock(node.left):
            if BRIEF < (number(node.right) or 0) < SHORTEST:
                yield node.lineno, ast.unparse(node)
        elif isinstance(node, ast.Assert):
            for test in [n for n in ast.walk(node.test) if isinstance(n, ast.Compare)]:
                for left, operator, right in zip(
                    [test.left, *test.comparators], test.ops, test.comparators, strict=False
                ):
                    most = number(right) if isinstance(operator, (ast.Lt, ast.LtE)) else None
                    if most is not None and most < SHORTEST and is_elapsed(left, names):
                        yield node.lineno, ast.unparse(test)


def test_no_test_judges_by_the_clock_of_a_busy_machine() -> None:
    hasty = {
        f"{file.relative_to(TESTS)}:{line}: {what}"
        for file in FILES
        for node in parsed(file)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        for line, what in hurried(node)
    }
    assert not hasty, "\n".join(sorted(hasty))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("end = time.monotonic() + 10", 1),
        ("end = time.monotonic() + 240", 0),
        ("assert time.perf_counter() - begin < 30", 1),
        ("took = time.time() - begin; assert 1 < took <= 5.0", 1),
        ("took = time.time() - begin; assert took > 5.0", 0),
    ],
)
def test_what_counts_as_hasty(line: str, found: int) -> None:
    assert len(list(hurried(ast.parse(line)))) == found


def test_no_test_gives_up_while_the_machine_pauses() -> None:
    hasty = []
    for file in FILES:
        for name, call in calls(file):
            at = f"{file.relative_to(TESTS)}:{call.lineno}: {name}"
            if name in ASKS and not any(word.arg in ("timeout", None) for word in call.keywords):
                hasty.append(f"{at} gives up after five seconds: say timeout=240")
            short = [found for found in seconds(name, call) if BRIEF < found < SHORTEST]
            hasty += [f"{at} waits {found:g} s: 240 cost nothing where all is well" for found in short]
    assert not hasty, "\n".join(hasty)
