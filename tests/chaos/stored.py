"""`StoringClients`: clients of `/v1/responses`. A response that says that it is stored must be there, also after its
disk failed."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from random import Random
from typing import Any

from customers import exchange
from ledger import Ledger

PATH = "/v1/responses"
KEPT = 200  # stored responses that are read again, of each client


class StoringClients:
    """Creates and reads responses without end, until `stop`."""

    def __init__(self, port: int, ledger: Ledger, rng: Random) -> None:
        self._port, self._ledger, self._rng = port, ledger, rng
        self._tasks: list[asyncio.Task[None]] = []
        self._stopping = False
        self.stored = self.not_stored = self.read = 0

    def come(self, count: int) -> None:
        self._tasks += [asyncio.create_task(self._go_on(Random(self._rng.random()))) for _ in range(count)]

    async def stop(self) -> None:
        self._stopping = True
        await asyncio.gather(*self._tasks)

    async def _go_on(self, rng: Random) -> None:
        kept: deque[tuple[str, Any]] = deque(maxlen=KEPT)
        while not self._stopping:
            if kept and rng.random() < 0.5:
                await self._check(*rng.choice(kept))
            elif (made := await self._ask("POST", PATH, _body(rng))) is not None and made[0] == 200:
                response = json.loads(made[1])
                if response["store"]:
                    self.stored += 1
                    kept.append((response["id"], response["output"]))
                    await self._check(*kept[-1])
                else:
                    self.not_stored += 1
            await asyncio.sleep(rng.uniform(0.05, 0.3))

    async def _check(self, id: str, output: Any) -> None:
        """Read a stored response. A disk may refuse that (500) or be too slow (503), but not lose it."""
        found = await self._ask("GET", f"{PATH}/{id}")
        if found is None or found[0] in (500, 503):
            return
        self.read += 1
        if found[0] != 200 or json.loads(found[1])["output"] != output:
            self._ledger.wrong.append(f"{id} was stored, but reading it is {found[0]}: {found[1][:200]!r}")

    async def _ask(self, method: str, path: str, body: bytes = b"") -> tuple[int, bytes] | None:
        head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
        return await exchange(self._port, self._ledger, PATH, (head + kind).encode() + body, f"{method} {path}")


def _body(rng: Random) -> bytes:
    text = f"What is {rng.randrange(500)} plus {rng.randrange(400)}?"
    return json.dumps({"input": text, "max_output_tokens": 8, "temperature": 0}).encode()
