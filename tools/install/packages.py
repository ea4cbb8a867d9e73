"""Runs pip install with short output: large downloads with sizes, then packages, megabytes and seconds."""

from __future__ import annotations

import re
import subprocess
import sys
import time

LARGE_MB = 5.0
_DOWNLOAD = re.compile(r"^\s*Downloading (\S+) \(([\d.]+) ([kMG]?B)\)")
_MB = {"B": 1e-6, "kB": 1e-3, "MB": 1.0, "GB": 1e3}


class Tally:
    """Progress of pip, read from the lines it prints."""

    def __init__(self) -> None:
        self.downloaded_mb = 0.0
        self.packages = 0

    def take(self, line: str) -> str | None:
        """Count one of pip's lines. Returns what to print for it, if anything."""
        found = _DOWNLOAD.match(line)
        if found is not None:
            mb = float(found[2]) * _MB[found[3]]
            self.downloaded_mb += mb
            return f"  {found[1].rpartition('/')[2]}  {mb:.0f} MB" if mb >= LARGE_MB else None
        if line.startswith("Installing collected packages: "):
            self.packages = line.count(",") + 1
            return f"  unpacking {self.packages} packages"
        return None

    def summary(self, seconds: float) -> str:
        return f"  {self.packages} packages, {self.downloaded_mb:.0f} MB downloaded, {seconds:.0f} s"


def install(title: str, pip: list[str], arguments: list[str]) -> int:
    """Run pip with `arguments` and print all its output if it fails. Returns its exit status."""
    print(title, flush=True)
    begun = time.monotonic()
    tally = Tally()
    said: list[str] = []
    with subprocess.Popen([*pip, "--progress-bar", "off", *arguments], stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            said.append(line)
            if shown := tally.take(line):
                print(shown, flush=True)
    if running.returncode != 0:
        sys.stdout.writelines(said)
    else:
        print(tally.summary(time.monotonic() - begun), flush=True)
    return running.returncode
