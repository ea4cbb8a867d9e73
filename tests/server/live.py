"""The real daemon as a separate process."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

PATIENT = {"WEFT_HANG_TIMEOUT": "240", "WEFT_API_HANG_TIMEOUT": "240"}
"""a machine that pauses for a while makes no process late; tests of hangs pass options, which override these"""


class Daemon:
    """`weft serve` on a free port."""

    def __init__(
        self, log: Path, *options: str, env: Mapping[str, str] | None = None, prefix: Sequence[str] = ()
    ) -> None:
        """`env`: environment variables in addition to those of this process. `prefix`: a command that runs it."""
        self._log = log
        self.begun = time.monotonic()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [*prefix, sys.executable, "-P", "-m", "weft.server", "serve", "--port", "0", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**PATIENT, **os.environ, **(env or {})},
            )
        self.ready_line = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        self.curl_line = self.process.stdout.readline()
        match = re.search(r"http://\S+", self.ready_line)
        assert match, self.stderr()
        self.url = match[0]

    def admin_url(self) -> str:
        """The URL of `--admin-port`, from the greeting. Call it once."""
        assert self.process.stdout is not None
        lines = iter(self.process.stdout.readline, "")
        return next(line.split()[1] for line in lines if line.startswith("admin: "))

    def stderr(self) -> str:
        return self._log.read_text()

    def wait_for_log(self, text: str, count: int = 1, seconds: float = 240) -> str:
        """Return the log once it contains this text `count` times. A thread writes it, so an event may not be logged
        yet."""
        end = time.monotonic() + seconds
        while (log := self.stderr()).count(text) < count:
            assert time.monotonic() < end, f"{text!r} {count} times in:\n{log}"
            time.sleep(0.02)
        return log

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Pause its engines within this context, so that their requests cannot end however fast they are."""
        with stopped(*self.children("weft.engine.process")):
            yield

    def children(self, module: str) -> list[int]:
        """Process ids of the daemon's processes that run this module."""
        return children(self.process.pid, module)

    @property
    def engine_pid(self) -> int:
        """The process id of its only engine, once it has started."""
        end = time.monotonic() + 240
        while len(pids := self.children("weft.engine.process")) != 1:
            assert time.monotonic() < end, pids
            time.sleep(0.02)
        return pids[0]

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def patched(folder: Path, code: str, of: str = "weft.engine.process") -> dict[str, str]:
    """The environment of a daemon whose engines run this code when they start. `folder`: a path that does not exist
    yet. of: the module whose processes run it; the daemon's is weft.server."""
    folder.mkdir()
    lines = ["import sys", f"if {of!r} in sys.orig_argv:", textwrap.indent(code, "    ")]
    (folder / "sitecustomize.py").write_text("\n".join(lines))
    return {"PYTHONPATH": os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])}


LOADS_ALL = """
from weft.engine.memory.loads import LoadSpeeds
LoadSpeeds.worthwhile = lambda self, entries, *_: len(entries)
"""
"""for `patched`: pages are loaded even if this machine's disk is slow compared with its processor"""


LOGS_MODELS = """
from weft.server.api.service import Service
attach = Service.attach
def logged(self, *args, **others):
    attach(self, *args, **others)
    print(f"serves {self.config.model_names[0]}", file=sys.stderr, flush=True)
Service.attach = logged
"""
"""for `patched`: an API process logs which model it serves from now on"""


def children(pid: int, module: str) -> list[int]:
    """Process ids of a process's children that run this module, as its first thread started them."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in found if module in command_line(child)]


def command_line(pid: int | str) -> str:
    """The command line of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def stop(pid: int) -> None:
    """Send SIGSTOP and wait until it takes effect: threads that compute run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    end = time.monotonic() + 240
    while not _states(pid) <= set("TtZX"):
        assert time.monotonic() < end
        time.sleep(0.001)


def _states(pid: int) -> set[str]:
    """The states of a process's threads, letters as in `ps`; none once it has ended."""
    found = set()
    for thread in Path(f"/proc/{pid}/task").glob("*/stat"):
        with contextlib.suppress(OSError):  # it is ending now
            found.add(thread.read_text().rpartition(")")[2].split()[0])
    return found


@contextlib.contextmanager
def stopped(*pids: int) -> Iterator[None]:
    """Stop these processes within this context."""
    for pid in pids:
        stop(pid)
    try:
        yield
    finally:
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def running(tmp_path: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "stderr", *options, env=env)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.end()
