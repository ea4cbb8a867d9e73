"""A server with real engines in this process: everything but the processes and their sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from weft.engine.config import EngineConfig
from weft.engine.encoders.engine import EncoderEngine
from weft.engine.engine import Engine
from weft.engine.model.encoders import serves_encoder
from weft.engine.wire.messages import AbortRequests, AddRequest, ToEngine, encoder, to_engine_decoder
from weft.engine.wire.streams import Streams
from weft.server.api.http_server import make_server
from weft.server.api.service import Service
from weft.server.config import ServeConfig
from weft.server.text.tokenizer import Tokenizer


class InProcess(Streams):
    """A client and its engine. Messages cross as bytes, as they do on a socket."""

    def __init__(self, engine: Engine | EncoderEngine, number: int = 0) -> None:
        super().__init__(number)
        self.engine = engine
        self.batches: list[int] = []  # requests of each batch of an encoder
        self._steps: asyncio.Task[None] | None = None

    def _send(self, message: ToEngine) -> None:
        match to_engine_decoder.decode(encoder.encode(message)):
            case AddRequest() as request:
                self.engine.add_or_refuse(request)
            case AbortRequests(handles):
                for handle in handles:
                    self.engine.abort(handle)
        if self._steps is None or self._steps.done():
            self._steps = asyncio.ensure_future(self._run())

    async def _run(self) -> None:
        while self.engine.has_work:
            await asyncio.sleep(0)  # requests of one body arrive before the step
            if (outputs := self.engine.step()) is None:
                await asyncio.sleep(0.002)
            else:
                self.batches.append(outputs.stats.iteration.requests)
                self._deliver(outputs)


def start(path: Path, **options: object) -> Engine | EncoderEngine:
    config = EngineConfig.model_validate({"model": str(path), "device": "cpu", "cpu_threads": 1, **options})
    return EncoderEngine(config) if serves_encoder(config) else Engine(config)


@contextlib.asynccontextmanager
async def serving(
    engines: dict[str, Engine | EncoderEngine], **options: object
) -> AsyncIterator[tuple[httpx.AsyncClient, Service, list[InProcess]]]:
    """A server of models by name. options: those of `ServeConfig`."""
    each = [{"model": engine.config.model, "served_model_name": [name]} for name, engine in engines.items()]
    models = {"models": each} if len(each) > 1 else each[0]
    service = Service(ServeConfig.model_validate({"port": 0, **models, **options}))
    clients = []
    for i, engine in enumerate(engines.values()):
        clients.append(InProcess(engine, i))
        tokenizer = Tokenizer.load(engine.config.tokenizer_path)
        service.models[i].attach(clients[i], engine.describe(), tokenizer, i)
    server = make_server(service)
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=240) as http:
        yield http, service, clients
    server.should_exit = True
    await task
    service.close()
