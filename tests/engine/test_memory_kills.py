"""The message of a process that the kernel killed for lack of memory has the limit and the use, in both versions of
control groups."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from weft.engine.config import EngineConfig
from weft.engine.wire import spawn
from weft.engine.wire.memory_kills import MemoryKills
from weft.engine.wire.spawn import EngineProcess

KILLED = "signal SIGKILL"


class Groups:
    """A folder like / with the files of control groups."""

    def __init__(self, root: Path, own: str) -> None:
        self.root = root
        (root / "proc/self").mkdir(parents=True)
        (root / "proc/self/cgroup").write_text(own)

    def write(self, group: str, **files: object) -> None:
        folder = self.root / "sys/fs/cgroup" / group
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / f"memory.{name}").write_text(f"{text}\n")


def v2(root: Path, path: str = "/", own: str = "0::{}\n") -> Groups:
    groups = Groups(root, own.format(path))
    groups.write(path.strip("/"), events="low 0\nhigh 0\nmax 3\noom 1\noom_kill 1\noom_group_kill 0")
    return groups


def test_version_2_has_limit_and_peak(tmp_path: Path) -> None:
    groups = v2(tmp_path)
    groups.write("", max=4 * 2**30, peak=4 * 2**30, current=2**20)
    kills = MemoryKills(tmp_path)
    assert kills.explain(KILLED) == KILLED  # another process was killed earlier
    groups.write("", events="low 0\nmax 9\noom 2\noom_kill 2")
    assert kills.explain("exit status 1") == "exit status 1"
    assert kills.explain(KILLED) == (
        "signal SIGKILL: the kernel killed 1 process for lack of memory; the limit of the control group is 4.00 GiB "
        f"({tmp_path}/sys/fs/cgroup/memory.max), and the most used was 4.00 GiB. Raise the limit or use less memory"
    )
    assert MemoryKills(tmp_path).explain(KILLED) == KILLED


def test_the_smallest_limit_around_the_process_counts_and_an_old_kernel_has_no_peak(tmp_path: Path) -> None:
    groups = v2(tmp_path, "/pod/box")
    groups.write("pod/box", max="max", current=3 * 2**29)
    groups.write("pod", events="oom_kill 7", max=2**31, current=2**31)
    kills = MemoryKills(tmp_path)
    groups.write("pod/box", events="oom_kill 3")
    assert "killed 2 processes" in kills.explain(KILLED)
    assert f"2.00 GiB ({tmp_path}/sys/fs/cgroup/pod/memory.max), and the most used was 2.00" in kills.explain(KILLED)


@pytest.mark.parametrize("path", ["/", "/docker/abc"])
def test_version_1_has_limit_and_peak(tmp_path: Path, path: str) -> None:
    """In a container, the path may be one of the machine."""
    groups = Groups(tmp_path, f"9:cpu,cpuacct:/\n4:memory:{path}\n1:name=systemd:/\n0::/\n")
    groups.write("memory", oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 0", limit_in_bytes=2**30)
    groups.write("memory", max_usage_in_bytes=2**30 - 4096)
    kills = MemoryKills(tmp_path)
    groups.write("memory", oom_control="oom_kill_disable 0\nunder_oom 0\noom_kill 1")
    assert "1.00 GiB" in kills.explain(KILLED)
    assert "memory.limit_in_bytes" in kills.explain(KILLED)
    groups.write("memory", limit_in_bytes=9223372036854771712)
    assert "has no limit, so the machine ran out" in kills.explain(KILLED)


@pytest.mark.parametrize("own", ["", "nonsense\n", "0::/\n", "4:memory:/x\n0::/\n", "0::/../../x\n"])
def test_without_control_groups_the_signal_is_all(tmp_path: Path, own: str) -> None:
    Groups(tmp_path, own)
    assert MemoryKills(tmp_path).explain(KILLED) == KILLED
    assert MemoryKills(tmp_path / "missing").explain(KILLED) == KILLED


@pytest.mark.asyncio
@pytest.mark.slow
async def test_an_engine_killed_at_its_start_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    groups = v2(tmp_path)
    groups.write("", max=2**30, peak=2**30)
    monkeypatch.setattr(spawn, "MemoryKills", lambda: MemoryKills(tmp_path))
    process = await EngineProcess.start(EngineConfig())
    groups.write("", events="oom_kill 2")
    os.kill(process.pid, signal.SIGKILL)
    assert "the limit of the control group is 1.00 GiB" in await asyncio.wait_for(process.wait_gone(), 240)
    await process.stop()
