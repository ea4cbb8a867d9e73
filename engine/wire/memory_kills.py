"""`MemoryKills`: whether the kernel killed a process for lack of memory, by the files of its control group."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

GIB = 2**30
SYSTEM = Path("/")

_V2 = ("memory.events", "memory.max", ("memory.peak", "memory.current"))
_V1 = ("memory.oom_control", "memory.limit_in_bytes", ("memory.max_usage_in_bytes", "memory.usage_in_bytes"))
_NO_LIMIT = 2**60  # Version 1 reports a number of about 2^63 without a limit.


class MemoryKills:
    """Created before a process starts, it explains a SIGKILL that the kernel sent to it since.

    The process is in the control group of this one. Its own limit and those of the groups around it apply."""

    def __init__(self, root: Path = SYSTEM) -> None:
        """`root`: the folder with `proc` and `sys`."""
        self._groups, (self._events, self._limit, self._peaks) = _control_groups(root)
        self._before = self._count("oom_kill")

    def explain(self, how: str) -> str:
        """Return `how` a process ended, with the limit and the use of memory if the kernel has killed for memory."""
        kills = self._count("oom_kill") - self._before
        if kills <= 0 or "SIGKILL" not in how:
            return how
        limited = [(limit, group) for group in self._groups if (limit := _number(group / self._limit)) is not None]
        limited = [(limit, group) for limit, group in limited if limit < _NO_LIMIT]
        killed = f"the kernel killed {kills} process{'es' if kills > 1 else ''} for lack of memory"
        if not limited:
            return f"{how}: {killed}; the control group has no limit, so the machine ran out"
        limit, group = min(limited, key=lambda each: each[0])
        peak = next((size for name in self._peaks if (size := _number(group / name)) is not None), None)
        use = "" if peak is None else f", and the most used was {peak / GIB:.2f} GiB"
        what = f"the limit of the control group is {limit / GIB:.2f} GiB ({group / self._limit}){use}"
        return f"{how}: {killed}; {what}. Raise the limit or use less memory"

    def _count(self, name: str) -> int:
        for group in self._groups[:1]:
            for line in _text(group / self._events).splitlines():
                key, _, value = line.partition(" ")
                if key == name and value.isdigit():
                    return int(value)
        return 0


def _control_groups(root: Path) -> tuple[list[Path], tuple[str, str, tuple[str, str]]]:
    """Return this process's control groups for memory, innermost first, and the names of their files."""
    lines = [line.split(":", 2) for line in _text(root / "proc/self/cgroup").splitlines()]
    mount = root / "sys/fs/cgroup"
    for number, controllers, path in (line for line in lines if len(line) == 3):
        if "memory" in controllers.split(","):
            if groups := list(_upwards(mount / "memory", path, _V1[0])):
                return groups, _V1
        elif number == "0" and not controllers and (groups := list(_upwards(mount, path, _V2[0]))):
            return groups, _V2
    return [], _V2


def _upwards(mount: Path, path: str, file: str) -> Iterator[Path]:
    """Yield the groups from `path` to `mount` that have this file. A container may see a path outside its mount."""
    group = mount / path.lstrip("/")
    while True:
        if (group / file).is_file():
            yield group
        if group == mount or mount not in group.parents:
            return
        group = group.parent


def _number(file: Path) -> int | None:
    text = _text(file).strip()
    return int(text) if text.isdigit() else None


def _text(file: Path) -> str:
    try:
        return file.read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""
