"""An engine that plays a script, with the real `Streams` and the real messages."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import numpy as np
import vocabularies

from weft.engine.wire.heartbeat import Heartbeats, Watch
from weft.engine.wire.messages import (
    AbortRequests,
    AddRequest,
    EngineReady,
    EngineStats,
    Finish,
    IterationStats,
    Outputs,
    Prefetch,
    ResetPrefixCache,
    SchedulerStats,
    Started,
    ToEngine,
    TokenLogprobs,
)
from weft.engine.wire.streams import Streams
from weft.server.api.http_server import Server as HttpServer
from weft.server.api.http_server import make_server
from weft.server.api.service import Service
from weft.server.config import ServeConfig
from weft.server.text.tokenizer import Tokenizer

MAX_MODEL_LEN = 512
HIDDEN = 8


@dataclass
class Script:
    """The engine's answer. By default a text, one token per iteration, then the end token."""

    text: str = "hello world"
    ids: Sequence[int] | None = None
    burst: int = 1
    """tokens of one delivery"""
    delay: float = 0.0
    """seconds before each burst"""
    gate: asyncio.Event | None = None
    """nothing is sent until it is set"""
    stop_after: int | None = None
    """tokens after which nothing more is sent, not even an end"""
    finish: Finish | None = None
    """finish reason that replaces the one of tokens and limits"""
    error: str | None = None
    cached_tokens: int = 0
    joules: float = 0.0
    """charged to the request with each of its messages"""
    predicted: tuple[int, int] | None = None
    """accepted and rejected tokens of a prediction, reported with the first message"""
    vary: bool = False
    """each further sequence of a prompt gets its own text"""


