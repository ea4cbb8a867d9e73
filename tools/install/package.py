"""Checks the files of the source distribution and the wheel, and that the wheel serves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterable
from pathlib import Path

# Files that the commands of the README need.
SOURCE = (
    *("Makefile", "constraints.txt", "Dockerfile", "README.md", "LICENSE", "pyproject.toml", "deploy/compose.yaml"),
    *("tools/install/__main__.py", "tests/conftest.py", "tests/deploy/alerts.test.yml", ".ci/run", ".dockerignore"),
)
# Data files, by name: the demo model, the page at /, a plan and the profile of the same name.
WHEEL = ("model.safetensors", "tokenizer.json", "index.html", "llama-3-8b-h200.json", "py.typed", "LICENSE")
START_SECONDS = 180


def check(folder: Path) -> list[str]:
    """Check the one .tar.gz and the one .whl in a folder. Returns the problems."""
    problems = []
    for pattern in ("*.tar.gz", "*.whl"):
        found = list(folder.glob(pattern))
        if len(found) != 1:
            problems.append(f"{folder} has {len(found)} files {pattern}")
            continue
        names = files(found[0])
        print(f"{found[0].name}: {len(names)} files, {found[0].stat().st_size / 1e6:.1f} MB", flush=True)
        lacking = set(SOURCE) - set(names) if pattern == "*.tar.gz" else set(WHEEL) - {Path(n).name for n in names}
        problems += [f"{found[0].name} lacks {name}" for name in sorted(lacking)]
        problems += [f"{found[0].name} has {name}" for name in stray(names)]
    return problems


def files(archive: Path) -> list[str]:
    """File names. Those of a source distribution are relative to its top folder."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            return wheel.namelist()
    with tarfile.open(archive) as source:
        return [member.name.partition("/")[2] for member in source.getmembers() if member.isfile()]


def stray(names: Iterable[str]) -> list[str]:
    """Files that do not belong there: leftovers of programs, and tests and tools in a wheel."""
    left = ("__pycache__", ".venv", ".git", "build", "dist")
    return [
        name for name in names if set(Path(name).parts) & set(left) or name.startswith(("weft/tests/", "weft/tools/"))
    ]


def serves(binaries: Path) -> list[str]:
    """Start an environment's `weft` outside the checkout and ask it one question. Returns the problems."""
    home = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    version = subprocess.run([binaries / "weft", "--version"], capture_output=True, text=True, env=home, cwd=binaries)
    if version.returncode != 0:
        return [f"weft --version: {version.stderr.strip()}"]
    print(version.stdout.strip(), flush=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    daemon = subprocess.Popen([binaries / "weft", "serve", "--port", str(port)], env=home, cwd=binaries)
    try:
        answer = _ask(f"http://127.0.0.1:{port}", daemon)
    finally:
        daemon.terminate()
        daemon.wait(60)
    print(f"123 + 456 is {answer or 'not answered'}", flush=True)
    return [] if answer == "579" else [f"the installed wheel answered {answer!r}"]


def _ask(server: str, daemon: subprocess.Popen[bytes]) -> str:
    question = {"model": "demo", "messages": [{"role": "user", "content": "What is 123 + 456?"}], "temperature": 0}
    request = urllib.request.Request(
        f"{server}/v1/chat/completions", json.dumps(question).encode(), {"Content-Type": "application/json"}
    )
    until = time.monotonic() + START_SECONDS
    while daemon.poll() is None and time.monotonic() < until:
        try:
            with (
                urllib.request.urlopen(f"{server}/ready", timeout=10),
                urllib.request.urlopen(request, timeout=60) as a,
            ):
                return str(json.load(a)["choices"][0]["message"]["content"])
        except urllib.error.URLError:
            time.sleep(0.5)  # still loading
    return ""
