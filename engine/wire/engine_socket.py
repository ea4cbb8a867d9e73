"""`Clients`: the API processes connected to the engine process."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import zmq

from weft.engine.wire.messages import HANDLE_BITS, FromEngine, Hello, Outputs, ToEngine, encoder, to_engine_decoder


def identity(client: int) -> bytes:
    """Return the routing id of a client's socket."""
    return b"client-%d" % client


class Clients:
    """A bound ROUTER socket, which sends each client its rows of an iteration. A client is known from its `Hello`
    until `forget`; messages to others are dropped."""

    def __init__(self, context: zmq.Context[Any], listener_fd: int) -> None:
        """`listener_fd` is the descriptor of a listening socket (`PrivateSocket`)."""
        self._socket: zmq.Socket[bytes] = context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.SNDHWM, 0)
        self._socket.setsockopt(zmq.RCVHWM, 0)
        self._socket.setsockopt(zmq.LINGER, 1000)
        self._socket.setsockopt(zmq.USE_FD, listener_fd)
        self._socket.bind(f"ipc:///proc/self/fd/{listener_fd}")  # zmq requires a name but does not use it
        self._known: set[int] = set()

    def receive(self, wait_ms: int) -> list[tuple[int, ToEngine]]:
        """Return all messages received, each with its sender. Waits up to `wait_ms` for the first one."""
        messages: list[tuple[int, ToEngine]] = []
        if wait_ms:
            self._socket.poll(wait_ms)
        while True:
            try:
                sender, frame = self._socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return messages
            client = int(sender.rpartition(b"-")[2])
            message = to_engine_decoder.decode(frame)
            if isinstance(message, Hello):
                self._known.add(client)
            messages.append((client, message))

    def __contains__(self, client: int) -> bool:
        return client in self._known

    def forget(self, client: int) -> None:
        self._known.discard(client)

    def send(self, client: int, message: FromEngine) -> None:
        self._send(client, encoder.encode(message))

    def send_all(self, message: FromEngine) -> None:
        frame = encoder.encode(message)
        for client in self._known:
            self._send(client, frame)

    def send_outputs(self, outputs: Outputs) -> None:
        """Send each client its rows, and the statistics to all."""
        parts = split(outputs)
        statistics = b""
        for client in self._known:
            part = parts.get(client)
            if part is None:
                statistics = statistics or encoder.encode(Outputs(stats=outputs.stats))
                self._send(client, statistics)
            else:
                self._send(client, encoder.encode(part))

    def _send(self, client: int, frame: bytes) -> None:
        # A ROUTER drops messages to peers that have gone.
        self._socket.send_multipart((identity(client), frame))

    def close(self) -> None:
        self._socket.close()


def split(outputs: Outputs) -> dict[int, Outputs]:
    """Return the rows of each client, by client. Every mapping of `Outputs` is by handle."""
    handles, tokens, finish = outputs.columns()
    owners = handles >> HANDLE_BITS
    mappings = {
        name: value for name in outputs.__struct_fields__ if isinstance(value := getattr(outputs, name), Mapping)
    }
    present = {*np.unique(owners).tolist(), *(started.handle >> HANDLE_BITS for started in outputs.started)}
    for mapping in mappings.values():
        present.update(handle >> HANDLE_BITS for handle in mapping)
    if len(present) == 1:
        return {present.pop(): outputs}
    parts = {}
    for client in present:
        mine = owners == client
        parts[client] = msgspec.structs.replace(
            outputs,
            handles=handles[mine].tobytes(),
            tokens=tokens[mine].tobytes(),
            finish=finish[mine].tobytes(),
            started=[started for started in outputs.started if started.handle >> HANDLE_BITS == client],
            **{
                name: {handle: value for handle, value in mapping.items() if handle >> HANDLE_BITS == client}
                for name, mapping in mappings.items()
            },
        )
    return parts
