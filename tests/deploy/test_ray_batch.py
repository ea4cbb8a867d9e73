"""Batches over Ray Data answer every line once, even if processes are killed. `make ray` runs it."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("ray.data", reason="make ray has it")

from ray_live import until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
LINES = 240


def named(part: str) -> list[int]:
    """Processes that have this in their command line."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if part.encode() in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
    return found


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder with a short path: Ray puts Unix sockets below it."""
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp", ignore_cleanup_errors=True) as path:
        yield Path(path)
        for pid in named(f"{path}/"):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def children(pid: int) -> set[int]:
    """All descendants of the process."""
    own = {int(c) for t in Path(f"/proc/{pid}/task").glob("*/children") for c in t.read_text().split()}
    return own.union(*(children(c) for c in own))


def test_every_line_is_answered_once_even_if_processes_are_killed(folder: Path) -> None:
    source, target = folder / "in.jsonl", folder / "out.jsonl"
    message = {"role": "user", "content": "What is 1 + 2?"}
    body = {"model": "mine", "messages": [message], "max_tokens": 30, "ignore_eos": True}
    lines = [{"custom_id": f"r{i}", "url": "/v1/chat/completions", "body": body} for i in range(LINES)]
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "weft.deploy.ray.batch", str(source), str(target)]
    command += ["--workers", "2", "--num-cpus", "0.5", "--rows", "20", "--concurrency", "8"]
    environment = {
        **os.environ, "RAY_TMPDIR": str(folder), "RAY_AUTH_MODE": "disabled", "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_DEFAULT_OBJECT_STORE_MEMORY_PROPORTION": "0.02",
    }  # fmt: skip

    def written() -> int:
        return target.read_bytes().count(b"\n") if target.exists() else 0

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)

    first = start()
    until(lambda: written() >= 20)
    assert first.poll() is None
    first.kill()
    first.communicate()
    until(lambda: not named(f"{folder}/"))  # the rest of its Ray has ended with it
    so_far = written()
    assert so_far < LINES

    second = start()
    until(lambda: written() >= so_far + 20)
    workers = [pid for pid in children(second.pid) if b"MapWorker" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert workers
    os.kill(workers[0], signal.SIGKILL)
    output, _ = second.communicate(timeout=600)
    assert second.returncode == 0, output.decode()
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    assert sorted(a["custom_id"] for a in answers) == sorted(line["custom_id"] for line in lines)
    assert all(a["response"]["status_code"] == 200 for a in answers)
    assert f"{LINES} requests: {LINES} answered, 0 failed" in output.decode()
