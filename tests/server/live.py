"""The real daemon as a process of its own."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path


class Daemon:
    """`weft serve` on a free port."""

    def __init__(self, log: Path, *options: str, env: Mapping[str, str] | None = None) -> None:
        """`env`: variables beside those of this process."""
        self._log = log
        self.begun = time.monotonic()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft.server", "serve", "--port", "0", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env={**os.environ, **(env or {})},
            )
        self.ready_line = ""

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        self.ready_line = self.process.stdout.readline()
        self.curl_line = self.process.stdout.readline()
        match = re.search(r"http://\S+", self.ready_line)
        assert match, self.stderr()
        self.url = match[0]

    def stderr(self) -> str:
        return self._log.read_text()

    def told(self, text: str, count: int = 1, seconds: float = 240) -> str:
        """The log, once it has this text so often. Threads write it: what has happened may not have been told of."""
        end = time.monotonic() + seconds
        while (log := self.stderr()).count(text) < count:
            assert time.monotonic() < end, f"{text!r} {count} times in:\n{log}"
            time.sleep(0.02)
        return log

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """While its engine is stopped: what it has begun cannot end, however fast it is."""
        engine = self.engine_pid
        os.kill(engine, signal.SIGSTOP)
        try:
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.kill(engine, signal.SIGCONT)

    def children(self, module: str) -> list[int]:
        """Process ids of the daemon's processes that run this module."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if module in command_line(pid)]

    @property
    def engine_pid(self) -> int:
        (pid,) = self.children("weft.engine.process")
        return pid

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


def command_line(pid: int | str) -> str:
    """Of a process; empty once it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@contextlib.contextmanager
def running(tmp_path: Path, *options: str, env: Mapping[str, str] | None = None) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "stderr", *options, env=env)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.end()
