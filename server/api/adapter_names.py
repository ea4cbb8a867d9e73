"""`AdapterNames`: the LoRA adapters of a model, by the names that requests use.

The engines keep the adapters and report each change to every API process. This process sends what it has to engines
that start later.
"""

from __future__ import annotations

import asyncio
import re
from functools import partial
from pathlib import Path
from typing import NamedTuple

from weft.engine.errors import EngineDead, one_line
from weft.engine.wire.messages import AdapterNews
from weft.engine.wire.streams import Streams
from weft.server.errors import ApiError, clip

LOAD_SECONDS = 120.0  # Seconds to wait for the engines to load an adapter.
RETRY_SECONDS = 5.0  # Seconds for which a failed load on first use is remembered.
MAX_FAILURES = 1000
MAX_NAME = 200  # Characters of a name.
NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]*(/[A-Za-z0-9_-][A-Za-z0-9._-]*)*")
"""Names of adapters, which appear in paths and in a metric's label that separates them with commas."""


class Served(NamedTuple):
    """An adapter with a name."""

    digest: str
    path: str


class AdapterNames:
    """The adapters of one model in this process. `folder`: where adapters are loaded from on first use."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = None if folder is None else folder.resolve()
        self.served: dict[str, Served] = {}
        self._dropped: set[str] = set()
        self._clients: list[Streams] = []
        self._loads: dict[str, asyncio.Future[str]] = {}
        """Loads in progress by name; the result is an error, or an empty string."""
        self._answers: dict[tuple[Streams, str], asyncio.Future[str | None]] = {}
        """Answers that are due, by engine and name: an error, an empty string, or None if the engine ended."""
        self._failures: dict[str, tuple[float, str]] = {}  # When a load on first use failed, and why.

    def attach(self, client: Streams) -> None:
        """Use an engine that is ready, and send it the adapters that it does not have."""
        reported = client.adapters.values()
        self._clients = [other for other in self._clients if other.alive] + [client]
        for news in list(reported):
            if news.name in self._dropped:
                client.drop_adapter(news.name)
            else:
                self._note(client, news)
        known = {news.name for news in reported}
        for name, served in self.served.items():
            if name not in known:
                client.load_adapter(name, served.path, served.digest)
        client.on_adapter, client.on_dead = partial(self._note, client), partial(self._ended, client)

    def _ended(self, client: Streams) -> None:
        """Wait no longer for an engine that has ended."""
        for (other, _), answer in self._answers.items():
            if other is client and not answer.done():
                answer.set_result(None)

    def _note(self, client: Streams, news: AdapterNews) -> None:
        if news.digest:
            self.served[news.name] = Served(news.digest, news.path)
            self._dropped.discard(news.name)
        elif not news.error:
            self.served.pop(news.name, None)
            self._dropped.add(news.name)
        answer = self._answers.get((client, news.name))
        if answer is not None and not answer.done():
            answer.set_result(news.error)

    def find(self, name: str) -> Served | None:
        return self.served.get(name)

    async def load(self, name: str, path: str) -> str:
        """Load an adapter in every engine. Returns an error, or an empty string. Engines that end meanwhile do not
        count, because their successors load it when they attach. Raises `EngineDead` if all end or do not answer."""
        if (load := self._loads.get(name)) is None:
            load = self._loads[name] = asyncio.ensure_future(self._ask(name, path))
            load.add_done_callback(lambda _: self._loads.pop(name, None))
        return await asyncio.shield(load)

    async def unload(self, name: str) -> str:
        """Forget a name in every engine. Returns an error, or an empty string. Raises `EngineDead` as `load` does."""
        return await self._ask(name, None)

    async def _ask(self, name: str, path: str | None) -> str:
        clients = [client for client in self._clients if client.alive]
        if not clients:
            raise EngineDead("there is no engine")
        loop = asyncio.get_running_loop()
        answers: dict[tuple[Streams, str], asyncio.Future[str | None]]
        answers = {(client, name): loop.create_future() for client in clients}
        self._answers |= answers
        for client in clients:
            if path is None:
                client.drop_adapter(name)
            else:
                client.load_adapter(name, path)
        try:
            async with asyncio.timeout(LOAD_SECONDS):
                errors = await asyncio.gather(*answers.values())
        except TimeoutError:
            raise EngineDead(f"the engines have not answered within {LOAD_SECONDS:g} seconds") from None
        finally:
            for key in answers:
                self._answers.pop(key, None)
        if all(error is None for error in errors):
            raise EngineDead(clients[0].dead)
        return next(filter(None, errors), "")

    async def load_from_folder(self, name: str) -> None:
        """Load an adapter that is requested for the first time, if the folder has it. Raises `ApiError` 400 if it
        cannot be loaded, and `EngineDead` as `load` does."""
        if self.folder is None or len(name) > MAX_NAME or NAME.fullmatch(name) is None:
            return
        loop = asyncio.get_running_loop()
        since, why = self._failures.get(name, (0.0, ""))
        if not why or loop.time() - since > RETRY_SECONDS:
            path = self.folder / name
            if not (path / "adapter_config.json").is_file():
                return
            why = self.refusal(path) or await self.load(name, str(path))
            self._failures.pop(name, None)
            if why:
                self._failures[name] = loop.time(), why
                while len(self._failures) > MAX_FAILURES:
                    del self._failures[next(iter(self._failures))]
        if why:
            raise ApiError(400, f"The adapter '{clip(name)}' cannot be loaded: {why}.", param="model", code="adapter")

    def refusal(self, path: Path) -> str:
        """Why a path may not be loaded: it is outside the folder, also through links; else an empty string."""
        if self.folder is None:
            return ""
        try:
            real = path.resolve()
            inside = all(file.resolve().is_relative_to(self.folder) for file in (real, *_files(real)))
        except (OSError, ValueError, RuntimeError) as error:  # a name that is too long, NUL, links in a circle
            return one_line(error)
        return "" if inside else f"{path} is not inside {self.folder} (--lora-dir)"


def _files(path: Path) -> list[Path]:
    return [path / "adapter_config.json", path / "adapter_model.safetensors"]
