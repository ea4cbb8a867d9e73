"""Listeners go from a daemon to its successor; those of a service manager are taken as they are."""

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


def test_nobody_there_is_no_error(path: str) -> None:
    assert find(path) is None
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(path)  # as a killed daemon leaves it
    assert find(path) is None


async def test_a_successor_gets_the_queues_and_says_when_it_serves(path: str) -> None:
    ours = listen("127.0.0.1", 0, 2)
    told = asyncio.Event()
    first = Handover(path, ours, told.set)
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
    # Connections that waited at the first one are still there when it has gone.
    waiting = [socket.create_connection(address) for _ in range(20)]
    for listener in ours:
        listener.close()
    second = Handover(path, predecessor.listeners, lambda: None)
    second.open()
    assert not told.is_set()
    predecessor.replace()
    async with asyncio.timeout(240):
        await told.wait()
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
    third = await asyncio.to_thread(find, path)  # the path is the second one's
    assert third is not None
    second.close()
    for sock in waiting:
        sock.close()


def found(path: str) -> Predecessor | None:
    """None while another one is about to take over."""
    with contextlib.suppress(ConfigError):
        return find(path)
    return None


async def test_a_successor_that_fails_leaves_the_port_where_it_was(path: str) -> None:
    ours = listen("127.0.0.1", 0, 1)
    told = asyncio.Event()
    first = Handover(path, ours, told.set)
    first.open()
    for _ in range(2):
        async with asyncio.timeout(240):
            while (predecessor := await asyncio.to_thread(found, path)) is None:
                await asyncio.sleep(0.02)  # the first one has yet to hear of the end of the last one
        predecessor._socket.close()  # it ended while it loaded
    assert not told.is_set()
    first.close()


def test_one_that_does_not_answer_is_a_line(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "PATIENCE", 0.1)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(path)
        silent.listen()
        with pytest.raises(ConfigError, match="does not answer"):
            find(path)


def test_listeners_are_shared_out() -> None:
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


def test_a_service_managers_sockets_are_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        assert child(listener) == f"[(3, {listener.getsockname()[1]}, False)] False"
        assert child(listener, 1) == "[] False"  # meant for another process
    with socket.socket() as idle:
        assert "is not a listening TCP socket" in child(idle)


def test_without_a_service_manager_there_are_none() -> None:
    assert inherited({}) == []
    assert inherited({"LISTEN_PID": str(os.getpid())}) == []
