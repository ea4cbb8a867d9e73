"""The engine's socket is reached only by inherited descriptors, even if temporary files are removed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from weft.engine.errors import ConfigError
from weft.engine.wire.engine_socket import Clients, identity
from weft.engine.wire.messages import Hello, encoder
from weft.engine.wire.spawn import PrivateSocket


@pytest.fixture
def context() -> Iterator[zmq.Context[zmq.Socket[bytes]]]:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    yield context
    context.destroy(0)


def sends_hello(context: zmq.Context[zmq.Socket[bytes]], address: str, number: int) -> None:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.ROUTING_ID, identity(number))
    dealer.connect(address)
    dealer.send(encoder.encode(Hello()))


@pytest.mark.parametrize("name", ["short", "long" * 25])
def test_nothing_stays_on_the_disk_and_a_path_may_be_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: zmq.Context[zmq.Socket[bytes]], name: str
) -> None:
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    socket = PrivateSocket()
    assert list(folder.iterdir()) == []
    folder.rmdir()
    clients = Clients(context, os.dup(socket.fd))  # which zmq closes
    sends_hello(context, socket.address, 3)
    assert clients.receive(10_000) == [(3, Hello())]
    clients.close()
    socket.close()


def test_an_engines_successor_listens_at_the_same_address(context: zmq.Context[zmq.Socket[bytes]]) -> None:
    socket = PrivateSocket()
    for number in (1, 2):
        sends_hello(context, socket.address, number)  # before any process accepts connections
        clients = Clients(context, os.dup(socket.fd))
        assert (number, Hello()) in clients.receive(10_000)
        clients.close()
        context.destroy(0)
        context = zmq.Context()
    socket.close()
    context.destroy(0)


def test_no_folder_for_a_socket_is_a_one_line_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(ConfigError, match="set TMPDIR"):
        PrivateSocket()
