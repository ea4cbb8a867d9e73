"""`Attachments`: which API process is which client of which engine, and which pairs serve."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from weft.server.daemon.api_process import ApiProcess
from weft.server.daemon.engine_supervisor import EngineSupervisor

ATTACH_SECONDS = 120.0
"""Seconds for an API process to serve after an engine is ready."""


class Attachments:
    """Connects API processes with engines. Both tables belong to the daemon and list what runs now."""

    def __init__(self, engines: Mapping[int, EngineSupervisor], api: Mapping[int, ApiProcess]) -> None:
        self._engines, self._api = engines, api
        self._clients: dict[tuple[int, int], int] = {}
        """Client numbers by API process and engine."""
        self._attached: set[tuple[int, int]] = set()
        """Pairs of an API process and an engine that serve."""

    def connect(self, i: int, engine: int, number: int) -> None:
        """Send an engine's address to an API process, which becomes its client with this number."""
        supervisor = self._engines[engine]
        if (engine_up := supervisor.engine_up(number)) is not None:
            self._clients[i, engine] = number
            self._api[i].send(engine_up)
            if supervisor.ready is not None:
                self.expect(i, engine)

    def expect(self, i: int, engine: int) -> None:
        """Kill an API process that does not serve within `ATTACH_SECONDS` of an engine becoming ready."""
        number = self._clients[i, engine]

        def check() -> None:
            current = self._clients.get((i, engine)) == number and self._engines[engine].ready is not None
            if current and i in self._api and (i, engine) not in self._attached:
                self._api[i].kill(f"not ready {ATTACH_SECONDS:g} s after the engine")

        asyncio.get_running_loop().call_later(ATTACH_SECONDS, check)

    def attached(self, i: int, engine: int) -> None:
        self._attached.add((i, engine))

    @property
    def num_attached(self) -> int:
        """Number of pairs that serve."""
        return len(self._attached)

    def serves(self, engine: int) -> bool:
        """Return whether all API processes serve with this engine."""
        return bool(self._api) and all((i, engine) in self._attached for i in self._api)

    def engine_ended(self, engine: int) -> None:
        self._attached = {pair for pair in self._attached if pair[1] != engine}

    def process_ended(self, i: int) -> None:
        self._attached = {pair for pair in self._attached if pair[0] != i}
        for engine, supervisor in self._engines.items():
            if (i, engine) in self._clients:
                supervisor.client_gone(self._clients[i, engine])
