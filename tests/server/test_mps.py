"""MPS for replicas, with a stand-in for `nvidia-cuda-mps-control`: start, failures, end, and what is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from live import running
from pydantic import ValidationError

from weft.engine.wire.child import has_ended
from weft.server.config import ServeConfig
from weft.server.daemon import mps, mps_guard
from weft.server.daemon.mps import LOG, PIPE, PREFIX, Mps

FAKE = Path(__file__).with_name("fake_mps.sh")
WAIT = 60.0


class Machine:
    """A machine with the stand-in installed. `behave` takes how it behaves."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self._patch, self._pids = folder, patch, folder / "pids"
        (folder / "bin").mkdir()
        (folder / "bin" / mps_guard.CONTROL).symlink_to(FAKE)
        patch.setenv("PATH", f"{folder / 'bin'}:{os.environ['PATH']}")
        patch.setenv("FAKE_MPS_PIDS", str(self._pids))
        patch.setenv("CUDA_VISIBLE_DEVICES", "1")
        patch.setenv("TMPDIR", str(folder))
        patch.setattr(tempfile, "tempdir", None)
        patch.setattr(mps, "DEFAULT_PIPES", folder / "nobody")
        for name in (PIPE, LOG):
            patch.delenv(name, raising=False)

    def behave(self, how: str) -> None:
        self._patch.setenv("FAKE_MPS", how)

    @property
    def pids(self) -> list[int]:
        return [int(pid) for pid in self._pids.read_text().split()] if self._pids.exists() else []

    @property
    def folders(self) -> list[Path]:
        return list(self.folder.glob(f"{PREFIX}*"))

    def kill_server(self) -> None:
        """Kill the server, if it has started."""
        if (file := self.folder / "pids.server").exists():
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(file.read_text()), signal.SIGKILL)

    @property
    def clean(self) -> bool:
        """Whether no process and no folder is left."""
        return all(map(has_ended, self.pids)) and not self.folders and not {PIPE, LOG} & set(os.environ)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    # the path of pytest's folders may be longer than MPS allows
    with tempfile.TemporaryDirectory(prefix="m") as folder:
        found = Machine(Path(folder), monkeypatch)
        yield found
        for pid in found.pids:
            if not has_ended(pid):
                os.kill(pid, signal.SIGKILL)


async def until(what: Callable[[], object]) -> None:
    async with asyncio.timeout(WAIT):
        while not what():
            await asyncio.sleep(0.02)


async def test_it_starts_in_a_folder_of_its_own_and_leaves_nothing(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    one = Mps()
    await one.start()
    (folder,) = machine.folders
    assert one.active
    assert os.environ[PIPE] == os.environ[LOG] == str(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert len(machine.pids) == 2
    assert not any(map(has_ended, machine.pids))
    assert (folder / mps_guard.OUTPUT).read_text() == "devices: .\n"  # the server must number all GPUs
    assert "share their GPU through MPS" in caplog.text
    await one.stop()
    await one.stop()
    assert not one.active
    assert (machine.folder / "pids.quit").read_text() == "quit -t 5\n"
    assert machine.clean


async def test_two_daemons_do_not_disturb_each_other(machine: Machine) -> None:
    first, second = Mps(), Mps()
    await first.start()
    first_pids = machine.pids
    del os.environ[PIPE], os.environ[LOG]  # another daemon has another environment
    second._before = dict.fromkeys(second._before)
    await second.start()
    assert len(machine.folders) == 2
    await second.stop()
    assert not any(map(has_ended, first_pids))
    await first.stop()
    assert machine.clean


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("fail", "it ended at the start (MPS is not permitted here)"),
        ("silent", "it did not answer within 1 s"),
        ("mute", "it did not answer within 1 s"),
    ],
)
async def test_replicas_alternate_if_it_does_not_start(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str, reason: str
) -> None:
    if how != "fail":
        monkeypatch.setattr(mps, "START_SECONDS", 1.0)
    monkeypatch.setattr(mps, "ANSWER_SECONDS", 0.2 if how == "mute" else WAIT)
    monkeypatch.setattr(mps, "STOP_SECONDS", 0.5 if how == "mute" else WAIT)
    machine.behave(how)
    one = Mps()
    await one.start()
    assert not one.active
    assert f"replicas run without MPS and alternate on their GPU: {reason}" in caplog.text
    if how == "mute":  # the guard was killed, so the server that it would have killed runs on
        machine.kill_server()
    await until(lambda: machine.clean)


