"""Engine processes that are started before they are assigned an engine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
import uuid
from importlib.util import find_spec
from pathlib import Path

from weft.engine import process
from weft.engine.wire import preloaded as preloaded
from weft.engine.wire.preloaded import PreloadedProcess


def test_a_preloaded_process_is_used_once() -> None:
    PreloadedProcess.begin()
    first = PreloadedProcess.take()
    second = PreloadedProcess.take()
    try:
        assert first.process.pid != second.process.pid
        assert first.process.poll() is second.process.poll() is None
    finally:
        for one in (first, second):
            one.socket.close()
    assert [one.process.wait(240) for one in (first, second)] == [0, 0]  # they were not needed


def test_one_that_died_meanwhile_is_replaced() -> None:
    PreloadedProcess.begin()
    (dead,) = preloaded._started
    dead.process.kill()
    dead.process.wait()
    dead.send_config(b"{}", ())  # there is none: no error
    taken = PreloadedProcess.take()
    taken.socket.close()
    assert taken.process.pid != dead.process.pid
    assert taken.process.wait(240) == 0


def with_mark(mark: str) -> list[int]:
    """Processes with the mark in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def test_a_refused_command_line_leaves_no_process() -> None:
    mark = f"MARK={uuid.uuid4()}"
    name, _, value = mark.partition("=")
    command = [sys.executable, "-P", "-m", "weft.server", "serve", "--prot", "1"]
    done = subprocess.run(command, env={**os.environ, name: value}, capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (2, "weft serve: unknown option --prot; did you mean --port?\n")
    until = time.monotonic() + 240
    while left := with_mark(mark):
        assert time.monotonic() < until, left
        time.sleep(0.05)


def test_its_preloaded_imports_are_there() -> None:
    for name in (*process.ENGINE_MODULES, *process.GPU_MODULES):
        assert find_spec(name) is not None


def test_an_engine_starts_without_transformers() -> None:
    code = "import sys, weft.engine.engine; print({'transformers', 'torch._dynamo'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, timeout=240, check=True)
    assert done.stdout == "set()\n", "they take seconds to import"
