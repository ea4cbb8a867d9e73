"""The life of one request, the same for completions and chat: admit, submit, merge its choices, account for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from weft.engine.errors import EngineDead
from weft.engine.wire.messages import Promise
from weft.engine.wire.sampling import SamplingParams
from weft.engine.wire.streams import Delta
from weft.server.api.choice import Choice, Ends, Piece
from weft.server.api.model_text import too_long
from weft.server.api.protocol import GenerationBody
from weft.server.api.service import Service
from weft.server.replicas.replicas import Look, Ticket
from weft.server.text.stops import StopStrings
from weft.server.tools.cache_control import HOUR
from weft.server.tools.structured import Grammar, Writer, write_grammar

RETRIES = 1
"""times a sequence is begun again when its engine ends: a request that ends engines shall not end all of them"""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt, and its text when the client sent text."""

    token_ids: Sequence[int]
    text: str | None = None
    promises: tuple[Promise, ...] = ()
    """how long its beginning is to be kept"""


class Generation:
    """All sequences of one request: `submit` starts them, `updates` brings pieces, `close` ends them in any case."""

    def __init__(
        self,
        service: Service,
        body: GenerationBody,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        scope: Scope,
        *,
        show: frozenset[int] = frozenset(),
        grammar: Grammar | None = None,
        stops: Sequence[str] | None = None,
        markup: tuple[str, str | None] | None = None,
        names: tuple[bytes, ...] = (),
    ) -> None:
        """`params`: one per prompt. `scope`: of the request, with what `middleware` put into it.

        `show`: special tokens that are text in this answer. `stops`: instead of the body's stop strings.
        `markup`: marks between which there are none. `names`: of the conversation.
        """
        if body.request_id is not None and not scope["weft.named"]:
            scope["weft.request_id"] = body.request_id
        self.service = service
        self.body = body
        self.prompts = prompts
        self.id: str = scope["weft.request_id"]
        self.arrival: float = scope["weft.arrival"]
        """`time.perf_counter()` when the request came"""
        self.choices: list[Choice] = []
        self._params = params
        self._stops = body.stop if stops is None else stops
        self._markup = markup
        self._names = names
        self._salt: str = scope["weft.salt"]
        self._constraint = grammar.field if grammar is not None else None
        self._loaded = service.loaded
        skip_ids = self._loaded.tokenizer.skip_ids
        self._show = show if body.skip_special_tokens else skip_ids
        self._ends = Ends(
            body.min_tokens, body.stop_token_ids, self._loaded.ready.eos_token_ids, skip_ids - self._show,
            body.include_stop_str_in_output,
        )  # fmt: skip
        self._tenant: int = scope["weft.key"]
        self._charge: Callable[[int], None] = scope["weft.charge"]
        self._charged = 0
        """tokens that were paid for"""
        self._prefilling: dict[int, int] = {}
        """prompt tokens by choice, for those without output yet"""
        self._tickets: list[Ticket] = []
        """by choice"""
        self._looks: list[Look] = []
        """by prompt"""
        self._again: dict[int, tuple[Ticket, int]] = {}
        """by prompt: where it was begun again, and the handle of the sequence that computes it"""
        self.replayable = False
        """nothing of what `updates` gives is sent before its end: choices may be begun again whatever they have had"""
        self._merging: asyncio.Queue[tuple[Choice, Delta | Exception]] | None = None
        """what was read of several choices, for `updates`"""
        self._reading = False

    def submit(self) -> None:
        """Hand every sequence to an engine. Raises `ApiError` 503 when too much is waiting."""
        loaded, body = self._loaded, self.body
        num_tokens = body.n * sum(len(prompt.token_ids) for prompt in self.prompts)
        salt = self._salt + body.cache_salt
        self._looks = [loaded.replicas.look(prompt.token_ids, salt) for prompt in self.prompts]
        with loaded.admission.admit(body.n * len(self.prompts), num_tokens):
            for i, look in enumerate(self._looks):
                ticket = loaded.replicas.route(look, self._params[i].max_tokens, body.prompt_cache_key)
                leader = -1
                for k in range(body.n):
                    choice = self._begin(len(self.choices), i, ticket if k == 0 else ticket.beside(), leader)
                    self.choices.append(choice)
                    leader = choice.stream.handle if k == 0 else leader
        self._pay()

    def _begin(self, index: int, i: int, ticket: Ticket, leader: int) -> Choice:
        """Start the sequence of a choice, of prompt i; it shares the pages of the `leader`."""
        loaded, body, params, prompt = self._loaded, self.body, self._params[i], self.prompts[i]
        k = index % body.n
        if k and params.seed is not None:
            params = msgspec.structs.replace(params, seed=_next_seed(params.seed, k))
        stream = ticket.replica.client.submit(
            self._looks[i].tokens,
            params,
            priority=body.priority,
            cache_salt=self._salt + body.cache_salt,
            leader=leader,
            tenant=self._tenant,
            metered=body.include_energy,
            promises=prompt.promises if leader < 0 else (),
            names=self._names if leader < 0 else (),
        )
        self._tickets[index:] = [ticket, *self._tickets[index + 1 :]]
        self._prefilling[index] = len(prompt.token_ids)
        loaded.admission.prefill_tokens += len(prompt.token_ids)
        return Choice(
            index,
            i,
            stream,
            loaded.tokenizer.detokenizer(prompt.token_ids, show=self._show),
            StopStrings(self._stops, include=body.include_stop_str_in_output, markup=self._markup)
            if self._stops
            else None,
            self._ends,
            self._constraint,
        )

    def _begin_again(self, choice: Choice, error: EngineDead) -> Choice:
        """Its engine has ended: another choice in its place, at another engine. Raises the error where that cannot be,
        or where the client has had some of it."""
        if choice.lives > RETRIES or (choice.num_tokens and not self.replayable):
            raise error
        i, replicas = choice.prompt, self._loaded.replicas
        self._prefilled(choice)
        self._tickets[choice.index].end()
        choice.stream.abort()
        ticket, leader = self._again.get(i, (None, -1))
        if ticket is not None and ticket.replica.client.alive:
            ticket = ticket.beside()
        else:
            with self.service.board.lock():
                limit, key = self._params[i].max_tokens, self.body.prompt_cache_key
                ticket, leader = replicas.route(self._looks[i], limit, key), -1
        fresh = self._begin(choice.index, i, ticket, leader)
        if leader < 0:
            self._again[i] = ticket, fresh.stream.handle
        fresh.lives, fresh.counted = choice.lives + 1, choice.counted
        self.choices[choice.index] = fresh
        self.service.metrics.retried.inc()
        return fresh

    async def updates(self, silence: float | None = None) -> AsyncGenerator[tuple[Choice, Piece] | None, None]:
        """Pieces of all choices as they come, until all have finished; None after each `silence` seconds without one.

        A choice whose engine ends is begun again elsewhere: one with the same index, and none of its pieces, follows.
        Raises `EngineDead` where that cannot be, or `ApiError` when the engine gave a sequence up.
        """
        if len(self.choices) == 1:
            choice = self.choices[0]
            while not choice.finished:
                try:
                    async with asyncio.timeout(silence):
                        delta = await choice.stream.read()
                except TimeoutError:
                    yield None
                    continue
                except EngineDead as error:
                    choice = self._begin_again(choice, error)
                    continue
                yield choice, self._take(choice, delta)
            return
        queue = self._merging = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(choice, queue)) for choice in self.choices]
        try:
            going = set(range(len(self.choices)))
            while going:
                try:
                    self._reading = True
                    async with asyncio.timeout(silence):
                        choice, delta_or_error = await queue.get()
                except TimeoutError:
                    yield None
                    continue
                finally:
                    self._reading = False
                if isinstance(delta_or_error, EngineDead) and choice.index in going:
                    again = self._begin_again(choice, delta_or_error)
                    pumps.append(asyncio.create_task(_pump(again, queue)))
                    continue
                if isinstance(delta_or_error, Exception):
                    raise delta_or_error
                if choice.index not in going:
                    continue  # deltas behind a stop string
                piece = self._take(choice, delta_or_error)
                if choice.finished:
                    going.discard(choice.index)
                yield choice, piece
        finally:
            for pump in pumps:
                pump.cancel()

    def idle(self) -> bool:
        """Whoever reads `updates` waits, and nothing that was read of several streams is on its way there."""
        return self._merging is None or (self._reading and self._merging.empty())

    def _take(self, choice: Choice, delta: Delta) -> Piece:
        metrics, now = self.service.metrics, time.perf_counter()
        piece = choice.take(delta)
        if not choice.first_token_at:
            self._prefilled(choice)
            choice.first_token_at = now
            if delta.started is not None and not choice.counted:
                choice.counted = True
                metrics.sequence_started(delta.started, now - self.arrival, self.service.config.model_names[0])
        else:
            metrics.itl.observe(now - choice.last_token_at)
        choice.last_token_at = now
        if choice.finished:
            self._tickets[choice.index].end()
            metrics.sequence_finished(
                str(piece.finish_reason),
                ttft=choice.first_token_at - self.arrival,
                latency=now - self.arrival,
                num_tokens=choice.num_tokens,
            )
        return piece

    def _prefilled(self, choice: Choice) -> None:
        self._tickets[choice.index].started()
        self._loaded.admission.prefill_tokens -= self._prefilling.pop(choice.index, 0)

    def close(self, cause: str) -> None:
        """Abort what has not finished, for this reason. Idempotent."""
        for choice in self.choices:
            self._prefilled(choice)
            self._tickets[choice.index].end()
            if not choice.finished:
                choice.finished = True
                choice.stream.abort()
                self.service.metrics.sequence_aborted(cause)
        self._pay()

    def _pay(self) -> None:
        """Charge the client's key for what was used since."""
        used = self.usage()["total_tokens"] if self.choices else 0
        self._charge(used - self._charged)
        self._charged = used

    def usage(self) -> dict[str, Any]:
        """Token counts so far; every prompt counts once."""
        prompt_tokens = sum(len(prompt.token_ids) for prompt in self.prompts)
        completion_tokens = sum(choice.num_tokens for choice in self.choices)
        cached = sum(choice.cached_tokens for choice in self.choices[:: self.body.n])
        usage: dict[str, Any] = {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        thought = [choice.reasoning_tokens for choice in self.choices if choice.reasoning_tokens is not None]
        if thought:
            usage["completion_tokens_details"] = {"reasoning_tokens": sum(thought)}
        if self.body.include_energy:
            joules = sum(choice.stream.joules for choice in self.choices)
            usage["energy_joules"] = round(joules, 6) if self._loaded.ready.energy_source else None
        return usage

    def created(self) -> tuple[int, int]:
        """Prompt tokens that this request put into the cache, to be kept as it asked: for minutes, for an hour or more.

        Those that were found there are none of them. Of one prompt.
        """
        choice, promises = self.choices[0], self.prompts[0].promises
        kept, found = choice.promised_tokens, choice.cached_tokens
        hour = min(kept, max((p.tokens for p in promises if p.seconds >= HOUR), default=0))
        return max(0, kept - max(found, hour)), max(0, hour - found)


async def _pump(choice: Choice, queue: asyncio.Queue[tuple[Choice, Delta | Exception]]) -> None:
    with suppress(asyncio.CancelledError):
        while True:
            try:
                delta = await choice.stream.read()
            except Exception as error:
                queue.put_nowait((choice, error))
                return
            queue.put_nowait((choice, delta))
            if delta.finish:
                return


def _next_seed(seed: int, k: int) -> int:
    """A seed of its own for the k-th sequence of a prompt, within 64 bits."""
    return (seed + k + 2**63) % 2**64 - 2**63


async def constrain(writer: Writer | None, request: Request, service: Service) -> Grammar | None:
    """The grammar of a request, if it asks for one, tried before the engine sees it. Raises `ApiError`, and
    `ClientDisconnect` for a client that leaves meanwhile: its turn goes to somebody else."""
    if writer is None:
        return None
    work = asyncio.create_task(write_grammar(writer, service.loaded.grammars, request.scope["weft.client"]))
    gone = asyncio.create_task(disconnected(request.receive))
    try:
        await asyncio.wait((work, gone), return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        work.cancel()
        gone.cancel()
        await asyncio.wait((gone,))  # the answer listens next


async def disconnected(receive: Receive) -> None:
    """Returns once the client has gone, or the answer has ended."""
    while (await receive())["type"] != "http.disconnect":
        pass


def output_limit(service: Service, asked: int | None, default: int | None, prompt_len: int, param: str) -> int:
    """Output tokens at most. Raises `ApiError` when prompt and output do not fit the context.

    `default` None means: what the context leaves.
    """
    limit = service.loaded.ready.max_model_len
    room = limit - prompt_len
    if asked is not None:
        if asked > room:
            what = f"you requested {prompt_len + asked} tokens ({prompt_len} in the {param}, {asked} in the completion)"
            raise too_long(limit, what, param)
        return asked
    if room < 1:
        raise too_long(limit, f"{prompt_len} tokens in the {param} leave none for the completion", param)
    return room if default is None else min(default, room)