@dataclass
class Stub(Streams):
    """`added` and `aborted` record the messages of the server."""

    tokenizer: Tokenizer
    script: Script = field(default_factory=Script)
    added: list[AddRequest] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    resets: int = 0
    fetched: list[tuple[bytes, ...]] = field(default_factory=list)
    """names of conversations whose pages were prefetched"""
    max_num_seqs: int = 256
    running: int = 0
    energy_source: str = ""
    pixels: str = ""
    """Directory of the shelf; the model then takes images."""

    def __post_init__(self) -> None:
        Streams.__init__(self, 0)
        self.eos = self.tokenizer.encode("<|eos|>")[-1]
        self.tasks: set[asyncio.Task[None]] = set()
        self.iterations = 0

    def describe(self) -> EngineReady:
        return EngineReady(
            model_type="stub",
            num_parameters=0,
            dtype="float32",
            device="cpu",
            vocab_size=self.tokenizer.vocab_size,
            max_model_len=MAX_MODEL_LEN,
            page_size=64,
            num_pages=100,
            max_num_seqs=self.max_num_seqs,
            max_num_batched_tokens=512,
            eos_token_ids=(self.eos,),
            load_seconds=0.0,
            hidden_size=HIDDEN,
            energy_source=self.energy_source,
            prefetches=True,
            modalities=("text", "image") if self.pixels else ("text",),
            pixels=self.pixels,
        )

    def prompt(self, i: int = -1) -> list[int]:
        return np.frombuffer(self.added[i].prompt_token_ids, np.int32).tolist()

    def _send(self, message: ToEngine) -> None:
        match message:
            case AddRequest():
                self.added.append(message)
                task = asyncio.get_running_loop().create_task(self._play(message, self.script))
                self.tasks.add(task)
                task.add_done_callback(self.tasks.discard)
            case AbortRequests():
                self.aborted += message.handles
            case Prefetch():
                self.fetched.append(message.names)
            case ResetPrefixCache():
                self.resets += 1

    def die(self) -> None:
        """The engine process ends, as the daemon reports it."""
        self.mark_dead("the engine ended (signal SIGKILL)")

    def _deliver_one(self, handle: int, tokens: Sequence[int], finish: Finish, **more: Any) -> None:
        self.iterations += 1
        reasons = [Finish.RUNNING] * (len(tokens) - 1) + [finish]
        self._deliver(
            Outputs(
                handles=np.full(len(tokens), handle, np.int64).tobytes(),
                tokens=np.array(tokens, np.int32).tobytes(),
                finish=np.array(reasons, np.uint8).tobytes(),
                stats=EngineStats(
                    scheduler=SchedulerStats(running=1, pages_held=25, pages_total=100),
                    iteration=IterationStats(tokens=len(tokens), requests=1, seconds=0.01),
                    iterations=self.iterations,
                ),
                **more,
            )
        )

    async def _play(self, request: AddRequest, script: Script) -> None:
        handle, params = request.handle, request.params
        if script.gate is not None:
            await script.gate.wait()
        prompt = np.frombuffer(request.prompt_token_ids, np.int32).tolist()
        k = params.prompt_logprobs
        scored = {handle: [logprobs(token, k) for token in prompt[1:]]} if k is not None else {}
        retained = max((retention.tokens for retention in request.retention), default=0)
        started = [Started(handle, script.cached_tokens, 0.001, 0.002, retained)]
        if params.max_tokens == 0:
            pooled = {handle: state_of(prompt).tobytes()} if params.pooling is not None else {}
            reported: dict[str, Any] = {"started": started, "prompt_logprobs": scored, "pooled": pooled}
            if script.error:
                reported["errors"] = {handle: script.error}
            self._deliver_one(handle, [-1], script.finish or Finish.LENGTH, **reported)
            return
        text = script.text + (f" {handle}" if script.vary else "")
        ids = list(script.ids) if script.ids is not None else self.tokenizer.encode(text, add_special_tokens=False)
        if not params.ignore_eos:
            ids.append(self.eos)
        ends = {*params.stop_token_ids} | (set() if params.ignore_eos else {self.eos})
        limit = params.max_tokens if params.max_tokens is not None else MAX_MODEL_LEN - len(prompt)
        stop_at = next((i + 1 for i, token in enumerate(ids) if token in ends), len(ids) + 1)
        ids = ids[: min(limit, stop_at)]
        finish = script.finish or (Finish.STOP if len(ids) == stop_at else Finish.LENGTH)
        for at in range(0, len(ids), script.burst):
            await asyncio.sleep(script.delay)
            if script.stop_after is not None and at >= script.stop_after:
                return
            burst = ids[at : at + script.burst]
            last = at + script.burst >= len(ids)
            more: dict[str, Any] = {"started": started, "prompt_logprobs": scored} if at == 0 else {}
            if request.metered and self.energy_source:
                more["joules"] = {handle: script.joules * (at // script.burst + 1)}
            if at == 0 and script.predicted is not None:
                more["predicted"] = {handle: script.predicted}
            if last and script.error:
                more["errors"] = {handle: script.error}
            if params.logprobs is not None:
                scores = [logprobs(token, params.logprobs, params.logprob_token_ids) for token in burst]
                more["logprobs"] = {handle: scores}
            self._deliver_one(handle, burst, finish if last else Finish.RUNNING, **more)


def state_of(prompt: Sequence[int]) -> np.ndarray:
    """`[HIDDEN]` float32: the stub's hidden states of a prompt."""
    return np.random.default_rng(list(prompt)).normal(size=HIDDEN).astype(np.float32)


def logprobs(token: int, k: int, requested: Sequence[int] = ()) -> TokenLogprobs:
    """The token is the second best; the best is the id before it."""
    best = [token - 1 if token else 1, token, *(token + i for i in range(1, k))][:k]
    values = [-0.5, -1.0, *(-2.0 - i for i in range(1, k))][:k]
    return TokenLogprobs(2, (token, *best, *requested), (-1.0, *values, *(-3.0 for _ in requested)))


@dataclass
class Server:
    """A daemon's HTTP side on a real socket, with a stub for its engine."""

    url: str
    service: Service
    engine: Stub
    http: httpx.AsyncClient
    front: HttpServer
    engines: list[Stub]
    """`engine` and the other engines"""

    async def post(self, path: str, body: dict[str, Any], **options: Any) -> httpx.Response:
        return await self.http.post(path, json=body, **options)

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.post("/v1/completions", {"model": "stub", "prompt": "hi", **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def chat(self, **body: Any) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hi"}]
        response = await self.post("/v1/chat/completions", {"model": "stub", "messages": messages, **body})
        assert response.status_code == 200, response.text
        return response.json()

    async def settle(self, condition: Callable[[], bool], timeout: float = 240) -> None:
        """Wait until the condition is true."""
        async with asyncio.timeout(timeout):
            while not condition():
                await asyncio.sleep(0.005)


@contextlib.asynccontextmanager
async def serving(
    *,
    attach: bool = True,
    max_num_seqs: int = 256,
    adds_bos: bool = False,
    energy_source: str = "",
    engines: int = 1,
    tokenizer: Tokenizer | None = None,
    pixels: str = "",
    **options: Any,
) -> AsyncIterator[Server]:
    """A running server. `pixels`: see `Stub`. `options` are those of `ServeConfig`; each of several `models` has one
    engine."""
    if models := options.get("models"):
        engines = len(models)
        options = {"port": 0, **options}
    else:
        options = {"served_model_name": ["stub"], "port": 0, "replicas": engines, **options}
    watch = Watch(Heartbeats(engines + 1))  # a process that never had a heartbeat is not late
    service = Service(ServeConfig(**options), watch=watch)
    tokenizer = tokenizer or Tokenizer(vocabularies.wrapped(vocabularies.byte_level(adds_bos=adds_bos)))
    sizes = {"max_num_seqs": max_num_seqs, "energy_source": energy_source}
    stubs = [Stub(tokenizer, pixels=pixels, **sizes) for _ in range(engines)]
    tokenizer.hide([stubs[0].eos])
    for i, stub in enumerate(stubs if attach else []):
        (service.models[i] if models else service).attach(stub, stub.describe(), tokenizer, i)
    server = make_server(service)
    server.config.timeout_graceful_shutdown = 1
    listener = socket.create_server(("127.0.0.1", 0), backlog=2048)
    task = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:
        await asyncio.sleep(0.005)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=url, timeout=240) as http:
        yield Server(url, service, stubs[0], http, server, stubs)
    server.should_exit = True
    await task
    service.close()
    if service._grammars is not None and service._grammars._reading is not None:
        await asyncio.wait((service._grammars._reading,))
