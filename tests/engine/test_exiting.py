"""The end of a process is reported when it begins to exit, before its memory has been freed."""

from __future__ import annotations

import asyncio
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from socket import socketpair
from typing import Any

import pytest

from weft.engine.wire import exiting
from weft.engine.wire.child import RANK
from weft.engine.wire.exiting import how_ended, is_exiting, kill_and_hold, wait_for_all, wait_for_end
from weft.engine.wire.spawn import EngineProcess


@pytest.fixture
def child() -> Iterator[subprocess.Popen[bytes]]:
    """A process that does nothing and is killed at the end."""
    process = subprocess.Popen(["sleep", "100"])
    yield process
    process.kill()
    process.wait()


def ended_but_not_reaped(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    pidfd = os.pidfd_open(process.pid)
    assert select.select([pidfd], [], [], 240)[0]
    os.close(pidfd)


def test_an_exiting_process_is_distinguished_from_a_running_one(child: subprocess.Popen[bytes]) -> None:
    assert not is_exiting(child.pid)
    assert not is_exiting(os.getpid())
    ended_but_not_reaped(child)
    assert is_exiting(child.pid)
    child.wait()
    assert not is_exiting(child.pid), "what cannot be seen is for others to judge"


def test_brackets_and_spaces_in_a_name_are_not_fields(tmp_path: Any) -> None:
    program = tmp_path / "a) Z 4 (b"
    program.symlink_to("/bin/sleep")
    process = subprocess.Popen([str(program), "100"])
    try:
        assert not is_exiting(process.pid)
    finally:
        process.kill()
        process.wait()


def test_a_process_that_frees_its_memory_slowly_is_reported_early(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = threading.Event()
    monkeypatch.setattr(exiting, "is_exiting", lambda pid: begun.is_set() and pid == child.pid)
    reported = threading.Event()
    thread = threading.Thread(target=wait_for_end, args=(child, reported.set))
    thread.start()
    assert not reported.wait(0.5), "it runs"
    begun.set()
    assert reported.wait(240)
    assert thread.is_alive(), "its memory is not there yet"
    child.kill()
    thread.join(240)
    assert not thread.is_alive()


def test_a_process_that_exits_at_once_is_reported_once(child: subprocess.Popen[bytes]) -> None:
    reported: list[float] = []
    thread = threading.Thread(target=wait_for_end, args=(child, lambda: reported.append(time.monotonic())))
    thread.start()
    child.kill()
    thread.join(240)
    assert not thread.is_alive()
    assert not reported
    assert child.wait() == -9


def test_a_reaped_process_has_ended(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.wait()
    wait_for_end(child, lambda: pytest.fail("there is nothing to tell"))


def test_an_engine_is_dead_before_its_memory_is_freed_and_stopped_after_that(
    child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    class PreloadedProcess:
        process = child
        socket, _ = socketpair()

    class Address:
        address, fd = "ipc:///nowhere", -1

    async def run() -> None:
        engine = EngineProcess(PreloadedProcess(), Address(), None, owns_socket=False)  # type: ignore[arg-type]
        monkeypatch.setattr(exiting, "is_exiting", lambda pid: pid == child.pid)
        why = await asyncio.wait_for(engine.wait_dead(), 240)
        assert "memory is being released" in why
        stopping = asyncio.create_task(engine.stop())
        await asyncio.sleep(0.2)
        assert not stopping.done(), "another one would find no memory"
        child.kill()
        await asyncio.wait_for(stopping, 240)

    asyncio.run(run())


def test_a_signal_without_a_name_is_reported_by_number() -> None:
    assert [how_ended(code) for code in (3, -9, -40)] == ["exit status 3", "signal SIGKILL", "signal 40"]


def test_only_the_given_processes_are_killed(child: subprocess.Popen[bytes]) -> None:
    assert kill_and_hold([child.pid], lambda _: False) == []

    def hidden(_: int) -> bool:
        raise PermissionError

    assert kill_and_hold([child.pid, 0], hidden) == []
    assert child.poll() is None
    wait_for_all(kill_and_hold([child.pid], lambda pid: pid == child.pid))
    assert child.wait() == -9
    assert kill_and_hold([child.pid], lambda _: True) == [], "it is not there any more"


def test_an_engine_has_exited_only_when_its_orphaned_ranks_have(child: subprocess.Popen[bytes]) -> None:
    class PreloadedProcess:
        process = child
        socket, _ = socketpair()

    class Address:
        address, fd = "ipc:///nowhere", -1

    code = ("-c", "import time; time.sleep(1000)")
    mine = subprocess.Popen([sys.executable, *code, str(child.pid), RANK])
    others = subprocess.Popen([sys.executable, *code, str(os.getpid()), RANK])
    pids = [mine.pid, others.pid]

    async def run() -> None:
        engine = EngineProcess(PreloadedProcess(), Address(), None, owns_socket=False, ranks=lambda: pids)  # type: ignore[arg-type]
        child.kill()
        assert await asyncio.wait_for(engine.wait_gone(), 240) == "the engine ended (signal SIGKILL)"

    try:
        asyncio.run(run())
        assert mine.wait(240) == -9
        assert others.poll() is None, "the number of one that has ended may be anybody's"
    finally:
        for process in (mine, others):
            process.kill()
            process.wait()
