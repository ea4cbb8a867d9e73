"""The wheel holds what its commands use, and no more.

The list of modules comes from pyproject.toml; nothing is built. The source says what a command uses: every import
counts, also those inside functions, and so do modules that are looked up by name.
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

import weft
from weft.server.daemon import cli
from weft.server.daemon.cli import CHECKOUT_COMMANDS, CHECKOUT_GROUPS, COMMANDS

ROOT = Path(weft.__file__).parent
MOST_LINES = 97_000
"""Lines of Python in the wheel: 72,000 when the laboratory left it; GGUF readers, fields and endpoints of others,
repairs of tool calls and failing disks came later, then recurrent states, latent attention, encoders, LoRA
adapters, images, packed weights and speculation. Raise this only together with the feature that needs it."""

PROGRAMS = ("weft", "weft.server.__main__")
"""The package itself (`LLM`) and the `weft` command."""
BY_NAME = {
    "weft.engine.model.families": "weft.engine.model.families.*"  # one file per architecture, listed by the folder
}
"""Modules that import others by names made at run time. Names that are written out are found without this table."""
NAME = re.compile(r"weft(\.\w+)+")


def modules(packages: Iterable[str]) -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for package in packages:
        for file in ROOT.joinpath(*package.split(".")[1:]).glob("*.py"):
            found[package if file.name == "__init__.py" else f"{package}.{file.stem}"] = file
    return found


def project(folder: Path) -> dict[str, dict[str, dict[str, list[str]]]]:
    return tomllib.loads((folder / "pyproject.toml").read_text(encoding="utf-8"))


WHEEL = modules(project(ROOT)["tool"]["setuptools"]["packages"])


def mentioned(tree: ast.AST) -> Iterator[str]:
    """Modules and members of modules that are imported, or named by a string such as "weft.engine.llm:LLM"."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and not node.level:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            name = node.value.partition(":")[0]
            if NAME.fullmatch(name):
                yield name


def used(name: str, known: dict[str, Path]) -> set[str]:
    """The modules that a module needs, with the packages around them."""
    names = set(mentioned(ast.parse(known[name].read_text(encoding="utf-8"))))
    if pattern := BY_NAME.get(name):
        names |= {other for other in known if other.startswith(pattern.rstrip("*"))}
    found = set()
    for other in names:
        parts = other.split(".")
        found |= {package for i in range(1, len(parts) + 1) if (package := ".".join(parts[:i])) in known}
    return found


def reachable(begin: Iterable[str], known: dict[str, Path]) -> set[str]:
    seen: set[str] = set()
    todo = list(begin)
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo.extend(used(name, known) - seen)
    return seen


def test_a_command_uses_every_module_of_the_wheel() -> None:
    unused = set(WHEEL) - reachable(PROGRAMS, WHEEL)
    assert not unused, "move them to tools/ or tests/, or delete them"


def test_the_wheel_has_every_module_that_it_uses() -> None:
    everything = modules(
        ".".join(("weft", *init.parent.relative_to(ROOT).parts))
        for folder in ("", "autosearch", "deploy", "engine", "kernels", "loadgen", "server", "tools")
        for init in ([ROOT / "__init__.py"] if not folder else (ROOT / folder).rglob("__init__.py"))
    )
    lacking = {name for module in WHEEL for name in used(module, everything)} - set(WHEEL)
    assert lacking == {"weft.tools", CHECKOUT_COMMANDS}  # cli.py looks for these and runs without them


def test_the_wheel_has_the_data_files_of_its_packages() -> None:
    data = project(ROOT)["tool"]["setuptools"]["package-data"]
    packed = {
        file
        for package, patterns in data.items()
        for pattern in patterns
        for file in ROOT.joinpath(*package.split(".")[1:]).glob(pattern)
    }
    there = {
        file
        for folder in {module.parent for module in WHEEL.values()} - {ROOT, ROOT / "deploy"}
        for file in folder.rglob("*")
        if file.is_file() and file.suffix not in (".py", ".pyc")
    }
    assert there <= packed


def test_a_server_starts_without_the_packages_of_any_extra() -> None:
    lacking = ("PIL", "matplotlib", "opentelemetry.sdk", "ortools", "pynvml", "triton")
    code = f"""
import sys
sys.modules |= dict.fromkeys({lacking})
import weft.engine.process, weft.engine.engine, weft.server.daemon.worker, weft.server.daemon.daemon
"""
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


def test_checkout_commands_are_not_in_the_wheel() -> None:
    assert not {command.name.split()[0] for command in COMMANDS} & set(CHECKOUT_GROUPS)


def test_a_checkout_command_outside_a_checkout_is_a_one_line_error(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(cli, "find_spec", lambda _: None)
    cli.all_commands.cache_clear()
    try:
        assert cli.main(["bench", "offline", "--help"]) == 2
    finally:
        cli.all_commands.cache_clear()
    (line,) = capsys.readouterr().err.splitlines()
    assert "in a checkout of weft's repository" in line


def test_the_wheel_does_not_grow() -> None:
    assert sum(len(file.read_text(encoding="utf-8").splitlines()) for file in WHEEL.values()) <= MOST_LINES


def test_ray_is_a_distribution_of_the_same_version() -> None:
    ray = project(ROOT / "deploy" / "ray")
    assert ray["tool"]["setuptools"]["packages"] == ["weft.deploy.ray"]
    version = project(ROOT)["project"]["version"]
    assert ray["project"]["version"] == version
    assert ray["project"]["dependencies"][0] == f"weft-serve=={version}"
    assert not [name for name in WHEEL if name.startswith("weft.deploy.ray")]
