"""Imports follow the order of the folders, in the root and inside each folder, and never form a circle.

Every import counts, including those inside a function or under `TYPE_CHECKING`.
"""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

import weft

ROOT = Path(weft.__file__).parent

FOLDERS: dict[str, set[str]] = {
    "kernels": set(),
    "engine": {"kernels"},
    "autosearch": {"engine", "kernels"},
    "loadgen": set(),
    "server": {"engine", "autosearch", "loadgen"},
    "deploy": {"engine", "autosearch", "loadgen", "server"},
    "tools": {"kernels", "engine", "autosearch", "loadgen", "server", "deploy"},
}
"""Folders that each folder may import besides itself. `server` and `deploy` may not import `kernels`."""

ENGINE = (
    ("demo", "errors", "progress", "profiling"),
    ("config",),
    ("images",),
    ("wire", "model"),
    ("plans", "memory"),
    ("runner",),
    ("ranks",),
    ("scheduling",),
    ("encoders", "engine"),
    ("llm", "process"),
)
SERVER = (
    ("errors", "config", "bodies", "keys", "logs"),
    ("options",),
    ("text", "observe"),
    ("tools", "batches", "replicas"),
    ("api",),
    ("daemon", "commands"),
    ("__main__",),
)
"""Levels, lowest first. A subfolder may import lower levels, and its own level without a circle."""

KERNELS = (
    ("common", "native"),
    ("formats",),
    ("reference",),
    ("matmul", "attention"),
    ("experts", "collectives"),
    ("sampling", "tiers"),
    ("tuning",),
)

RUNNER = (("iteration",), ("options",), ("memory",), ("device",), ("cpu", "cuda"), ("start",))
"""Levels of `engine/runner/`."""

COMMAND_LINE = {"server.daemon.cli", "server.commands"}
"""The only modules that may import `autosearch` and `loadgen`, for their subcommands."""


def modules() -> dict[str, Path]:
    """Return each file by its dotted name below `weft`."""
    found = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """Yield the modules of weft that a file imports, by their longest known name."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "weft" and not node.level:
            base = (node.module or "").removeprefix("weft").lstrip(".")
            names = [f"{base}.{alias.name}".lstrip(".") for alias in node.names]
            yield from (name if name in known else base for name in names if name in known or base in known)
        elif isinstance(node, ast.Import):
            yield from (a.name[5:] for a in node.names if a.name.startswith("weft.") and a.name[5:] in known)


@pytest.fixture(scope="module")
def graph() -> dict[str, set[str]]:
    known = modules()
    return {name: set(imports(file, known)) - {name} for name, file in known.items()}


def subfolder(name: str) -> str:
    """Return the subfolder or file that a module belongs to: `engine.memory.pages` -> `memory`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the strongly connected components of more than one node (Tarjan)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for other in graph.get(node, ()):
            if other not in index:
                visit(other)
                low[node] = min(low[node], low[other])
            elif other in stack:
                low[node] = min(low[node], index[other])
        if low[node] == index[node]:
            component = [stack.pop()]
            while component[-1] != node:
                component.append(stack.pop())
            if len(component) > 1:
                found.append(sorted(component))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_folders_import_only_the_folders_they_may(graph: dict[str, set[str]]) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if (top := other.split(".")[0]) != (own := name.split(".")[0]) and top not in FOLDERS[own]
    ]
    assert not wrong


@pytest.mark.parametrize(("folder", "levels"), [("engine", ENGINE), ("server", SERVER), ("kernels", KERNELS)])
def test_subfolders_import_only_lower_levels(
    graph: dict[str, set[str]], folder: str, levels: tuple[tuple[str, ...], ...]
) -> None:
    level = {name: i for i, names in enumerate(levels) for name in names}
    own = {name: {o for o in others if o.startswith(f"{folder}.")} for name, others in graph.items()}
    subfolders: dict[str, set[str]] = {}
    for name, others in own.items():
        if name.startswith(f"{folder}."):
            subfolders.setdefault(subfolder(name), set()).update(subfolder(o) for o in others)
    assert set(subfolders) == set(level), "a subfolder is missing from this test's levels, or does not exist"
    assert len(subfolders) <= 17, "too many subfolders to show an architecture"
    wrong = [f"{a} imports {b}" for a, bs in subfolders.items() for b in bs if a != b and level[b] > level[a]]
    assert not wrong
    assert not circles({a: bs - {a} for a, bs in subfolders.items()})


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert not circles(graph)


def test_the_server_imports_only_the_client_side_of_the_engine(graph: dict[str, set[str]]) -> None:
    allowed = {"wire", "images", "errors", "config", ""}
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if name.startswith("server.")
        and other.startswith("engine.")
        and subfolder(other) not in allowed
        and not name.startswith(tuple(COMMAND_LINE))
    ]
    assert not wrong


@pytest.mark.parametrize("folder", ["autosearch", "loadgen"])
def test_only_the_command_line_imports_the_search_and_the_load_generator(
    graph: dict[str, set[str]], folder: str
) -> None:
    wrong = [
        name
        for name, others in graph.items()
        if name.startswith("server.")
        and any(o.startswith(folder) for o in others)
        and not name.startswith(tuple(COMMAND_LINE))
    ]
    assert not wrong


@pytest.mark.parametrize(
    "package", [name for name, file in modules().items() if file.name == "__init__.py" and not name.startswith("tools")]
)
def test_a_folder_states_what_it_owns_what_it_may_import_and_what_it_must_never_do(package: str) -> None:
    file = ROOT.joinpath(*package.split("."), "__init__.py")
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""

    assert [line.split(":")[0] for line in text.splitlines() if ":" in line][-3:] == ["Owns", "May import", "Never"]


def test_every_folder_is_in_the_wheel() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["setuptools"]["packages"]
    there = {"weft"} | {
        ".".join(("weft", *init.parent.relative_to(ROOT).parts))
        for folder in FOLDERS
        if folder != "tools"
        for init in (ROOT / folder).rglob("__init__.py")
        if init.parent != ROOT / "deploy" / "ray"
    }
    assert set(listed) == there


def test_no_file_imports_a_private_name_of_another() -> None:
    wrong = [
        f"{name} imports {alias.name} from {node.module}"
        for name, file in modules().items()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8")))
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("weft.")
        for alias in node.names
        if alias.name.startswith("_")
    ]
    assert not wrong


def test_other_folders_import_only_the_public_modules_of_a_kernel_folder(graph: dict[str, set[str]]) -> None:
    wrong = []
    for name, others in graph.items():
        for other in others:
            _, folder, module = (*other.split("."), "", "")[:3]
            if other.startswith("kernels.") and module and not name.startswith((f"kernels.{folder}", "tools.")):
                public = import_module(f"weft.kernels.{folder}").PUBLIC
                if module not in public:
                    wrong.append(f"{name} imports {other}")
    assert not wrong


def test_folders_of_the_runner_import_only_lower_levels(graph: dict[str, set[str]]) -> None:
    level = {name: i for i, names in enumerate(RUNNER) for name in names}
    folders = {name: name.split(".")[2] for name in graph if name.startswith("engine.runner.")}
    assert set(folders.values()) == set(level)
    wrong = [
        f"{name} imports {other}"
        for name, own in folders.items()
        for other in graph[name] & set(folders)
        if folders[other] != own and level[folders[other]] >= level[own]
    ]
    assert not wrong
