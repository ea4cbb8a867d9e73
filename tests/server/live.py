"""The real daemon as a process of its own."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path


class Daemon:
    """`weft serve` on a free port."""

    def __init__(self, log: Path, *options: str) -> None:
        self._log = log
        self.begun = time.monotonic()
        with log.open("wb") as stderr:
            self.process = subprocess.Popen(
                [sys.executable, "-P", "-m", "weft.server.daemon.cli", "serve", "--port", "0", *options],
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
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

    def children(self, module: str) -> list[int]:
        """Process ids of the daemon's processes that run this module."""
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        return [int(pid) for pid in children if module in Path(f"/proc/{pid}/cmdline").read_text()]

    @property
    def engine_pid(self) -> int:
        (pid,) = self.children("weft.engine.process")
        return pid

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def running(tmp_path: Path, *options: str) -> Iterator[Daemon]:
    daemon = Daemon(tmp_path / "stderr", *options)
    try:
        daemon.wait_ready()
        yield daemon
    finally:
        daemon.end()
