"""Separate environments for programs that need other versions than weft does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

LIMIT_SECONDS = 300
DONE = ".done"


def wanted(text: str) -> dict[str, list[str]]:
    """Requirements by name, from lines `NAME: REQUIREMENT …`. `#` starts a comment."""
    lines = (line.partition("#")[0] for line in text.splitlines())
    return {name.strip(): rest.split() for name, _, rest in (line.partition(":") for line in lines) if rest.split()}


def install(file: Path, folder: Path, names: list[str]) -> int:
    """Create `folder`/NAME with the requirements that `file` lists, for each name (none: all).

    An environment that cannot be created is reported and left out; its tests are skipped. Returns the number of those.
    """
    environments = wanted(file.read_text())
    missing = 0
    for name in names or environments:
        place, line = folder / name, " ".join(environments[name])
        if (place / DONE).exists() and (place / DONE).read_text() == line:
            continue
        begun = time.monotonic()
        shutil.rmtree(place, ignore_errors=True)
        why = _run(["venv", "-p", sys.executable, str(place)]) or _run(
            ["pip", "install", "-p", str(place / "bin" / "python"), *environments[name]]
        )
        if why:
            shutil.rmtree(place, ignore_errors=True)
            missing += 1
            print(f"  {name} cannot be installed, its tests are skipped: {why}", flush=True)
            continue
        (place / DONE).write_text(line)
        print(f"  {name}: {line}, {time.monotonic() - begun:.0f} s", flush=True)
    return missing


def _run(arguments: list[str]) -> str:
    """The end of uv's output if it failed, else an empty string."""
    command = [sys.executable, "-m", "uv", *arguments, "-q", "--no-config"]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=LIMIT_SECONDS, env={**os.environ, "UV_LINK_MODE": "copy"}
        )
    except subprocess.TimeoutExpired:
        return f"more than {LIMIT_SECONDS} s"
    except OSError as error:
        return str(error)
    return "" if done.returncode == 0 else " ".join(done.stderr.split())[-300:] or f"status {done.returncode}"
