"""A daemon passes its listeners to its successor. A service manager's listeners are used unchanged."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from weft.engine.errors import ConfigError
from weft.server.daemon import handover
from weft.server.daemon.handover import Handover, Predecessor, find
from weft.server.daemon.listen import distribute, inherited, listen


@pytest.fixture
def path(tmp_path: Path) -> str:
    return f"{tmp_path}/handover"


def test_no_predecessor_is_not_an_error(path: str) -> None:
    assert find(path) is None
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)  # as a killed daemon leaves it
    assert find(path) is None


async def test_a_successor_gets_the_queues_and_reports_when_it_serves(path: str) -> None:
    ours = listen("127.0.0.1", 0, 2)
    reported = asyncio.Event()
    first = Handover(path, ours, reported.set)
    first.open()
    assert os.stat(path).st_mode & 0o777 == 0o600
    predecessor = await asyncio.to_thread(find, path)
    assert predecessor is not None
    assert predecessor.pid == os.getpid()
    for own in distribute(predecessor.listeners, 5):  # they are blocking for both daemons, or for none
        assert not any(os.get_blocking(listener.fileno()) for listener in (*ours, *own))
    address = ours[0].getsockname()
    assert [listener.getsockname() for listener in predecessor.listeners] == [address] * 2
    with pytest.raises(ConfigError, match="another daemon is about to"):
        await asyncio.to_thread(find, path)
    # Connections that waited at the first one are still there after it has exited.
    waiting = [socket.create_connection(address) for _ in range(20)]
    for listener in ours:
        listener.close()
    second = Handover(path, predecessor.listeners, lambda: None)
    second.open()
    assert not reported.is_set()
    predecessor.replace()
    async with asyncio.timeout(240):
        await reported.wait()
    first.close()
    count = 0
    for listener in predecessor.listeners:
        listener.setblocking(False)
        while True:
            try:
                listener.accept()[0].close()
            except BlockingIOError:
                break
            count += 1
    assert count == 20
    third = await asyncio.to_thread(find, path)  # the path belongs to the second one
    assert third is not None
    second.close()
    for sock in waiting:
        sock.close()


def found(path: str) -> Predecessor | None:
    """The predecessor; None while another daemon is about to take over."""
    with contextlib.suppress(ConfigError):
        return find(path)
    return None


async def test_a_failing_successor_leaves_the_port_unchanged(path: str) -> None:
    ours = listen("127.0.0.1", 0, 1)
    reported = asyncio.Event()
    first = Handover(path, ours, reported.set)
    first.open()
    for _ in range(2):
        async with asyncio.timeout(240):
            while (predecessor := await asyncio.to_thread(found, path)) is None:
                await asyncio.sleep(0.02)  # the first one has not been notified yet of the end of the last one
        predecessor._socket.close()  # it ended while it loaded
    assert not reported.is_set()
    first.close()


def test_a_predecessor_that_does_not_answer_is_a_one_line_error(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        with pytest.raises(ConfigError, match="does not answer"):
            find(path)


def test_listeners_are_distributed() -> None:
    listeners = listen("127.0.0.1", 0, 3)
    assert distribute(listeners, 3) == [[one] for one in listeners]
    assert distribute(listeners, 2) == [[listeners[0], listeners[2]], [listeners[1]]]
    four = distribute(listeners[:2], 4)
    assert [[one.getsockname() for one in own] for own in four] == [[listeners[0].getsockname()]] * 4
    assert len({own[0].fileno() for own in four}) == 4


CHILD = """
import os, socket, sys
from weft.server.daemon.listen import inherited
from weft.engine.errors import ConfigError
os.environ["LISTEN_PID"] = str(os.getpid() + int(sys.argv[1]))
try:
    listeners = inherited()
except ConfigError as error:
    print(error)
else:
    print([(l.fileno(), l.getsockname()[1], l.get_inheritable()) for l in listeners], "LISTEN_FDS" in os.environ)
"""


def child(sock: socket.socket, other: int = 0) -> str:
    command = 'exec 3<&"$1"; exec "$2" -P -c "$3" "$4"'
    run = subprocess.run(
        ["bash", "-c", command, "bash", str(sock.fileno()), sys.executable, CHILD, str(other)],
        pass_fds=[sock.fileno()],
        env={**os.environ, "LISTEN_FDS": "1", "LISTEN_FDNAMES": "weft"},
        capture_output=True,
        text=True,
        timeout=240,
        check=True,
    )
    return run.stdout.strip()


def test_a_service_managers_sockets_are_used() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert child(listener) == f"[(3, {listener.getsockname()[1]}, False)] False"
        assert child(listener, 1) == "[] False"  # meant for another process
    with socket.socket() as idle:
        assert "is not a listening TCP socket" in child(idle)


def test_without_a_service_manager_there_are_none() -> None:
    assert inherited({}) == []
    assert inherited({"LISTEN_PID": str(os.getpid())}) == []
