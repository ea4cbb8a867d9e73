"""`StoringClients`: clients of `/v1/responses`. A response that says that it is stored must be there, also after its
disk failed."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from contextlib import suppress
from random import Random
from typing import Any

from customers import PATIENCE_SECONDS, Broken, whole
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
        ledger = self._ledger
        try:
            reader, writer = await asyncio.open_connection("127.0.0.1", self._port)
        except OSError:
            ledger.refused += 1
            return None
        try:
            head = f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
            kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
            writer.write((head + kind).encode() + body)
            status, answer = await asyncio.wait_for(whole(reader), PATIENCE_SECONDS)
        except TimeoutError:
            ledger.unanswered.append(f"{method} {path}")
            return None
        except (Broken, OSError):
            ledger.broken[PATH] += 1
            return None
        finally:
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()
        ledger.answered[PATH, str(status)] += 1
        return status, answer


def _body(rng: Random) -> bytes:
    text = f"What is {rng.randrange(500)} plus {rng.randrange(400)}?"
    return json.dumps({"input": text, "max_output_tokens": 8, "temperature": 0}).encode()