async def test_it_may_not_be_installed(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PATH", str(machine.folder))
    one = Mps()
    await one.start()
    assert not one.active
    assert f"{mps_guard.CONTROL} is not installed" in caplog.text
    assert machine.clean


async def test_a_folder_with_a_long_name_is_refused(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(mps, "LONGEST_FOLDER", 10)
    await Mps().start()
    assert "is too long: set TMPDIR" in caplog.text
    assert machine.clean


@pytest.mark.parametrize("which", [0, 1])
async def test_engines_start_without_it_once_it_has_ended(
    machine: Machine, caplog: pytest.LogCaptureFixture, which: int
) -> None:
    one = Mps()
    await one.start()
    watching = asyncio.create_task(one.watch())
    os.kill(machine.pids[which], signal.SIGKILL)  # the control process, or the server, with which it ends here
    await asyncio.wait_for(watching, WAIT)
    assert not one.active
    assert PIPE not in os.environ
    assert re.search(r"MPS ended \(.+\): engines that start from now on alternate", caplog.text)
    assert all(map(has_ended, machine.pids))
    await one.stop()
    assert machine.clean


@pytest.mark.parametrize("named", [True, False])
async def test_one_that_runs_already_is_used_and_not_ended(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, named: bool
) -> None:
    caplog.set_level(logging.INFO)
    theirs = machine.folder / "theirs"
    theirs.mkdir()
    other = subprocess.Popen([FAKE, "-f"], env={**os.environ, PIPE: str(theirs)}, stdout=subprocess.DEVNULL)
    try:
        await until((theirs / "control").exists)
        if named:
            monkeypatch.setenv(PIPE, str(theirs))
        else:
            monkeypatch.setattr(mps, "DEFAULT_PIPES", theirs)
        one = Mps()
        await one.start()
        assert one.active
        assert os.environ.get(PIPE) == (str(theirs) if named else None)
        assert f"the MPS that runs in {theirs}" in caplog.text
        await one.watch()
        await one.stop()
        assert other.poll() is None
        assert not machine.folders
    finally:
        other.terminate()
        other.wait()


async def test_a_name_in_the_environment_without_a_process_is_replaced(
    machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = machine.folder / "dead"
    dead.mkdir()
    (dead / "control").write_text("4000000")
    monkeypatch.setenv(PIPE, str(dead))
    one = Mps()
    await one.start()
    assert one.active
    assert os.environ[PIPE] == str(machine.folders[0])
    await one.stop()
    assert os.environ[PIPE] == str(dead)


@pytest.mark.nightly
@pytest.mark.skipif(Path("/dev/nvidia0").exists(), reason="engines would use the GPU, which the stand-in cannot share")
@pytest.mark.parametrize("kill", [False, True])
async def test_the_engines_of_a_daemon_use_it(machine: Machine, tmp_path: Path, kill: bool) -> None:
    with running(tmp_path, "--model", "demo", "--replicas", "2", "--mps") as daemon:
        (folder,) = machine.folders
        engines = daemon.children("weft.engine.process")
        assert len(engines) == 2
        for engine in engines:
            assert f"{PIPE}={folder}".encode() in Path(f"/proc/{engine}/environ").read_bytes().split(b"\0")
        if kill:
            daemon.process.kill()
    await until(lambda: machine.clean)


DAEMON = """
import asyncio, pathlib, sys
from weft.server.daemon import mps
mps.DEFAULT_PIPES = pathlib.Path("/nowhere")
async def run():
    one = mps.Mps()
    await one.start()
    print(one._guard.pid, flush=True)
    await asyncio.sleep(1000)
asyncio.run(run())
"""


@pytest.mark.parametrize("guard_too", [False, True])
async def test_kill_9_leaves_nothing_behind(machine: Machine, guard_too: bool) -> None:
    daemon = subprocess.Popen([sys.executable, "-P", "-c", DAEMON], stdout=subprocess.PIPE, text=True)
    try:
        assert daemon.stdout is not None
        guard = int(await asyncio.to_thread(daemon.stdout.readline))
        assert not any(map(has_ended, machine.pids))
        if guard_too:
            os.kill(guard, signal.SIGKILL)
    finally:
        daemon.kill()
        daemon.wait()
        daemon.stdout.close()  # type: ignore[union-attr]
    if guard_too:  # the kernel ends the control process; the next daemon removes the folder
        await until(lambda: has_ended(machine.pids[0]))
        machine.kill_server()
        (left,) = machine.folders
        one = Mps()
        await one.start()
        assert one.active
        assert left not in machine.folders
        await one.stop()
    await until(lambda: machine.clean)


def test_it_needs_replicas() -> None:
    with pytest.raises(ValidationError, match="--mps needs replicas of 2 or more"):
        ServeConfig(mps=True)
    with pytest.raises(ValidationError, match="several models alternate"):
        ServeConfig(mps=True, models=["demo", "demo served_model_name=b"])
    assert ServeConfig(mps=True, replicas=2).mps
