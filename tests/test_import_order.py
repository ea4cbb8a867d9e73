"""An import never runs up: not between the top-level folders, not between the wings of one, not in a circle.

Every import counts, also one inside a function or under `TYPE_CHECKING`: who reads the code follows those too.
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
"""what each folder may import beside itself"""

ENGINE = (
    ("demo", "errors", "progress", "profiling"),
    ("config",),
    ("wire", "model"),
    ("plans", "memory"),
    ("runner",),
    ("ranks",),
    ("scheduling",),
    ("engine",),
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
"""floors, the lowest first: a room may import what lies below it, and its own floor without going round"""

KERNELS = (
    ("common",),
    ("formats",),
    ("reference",),
    ("matmul", "attention"),
    ("experts", "collectives"),
    ("sampling", "tiers"),
    ("tuning",),
)

RUNNER = (("iteration",), ("options",), ("memory",), ("device",), ("cpu", "cuda"), ("start",))
"""the folders of `engine/runner/`"""

COMMAND_LINE = {"server.daemon.cli", "server.commands"}
"""the only ones that know every sub-command, and so the searches and the load generator"""


def modules() -> dict[str, Path]:
    """Dotted name below `weft` -> file."""
    found = {}
    for folder in FOLDERS:
        for file in sorted((ROOT / folder).rglob("*.py")):
            parts = file.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file
    return found


def imports(file: Path, known: dict[str, Path]) -> Iterator[str]:
    """The modules of weft that a file imports, by their longest known name."""
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


def room(name: str) -> str:
    """The wing or file of a folder that a module belongs to: `engine.memory.pages` -> `memory`."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one node (Tarjan)."""
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
            part = [stack.pop()]
            while part[-1] != node:
                part.append(stack.pop())
            if len(part) > 1:
                found.append(sorted(part))

    for node in graph:
        if node not in index:
            visit(node)
    return found


def test_folders_import_only_what_lies_below_them(graph: dict[str, set[str]]) -> None:
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if (top := other.split(".")[0]) != (own := name.split(".")[0]) and top not in FOLDERS[own]
    ]
    assert not wrong


@pytest.mark.parametrize(("folder", "floors"), [("engine", ENGINE), ("server", SERVER), ("kernels", KERNELS)])
def test_wings_import_only_what_lies_below_them(
    graph: dict[str, set[str]], folder: str, floors: tuple[tuple[str, ...], ...]
) -> None:
    floor = {name: i for i, names in enumerate(floors) for name in names}
    own = {name: {o for o in others if o.startswith(f"{folder}.")} for name, others in graph.items()}
    rooms: dict[str, set[str]] = {}
    for name, others in own.items():
        if name.startswith(f"{folder}."):
            rooms.setdefault(room(name), set()).update(room(o) for o in others)
    assert set(rooms) == set(floor), "a room is missing from this test's floors, or is gone"
    assert len(rooms) <= 16, "too many rooms to show an architecture"
    wrong = [f"{a} imports {b}" for a, bs in rooms.items() for b in bs if a != b and floor[b] > floor[a]]
    assert not wrong
    assert not circles({a: bs - {a} for a, bs in rooms.items()})


def test_no_modules_import_each_other_in_a_circle(graph: dict[str, set[str]]) -> None:
    assert not circles(graph)


def test_the_server_knows_only_the_client_side_of_the_engine(graph: dict[str, set[str]]) -> None:
    allowed = {"wire", "errors", "config", ""}
    wrong = [
        f"{name} imports {other}"
        for name, others in graph.items()
        for other in others
        if name.startswith("server.")
        and other.startswith("engine.")
        and room(other) not in allowed
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
    "wing",
    [
        f"{f}.{n}"
        for f, floors in (("engine", ENGINE), ("server", SERVER), ("kernels", KERNELS), ("engine.runner", RUNNER))
        for names in floors
        for n in names
    ]
    + ["autosearch", "autosearch.advisor"],
)
def test_a_wing_says_what_it_owns_what_it_may_import_and_what_it_never_does(wing: str) -> None:
    folder = ROOT / Path(*wing.split("."))
    if not folder.is_dir():
        pytest.skip("a file, no wing")
    text = ast.get_docstring(ast.parse((folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    assert [line.split(":")[0] for line in text.splitlines() if ":" in line][-3:] == ["Owns", "May import", "Never"]


def test_every_wing_is_in_the_wheel() -> None:
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
        f"{name} imports {alias.name} of {node.module}"
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


def test_folders_of_the_runner_import_only_what_lies_below_them(graph: dict[str, set[str]]) -> None:
    floor = {name: i for i, names in enumerate(RUNNER) for name in names}
    folders = {name: name.split(".")[2] for name in graph if name.startswith("engine.runner.")}
    assert set(folders.values()) == set(floor)
    wrong = [
        f"{name} imports {other}"
        for name, own in folders.items()
        for other in graph[name] & set(folders)
        if folders[other] != own and floor[folders[other]] >= floor[own]
    ]
    assert not wrong
