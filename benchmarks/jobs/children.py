"""Finds the child processes of a process."""

from __future__ import annotations

from pathlib import Path


def children(parent: int) -> list[int]:
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == parent:
                    found.append(int(entry.name))
            except OSError:  # the process has ended
                continue
    return sorted(found)


def command_line(pid: int) -> list[str]:
    """The arguments of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
    except OSError:
        return []
