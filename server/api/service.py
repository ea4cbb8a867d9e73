"""`Service`: what the endpoints share, and the phase of life the daemon is in."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from enum import Enum
from typing import Any, NamedTuple, Protocol, TypeVar

from weft.engine.wire.beat import ENGINE, LATE_SECONDS, Watch
from weft.engine.wire.messages import EngineReady
from weft.engine.wire.streams import Streams
from weft.server.api.admission import Admission
from weft.server.api.protocol import ChatMessage, GenerationBody
from weft.server.bodies import BodyBounds
from weft.server.config import ServeConfig
from weft.server.errors import ApiError, bad_request, clip, unavailable
from weft.server.keys import load_keys
from weft.server.observe.board import Board
from weft.server.observe.limits import RateLimits
from weft.server.observe.metrics import Metrics
from weft.server.replicas.replicas import Replicas
from weft.server.text.tokenizer import Tokenizer
from weft.server.text.truncation import Truncation
from weft.server.tools.grammar_compiler import GrammarCompiler

T = TypeVar("T")

UNKNOWN_CONTEXT = 2**15
"""tokens, as far as bodies are concerned that come before the model is loaded"""

RENDER_SECONDS = 5.0
"""that a chat template may take"""


class Phase(Enum):
    LOADING = "loading"
    SERVING = "serving"
    DRAINING = "draining"
    DEAD = "dead"


_REFUSALS = {
    Phase.LOADING: ("The model is still loading.", 2),
    Phase.DRAINING: ("The server is shutting down.", 10),
    Phase.DEAD: ("The engine has ended; this server is going down.", 10),
}


class OpenAnswer(Protocol):
    """An answer under way."""

    def interrupt(self, error: ApiError, cause: str) -> None:
        """End it with this error."""
        ...


class EncodedChat(NamedTuple):
    ids: list[int]
    text: str
    """for `Tokenizer.without_seams`"""


class LoadedModel(NamedTuple):
    """Everything that exists only once an engine is ready."""

    replicas: Replicas
    ready: EngineReady
    """of all engines together"""
    tokenizer: Tokenizer
    admission: Admission
    grammars: GrammarCompiler


class Service:
    """One API process's state. Lives on the event loop; only `offload` leaves it."""

    def __init__(
        self,
        config: ServeConfig,
        board: Board | None = None,
        row: int = 0,
        keys: Sequence[bytes] | None = None,
        watch: Watch | None = None,
    ) -> None:
        """`row`: of this process on the daemon's `board`. `keys`: digests, when they have been read already.

        `watch`: over the daemon's processes.
        """
        self.config = config
        self.keys = load_keys(config) if keys is None else list(keys)
        self.board = board or Board(1, len(self.keys), engines=config.num_engines)
        self.metrics = Metrics(self.board, row, watch)
        self.replicas = Replicas(self.board, row, stalled=self._stalls)
        self.limits = RateLimits(self.board, self.metrics.rejected, config.rate_limit, config.rate_limit_tokens)
        self.body_bounds = BodyBounds.of(config.max_body_mib, UNKNOWN_CONTEXT)
        self.phase = Phase.LOADING
        self.handed_over = False
        """another daemon takes the connections from now on"""
        self.created = int(time.time())
        self.open: set[OpenAnswer] = set()
        self.renew: Callable[[Sequence[int]], Awaitable[str]] | None = None
        """has the daemon start engines anew; returns why it does not, or nothing"""
        self._watch = watch
        self._coming = set(range(self.board.engines))
        """engines that are there, or on their way"""
        self._admission = Admission(
            self.replicas,
            self.board,
            row,
            self.metrics.rejected,
            max_requests=config.max_queued_requests,
            max_tokens=config.max_queued_tokens,
        )
        self._loaded: LoadedModel | None = None
        self._grammars: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(config.tokenizer_threads, thread_name_prefix="tokenizer")

    def attach(self, client: Streams, ready: EngineReady, tokenizer: Tokenizer, engine: int = 0) -> None:
        """An engine has loaded the model: serve it."""
        figures = self.metrics.engines[engine]
        self.replicas.attach(engine, client, ready, figures.hear)
        self._coming.add(engine)
        figures.loaded(self.config.model_names[0], ready)
        ready = self.replicas.ready
        self.body_bounds = BodyBounds.of(self.config.max_body_mib, ready.max_model_len)
        if self._grammars is None:
            vocabulary = (tokenizer.to_json, ready.vocab_size, ready.eos_token_ids)
            self._grammars = GrammarCompiler(*vocabulary, self.metrics.grammar_tried)
        self._loaded = LoadedModel(self.replicas, ready, tokenizer, self._admission, self._grammars)
        if self.phase is Phase.LOADING:
            self.phase = Phase.SERVING

    def engine_died(self, engine: int = 0, *, restarting: bool = False) -> None:
        """There is no such engine any more. `restarting`: another one is on its way."""
        self.replicas.detach(engine)
        if not restarting:
            self._coming.discard(engine)
        if not self._coming:
            self.phase = Phase.DEAD
        elif self.phase is Phase.SERVING and not any(self.replicas):
            self.phase = Phase.LOADING
        self.metrics.engines[engine].died()

    def interrupt_all(self, error: ApiError, cause: str) -> None:
        """End every open answer with this error."""
        for answer in list(self.open):
            answer.interrupt(error, cause)

    @property
    def loaded(self) -> LoadedModel:
        """The loaded model. Raises `ApiError` while there is none to work with."""
        if self._loaded is None or self.phase is not Phase.SERVING:
            self.metrics.rejected.labels(self.phase.value).inc()
            message, retry_after = _REFUSALS[self.phase]
            raise unavailable(message, self.phase.value, retry_after)
        return self._loaded

    @property
    def closing(self) -> bool:
        """Connections end behind their next answer: who asks again shall ask elsewhere."""
        return self.handed_over or self.phase in (Phase.DRAINING, Phase.DEAD)

    def _stalls(self, engine: int) -> bool:
        return self._watch is not None and self._watch.late(ENGINE + engine, LATE_SECONDS) is not None

    @property
    def stalled(self) -> ApiError | None:
        """No engine shows progress, as each tells all processes itself; else None."""
        if self._watch is None:
            return None
        ages = [self._watch.late(ENGINE + engine, LATE_SECONDS) for engine in self._coming]
        late = [age for age in ages if age is not None]
        if not late or len(late) < len(ages):
            return None
        who = "The engine has shown no" if self.board.engines == 1 else "No engine has shown"
        if self.board.engines == 1 and (silent := self._watch.silent_rank(ENGINE, LATE_SECONDS)) is not None:
            who = f"The engine's rank {silent[0]} has shown no"
        return unavailable(f"{who} progress for {min(late):.0f} seconds.", "engine_stalled", 10)

    def engine_stage(self, engine: int = 0) -> str:
        """The long work an engine is at, a start for example, in words; else empty."""
        return self._watch.beats.stage(ENGINE + engine) if self._watch is not None else ""

    def engine_states(self) -> list[dict[str, Any]]:
        """Of each engine, for people and probes: its number and state, and the long work that it is at."""
        states: list[dict[str, Any]] = []
        for engine in range(self.board.engines):
            state = self.replicas.state(engine)
            if state == "away":
                state = "loading" if engine in self._coming else "dead"
            stage = self.engine_stage(engine)
            states.append({"engine": engine, "state": state, **({"stage": stage} if stage else {})})
        return states

    @property
    def unready(self) -> ApiError | None:
        """Why a router should send its work elsewhere, or None."""
        if (reason := self.stalled) is not None:
            return reason
        if self.phase is not Phase.SERVING:
            message, retry_after = _REFUSALS[self.phase]
            return unavailable(message, self.phase.value, retry_after)
        return self.loaded.admission.refusal(1, 1)

    def model_name(self, asked: str | None) -> str:
        """The name an answer carries. Raises `ApiError` 404 for a model that is not served."""
        names = self.config.model_names
        if asked is None:
            return names[0]
        if asked not in names:
            served = ", ".join(names)
            raise ApiError(
                404,
                f"The model '{clip(asked)}' is not served here; served: {served}.",
                param="model",
                code="model_not_found",
            )
        return asked

    async def offload(self, function: Callable[[], T]) -> T:
        """Run CPU work in a worker thread."""
        return await asyncio.get_running_loop().run_in_executor(self._threads, function)

    async def encode(
        self, texts: Sequence[str], *, add_special_tokens: bool, param: str, truncation: Truncation | None = None
    ) -> list[list[int]]:
        """Token ids of texts, in a worker thread. Raises `ApiError` for what can never fit, before any work.

        `truncation`: shortens what is too long instead.
        """
        loaded = self.loaded
        if truncation is not None:
            texts = [truncation.text(text, self._longest_text) for text in texts]
        for text in texts:
            self._check_length(len(text), param)
        encode = loaded.tokenizer.encode
        ids = await self.offload(lambda: [encode(text, add_special_tokens=add_special_tokens) for text in texts])
        if truncation is None:
            return ids
        return [truncation.ids(i, loaded.tokenizer.bos_token_id if add_special_tokens else None) for i in ids]

    async def render(self, messages: Sequence[ChatMessage], arguments: Mapping[str, Any]) -> str:
        """The text of a conversation, for people. `arguments`: of the template. Raises `ApiError`."""
        tokenizer, control = self.loaded.tokenizer, self.config.allow_special_tokens
        self._check_length(sum(len(message.content or "") for message in messages), "messages")
        text = await self._in_time(lambda: tokenizer.render_chat(messages, arguments, control=control))
        return tokenizer.without_seams(text)

    async def encode_chat(
        self,
        messages: Sequence[ChatMessage],
        arguments: Mapping[str, Any],
        *,
        add_special_tokens: bool,
        truncation: Truncation | None = None,
    ) -> EncodedChat:
        """A conversation as tokens. The template writes the special tokens itself. Raises `ApiError`.

        `arguments`: of the template.
        """
        render = self.loaded.tokenizer.render_chat
        if truncation is None:
            self._check_length(sum(len(message.content or "") for message in messages), "messages")
        control = self.config.allow_special_tokens
        text = await self._in_time(lambda: render(messages, arguments, control=control))
        (ids,) = await self.encode(
            [text], add_special_tokens=add_special_tokens, param="messages", truncation=truncation
        )
        return EncodedChat(ids, text)

    async def _in_time(self, render: Callable[[], str]) -> str:
        """Run this in a worker thread. Raises `ApiError` 400 when it takes long, not counting the wait for a thread."""
        loop = asyncio.get_running_loop()

        def begin() -> None:
            with suppress(RuntimeError):  # the client may have gone
                limit.reschedule(loop.time() + RENDER_SECONDS)

        def work() -> str:
            loop.call_soon_threadsafe(begin)
            return render()

        try:
            async with asyncio.timeout(None) as limit:
                return await self.offload(work)
        except TimeoutError:
            what = f"The chat template takes longer than {RENDER_SECONDS:g} s with these messages."
            raise bad_request(what, "messages") from None

    @property
    def _longest_text(self) -> int:
        """Characters that as many tokens as the context has can stand for."""
        loaded = self.loaded
        return loaded.ready.max_model_len * max(loaded.tokenizer.longest_token, 8)

    def _check_length(self, characters: int, param: str) -> None:
        if characters > self._longest_text:
            what = f"the {param} has {characters} characters, more than that many tokens hold"
            raise too_long(self.loaded.ready.max_model_len, what, param)

    def check_sampled_ids(self, body: GenerationBody) -> None:
        """The token ids that a body speaks of beside its prompt. Raises `ApiError`."""
        self.check_ids(body.stop_token_ids, "stop_token_ids")
        self.check_ids(list(body.logit_bias), "logit_bias")
        self.check_ids(body.allowed_token_ids or [], "allowed_token_ids", at_most=self.loaded.ready.vocab_size)

    def check_ids(self, ids: Sequence[int], param: str, *, at_most: int | None = None) -> None:
        """Raises `ApiError` for ids outside the vocabulary, and for more than `at_most`."""
        if at_most is not None and len(ids) > at_most:
            raise bad_request(f"{param}: must have at most {at_most} token ids, not {len(ids)}.", param)
        size = self.loaded.ready.vocab_size
        if ids and not (min(ids) >= 0 and max(ids) < size):
            raise bad_request(f"{param}: token ids must be between 0 and {size - 1}.", param)

    def close(self) -> None:
        if self._grammars is not None:
            self._grammars.close()
        self._threads.shutdown(wait=False, cancel_futures=True)


def too_long(max_model_len: int, what: str, param: str) -> ApiError:
    return bad_request(
        f"This model's maximum context length is {max_model_len} tokens. However, {what}. Please reduce the length.",
        param,
        "context_length_exceeded",
    )
