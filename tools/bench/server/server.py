"""`weft bench server`: CPU cost of the API processes. They and their sockets are real, the engine only emits tokens."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Any

from weft import unwritable
from weft.engine.errors import ConfigError, WeftError
from weft.engine.wire.client import EngineClient
from weft.engine.wire.heartbeat import Heartbeats
from weft.engine.wire.spawn import PrivateSocket
from weft.server.config import ServeConfig
from weft.server.daemon.api_process import ApiProcess, Place
from weft.server.daemon.control import EngineUp, Failed, Ready, Stop
from weft.server.daemon.listen import listen
from weft.server.observe.metrics import Metrics
from weft.server.observe.shared_state import SharedState
from weft.tools.bench.server.client import http_request

WARM_UP_SECONDS = 1.0
_WORD = "hello "


def run(arguments: argparse.Namespace) -> int:
    """Measure and print. Raises `WeftError`."""
    if min(arguments.streams, arguments.rate, arguments.seconds, arguments.api_workers) <= 0:
        raise ConfigError("--streams, --rate, --seconds and --api-workers must be more than 0")
    if arguments.scrapes < 0:
        raise ConfigError("--scrapes must not be less than 0")
    figures = asyncio.run(_Bench(arguments, _parse_fields(arguments.fields)).run())
    fields = f" with {arguments.fields}" if figures["fields"] else ""
    tokenized = f", while {figures['tokenized']} prompts of {arguments.tokenize} tokens were tokenized"
    print(
        f"{figures['api_us_per_token']:.1f} us of CPU per streamed token on the API side "
        f"({figures['tokens']} tokens in {figures['seconds']:.1f} s, {arguments.streams} streams of "
        f"/{figures['endpoint']}{fields} at {arguments.rate:g} tokens/s, {arguments.api_workers} API process(es), "
        f"{100 * figures['api_cpu']:.0f} % of a core)\n"
        f"event-loop lag: p50 {figures['lag_p50_ms']}, p99 {figures['lag_p99_ms']} (upper bounds of buckets)"
        f"{tokenized * bool(arguments.tokenize)}\n"
        f"on {figures['machine']}"
    )
    if arguments.scrapes:
        share = 100 * figures["scrape_cpu"]
        print(f"{figures['us_per_scrape']:.0f} us of CPU per scrape of /metrics, {share:.2f} % of a core")
    if arguments.json is not None:
        try:
            arguments.json.write_text(json.dumps(figures, indent=1) + "\n")
        except OSError as error:
            raise WeftError(unwritable(arguments.json, error)) from None
    return 0


def _parse_fields(text: str) -> dict[str, Any]:
    try:
        fields = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--fields is not valid JSON: {error}") from None
    if not isinstance(fields, dict):
        raise ConfigError("--fields must be a JSON object")
    return fields


class _Bench:
    def __init__(self, arguments: argparse.Namespace, fields: dict[str, Any]) -> None:
        """fields: further fields of the streams' requests."""
        self._arguments = arguments
        self._fields = fields
        self._config = ServeConfig.model_validate(
            {
                "port": 0,
                "api_workers": arguments.api_workers,
                "max_queued_tokens": 10**12,
                "access_log": False,
                "log_level": "error",
                "tool_call_parser": "hermes",
            }
        )
        self._listeners = listen("127.0.0.1", 0, arguments.api_workers)
        self._shared_state = SharedState(arguments.api_workers + 1)
        self._heartbeats = Heartbeats(arguments.api_workers + 1)
        self._metrics = Metrics(self._shared_state, 0)
        self._tokenized = 0
        """Long prompts that were answered."""

    async def run(self) -> dict[str, Any]:
        socket = PrivateSocket()
        children: list[Process] = []
        apis: list[ApiProcess] = []
        watcher: EngineClient | None = None
        try:
            children.append(
                await _start("weft.tools.bench.server.engine", socket.fd, self._arguments.rate, 300, fd=socket.fd)
            )
            watcher = EngineClient(socket.address, 0)
            await watcher.wait_ready()
            for i in range(self._arguments.api_workers):
                apis.append(await self._start_api(i, socket))
            with tempfile.NamedTemporaryFile() as file:
                path, body = self._request(1, 1 << 19, stream=True, **self._fields)
                file.write(body)
                file.flush()
                host, port = self._listeners[0].getsockname()
                streams = self._arguments.streams
                clients = await _start("weft.tools.bench.server.client", host, port, streams, file.name, path)
                children.append(clients)
                assert clients.stdout is not None
                if not await clients.stdout.readline():
                    raise WeftError("the streams could not be opened")
                return await self._measure(watcher, apis)
        finally:
            if watcher is not None:
                watcher.close()
            for api in apis:
                api.send(Stop())
            for child in children:
                with suppress(ProcessLookupError):
                    child.kill()
            for api in apis:
                api.kill()
            await asyncio.gather(*(api.wait() for api in apis), *(child.wait() for child in children))
            socket.close()

    async def _start_api(self, i: int, socket: PrivateSocket) -> ApiProcess:
        place = Place(i + 1, self._shared_state, self._heartbeats, i + 1, [socket.path_fd])
        api = await ApiProcess.start(self._config, [], [], place, [self._listeners[i]])
        api.send(EngineUp(socket.address, i + 1))
        async for message in api.messages():
            if isinstance(message, Ready):
                return api
            if isinstance(message, Failed):
                raise WeftError(message.message)
        raise WeftError(f"an API process ended ({await api.wait()})")

    def _request(self, prompt_tokens: int, max_tokens: int, **fields: Any) -> tuple[str, bytes]:
        text = _WORD * prompt_tokens
        body: dict[str, Any] = {"max_tokens": max_tokens, **fields}
        if self._arguments.endpoint != "messages":  # it has no such field
            body["ignore_eos"] = True
        if self._arguments.endpoint in ("chat", "messages"):
            path = "/v1/messages" if self._arguments.endpoint == "messages" else "/v1/chat/completions"
            return path, json.dumps(body | {"messages": [{"role": "user", "content": text}]}).encode()
        if self._arguments.endpoint == "responses":
            body["max_output_tokens"] = body.pop("max_tokens")
            return "/v1/responses", json.dumps(body | {"input": text}).encode()
        return "/v1/completions", json.dumps(body | {"prompt": text}).encode()

    async def _measure(self, watcher: EngineClient, apis: list[ApiProcess]) -> dict[str, Any]:
        await asyncio.sleep(WARM_UP_SECONDS)
        lag = self._metrics.event_loop_lag
        cpu, begun, lags = _cpu_seconds(apis), time.monotonic(), lag.counts()
        tokens = watcher.stats.scheduler.generation_tokens
        tokenizing = asyncio.create_task(self._tokenize()) if self._arguments.tokenize else None
        await asyncio.sleep(self._arguments.seconds)
        seconds, tokens = time.monotonic() - begun, watcher.stats.scheduler.generation_tokens - tokens
        cpu = _cpu_seconds(apis) - cpu
        if tokenizing is not None:
            tokenizing.cancel()
            with suppress(asyncio.CancelledError):
                await tokenizing
        grown = [after - before for after, before in zip(lag.counts(), lags, strict=True)]
        scraping = await self._measure_scrapes(apis, cpu / seconds) if self._arguments.scrapes else {}
        return {
            "endpoint": self._arguments.endpoint,
            "fields": self._fields,
            "streams": self._arguments.streams,
            "tokens": tokens,
            "seconds": seconds,
            "api_us_per_token": cpu / max(1, tokens) * 1e6,
            "api_cpu": cpu / seconds,
            "lag_p50_ms": _quantile(lag.bounds, grown, 0.5),
            "lag_p99_ms": _quantile(lag.bounds, grown, 0.99),
            "tokenized": self._tokenized,
            **scraping,
            "machine": f"{os.cpu_count()} cores, {platform.machine()}, Python {platform.python_version()}",
        }

    async def _measure_scrapes(self, apis: list[ApiProcess], without: float) -> dict[str, Any]:
        """Measure again with scrapes. without: share of a core that the API processes use without them."""
        reader, writer = await asyncio.open_connection(*self._listeners[0].getsockname())
        count = max(1, round(self._arguments.scrapes * self._arguments.seconds))
        cpu, begun = _cpu_seconds(apis), time.monotonic()
        for i in range(1, count + 1):
            writer.write(b"GET /metrics HTTP/1.1\r\nHost: localhost\r\n\r\n")
            head = await reader.readuntil(b"\r\n\r\n")
            await reader.readexactly(int(head.partition(b"content-length: ")[2].split(b"\r")[0]))
            await asyncio.sleep(begun + i / self._arguments.scrapes - time.monotonic())
        seconds = time.monotonic() - begun
        writer.close()
        cpu = _cpu_seconds(apis) - cpu - without * seconds
        return {"scrapes": count, "us_per_scrape": cpu / count * 1e6, "scrape_cpu": cpu / seconds}

    async def _tokenize(self) -> None:
        """Send long prompts one after another, each for one token."""
        request = http_request(*self._request(self._arguments.tokenize, 1, stream=False))
        host, port = self._listeners[0].getsockname()
        while True:
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(request)
            status = await reader.readline()
            if b" 200 " not in status:
                raise WeftError(f"a prompt of {self._arguments.tokenize} tokens was answered {status.decode().strip()}")
            self._tokenized += 1
            writer.close()


async def _start(module: str, *arguments: object, fd: int | None = None) -> Process:
    """fd: a descriptor that the process inherits."""
    fds = () if fd is None else (fd,)
    return await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", module, *map(str, arguments), stdin=PIPE, stdout=PIPE, pass_fds=fds
    )


def _cpu_seconds(apis: list[ApiProcess]) -> float:
    """CPU seconds of all threads of the processes, user and system, by the scheduler's clock."""
    nanoseconds = 0
    for api in apis:
        for thread in Path(f"/proc/{api.pid}/task").iterdir():
            with suppress(FileNotFoundError):
                nanoseconds += int((thread / "schedstat").read_text().split()[0])
    return nanoseconds / 1e9


def _quantile(bounds: tuple[float, ...], counts: list[float], share: float) -> str:
    """Upper bound of the bucket that holds the quantile."""
    below = 0.0
    for bound, count in zip(bounds, counts, strict=False):
        below += count
        if below >= share * sum(counts):
            return f"{bound * 1e3:g} ms"
    return f"> {bounds[-1] * 1e3:g} ms"
