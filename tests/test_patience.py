"""Tests wait long enough: a machine that pauses for some seconds fails none of them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

TESTS = Path(__file__).parent
FILES = [
    file
    for file in sorted(TESTS.rglob("*.py"))
    if file.relative_to(TESTS).parts[0] not in ("gpu", "chaos", "mutants")  # no change waits for these tests
]
ASKS = {f"httpx.{name}" for name in ("get", "post", "request", "stream", "Client", "AsyncClient")}
"""calls that give up after five seconds unless they get a timeout"""
WAITS = {"wait", "wait_for", "join", "communicate", "timeout", "settimeout", "result", "get"}
SHORTEST = 60
"""seconds that a test waits at least for an expected event"""
BRIEF = 3
"""seconds that a test waits at most for an event that must not happen"""


def calls(file: Path) -> Iterator[tuple[str, ast.Call]]:
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
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
