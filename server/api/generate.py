"""`Generation`: one request from admission to usage: submit its sequences, merge their output, account for them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.types import Receive, Scope

from weft.engine.errors import EngineDead
from weft.engine.wire.messages import Retention
from weft.engine.wire.page_keys import adapter_salt
from weft.engine.wire.sampling import SamplingParams
from weft.engine.wire.streams import Delta
from weft.server.api.choice import Choice, EndRules, Piece
from weft.server.api.media.prompt import PromptImages
from weft.server.api.model_text import too_long
from weft.server.api.protocol import GenerationBody
from weft.server.api.service import Service
from weft.server.errors import bad_request, clip
from weft.server.keys import precedence
from weft.server.replicas.replicas import PromptPages, Ticket
from weft.server.text.stops import StopStrings
from weft.server.tools.cache_control import HOUR
from weft.server.tools.structured import Grammar

RETRIES = 1
"""Times a sequence is restarted when its engine dies, so that a request that kills engines cannot kill them all."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A tokenized prompt, with its text if the client sent text."""

    token_ids: Sequence[int]
    text: str | None = None
    retention: tuple[Retention, ...] = ()  # prefixes whose pages are retained, and for how long
    segment: int = 0  # tokens before the second text of a pair, see `AddRequest`
    images: PromptImages | None = None
    prediction: Sequence[int] | None = None  # a text that the output may repeat in part; None if not given


