"""The daemon: one process that loads a model, serves it, drains on SIGTERM, and never outlives its engine unnoticed."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import shlex
import signal
import socket
import sys
import time
from collections.abc import Generator
from contextlib import contextmanager

import prometheus_client
import uvicorn
import uvloop

from weft import __version__
from weft.engine.client import EngineClient
from weft.engine.errors import ConfigError, WeftError
from weft.engine.messages import EngineReady
from weft.server.app import create_app
from weft.server.config import ServeConfig
from weft.server.errors import ApiError
from weft.server.service import Phase, Service
from weft.server.tokenizer import Tokenizer

DRAIN_TICK = 0.05
FAREWELL = 1.0
"""seconds that last answers get to leave"""

logger = logging.getLogger("weft")


def run(config: ServeConfig) -> int:
    """Serve until a signal or the engine's end. Returns the exit code: 0 after a signal, 1 otherwise."""
    logging.basicConfig(
        level=config.log_level.upper(), stream=sys.stderr, format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    prometheus_client.disable_created_metrics()
    try:
        listener = _listen(config.host, config.port)
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            return runner.run(_Daemon(config, listener).run())
    except WeftError as error:
        print(f"weft: {error}", file=sys.stderr)
        return 1


def _listen(host: str, port: int) -> socket.socket:
    """A listening socket. Taken before anything is loaded, so that a taken port is told at once."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(2048)
    except OSError as error:
        hint = "; choose another --port" if error.errno == errno.EADDRINUSE else ""
        raise ConfigError(f"cannot listen on {host} port {port}: {error.strerror or error}{hint}") from None
    return listener


class _Server(uvicorn.Server):
    """uvicorn, without its signal handling: the daemon decides when to end."""

    @contextmanager
    def capture_signals(self) -> Generator[None, None, None]:
        yield


class _Daemon:
    def __init__(self, config: ServeConfig, listener: socket.socket) -> None:
        self._config = config
        self._listener = listener
        self._service = Service(config)
        self._begun = time.monotonic()
        self._asked_to_stop = asyncio.Event()
        self._asked_twice = asyncio.Event()

    async def run(self) -> int:
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, self._on_signal)
        server = _Server(
            uvicorn.Config(
                create_app(self._service),
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=2,
            )
        )
        logging.getLogger("uvicorn").setLevel(logging.WARNING)
        serving = asyncio.create_task(server.serve(sockets=[self._listener]))
        client = await EngineClient.start(self._config.engine)
        try:
            return await self._live(client)
        finally:
            server.should_exit = True
            await asyncio.wait((serving,), timeout=FAREWELL)
            server.force_exit = True
            await asyncio.gather(serving, client.stop(timeout=2.0), return_exceptions=True)
            self._service.close()

    async def _live(self, client: EngineClient) -> int:
        """From loading to the end; returns the exit code."""
        stop = asyncio.create_task(self._asked_to_stop.wait())
        loading = asyncio.create_task(self._load(client))
        await asyncio.wait((stop, loading), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            loading.cancel()
            return 0
        ready = loading.result()
        self._announce(ready)
        dead = asyncio.create_task(client.wait_dead())
        await asyncio.wait((stop, dead), return_when=asyncio.FIRST_COMPLETED)
        if not dead.done():
            await self._drain(dead)
        if dead.done():
            self._service.engine_died()
            print(f"weft: {dead.result()}", file=sys.stderr)
            await self._until_idle(FAREWELL)
            return 1
        return 0

    async def _load(self, client: EngineClient) -> EngineReady:
        """Engine and tokenizer, at the same time. Raises `WeftError`."""
        path = self._config.model_path
        tokenizer, ready = await asyncio.gather(
            self._service.offload(lambda: Tokenizer.load(path)), client.wait_ready()
        )
        tokenizer.hide(ready.eos_token_ids)
        self._service.attach(client, ready, tokenizer)
        return ready

    def _on_signal(self) -> None:
        if self._asked_to_stop.is_set():
            self._asked_twice.set()
        self._asked_to_stop.set()

    async def _drain(self, dead: asyncio.Task[str]) -> None:
        """Take no new work, let open answers finish, then end those that did not."""
        service = self._service
        service.phase = Phase.DRAINING
        logger.info("draining %d open requests", len(service.open))
        deadline = time.monotonic() + self._config.drain_timeout
        while service.open and time.monotonic() < deadline and not self._asked_twice.is_set() and not dead.done():
            await asyncio.sleep(DRAIN_TICK)
        if not dead.done():
            error = ApiError(503, "The server is shutting down.", code="draining", retry_after=10)
            service.interrupt_all(error, "drain")
            await self._until_idle(FAREWELL)

    async def _until_idle(self, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._service.open and time.monotonic() < deadline:
            await asyncio.sleep(DRAIN_TICK)

    def _announce(self, ready: EngineReady) -> None:
        service, config = self._service, self._config
        host, port = self._listener.getsockname()[:2]
        host = {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
        url = f"http://{host}:{port}"
        name = config.model_names[0]
        seconds = time.monotonic() - self._begun
        pages = f"{ready.num_pages} KV pages of {ready.page_size} tokens"
        print(
            f"weft {__version__} serves {name} at {url} "
            f"({ready.model_type}, {ready.dtype} on {ready.device}, {pages}, ready in {seconds:.1f} s)\n"
            f"try: {_curl(url, name, chat=service.engine.tokenizer.has_chat_template, key=bool(config.api_key))}",
            flush=True,
        )


def _curl(url: str, model: str, *, chat: bool, key: bool) -> str:
    """A command that works when pasted into a shell."""
    question = "What is 12 + 30?"
    path = "/v1/chat/completions" if chat else "/v1/completions"
    prompt = {"messages": [{"role": "user", "content": question}]} if chat else {"prompt": question}
    body = json.dumps({"model": model, **prompt})
    authorization = ' -H "Authorization: Bearer $WEFT_API_KEY"' if key else ""
    return f"curl {shlex.quote(url + path)} -H 'Content-Type: application/json'{authorization} -d {shlex.quote(body)}"
