"""Notifications to a service manager, on a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from weft.server.daemon.notify import Notifier


class Manager:
    def __init__(self, address: str) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.socket.settimeout(240)
        self.socket.bind("\0" + address[1:] if address[0] == "@" else address)
        self.environment = {"NOTIFY_SOCKET": address, "HOME": "/"}

    def received(self) -> list[str]:
        return self.socket.recv(4096).decode().split("\n")


@pytest.fixture(params=["path", "abstract"])
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Manager]:
    path = f"{tmp_path}/notify"
    manager = Manager(path if request.param == "path" else "@" + path)
    yield manager
    manager.socket.close()


def test_the_notifications_of_a_lifetime(manager: Manager) -> None:
    notifier = Notifier(manager.environment)
    assert manager.environment == {"HOME": "/"}  # children must not notify for us
    notifier.status("loading")
    assert manager.received() == ["STATUS=loading"]
    notifier.ready("serving")
    assert manager.received() == ["READY=1", "STATUS=serving"]
    notifier.reloading()
    reloading, at = manager.received()
    assert reloading == "RELOADING=1"
    assert int(at.removeprefix("MONOTONIC_USEC=")) > 0
    notifier.stopping("draining")
    assert manager.received() == ["STOPPING=1", "STATUS=draining"]


async def test_the_watchdog_is_notified_while_healthy(manager: Manager) -> None:
    manager.environment |= {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())}
    notifier = Notifier(manager.environment)
    assert notifier.watchdog_seconds == 0.02
    healthy = True
    watch = asyncio.create_task(notifier.watch(lambda: healthy))
    for _ in range(3):
        assert await asyncio.to_thread(manager.received) == ["WATCHDOG=1"]
    healthy = False
    await asyncio.sleep(0.1)
    manager.socket.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:  # earlier messages
            manager.received()
    await asyncio.sleep(0.1)
    with pytest.raises(BlockingIOError):
        manager.received()
    watch.cancel()


@pytest.mark.parametrize(
    "environment", [{}, {"NOTIFY_SOCKET": ""}, {"NOTIFY_SOCKET": "vsock:1:2"}, {"NOTIFY_SOCKET": "/nowhere/notify"}]
)
async def test_without_a_manager_nothing_happens(environment: dict[str, str]) -> None:
    notifier = Notifier({**environment, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": "1"})
    assert notifier.watchdog_seconds is None  # another process is watched
    notifier.ready("serving")
    await notifier.watch()


def test_a_manager_that_does_not_listen_blocks_nothing(manager: Manager) -> None:
    notifier = Notifier(manager.environment)
    for _ in range(10_000):
        notifier.status("x" * 1000)