class Generation:
    """All sequences of one request: `submit` starts them, `updates` yields pieces, `close` ends them."""

    def __init__(
        self, service: Service, body: GenerationBody, prompts: Sequence[Prompt], params: Sequence[SamplingParams],
        scope: Scope, *, show: frozenset[int] = frozenset(), grammar: Grammar | None = None,
        stop: bool = True, markup: tuple[str, str | None] | None = None,
        names: tuple[bytes, ...] = (),
    ) -> None:  # fmt: skip
        """`params`: one per prompt. `scope`: the request's, with the entries that `middleware` adds.

        `show`: special tokens to keep in the text. `stop`: the body's stop strings and patterns end the text. `markup`:
        marks between which they are ignored. `names`: the conversation's names."""
        if body.request_id is not None and not scope["weft.named"]:
            scope["weft.request_id"] = body.request_id
        self.service, self.body, self.prompts = service, body, prompts
        self.id: str = scope["weft.request_id"]
        self.arrival: float = scope["weft.arrival"]  # `time.perf_counter()` when the request arrived
        self.choices: list[Choice] = []
        self._params = params
        self._stops = body.stop if stop else []
        self._patterns = body.stop_regex if stop else None
        self._markup = markup
        self._names = names
        self._salt: str = scope["weft.salt"]
        self._tenant: int = scope["weft.key"]
        adapter = service.adapter(body.lora_path or body.model)
        if adapter is None and body.lora_path is not None:
            raise bad_request(f"The adapter '{clip(body.lora_path)}' is not served here.", "lora_path")
        self._adapter = "" if adapter is None else adapter.digest
        # Without keys, adapters share the engine fairly.
        self._account = self._tenant if service.keys or adapter is None else 1 + int(adapter.digest[:12], 16)
        self._constraint = grammar.field if grammar is not None else None
        self._loaded = service.loaded
        skip_ids = self._loaded.tokenizer.skip_ids
        self._show = show if body.skip_special_tokens else skip_ids
        self._ends = EndRules(
            body.min_tokens, body.stop_token_ids, self._loaded.ready.eos_token_ids, skip_ids - self._show,
            body.include_stop_str_in_output,
        )  # fmt: skip
        self._key = self._tenant if service.keys else None
        self._admitted = False
        best = service.best_priorities
        self._best_priority = best[self._tenant] if best else service.config.best_priority
        self._charge: Callable[[int], None] = scope["weft.charge"]
        self._charged = 0  # tokens charged so far
        self._prefilling: dict[int, int] = {}  # prompt tokens by choice, for choices without output
        self._tickets: list[Ticket] = []  # by choice
        self._lookups: list[PromptPages] = []  # by prompt
        self._restarts: dict[int, tuple[Ticket, int]] = {}
        """By prompt: the ticket of its restart, and the handle of the sequence that computes the prompt."""
        self.replayable = False
        """Nothing is sent before the end of `updates`, so choices may be restarted even after they produced output."""
        self._merging: asyncio.Queue[tuple[Choice, Delta | Exception]] | None = None
        """Output of several choices, to be read by `updates`."""
        self._reading = False

    def submit(self) -> None:
        """Submit every sequence to an engine. Raises `ApiError` 503 if the queue is full."""
        loaded, body = self._loaded, self.body
        num_tokens = body.n * sum(len(prompt.token_ids) for prompt in self.prompts)
        salt = adapter_salt(self._adapter, self._salt + body.cache_salt)
        self._lookups = [
            loaded.replicas.prompt_pages(prompt.token_ids, salt, prompt.images.spans if prompt.images else ())
            for prompt in self.prompts
        ]
        with loaded.admission.admit(body.n * len(self.prompts), num_tokens, self._key):
            for i, pages in enumerate(self._lookups):
                ticket = loaded.replicas.route(pages, self._params[i].max_tokens, body.prompt_cache_key)
                leader = -1
                for k in range(body.n):
                    choice = self._begin(len(self.choices), i, ticket if k == 0 else ticket.sibling(), leader)
                    self.choices.append(choice)
                    leader = choice.stream.handle if k == 0 else leader
        self._admitted = True
        self._charge_usage()

    def _begin(self, index: int, i: int, ticket: Ticket, leader: int) -> Choice:
        """Start the sequence of a choice of prompt `i`. It shares the pages of the `leader` sequence."""
        loaded, body, params, prompt = self._loaded, self.body, self._params[i], self.prompts[i]
        k = index % body.n
        if k and params.seed is not None:
            params = msgspec.structs.replace(params, seed=(params.seed + k + 2**63) % 2**64 - 2**63)  # wraps to 64 bits
        stream = ticket.replica.client.submit(
            self._lookups[i].tokens,
            params,
            priority=body.priority,
            cache_salt=self._salt + body.cache_salt,
            leader=leader,
            tenant=self._account,
            precedence=precedence(body.priority, self._best_priority),
            metered=body.include_energy,
            retention=prompt.retention if leader < 0 else (),
            names=self._names if leader < 0 else (),
            adapter=self._adapter,
            segment=prompt.segment,
            images=() if prompt.images is None else prompt.images.spans,
            prediction=prompt.prediction or (),
            max_drafts=None if body.speculation is None else body.speculation.max_tokens,
        )
        self._tickets[index:] = [ticket, *self._tickets[index + 1 :]]
        self._prefilling[index] = len(prompt.token_ids)
        loaded.admission.prefill_tokens += len(prompt.token_ids)
        return Choice(
            index,
            i,
            stream,
            loaded.tokenizer.detokenizer(prompt.token_ids, show=self._show),
            StopStrings(self._stops, self._patterns, include=body.include_stop_str_in_output, markup=self._markup)
            if self._stops or self._patterns is not None
            else None,
            self._ends,
            self._constraint,
        )

    def _restart(self, choice: Choice, error: EngineDead) -> Choice:
        """Replace a choice whose engine died by a new one at another engine. Raises `error` if no engine is left, the
        retries are used up, or the client already has output of the choice."""
        if choice.attempts > RETRIES or (choice.num_tokens and not self.replayable):
            raise error
        i, replicas = choice.prompt, self._loaded.replicas
        self._prefilled(choice)
        self._tickets[choice.index].end()
        choice.stream.abort()
        ticket, leader = self._restarts.get(i, (None, -1))
        if ticket is not None and ticket.replica.client.alive:
            ticket = ticket.sibling()
        else:
            with self.service.shared_state.lock():
                limit, key = self._params[i].max_tokens, self.body.prompt_cache_key
                ticket, leader = replicas.route(self._lookups[i], limit, key), -1
        fresh = self._begin(choice.index, i, ticket, leader)
        if leader < 0:
            self._restarts[i] = ticket, fresh.stream.handle
        fresh.attempts, fresh.counted = choice.attempts + 1, choice.counted
        self.choices[choice.index] = fresh
        self.service.metrics.retried.inc()
        return fresh

    async def updates(self, silence: float | None = None) -> AsyncGenerator[tuple[Choice, Piece] | None, None]:
        """Yield pieces of all choices until all have finished, and None after each `silence` seconds without one.

        A choice whose engine dies is restarted as a new choice with the same index, starting from its first piece.
        Raises `EngineDead` if that is impossible, and `ApiError` if the engine aborts a sequence."""
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
                    choice = self._restart(choice, error)
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
                    again = self._restart(choice, delta_or_error)
                    pumps.append(asyncio.create_task(_pump(again, queue)))
                    continue
                if isinstance(delta_or_error, Exception):
                    raise delta_or_error
                if choice.index not in going:
                    continue  # deltas after a stop string
                piece = self._take(choice, delta_or_error)
                if choice.finished:
                    going.discard(choice.index)
                yield choice, piece
        finally:
            for pump in pumps:
                pump.cancel()

    def idle(self) -> bool:
        """Return whether nothing is queued for the reader of `updates`, so that output may bypass it."""
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
                self._count_wait(delta.started.queue_seconds)
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
        """Abort unfinished choices; `cause` is for the metrics. Idempotent."""
        for choice in self.choices:
            self._prefilled(choice)
            self._tickets[choice.index].end()
            if not choice.finished:
                choice.finished = True
                choice.stream.abort()
                self.service.metrics.sequence_aborted(cause)
                if not choice.first_token_at:
                    self._count_wait(time.perf_counter() - self.arrival)
        for prompt in self.prompts:
            if prompt.images is not None:
                prompt.images.shelved.close()
        if self._admitted:
            self._admitted = False
            self._loaded.admission.left(self._key)
        self._charge_usage()

    def _count_wait(self, seconds: float) -> None:
        if self.service.keys:
            self.service.metrics.key_queue_time.labels(str(self._tenant)).observe(seconds)

    def _charge_usage(self) -> None:
        """Charge the client's key for tokens used since the last call."""
        used = self.usage()["total_tokens"] if self.choices else 0
        self._charge(used - self._charged)
        self._charged = used

    def usage(self) -> dict[str, Any]:
        """Token counts so far. Each prompt counts once, for any `n`."""
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
        details = {"reasoning_tokens": sum(thought)} if thought else {}
        if any(prompt.prediction is not None for prompt in self.prompts):
            accepted, rejected = zip(*(choice.stream.predicted for choice in self.choices), strict=True)
            details |= {"accepted_prediction_tokens": sum(accepted), "rejected_prediction_tokens": sum(rejected)}
        if details:
            usage["completion_tokens_details"] = details
        if self.body.include_energy:
            joules = sum(choice.stream.joules for choice in self.choices)
            usage["energy_joules"] = round(joules, 6) if self._loaded.ready.energy_source else None
        return usage

    def newly_retained(self) -> tuple[int, int]:
        """Tokens of the first prompt that this request added to the retained pages: for less than an hour, for longer.
        Tokens that were already cached do not count."""
        choice, retention = self.choices[0], self.prompts[0].retention
        retained, cached = choice.retained_tokens, choice.cached_tokens
        hour = min(retained, max((p.tokens for p in retention if p.seconds >= HOUR), default=0))
        return max(0, retained - max(cached, hour)), max(0, hour - cached)


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


async def wait_for_disconnect(receive: Receive) -> None:
    """Return once the client has disconnected or the answer has ended."""
    while (await receive())["type"] != "http.disconnect":
        pass


def output_limit(service: Service, asked: int | None, default: int | None, prompt_len: int, param: str) -> int:
    """The maximum number of output tokens. Raises `ApiError` if prompt and output do not fit the context. `default`
    applies if the request sets no limit; None uses the rest of the context."""
    limit = service.loaded.ready.max_model_len
    left = limit - prompt_len
    if asked is not None:
        if asked > left:
            what = f"you requested {prompt_len + asked} tokens ({prompt_len} in the {param}, {asked} in the completion)"
            raise too_long(limit, what, param)
        return asked
    if left < 1:
        raise too_long(limit, f"{prompt_len} tokens in the {param} leave none for the completion", param)
    return left if default is None else min(default, left)
