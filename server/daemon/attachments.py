"""`Attachments`: which API process is which client of which engine, and who serves with whom."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from weft.server.daemon.api_process import ApiProcess
from weft.server.daemon.engine_supervisor import EngineSupervisor

ATTACH_SECONDS = 120.0
"""that an API process may take to serve once there is an engine that is ready"""


class Attachments:
    """Both tables are the daemon's: of what runs now."""

    def __init__(self, engines: Mapping[int, EngineSupervisor], api: Mapping[int, ApiProcess]) -> None:
        self._engines, self._api = engines, api
        self._clients: dict[tuple[int, int], int] = {}
        """the client's number by API process and engine"""
        self._attached: set[tuple[int, int]] = set()
        """API processes, and engines that they are attached to"""

    def introduce(self, i: int, engine: int, number: int) -> None:
        """Tell an API process where an engine is, whose client with this number it is to be."""
        supervisor = self._engines[engine]
        if (introduction := supervisor.introduction(number)) is not None:
            self._clients[i, engine] = number
            self._api[i].send(introduction)
            if supervisor.ready is not None:
                self.expect(i, engine)

    def expect(self, i: int, engine: int) -> None:
        """An engine is ready: an API process that does not serve with it soon is of no use."""
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
        """Pairs that serve."""
        return len(self._attached)

    def serves(self, engine: int) -> bool:
        """With every API process that there is."""
        return bool(self._api) and all((i, engine) in self._attached for i in self._api)

    def engine_ended(self, engine: int) -> None:
        self._attached = {pair for pair in self._attached if pair[1] != engine}

    def process_ended(self, i: int) -> None:
        self._attached = {pair for pair in self._attached if pair[0] != i}
        for engine, supervisor in self._engines.items():
            if (i, engine) in self._clients:
                supervisor.client_gone(self._clients[i, engine])
